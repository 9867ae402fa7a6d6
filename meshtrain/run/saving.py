"""Saves a run's checkpoints, records their evaluations, and reports the checkpoint to resume from after a failure."""

import contextlib
import dataclasses
import functools
import math
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import jax

from meshtrain.assembly.assemble import Assembly
from meshtrain.checkpoint import retention
from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.other_runs import extra_of_newest
from meshtrain.checkpoint.owner import own_folder
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.config.records import record
from meshtrain.data.dataset import Dataset
from meshtrain.data.loader import next_sample
from meshtrain.errors import FolderLost, Interrupted, Problem, SaveFailed, UserError, refuse, unknown, warn
from meshtrain.launch import peers
from meshtrain.loop import Actions
from meshtrain.observe.run_files import EVALUATED, LOSS_OF
from meshtrain.observe.trackers import Trackers, metrics_of_evaluation
from meshtrain.run import workdir
from meshtrain.run.evaluation import sets_of
from meshtrain.sharding.trees import leaves_with_paths
from meshtrain.step.early_stop import reason
from meshtrain.step.guard import name_of_first, skip_reason
from meshtrain.step.state import TrainState
from meshtrain.store import buckets
from meshtrain.store.buckets import Unreached, wrap_bucket_errors

T = TypeVar("T")

EVALUATIONS = "early_stop"  # a key of a checkpoint's metadata, whose value is metric -> {step: value}


def save(
    assembly: Assembly,
    checkpoints: Checkpoints,
    corpus: Dataset,
    found: Mapping[int, float],
    step: int,
    state: TrainState,
) -> dict[str, float]:
    """Starts to save the state of a step, and returns when the state's buffers may be donated.

    A failed save is a warning and does not end the run: the disk may have space at the next save.

    Args:
      assembly: the run's assembly.
      checkpoints: the run's checkpoints.
      corpus: the run's data, whose fingerprint the checkpoint records.
      found: step -> value of the early-stopping metric, for each evaluation so far; saved in the checkpoint.
      step: the number of completed steps.
      state: the training state after this step.

    Returns:
      Values to log: `save_blocking_seconds`, and `failed_saves` if the previous save or the start of this save failed.

    Raises:
      FolderLost: the run's folder or its checkpoint folder was deleted or replaced.
    """
    start_seconds = time.perf_counter()
    extra = {
        "next_sample": next_sample(step, assembly.config.batch_size),
        "corpus": corpus.fingerprint,
        EVALUATIONS: {assembly.config.early_stop.metric: {str(one): value for one, value in found.items()}},
        "config": record(assembly.config),
        "versions": {"jax": jax.__version__},
    }
    values = dict[str, float]()
    try:
        checkpoints.wait()
    except SaveFailed as error:
        checkpoints.refuse_lost()
        warn(str(error))
        values["failed_saves"] = 1.0
    try:
        checkpoints.save(step, assembly.steps.to_kept(state), extra)
    except SaveFailed as error:
        checkpoints.refuse_lost()
        warn(str(error))
        values["failed_saves"] = values.setdefault("failed_saves", 0.0) + 1
    return {"save_blocking_seconds": time.perf_counter() - start_seconds, **values}


def finish(checkpoints: Checkpoints) -> None:
    """Waits until the last save is on the disk, or in the bucket.

    Raises:
      FolderLost: the run's folder or its checkpoint folder was deleted or replaced.
      SaveFailed: the last save could not be written; the message names the step from which the same command resumes.
    """
    with contextlib.suppress(SaveFailed):
        checkpoints.wait()
    checkpoints.refuse_lost()
    # The last save may also have failed at its start; `save` only warns of such a failure.
    if error := checkpoints.newest_failure:
        try:
            step = checkpoints.latest_step()
            where = "starts from the beginning" if step is None else f"resumes from step {step}"
        except Unreached:
            where = "resumes from the newest step there"
        raise SaveFailed(f"{error}; the same command {where}")


def actions(
    assembly: Assembly, checkpoints: Checkpoints, corpus: Dataset, run: Path, start_step: int
) -> dict[str, Callable]:
    """Returns name -> function for the fields of `loop.Actions` about saves, non-finite values and early stopping.

    All processes call this function together. If the run resumes, early stopping continues with the evaluations in its
    newest checkpoint.

    Args:
      assembly: the run's assembly.
      checkpoints: the run's checkpoints.
      corpus: the run's data.
      run: the run's folder.
      start_step: the step from which the run resumes; 0 for a new run.
    """
    has_row = bool(start_step) and has_evaluated(checkpoints, assembly.config.checkpoint, run, start_step)
    options, saved = assembly.config.early_stop, extra_of_newest(checkpoints.directory) if start_step else {}
    values = saved[EVALUATIONS].get(options.metric) if EVALUATIONS in saved else None
    found = {int(step): float(value) for step, value in (values or {}).items()}
    paths = [path for path, _ in leaves_with_paths(assembly.state.params)]
    return {
        "save": functools.partial(save, assembly, checkpoints, corpus, found),
        "finish_saving": functools.partial(finish, checkpoints),
        "rate": checkpoints.rate,
        "diagnose": functools.partial(diagnosis, checkpoints),
        "name": functools.partial(skip_reason, paths),
        "is_missing": lambda step: step == start_step and not has_row and len(corpus.validation) > 0,
        "reason": functools.partial(reason, options, found, higher=higher_is_better(assembly, options.metric)),
    }


def has_evaluated(checkpoints: Checkpoints, options: CheckpointOptions, run: Path, step: int) -> bool:
    """Returns whether the run's metrics.jsonl has the evaluation of the step from which the run resumes.

    A process may have been killed after it wrote this row of metrics, and before it recorded the values with the
    checkpoint. Then this function records the values. All processes call it together, because the run's folder may be
    on one machine only.

    Args:
      checkpoints: the run's checkpoints.
      options: the configuration's group `checkpoint`.
      run: the run's folder.
      step: the step from which the run resumes.
    """
    values = metrics_of_evaluation(run, step) if peers.is_main_process() else {}
    if values and options.keep_best:
        with wrap_bucket_errors(checkpoints.directory):
            is_rated = step in retention.read_ratings(checkpoints.directory)
        if not is_rated:  # JSON has no NaN
            checkpoints.rate(step, {name: math.nan if value is None else value for name, value in values.items()})
    return bool(peers.gather_values("evaluated", bool(values))[0])


def higher_is_better(assembly: Assembly, metric: str) -> bool:
    """Returns whether a larger value of the evaluation metric `metric` is better, as the task declares it."""
    return metric.removeprefix(EVALUATED) in assembly.task.higher_is_better


@contextlib.contextmanager
def open_checkpoints(assembly: Assembly, run: Path) -> Iterator[Checkpoints]:
    """Context manager: locks the run's folder and its checkpoint folder or bucket, and yields the opened checkpoints.

    The task defines whether a higher `best_metric` is better. If the run's folder is deleted during the block, files
    that a save has written after the deletion are removed.

    Raises:
      UserError: another run uses the folder or the bucket, or it cannot be written.
      FolderLost: the run's folder or its checkpoint folder was deleted or replaced.
    """
    options = assembly.config.checkpoint
    directory = buckets.place(options.directory or run / CHECKPOINTS)
    is_higher = higher_is_better(assembly, options.best_metric)
    try:
        with (
            workdir.lock(run) as lost,
            own_folder(
                directory, workdir.remember(run, workdir.RUN_ID, new_id), may_vanish=not options.directory
            ) as elsewhere,
            Checkpoints(
                directory,
                options,
                higher_is_better=is_higher,
                lost=lambda: lost() or elsewhere(),
                saved=functools.partial(workdir.record_saved, run),
            ) as checkpoints,
        ):
            if (step := checkpoints.latest_step()) and peers.is_main_process():
                workdir.record_saved(run, step)
            yield checkpoints
    except FolderLost:
        if isinstance(directory, Path):
            retention.remove_rest(directory, run)
        raise


def new_id() -> str:
    """Returns a new run id, which marks the owner of a checkpoint folder or bucket."""
    return uuid.uuid4().hex


@contextlib.contextmanager
def guard(actions: Actions, checkpoints: Checkpoints, trackers: Trackers) -> Iterator[Actions]:
    """Context manager: yields a copy of `actions` with checks for deleted files.

    Before an evaluation or a row of metrics, the copy raises FolderLost if the run's folder was deleted or replaced. If
    the metrics file was deleted, the loop saves the state and stops.

    Args:
      actions: the actions of the loop.
      checkpoints: the run's checkpoints, which detect a deleted folder.
      trackers: the run's trackers, which detect a deleted metrics file.

    Raises:
      FolderLost: the run's folder or its checkpoint folder was deleted or replaced; or the metrics file was deleted or
        replaced, after the state was saved.
    """

    def checked(action: Callable[..., T]) -> Callable[..., T]:
        def check(*given: object) -> T:
            checkpoints.refuse_lost()
            return action(*given)

        return check

    stops = functools.partial(stops_without, trackers.lost, [])
    try:
        yield dataclasses.replace(actions, evaluate=checked(actions.evaluate), write=checked(actions.write), lost=stops)
    except Interrupted as error:
        if line := trackers.lost():
            raise FolderLost(f"{line}; {error}") from error
        raise
    if line := trackers.lost():
        raise FolderLost(f"{line}; the run is complete")


def stops_without(lost: Callable[[], str], asked: list[str]) -> bool:
    """Returns whether a run must stop because its metrics file was deleted; the loop calls it after each step.

    With several processes it returns False: process 0 sends SIGTERM to itself, and JAX then stops all processes.

    Args:
      lost: () -> an error line if this process's metrics file was deleted or replaced, else ''.
      asked: a list that is empty until process 0 has sent SIGTERM; then it contains the error line.
    """
    if not (line := lost()) or peers.count() == 1:
        return bool(line)
    if not asked:
        asked.append(line)
        signal.raise_signal(signal.SIGTERM)
    return False


def refuse_unknown_metric(assembly: Assembly, corpus: Dataset) -> None:
    """Checks that an evaluation computes `checkpoint.best_metric` and `early_stop.metric`, if they are used.

    The evaluation is traced but not compiled.

    Raises:
      UserError: the task has no metric of this name, or there are no validation examples.
    """
    best, early = assembly.config.checkpoint, assembly.config.early_stop
    asked = {"checkpoint.best_metric": best.best_metric} if best.keep_best else {}
    asked |= {"early_stop.metric": early.metric} if early.patience else {}
    if not asked:
        return
    if not len(corpus.validation):
        key = "checkpoint.keep_best" if best.keep_best else "early_stop.patience"
        raise UserError(
            Problem(
                key,
                got=(
                    f"{best.keep_best or early.patience}, but there are no validation examples to compare checkpoints"
                ),
                allowed="0, or data with a validation split",
                nearest=f"{key}=0",
            )
        )
    sums = jax.eval_shape(assembly.steps.evaluate, assembly.state.params, assembly.batch)
    names = [EVALUATED + name for name in ("loss", *sorted(sums.keys() - {"loss", "weight"}))]
    if len(sets := sets_of(corpus.validation)) > 1:
        names += [LOSS_OF + name for name in sets]
    refuse([unknown(key, name, names, names[0]) for key, name in asked.items() if name not in names])


def diagnosis(checkpoints: Checkpoints, state: TrainState, number: int, layer: int) -> str:
    """Returns a text that names the first non-finite array, and the checkpoint from which the run can resume.

    Args:
      checkpoints: the run's checkpoints.
      state: the newest training state.
      number: the index of the loss or gradient that was not finite, from `loop.first_not_finite`.
      layer: the layer of this gradient; -1: unknown, or no layer.
    """
    step = checkpoints.latest_step()
    where = "none" if step is None else str(checkpoints.directory / str(step))
    first = name_of_first(state.params, number, layer)
    return f"first array that is not finite: {first}; last good checkpoint: {where}"
