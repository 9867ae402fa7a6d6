"""Saves of a run: what goes into them, their metric, and the checkpoint to return to after a failure."""

import contextlib
import json
import time
from collections.abc import Mapping

import jax

from meshtrain.assemble import Assembly
from meshtrain.config.config import to_json
from meshtrain.data.corpus import Corpus
from meshtrain.data.loader import next_sample
from meshtrain.data.own import Data
from meshtrain.launch import peers
from meshtrain.step.guard import name_of_first
from meshtrain.step.state import TrainState
from meshtrain.store.checkpoint import Checkpoints
from meshtrain.words.errors import SaveFailed, warn


def save(
    assembly: Assembly, checkpoints: Checkpoints, corpus: Corpus | Data, step: int, state: TrainState
) -> dict[str, float]:
    """Starts to save a step, and returns values to log as soon as the state's buffers may be donated.

    A save that fails is a warning and does not end the run: there may be space on the disk at the next one.
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


def finish(checkpoints: Checkpoints) -> None:
    """Waits until the last save is on the disk.

    Raises:
      SaveFailed: it could not be written; the message names the step from which the same command resumes.
    """
    with contextlib.suppress(SaveFailed):
        checkpoints.wait()
    # The last save may also have failed at its start, of which `save` has only warned.
    if error := checkpoints.newest_failure:
        step = checkpoints.latest_step()
        where = "begins anew" if step is None else f"goes on from step {step}"
        raise SaveFailed(f"{error}; the same command {where}")


def rate(assembly: Assembly, checkpoints: Checkpoints, step: int, values: Mapping[str, float]) -> None:
    """Records an evaluation's metric for the checkpoint of a step, if `checkpoint.keep_best` asks for it."""
    options = assembly.config.checkpoint
    if options.keep_best and options.best_metric in values and peers.is_main_process():
        checkpoints.rate(step, values[options.best_metric])


def diagnosis(checkpoints: Checkpoints, state: TrainState, number: int) -> str:
    """Returns the name of the first array that was not finite, and the checkpoint that the run can resume from.

    Args:
      checkpoints: the run's own.
      state: the newest one.
      number: see `guard.first_not_finite`.
    """
    step = checkpoints.latest_step()
    where = "none" if step is None else str(checkpoints.directory / str(step))
    return f"first array that is not finite: {name_of_first(state.params, number)}; last good checkpoint: {where}"
