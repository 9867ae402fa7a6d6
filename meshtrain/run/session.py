"""Runs the training loop of a run with its actions (evaluate, save, log) and its observers."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import jax

from meshtrain import loop
from meshtrain.assembly.assemble import Assembly
from meshtrain.assembly.facts import throughput_of
from meshtrain.assembly.steps import StepFunction
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.config.schema import Config
from meshtrain.data.dataset import Dataset
from meshtrain.launch import peers
from meshtrain.launch.watchdog import Watchdog
from meshtrain.models.task import Params
from meshtrain.observe.goodput import Goodput
from meshtrain.observe.process_times import OwnTimes
from meshtrain.observe.profiler import Profiler
from meshtrain.observe.progress import Progress
from meshtrain.observe.trackers import Trackers
from meshtrain.run import memory_check, saving, workdir
from meshtrain.run.dataset import examples_consumed, training_batches
from meshtrain.run.evaluation import evaluate_with_texts
from meshtrain.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Session:
    """The objects that all phases of a run share.

    Attributes:
      assembly: the mesh, the task, the shardings and the jitted functions.
      corpus: the training and validation data.
      checkpoints: the run's checkpoints.
      run: the run's folder.
      watchdog: ends the process if no step completes in time.
      begun_seconds: the program's start by `time.monotonic`; goodput is measured from this time.
    """

    assembly: Assembly
    corpus: Dataset
    checkpoints: Checkpoints
    run: Path
    watchdog: Watchdog
    begun_seconds: float


@dataclasses.dataclass(frozen=True)
class Start:
    """The state of a run before the first step of this process.

    Attributes:
      state: the initial or the restored training state.
      step: the number of steps that are completed in this state.
      restored: metrics about reading the state from a checkpoint, such as `restore_seconds`; empty if no checkpoint was
        read.
      program: the compiled training step.
      train_step: (step, state, batch) -> (state, metrics), for the loop.
    """

    state: TrainState
    step: int
    restored: Mapping[str, float]
    program: jax.stages.Compiled
    train_step: StepFunction


def run_loop(
    session: Session, start: Start, texts: Callable[[Params], Sequence[tuple[str, str]]]
) -> tuple[TrainState, Mapping[str, float | None]]:
    """Runs the training loop to its end; returns the last state, and the values of the last row and evaluation.

    Args:
      session: the objects of the run.
      start: the state before the first step, from `initial_state.begin`. Its arrays are donated.
      texts: weights -> pairs (prompt, generated text) for evaluations, from `generating.sample_texts`.

    Raises:
      TrainingStopped, Interrupted, SaveFailed: see `loop.run`.
    """
    assembly, corpus, run, checkpoints = session.assembly, session.corpus, session.run, session.checkpoints
    with memory_check.explain_memory(assembly, start.program), observing(session, start) as (observers, trackers):
        actions = loop.Actions(
            train_step=start.train_step,
            evaluate=functools.partial(evaluate_with_texts, assembly, corpus, texts, run, observers.progress.line),
            **saving.actions(assembly, checkpoints, corpus, run, start.step),
            write=trackers.write,
            drawn=functools.partial(examples_consumed, assembly.config, assembly.task, corpus),
        )
        when, throughput = timetable(assembly.config), throughput_of(assembly)
        stream = training_batches(assembly, corpus, start.step)
        with saving.guard(actions, checkpoints, trackers) as actions:
            last = loop.run(start.state, start.step, stream, when, throughput, actions, observers)
        with session.watchdog.longer_limit():
            trackers.close()  # a tracker may send remaining rows over the network
        return last


@contextmanager
def observing(session: Session, start: Start) -> Iterator[tuple[loop.Observers, Trackers]]:
    """Yields the loop's observers and the run's trackers; closes trackers, progress bar and profiler after the block.

    Args:
      session: the objects of the run.
      start: the state before the first step. If it was restored from a checkpoint, `start.restored` (metrics such as
        `restore_seconds`) is written as a row of metrics.
    """
    config, run, is_main, n = session.assembly.config, session.run, peers.is_main_process(), peers.count()
    with (
        closing(Trackers(config.observe, run, start.step, is_main=is_main)) as trackers,
        closing(Progress(config.num_steps, start.step, is_main=is_main, show_bar=config.observe.progress)) as progress,
        closing(Profiler(config.profile, run)) as profiler,
        OwnTimes() if n > 1 else nullcontext() as own_times,
    ):
        if start.restored and start.step < config.num_steps:
            trackers.write(start.step, start.restored)
        since = workdir.start_seconds(run, session.begun_seconds, trackers.done.passed_seconds)
        goodput = Goodput(since, trackers.done, num_processes=n)
        yield loop.Observers(progress, profiler, session.watchdog, goodput, own_times), trackers


def timetable(config: Config) -> loop.Timetable:
    """Returns the loop's timetable: the last step, and the number of steps between logs, evaluations and saves."""
    return loop.Timetable(
        num_steps=config.num_steps,
        log_every=config.log_every,
        eval_every=config.eval_every,
        save_every=config.checkpoint.every,
        max_skipped_in_a_row=config.guard.max_skipped_in_a_row,
        can_stop=config.early_stop.patience > 0,
    )
