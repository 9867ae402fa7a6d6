"""Where a run starts from, and what it keeps so that it can."""

import dataclasses
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from meshtrain import flags, workdir
from meshtrain.assemble import Assembly, stored_params
from meshtrain.config import Config, to_json
from meshtrain.data.corpus import Corpus
from meshtrain.data.loader import next_sample
from meshtrain.errors import UserError, warn
from meshtrain.launch import peers
from meshtrain.observe import trackers
from meshtrain.step.guard import name_of_first
from meshtrain.step.state import TrainState
from meshtrain.store.checkpoint import CHECKPOINTS, Checkpoints, SaveFailed
from meshtrain.store.other_runs import find, restore_params


def saved_step(run: Path) -> int:
    """Returns the newest step that a run has saved completely, 0 where there is none."""
    try:
        with find(run / CHECKPOINTS) as checkpoints:
            return checkpoints.latest_step() or 0
    except UserError:
        return 0


def check(config: Config, run: Path, start_step: int) -> list[str]:
    """Returns one line for each reason why a run cannot begin or go on in its folder; reads no array, writes nothing.

    Args:
      config: what the run is told.
      run: its folder, there or not.
      start_step: what `saved_step` found. From 1 on the run has weights of its own, and `init_from` is history.
    """
    found = workdir.check(run, config) or trackers.check(run)
    if start_step > config.num_steps:
        found.append(
            f"num_steps: got {config.num_steps}, and the workdir's run is at step {start_step}; allowed: at least "
            f"{start_step}; nearest: {start_step}"
        )
    if config.init_from and not start_step:
        try:
            find(config.init_from).close()
        except UserError as error:
            found += [f"init_from: {problem}" for problem in error.problems]
    return found


def refuse_unequal_processes(config: Config, run: Path) -> None:
    """Refuses processes that were started for different things, before they wait for each other in vain.

    Raises:
      UserError: the first difference of each; the same lines in all processes.
    """
    versions = {name: importlib.metadata.version(name) for name in ("meshtrain", "jax", "jaxlib", "flax", "optax")}
    peers.refuse_differences("versions", {"python": platform.python_version(), **versions})
    peers.refuse_differences("configuration", {"workdir": str(run), **flags.flatten(json.loads(to_json(config)))})


def refuse_other_weights(assembly: Assembly, run: Path) -> None:
    """Compares the weights that a new run would begin with to its own, by their shapes, before anything is written.

    Raises:
      UserError: those of `init_from` are another model's.
    """
    if assembly.config.init_from and not saved_step(run):
        with find(assembly.config.init_from) as checkpoints:
            step = checkpoints.latest_step()
            assert step is not None, "find returns only directories with a complete step"
            checkpoints.refuse_other_params(step, assembly.kept_state.params)


def starting_state(assembly: Assembly, checkpoints: Checkpoints) -> tuple[TrainState, int, dict[str, float]]:
    """Returns the newest saved state that is whole, its step, and what to log of it.

    Where nothing was saved, these are step 0 and initial weights, or those of `init_from`.

    Raises:
      UserError: the checkpoint is another model's; or none is as it was written.
    """
    start_seconds = time.perf_counter()
    step, damaged = checkpoints.newest_whole()
    for line in damaged if jax.process_index() == 0 else ():
        warn(f"{line}; set aside, the one before it is used")
    if step is None:
        return beginning(assembly), 0, {}
    state = assembly.from_kept(checkpoints.restore(step, assembly.kept_state))
    jax.block_until_ready(state)
    return state, step, {"restore_seconds": time.perf_counter() - start_seconds}


def beginning(assembly: Assembly) -> TrainState:
    """Returns the state before the first step: initial weights, or those of `init_from`.

    Raises:
      UserError: the other run's weights are another model's.
    """
    config = assembly.config
    # Before the initial state, which has to be compiled: other weights than these are refused here.
    kept = restore_params(config.init_from, assembly.kept_state.params) if config.init_from else None
    state = assembly.init(jax.random.key_data(jax.random.key(config.seed)))
    return state if kept is None else dataclasses.replace(state, params=stored_params(assembly, kept))


def save(
    assembly: Assembly, checkpoints: Checkpoints, corpus: Corpus, step: int, state: TrainState
) -> dict[str, float]:
    """Starts to save a step; returns what to log of it, once the state's buffers may be overwritten.

    A save that fails is said aloud and does not end the run: the next one may find a disk with room again.
    """
    start_seconds = time.perf_counter()
    extra = {
        "next_sample": next_sample(step, assembly.config.batch_size),
        "corpus": corpus.fingerprint,
        "config": json.loads(to_json(assembly.config)),
        "versions": {"jax": jax.__version__},
    }
    values = dict[str, float]()
    try:
        checkpoints.wait()
    except SaveFailed as error:
        warn(str(error))
        values["failed_saves"] = 1.0
    try:
        checkpoints.save(step, assembly.to_kept(state), extra)
    except SaveFailed as error:
        warn(str(error))
        values["failed_saves"] = values.setdefault("failed_saves", 0.0) + 1
    return {"save_blocking_seconds": time.perf_counter() - start_seconds, **values}


def rate(assembly: Assembly, checkpoints: Checkpoints, step: int, values: Mapping[str, float]) -> None:
    """Notes what an evaluation says of the save of a step, where good saves are to stay."""
    options = assembly.config.checkpoint
    if options.keep_best and options.best_metric in values and jax.process_index() == 0:
        checkpoints.rate(step, values[options.best_metric])


def diagnosis(checkpoints: Checkpoints, state: TrainState, number: int) -> str:
    """Returns what first was no number in steps that went wrong, and where the run can be taken up again.

    Args:
      checkpoints: the run's own.
      state: the newest one.
      number: see `guard.first_not_finite`.
    """
    step = checkpoints.latest_step()
    where = "none" if step is None else str(checkpoints.directory / str(step))
    return f"first array that is not finite: {name_of_first(state.params, number)}; last good checkpoint: {where}"
