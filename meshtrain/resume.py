"""Where a run starts from, and what it keeps so that it can."""

import dataclasses
import json
from pathlib import Path

import jax

from meshtrain import workdir
from meshtrain.assemble import Assembly, stored_params
from meshtrain.config import Config, to_json
from meshtrain.data.corpus import Corpus
from meshtrain.data.loader import next_sample
from meshtrain.errors import UserError
from meshtrain.step.guard import name_of_first
from meshtrain.step.state import TrainState
from meshtrain.store.checkpoint import CHECKPOINTS, Checkpoints, find, restore_params


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
    found = workdir.check(run, config)
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


def starting_state(assembly: Assembly, checkpoints: Checkpoints, step: int) -> TrainState:
    """Returns the state that was saved at `step`; at 0 initial weights, or those of `init_from`.

    Raises:
      UserError: the checkpoint is another model's.
    """
    config = assembly.config
    if step:
        return assembly.from_kept(checkpoints.restore(step, assembly.kept_state))
    # Before the initial state, which has to be compiled: other weights than these are refused here.
    kept = restore_params(config.init_from, assembly.kept_state.params) if config.init_from else None
    state = assembly.init(jax.random.key_data(jax.random.key(config.seed)))
    return state if kept is None else dataclasses.replace(state, params=stored_params(assembly, kept))


def save(assembly: Assembly, checkpoints: Checkpoints, corpus: Corpus, step: int, state: TrainState) -> None:
    """Starts to save a step; returns once the state's buffers may be overwritten."""
    extra = {
        "next_sample": next_sample(step, assembly.config.batch_size),
        "corpus": corpus.fingerprint,
        "config": json.loads(to_json(assembly.config)),
        "versions": {"jax": jax.__version__},
    }
    checkpoints.save(step, assembly.to_kept(state), extra)


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
