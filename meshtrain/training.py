"""A run from top to bottom: devices, data, shardings, weights, steps, and the summary at the end."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TypeAlias

import jax

from meshtrain import loop, options
from meshtrain.assemble import (
    Assembly,
    OuterStep,
    array_rows,
    assemble,
    compiled_steps,
    num_trained,
    throughput_of,
    traced_steps,
)
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.config import fewer
from meshtrain.config.build import Given
from meshtrain.config.fields import Config
from meshtrain.config.resolve import resolve
from meshtrain.config.tasks import MakeTask, abstract_task
from meshtrain.data.loader import batches
from meshtrain.data.own_source import Data, MakeData
from meshtrain.errors import Problem, refuse, warn
from meshtrain.files import expanded, url_problems
from meshtrain.launch import cluster, distributed, peers
from meshtrain.launch.endings import telling_errors
from meshtrain.launch.watchdog import Watchdog
from meshtrain.models.task import Params, limits
from meshtrain.observe.goodput import Goodput
from meshtrain.observe.process_times import OwnTimes
from meshtrain.observe.profiler import Profiler
from meshtrain.observe.progress import Progress, phase
from meshtrain.observe.trackers import Trackers
from meshtrain.run import memory_check, saving, start, summary, workdir
from meshtrain.run.evaluation import evaluate_with_texts
from meshtrain.run.generating import continuations
from meshtrain.run.opened import drawn, open_data, refuse_unequal_data, warn_of_repeats, with_steps
from meshtrain.sharding.mesh import advice, describe, mesh_shape, num_needed
from meshtrain.sharding.placement_text import table
from meshtrain.sharding.rules import Rules
from meshtrain.step.state import TrainState

Show: TypeAlias = Callable[[str], AbstractContextManager[Callable[[str], None]]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What `train` returns.

    Attributes:
      state: the last state.
      values: the metrics last logged and evaluated.
      directory: the run's folder.
      assembly: mesh, task, shardings and functions of the run.
    """

    state: TrainState
    values: Mapping[str, float | None]
    directory: Path
    assembly: Assembly


def train(
    config: Given,
    directory: str | Path = "runs/default",
    make_task: MakeTask | None = None,
    make_data: MakeData | None = None,
    rules: Rules | None = None,
) -> Result:
    """Trains from the beginning, or from the newest checkpoint in the directory. `meshtrain.train` is this function.

    In a notebook::

        import meshtrain

        config = meshtrain.default()
        config.mesh.data = 2
        config.num_steps = 100
        result = meshtrain.train(config, "runs/mine")
        print(result.values["eval_loss"])

    Args:
      config: a ConfigDict as `meshtrain.config.default` returns it, a dict of the values that differ from the defaults,
        or a frozen `Config`.
      directory: the run's folder, for configuration, metrics and checkpoints.
      make_task: a task function (config, placement) -> Task; None for the one that `config.task` names.
      make_data: a function config -> `data.own_source.Data`; None for what `config.data` says.
      rules: logical axis -> mesh axes for the task's weights, activations and batch; None for the built-in table.

    Raises:
      UserError: a problem of configuration, data or task that the user can fix.
      TrainingStopped, Interrupted, SaveFailed: see `loop.run`.
    """
    begun_seconds = time.monotonic()
    _refuse_arguments(directory, make_task, make_data, rules)
    source = {"data.source": options.function_name(make_data)} if make_data else {}
    config = resolve(config, source, make_task=make_task, rules=rules, reads_data=make_data is None)
    return train_resolved(config, directory, make_task, make_data, rules, begun_seconds=begun_seconds)


def train_resolved(
    config: Config,
    directory: str | Path,
    make_task: MakeTask | None = None,
    make_data: MakeData | None = None,
    rules: Rules | None = None,
    *,
    begun_seconds: float,
) -> Result:
    """Trains a configuration from `resolve`; `train` says what the other arguments are, and what is raised.

    Args:
      begun_seconds: when the program began, by `time.monotonic`; goodput counts from there.
    """
    run, there = expanded(directory).absolute(), config.checkpoint.directory
    if os.environ.get(cluster.FULL):
        refuse(fewer.check(config))
    devices, notes = distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))
    is_main = peers.is_main_process()
    show = functools.partial(phase, is_main=is_main)
    with telling_errors(), Watchdog(config.watchdog_seconds) as watchdog:
        corpus, epochs = None, ""
        if config.num_epochs:
            corpus = open_data(config, abstract_task(config, make_task), make_data)
            config, epochs = with_steps(config, corpus)
        start.refuse_unequal_processes(config, run)
        full = cluster.full_size(os.environ, peers.count())
        of_workdir = peers.share_problems("workdir", start.check(config, run, start.saved_step(run, there)))
        with show("mesh") as say, fewer.refusing(peers.count(), full):
            simulated = devices[0].platform == "cpu" and full == 1
            shape = mesh_shape(config.mesh, len(devices), simulated=simulated)
            if peers.count() < full:
                config, line = fewer.spread(config, shape, peers.count(), full, rules)
                notes.append(line)
            assembly = assemble(config, shape, devices, make_task, rules, of_workdir)
            memory_check.refuse_too_large(assembly, make_task, rules)
            num_machines = peers.num_machines()
            say("; ".join([describe(assembly.mesh, num_machines), *assembly.cost.exchanges, *notes]))
        for what, change in advice(assembly.mesh, num_machines) if is_main else ():
            warn(f"mesh: {what}; nearest: {change}")
        with show("data") as say:
            corpus = corpus or open_data(config, assembly.task, make_data)
            workdir.refuse_other_corpus(run, corpus.fingerprint, there)
            refuse_unequal_data(config, corpus, start.saved_step(run, there))
            say("; ".join(filter(None, (corpus.summary, epochs))))
        warn_of_repeats(config, assembly.task, corpus)
        start.refuse_other_weights(assembly, run)
        saving.refuse_unknown_metric(assembly, corpus)
        continued = continuations(assembly, corpus, make_task, rules)
        with saving.opened(assembly, run) as checkpoints:
            state, values = run_steps(assembly, corpus, continued, checkpoints, run, watchdog, show, begun_seconds)
        with watchdog.patient(), memory_check.explained(assembly):
            summary.show(assembly, corpus, state, values, run, make_task, rules)
    return Result(state, values, run, assembly)


def _refuse_arguments(directory: object, make_task: object, make_data: object, rules: object) -> None:
    task_fix = f"default(task='{make_task}')" if isinstance(make_task, str) else "train(config, directory, my_task)"
    data_fix = "train(..., rules=rules)" if isinstance(make_data, Rules) else "lambda config: Data(...)"
    rules_fix = "sharding.rules.extend(default_rules(LayoutOptions()), Rule(...))"
    arguments = (
        ("directory", directory, isinstance(directory, str | os.PathLike), "a folder's path", "runs/default"),
        ("make_task", make_task, callable(make_task), "a function (config, placement) -> Task", task_fix),
        ("make_data", make_data, callable(make_data), "a function config -> Data", data_fix),
        ("rules", rules, isinstance(rules, Rules), "sharding.rules.Rules", rules_fix),
    )
    problems = [
        Problem(name, got=type(given).__name__, allowed=wanted, nearest=fix)
        for name, given, is_right, wanted, fix in arguments
        if not is_right and (given is not None or name == "directory")
    ]
    refuse(problems or url_problems("directory", str(directory)))


def run_steps(
    assembly: Assembly,
    corpus: Data,
    continued: Callable[[Params], Sequence[tuple[str, str]]],
    checkpoints: Checkpoints,
    run: Path,
    watchdog: Watchdog,
    show: Show,
    begun_seconds: float,
) -> tuple[TrainState, Mapping[str, float | None]]:
    """Begins a run, and runs the loop; see `loop.run` for what comes back.

    Args:
      assembly: mesh, task, shardings and functions of the run.
      corpus: its data.
      continued: weights -> prompts with the texts after them, for evaluations.
      checkpoints: its checkpoints.
      run: its folder.
      watchdog: ends the process if no step completes in time.
      show: see `begun`.
      begun_seconds: when the program began, by `time.monotonic`.
    """
    config, is_main, n = assembly.config, peers.is_main_process(), peers.count()
    state, start_step, restored, train_step, outer_step = begun(assembly, corpus, checkpoints, run, show)
    with (
        memory_check.explained(assembly, train_step),
        closing(Trackers(config.observe, run, start_step, is_main=is_main)) as trackers,
        closing(Progress(config.num_steps, start_step, is_main=is_main, show_bar=config.observe.progress)) as progress,
        closing(Profiler(config.profile, run)) as profiler,
        OwnTimes() if n > 1 else nullcontext() as own_times,
    ):
        if restored and start_step < config.num_steps:
            trackers.write(start_step, restored)
        actions = loop.Actions(
            train_step=train_step,
            evaluate=functools.partial(evaluate_with_texts, assembly, corpus, continued, run, progress.line),
            **saving.actions(assembly, checkpoints, corpus, run, start_step),
            write=trackers.write,
            drawn=functools.partial(drawn, config, assembly.task, corpus),
            outer_step=outer_step,
        )
        since = workdir.begun_seconds(run, begun_seconds, trackers.done.passed_seconds)
        goodput = Goodput(since, trackers.done, num_processes=n)
        observers = loop.Observers(progress, profiler, watchdog, goodput, own_times)
        stream = _batches(assembly, corpus, start_step)
        with saving.guarded(actions, checkpoints, trackers) as actions:
            last = loop.run(state, start_step, stream, timetable(config), throughput_of(assembly), actions, observers)
        with watchdog.patient():
            trackers.close()  # one may send what is left over the network
        return last


def begun(
    assembly: Assembly, corpus: Data, checkpoints: Checkpoints, run: Path, show: Show
) -> tuple[TrainState, int, dict[str, float], jax.stages.Compiled, OuterStep]:
    """Makes or restores the state while the step compiles; returns both, with the state's step and values to log.

    Args:
      assembly: mesh, task, shardings and functions of the run.
      corpus: its data.
      checkpoints: its checkpoints.
      run: its folder.
      show: name -> context manager of a phase of the start; it yields a function that takes the phase's result as text.
    """
    config, is_main = assembly.config, peers.is_main_process()
    with memory_check.explained(assembly), ThreadPoolExecutor(1) as thread, telling_errors():
        with show("restore" if start.saved_step(run, config.checkpoint.directory) else "init") as say:
            # The compiler releases the interpreter, so the state is initialized or restored while the step compiles.
            compiling = thread.submit(compiled_steps, traced_steps(assembly))
            state, start_step, restored = start.starting_state(assembly, checkpoints)
            say(f"from {config.init_from}" if config.init_from and not start_step else f"step {start_step}")
        if is_main and start_step:
            start.warn_of_another_rate(assembly, run, state)
        workdir.record(run, config, corpus.fingerprint, table(array_rows(assembly)))
        with show("compile") as say:
            train_step, outer_step = compiling.result()
            workdir.record_device(run, assembly, train_step)
            memory_check.warn_of_large_step(assembly, train_step)
            say(parameters_text(assembly))
    return state, start_step, restored, train_step, outer_step


def _batches(assembly: Assembly, corpus: Data, start_step: int) -> Iterator[dict[str, jax.Array]]:
    """Yields the global batches of the steps after `start_step`, forever."""
    config = assembly.config
    return batches(
        corpus.train,
        batch=assembly.batch,
        limits=limits(assembly.task),
        seed=config.seed,
        start_step=start_step,
        end_step=config.num_steps,
        num_threads=config.data.num_threads,
        num_prefetch_batches=config.data.num_prefetch_batches,
    )


def parameters_text(assembly: Assembly) -> str:
    """Returns the number of parameters as text, the number of trained ones if some are frozen, and a narrow dtype."""
    trained, frozen = num_trained(assembly)
    beside = f", {trained:,} of them trained" if frozen else ""
    if assembly.config.precision.param_dtype == "bfloat16":
        beside += "; weights are bfloat16 without a float32 copy, rounded at random (precision.param_dtype)"
    return f"{assembly.task.parameters_text}{beside}"


def timetable(config: Config) -> loop.Timetable:
    """Returns when the loop logs, evaluates, saves and stops."""
    return loop.Timetable(
        num_steps=config.num_steps,
        log_every=config.log_every,
        eval_every=config.eval_every,
        save_every=config.checkpoint.every,
        max_skipped_in_a_row=config.guard.max_skipped_in_a_row,
        outer_every=config.local_steps.period,
        can_stop=config.early_stop.patience > 0,
    )
