"""Reads `metrics.jsonl`: a curve for each metric, and the tokens (or other units) and seconds at each step.

N: points of a curve.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np

from meshtrain.errors import is_finite
from meshtrain.files import Json, JsonObject
from meshtrain.observe.run_files import has_goodput, row_of, seconds_since_start

_MOST_STEPS = 1 << 53  # above this step, float64 would merge neighboring steps


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric over the N steps at which it was logged.

    Attributes:
      steps: int64 [N], increasing.
      values: float64 [N]; NaN if the logged value is null.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Log:
    """The log of a run, by metric.

    Attributes:
      curves: metric -> its curve, in the order of their first rows; metrics without any number are left out.
      unit: the name of the counted units, such as tokens or images; empty if the log does not state it.
      units_per_step: number of units per step; 0 if the log does not state it.
      clock: the seconds since the run's first start at each step whose time is known; may have no steps.
    """

    curves: Mapping[str, Curve]
    unit: str
    units_per_step: float
    clock: Curve

    def units_at(self, steps: np.ndarray) -> np.ndarray:
        """Returns the number of units (such as tokens) up to each of N steps, float64 [N].

        The numbers are NaN if `units_per_step` is 0.

        Args:
          steps: int64 [N].
        """
        return steps * (self.units_per_step or math.nan)

    def seconds_at(self, steps: np.ndarray) -> np.ndarray:
        """Returns the seconds from the run's first start to each of N steps, float64 [N].

        Between two rows with a time, the seconds are interpolated. Before the first of these rows they are NaN, and
        after the last they stay constant. All are NaN if no row has a time.

        Args:
          steps: int64 [N].
        """
        if not len(self.clock.steps):
            return np.full(len(steps), math.nan)
        return np.interp(steps, self.clock.steps, self.clock.values, left=math.nan)


def read(path: pathlib.Path) -> Log | None:
    """Returns the log in a `metrics.jsonl`; None if the file has no row. Incomplete or invalid lines are skipped.

    If a run repeated steps because it resumed from an earlier step, the values of the last repetition are used.

    Raises:
      OSError: the file cannot be read.
    """
    kept = list[JsonObject]()
    with path.open("rb") as file:
        for line in file:
            row = row_of(line)
            if row is None or not 0 <= row["step"] < _MOST_STEPS:
                continue
            while kept and kept[-1]["step"] > row["step"]:
                kept.pop()
            kept.append(row)
    if not kept:
        return None
    curves = _curves(kept)
    unit, units_per_step = _unit(kept)
    timed = {row["step"]: seconds_since_start(row) for row in kept if has_goodput(row)}
    clock = _curve(timed)
    return Log(curves, unit, units_per_step, Curve(clock.steps, np.maximum.accumulate(clock.values)))


def _curves(rows: Iterable[Mapping[str, Json]]) -> dict[str, Curve]:
    found = dict[str, dict[int, float]]()
    for row in rows:
        for name, value in row.items():
            if name != "step" and (value is None or isinstance(value, float) or is_finite(value)):
                found.setdefault(name, {})[row["step"]] = float(value) if is_finite(value) else math.nan
    curves = {name: _curve(points) for name, points in found.items()}
    return {name: curve for name, curve in curves.items() if not np.isnan(curve.values).all()}


def _curve(points: Mapping[int, float]) -> Curve:
    return Curve(np.fromiter(points, np.int64, len(points)), np.fromiter(points.values(), np.float64, len(points)))


def _unit(rows: Iterable[Mapping[str, Json]]) -> tuple[str, float]:
    """Returns (unit of a run, units per step), from the newest row with a metric `UNIT_per_second`.

    Returns ('', 0) if no row has such a metric.
    """
    names = {name.removesuffix("_per_second") for row in rows for name in row if name.endswith("_per_second")}
    for row in reversed(list(rows)):
        for name in names & row.keys():
            if row["step"] and is_finite(row[name]):
                return name, row[name] / row["step"]
    return "", 0.0
