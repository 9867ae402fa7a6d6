"""Fits the latency and bandwidth of a link to the times of collectives of several sizes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from meshtrain.cli.tables import format_bytes
from meshtrain.hardware.links import Link
from meshtrain.probe.bench.timed import Timed

LEAST_SIZES = 3
BUSY_SPREAD = 1.5  # above this ratio another program used the machine, and the times are unreliable
MOST_ERROR = 0.5


@dataclasses.dataclass(frozen=True)
class Fit:
    """The line fitted to the times of one operation along one axis, or the reason why no line was fitted.

    Attributes:
      axis: an axis of the mesh.
      operation: an element of `links.OPERATIONS`.
      link: the fitted latency and bandwidth; None if the times do not allow a fit.
      error: the median of |fitted - measured| / measured; NaN if no line was computed.
      why_not: the reason why `link` is None; empty if there is a link.
    """

    axis: str
    operation: str
    link: Link | None
    error: float
    why_not: str


def fit(rows: Sequence[Timed], num_hosts: int) -> Fit:
    """Fits seconds = latency + wire bytes / bandwidth by least squares of the relative errors.

    With absolute errors, the largest size would dominate. There is no fit if a result was wrong, if the machine was
    busy (the times of one size vary), if fewer than three sizes were measured, or if the times are not close to a
    rising line.

    Args:
      rows: the measurements of one operation along one axis, one per size; at least one.
      num_hosts: the number of hosts over which the devices of a group are distributed.
    """
    axis, operation = rows[0].axis, rows[0].operation
    if why_not := _unusable(rows):
        return Fit(axis, operation, None, math.nan, why_not)
    seconds = np.array([row.fastest_seconds for row in rows])
    wire_bytes = np.array([row.wire_bytes for row in rows])
    scale = wire_bytes.max()  # conditioning: unscaled, one column would be 1e9 times the other
    matrix = np.stack([1 / seconds, wire_bytes / scale / seconds], axis=1)
    (latency, rise), *_ = np.linalg.lstsq(matrix, np.ones(len(rows)))
    error = float(np.median(np.abs((latency + rise * wire_bytes / scale) / seconds - 1)))
    if latency < 0 or rise <= 0 or error > MOST_ERROR:
        nearest = f"the best fit has a latency of {latency * 1e6:.1f} us, and a GB takes {rise / scale * 1e9:.3g} s"
        return Fit(axis, operation, None, error, f"the times are not linear in the bytes; {nearest}")
    link = Link(axis, operation, rows[0].group_size, num_hosts, float(latency), float(scale / rise))
    return Fit(axis, operation, link, error, "")


def _unusable(rows: Sequence[Timed]) -> str:
    """Returns the reason why the times of these measurements cannot be fitted; empty if they can."""
    if any(row.wrong for row in rows):
        return "the results are wrong"
    busy = [row for row in rows if row.spread > BUSY_SPREAD]
    if busy:
        worst = max(busy, key=lambda row: row.spread)
        return (
            f"the machine was busy: at {len(busy)} of {len(rows)} sizes the median round took more than {BUSY_SPREAD} "
            f"times the fastest, {worst.spread:.2f} times at {format_bytes(worst.num_bytes)}"
        )
    if len(rows) < LEAST_SIZES:
        return f"a fit needs {LEAST_SIZES} sizes, and {len(rows)} were measured"
    return ""
