"""Saves of a run: what goes into them, their metric, and the checkpoint to return to after a failure."""

import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from meshtrain.assemble import Assembly
from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.other_runs import recorded
from meshtrain.checkpoint.owner import owned
from meshtrain.config.config import Config
from meshtrain.data.loader import next_sample
from meshtrain.data.own_source import Data
from meshtrain.errors import SaveFailed, UserError, refuse, unknown, warn
from meshtrain.files import is_url
from meshtrain.observe.run_files import EVALUATED, LOSS_OF
from meshtrain.run import workdir
from meshtrain.run.evaluation import sets_of
from meshtrain.sharding.trees import leaves_with_paths
from meshtrain.step.early_stop import reason
from meshtrain.step.guard import name_of_first, name_of_gradient
from meshtrain.step.state import TrainState
from meshtrain.store.buckets import Unreached

EVALUATIONS = "early_stop"  # in a checkpoint: metric -> {step: value}


def save(
    assembly: Assembly,
    checkpoints: Checkpoints,
    corpus: Data,
    found: Mapping[int, float],
    step: int,
    state: TrainState,
) -> dict[str, float]:
    """Starts to save a step, and returns values to log as soon as the state's buffers may be donated.

    With it goes what `early_stop.reason` has found so far.

    A save that fails is a warning and does not end the run: there may be space on the disk at the next one.
    """
    start_seconds = time.perf_counter()
    extra = {
        "next_sample": next_sample(step, assembly.config.batch_size),
        "corpus": corpus.fingerprint,
        EVALUATIONS: {assembly.config.early_stop.metric: {str(one): value for one, value in found.items()}},
        "config": dataclasses.asdict(assembly.config),
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
    """Waits until the last save is on the disk, or in the bucket.

    Raises:
      SaveFailed: it could not be written; the message names the step from which the same command resumes.
    """
    with contextlib.suppress(SaveFailed):
        checkpoints.wait()
    # The last save may also have failed at its start, of which `save` has only warned.
    if error := checkpoints.newest_failure:
        try:
            step = checkpoints.latest_step()
            where = "begins anew" if step is None else f"goes on from step {step}"
        except Unreached:
            where = "goes on from the newest step there"
        raise SaveFailed(f"{error}; the same command {where}")


def actions(assembly: Assembly, checkpoints: Checkpoints, corpus: Data, start_step: int) -> dict[str, Callable]:
    """Returns the functions of `loop.Actions` that save, rate, name what is wrong, and end a run by its evaluations.

    They know the evaluations that a run has made before it resumes.
    """
    options, saved = assembly.config.early_stop, recorded(checkpoints.directory) if start_step else {}
    values = saved[EVALUATIONS].get(options.metric) if EVALUATIONS in saved else None
    found = {int(step): float(value) for step, value in (values or {}).items()}
    paths = [path for path, _ in leaves_with_paths(assembly.state.params)]
    return {
        "save": functools.partial(save, assembly, checkpoints, corpus, found),
        "finish_saving": functools.partial(finish, checkpoints),
        "rate": checkpoints.rate,
        "diagnose": functools.partial(diagnosis, checkpoints),
        "name": functools.partial(name_of_gradient, paths),
        "reason": functools.partial(reason, options, found, higher=higher_is_better(assembly, options.metric)),
    }


def higher_is_better(assembly: Assembly, metric: str) -> bool:
    """Returns whether a larger value of an evaluation's metric is a better one, as the task states it."""
    return metric.removeprefix(EVALUATED) in assembly.task.higher_is_better


def checkpoints_of(assembly: Assembly, run: Path) -> Checkpoints:
    """Opens the checkpoints in a run's folder for writing; the task says in which direction `best_metric` is better."""
    options = assembly.config.checkpoint
    is_higher = higher_is_better(assembly, options.best_metric)
    return Checkpoints(options.directory or run / CHECKPOINTS, options, higher_is_better=is_higher)


def owning(config: Config, run: Path) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which a run, by the id that its folder keeps, owns the bucket of its checkpoints."""
    if not is_url(directory := config.checkpoint.directory):
        return contextlib.nullcontext()
    return owned(directory, workdir.kept(run, workdir.RUN_ID, lambda: uuid.uuid4().hex))


def refuse_unknown_metric(assembly: Assembly, corpus: Data) -> None:
    """Compares metrics that options name with those of an evaluation, which are traced and not compiled.

    Raises:
      UserError: `keep_best` or `early_stop.patience` asks for a metric that this task does not have, or there is
        nothing to evaluate.
    """
    best, early = assembly.config.checkpoint, assembly.config.early_stop
    asked = {"checkpoint.best_metric": best.best_metric} if best.keep_best else {}
    asked |= {"early_stop.metric": early.metric} if early.patience else {}
    if not asked:
        return
    if not len(corpus.validation):
        key = "checkpoint.keep_best" if best.keep_best else "early_stop.patience"
        raise UserError(
            f"{key}: got {best.keep_best or early.patience}, and there are no validation examples to compare "
            f"checkpoints by; allowed: 0, or data with a validation split; nearest: {key}=0"
        )
    sums = jax.eval_shape(assembly.eval_step, assembly.state.params, assembly.batch)
    names = [EVALUATED + name for name in ("loss", *sorted(sums.keys() - {"loss", "weight"}))]
    if len(sets := sets_of(corpus.validation)) > 1:
        names += [LOSS_OF + name for name in sets]
    refuse([unknown(key, name, names, names[0]) for key, name in asked.items() if name not in names])


def diagnosis(checkpoints: Checkpoints, state: TrainState, number: int, layer: int) -> str:
    """Returns the name of the first array that was not finite, and the checkpoint that the run can resume from.

    Args:
      checkpoints: the run's own.
      state: the newest one.
      number, layer: see `guard.name_of_gradient`.
    """
    step = checkpoints.latest_step()
    where = "none" if step is None else str(checkpoints.directory / str(step))
    first = name_of_first(state.params, number, layer)
    return f"first array that is not finite: {first}; last good checkpoint: {where}"
