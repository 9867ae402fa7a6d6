"""The story of a run, top to bottom: devices, data, placements, weights, steps, and what is left at the end."""

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_collections

from meshtrain import loop, resume, summary, workdir
from meshtrain.assemble import Assembly, MakeTask, array_rows, assemble
from meshtrain.config import Config, check, resolve
from meshtrain.data.corpus import open_corpus
from meshtrain.errors import UserError
from meshtrain.evaluate import evaluate, training_batches
from meshtrain.hardware import compiler_options, peak_flops_per_second
from meshtrain.launch import distributed
from meshtrain.layout.explain import table
from meshtrain.layout.mesh import describe, mesh_shape, num_needed
from meshtrain.layout.rules import Rules
from meshtrain.observe.profiler import Profiler
from meshtrain.observe.progress import Progress, phase
from meshtrain.observe.trackers import Trackers
from meshtrain.step.precision import compute_name
from meshtrain.step.state import TrainState
from meshtrain.store.checkpoint import CHECKPOINTS, Checkpoints


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves in memory: its last state, the values last logged, its folder, and what it was made of."""

    state: TrainState
    values: Mapping[str, float | None]
    directory: Path
    assembly: Assembly


def train(
    config: Config | ml_collections.ConfigDict,
    directory: str | Path = "runs/default",
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
) -> Result:
    """Trains, from the beginning or from where this directory's run stopped. `meshtrain.train` is this function.

    Args:
      config: what to do; in a ConfigDict, as `meshtrain.config.default` returns one, or frozen.
      directory: the run's own folder: configuration, metrics, checkpoints.
      make_task: a model of one's own, (config, placement) -> Task; None for the decoder of `config.model`.
      rules: logical axis -> mesh axes for its weights; None for the built-in table.

    Raises:
      UserError: what a user can mend, before anything is compiled; TrainingStopped, Interrupted: see `loop.run`.
    """
    own_task = make_task is not None
    config, run = resolve(config, own_task=own_task), Path(directory).expanduser().absolute()
    devices, notes = distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))
    is_main, start_step = distributed.is_main_process(), resume.saved_step(run)
    shape = mesh_shape(config.mesh, len(devices), simulated=devices[0].platform == "cpu")
    if problems := check(config, shape, own_task=own_task) + resume.check(config, run, start_step):
        raise UserError(*problems)
    show = functools.partial(phase, is_main=is_main)
    with show("data") as say:
        corpus = open_corpus(
            config.data, sequence_length=config.sequence_length, vocab_size=config.model.vocab_size, seed=config.seed
        )
        workdir.refuse_other_corpus(run, corpus.fingerprint)
        say(corpus.summary)
    with show("mesh") as say:
        assembly = assemble(config, shape, devices, make_task, rules)
        say("; ".join([describe(assembly.mesh), *notes]))
    with Checkpoints(run / CHECKPOINTS, config.checkpoint) as checkpoints, ThreadPoolExecutor(1) as thread:
        # The compiler leaves the interpreter alone: initial weights, a program of their own, come meanwhile.
        compiling = thread.submit(compiled_step, assembly)
        with show("restore" if start_step else "init") as say:
            state = resume.starting_state(assembly, checkpoints, start_step)
            say(f"from {config.init_from}" if config.init_from and not start_step else f"step {start_step}")
        workdir.record(run, config, corpus.fingerprint, table(array_rows(assembly)), writes=is_main)
        with show("compile") as say:
            train_step = compiling.result()
            say(f"{assembly.task.num_parameters:,} parameters")
        with (
            Trackers(config.observe, run, start_step, is_main=is_main) as trackers,
            Progress(config.num_steps, start_step, is_main=is_main, show_bar=config.observe.progress) as progress,
            Profiler(config.profile, run) as profiler,
        ):
            actions = loop.Actions(
                train_step=train_step,
                evaluate=functools.partial(evaluate, assembly, corpus),
                save=functools.partial(resume.save, assembly, checkpoints, corpus),
                write=trackers.write,
                diagnose=functools.partial(resume.diagnosis, checkpoints),
            )
            batches = training_batches(assembly, corpus, start_step)
            state, values = loop.run(state, start_step, batches, plan_of(assembly), actions, progress, profiler)
    summary.show(assembly, corpus, state, values, run, is_main=is_main)
    return Result(state, values, run, assembly)


def compiled_step(assembly: Assembly) -> Any:
    """Returns the step, compiled with the options that this kind of device wants."""
    options = compiler_options(assembly.mesh.devices.flat[0].device_kind)
    return assembly.train_step.lower(assembly.state, assembly.batch).compile(options)


def plan_of(assembly: Assembly) -> loop.Plan:
    """Returns when the loop does what, and what a step is worth."""
    config, device = assembly.config, assembly.mesh.devices.flat[0]
    return loop.Plan(
        num_steps=config.num_steps,
        log_every=config.log_every,
        eval_every=config.eval_every,
        save_every=config.checkpoint.every,
        max_skipped_in_a_row=config.guard.max_skipped_in_a_row,
        num_tokens_per_step=config.batch_size * config.sequence_length,
        flops_per_token=assembly.task.flops_per_token,
        num_devices=assembly.mesh.size,
        peak_flops_per_second=peak_flops_per_second(device.device_kind, compute_name(config.precision)),
    )
