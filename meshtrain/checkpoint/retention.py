"""Retains the newest checkpoints, checkpoints at multiples of a number of steps, and the best; deletes all others."""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshtrain.checkpoint.integrity import MANIFEST, is_sealed
from meshtrain.checkpoint.owner import OWNER
from meshtrain.files import read_json
from meshtrain.options import Except, option
from meshtrain.store import buckets
from meshtrain.store.buckets import Place

DAMAGED = "damaged"  # folder next to the checkpoints, for checkpoints whose checksums do not match
HALF_WRITTEN = ".orbax-checkpoint-tmp"  # part of the name of a folder that is being written or deleted
_ROUNDS, _ROUND_SECONDS = 5, 0.2
Ratings = Mapping[int, Mapping[str, float]]  # step -> metric of its evaluation -> value
RATINGS = "ratings.json"  # file next to the checkpoints: {step: {metric: value}}


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """When and where the state is saved, and which checkpoints are kept."""

    directory: str = option(
        "", "folder or gs://bucket/prefix of the checkpoints; '': checkpoints/ in the workdir", names="path"
    )
    every: int = option(0, "steps between saves; 0: only after the last step, which is always saved", minimum=0)
    keep_last: int = option(3, "number of newest checkpoints to keep; older checkpoints are deleted", minimum=1)
    keep_every: int = option(0, "also keep checkpoints at multiples of this many steps; 0: none", minimum=0)
    keep_best: int = option(0, "also keep this number of best checkpoints, by best_metric", minimum=0)
    best_metric: str = option(
        "eval_loss",
        "evaluation metric that keep_best compares; lower is better, except in Task.higher_is_better",
        only_for={"keep_best": Except(0)},
    )


def steps_to_keep(
    steps: Iterable[int], options: CheckpointOptions, ratings: Ratings, *, higher_is_better: bool
) -> set[int]:
    """Returns the steps whose checkpoints are retained: the newest, multiples of `keep_every`, and the best.

    Args:
      steps: the steps with a complete checkpoint.
      options: `keep_last`, `keep_every`, `keep_best` and `best_metric`.
      ratings: step -> metric -> value, for the evaluated steps. A step without a finite value of `options.best_metric`
        is never among the best.
      higher_is_better: whether a larger value of `options.best_metric` is better.
    """
    ordered, name = sorted(steps), options.best_metric
    stay = set(ordered[-options.keep_last :])
    if options.keep_every:
        stay |= {step for step in ordered if step % options.keep_every == 0}
    found = {step: ratings[step][name] for step in ordered if step in ratings and name in ratings[step]}
    sign = -1 if higher_is_better else 1
    rated = sorted((sign * value, -step) for step, value in found.items() if math.isfinite(value))
    best = {-step for _, step in rated[: options.keep_best]}
    return stay | best


def read_ratings(directory: Place) -> dict[int, dict[str, float]]:
    """Returns {step: {metric: value}} from the `ratings.json` of a folder; {} if this file is missing or damaged."""
    try:
        content = read_json((directory / RATINGS).read_text(encoding="utf-8"))
        # Older files have a single number instead of several metrics.
        named = {
            int(step): values if isinstance(values, dict) else {CheckpointOptions.best_metric: values}
            for step, values in content.items()
        }
        return {step: {name: float(value) for name, value in values.items()} for step, values in named.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def rate(directory: Place, step: int, values: Mapping[str, float]) -> None:
    """Adds `values`, the evaluation metrics of a step, to a folder's `ratings.json`. Raises OSError if it fails."""
    ratings = read_ratings(directory) | {step: dict(values)}
    buckets.write(directory / RATINGS, json.dumps(dict(sorted(ratings.items()))))


def checkpoint_steps(directory: Place) -> list[int]:
    """Returns the steps of all checkpoints in a folder, complete or incomplete, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal() and entry.is_dir())


def prune(directory: Place, options: CheckpointOptions, *, higher_is_better: bool) -> None:
    """Deletes the sealed checkpoints that `steps_to_keep` does not return.

    On a disk, a checkpoint is renamed first, so that `sweep` can delete its remaining files if this deletion is killed.
    In a bucket, its manifest is deleted first.

    Args:
      directory: the folder of the checkpoints.
      options: which checkpoints to keep.
      higher_is_better: whether a larger value of `options.best_metric` is better.

    Raises:
      OSError: a checkpoint cannot be deleted.
    """
    sealed_steps = [step for step in checkpoint_steps(directory) if is_sealed(directory / str(step))]
    stay = steps_to_keep(sealed_steps, options, read_ratings(directory), higher_is_better=higher_is_better)
    for step in sorted(set(sealed_steps) - stay):
        one, going = directory / str(step), directory / f"{step}{HALF_WRITTEN}"
        if not isinstance(one, Path):
            buckets.delete(one, MANIFEST)
            continue
        one.rename(going)
        shutil.rmtree(going)


def sweep(directory: Place) -> None:
    """Deletes checkpoints of unfinished saves and unfinished deletions. Files that a thread still writes may remain."""
    if not isinstance(directory, Path):
        for one in [directory / str(step) for step in checkpoint_steps(directory)]:
            if not (is_sealed(one) or (one / buckets.COMMITTED).exists()):
                buckets.delete(one, MANIFEST)
    elif directory.is_dir():
        for entry in directory.iterdir():
            if HALF_WRITTEN in entry.name:
                shutil.rmtree(entry, ignore_errors=True)


def remove_rest(directory: Path, above: Path) -> None:
    """Removes the incomplete checkpoints that the threads of a save wrote after the run's folder was deleted.

    Then also removes `directory` and `above` if they are empty.

    Args:
      directory: the folder of the checkpoints, usually inside the run's folder. If it contains the file of an owner,
        another run uses it, and nothing is removed.
      above: the run's folder, which the save's threads may have created again.
    """
    is_inside = directory.parent == above
    for _ in range(_ROUNDS):  # threads of a failed save may still be writing
        if (directory / OWNER).exists():
            return
        found = list(directory.iterdir()) if directory.is_dir() else []
        for entry in found:
            if HALF_WRITTEN in entry.name or (entry.name.isdecimal() and not is_sealed(entry)):
                shutil.rmtree(entry, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder contains other files
            for folder in (directory, above) if found or is_inside else ():  # otherwise it may be a mount point
                folder.rmdir()
        time.sleep(_ROUND_SECONDS)


def set_aside(directory: Place, step: int) -> None:
    """Moves the checkpoint of a step into the folder `damaged`, for inspection.

    Its new name is the step; if this name exists in `damaged`, -2 or a larger number is appended.
    """
    one, aside = directory / str(step), (directory.parent if isinstance(directory, Path) else directory) / DAMAGED
    names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
    new = next(aside / name for name in names if not (aside / name).exists())
    if not isinstance(one, Path):
        buckets.move(one, new)
    else:
        aside.mkdir(exist_ok=True)
        one.rename(new)
