"""Computes how a strategy scales: for each number of devices, its time by cause and its speedup (MODELLED).

Throughput r, devices n; r0 and n0 belong to the base, the smallest number of devices on which the step may fit:

    speedup       r / r0; with a fixed batch this is t0 / t
    efficiency    speedup n0 / n
    serial share  s of Amdahl's law (1967), t / t0 = s + (1 - s) n0 / n. For one measurement it is
                  (1 / speedup - n0 / n) / (1 - n0 / n), as defined by Karp and Flatt (1990); for several, the least
                  squares fit of t / t0. It is negative if the speedup is more than n / n0.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.hlo.parse import Program
from meshtrain.plan.timing.streams import Assumptions, Streams, Timing, transfer_seconds
from meshtrain.report.scaling.strategies import BEST, KINDS, STRONG, Point
from meshtrain.sharding.mesh import over_slices
from meshtrain.sharding.rules import AXES


@dataclasses.dataclass(frozen=True)
class Spent:
    """The seconds of a step by cause; computing, idle and waiting add up to the step.

    Attributes:
      computing: seconds in which a device computes, if transfers took no time.
      idle: seconds in which a pipeline's stage idles, if transfers took no time.
      waiting: axis, or axes joined by `+` -> seconds by which its transfers lengthen the step, in mesh order (slowest
        network first). The transfers are added to the model axis by axis, last axis first; each value is the increase
        when the axis is added.
      latency: the part of `waiting` that would remain if transfers had latency, but their bytes took no time.
    """

    computing: float
    idle: float
    waiting: Mapping[str, float]
    latency: float


def spent(program: Program, mesh: Mesh, cluster: Cluster, assumptions: Assumptions, idle_share: float) -> Spent:
    """Returns the modelled seconds of a step by cause: computing, idle, waiting for links, and latency.

    Args:
      program: the scheduled program.
      mesh: the mesh of the program.
      cluster: the cluster; its accelerators have known peaks.
      assumptions: the assumptions of the time model.
      idle_share: share of a pipeline's clock ticks in which a stage idles; 0 without a pipeline.
    """
    assert cluster.accelerator is not None
    accelerator = cluster.accelerator
    found = collectives(program, dict(mesh.shape), over_slices(mesh))
    each = transfer_seconds(found, mesh, cluster, assumptions)

    def step(axes: Iterable[str], *, has_bytes: bool = True) -> float:
        """Returns the seconds of a step in which only transfers along some axes take time.

        Args:
          axes: the axes, as in `Collective.axes`.
          has_bytes: whether these transfers take the time of their bytes in addition to their latency.
        """
        chosen = set(axes)
        alone = {
            one.name: (each[one.name][0] + (each[one.name][1] if has_bytes else 0.0)) if one.axes in chosen else 0.0
            for one in found
        }
        return Streams(program, accelerator, alone, assumptions).step()[0]

    order = sorted({one.axes for one in found}, key=_place)
    seconds = [step(order[number:]) for number in range(len(order) + 1)]
    free = seconds[-1]
    waiting = {axes: seconds[number] - seconds[number + 1] for number, axes in enumerate(order)}
    latency = step(order, has_bytes=False) - free if order else 0.0
    return Spent(free * (1 - idle_share), free * idle_share, waiting, latency)


def _place(axes: str) -> tuple[int, str]:
    """Sort key: position of an axis (or joined axes) in mesh order; unknown axes last."""
    first = axes.partition("+")[0]
    return (AXES.index(first) if first in AXES else len(AXES), axes)


@dataclasses.dataclass(frozen=True)
class Row:
    """The modelled time and memory of a strategy on one number of devices.

    Attributes:
      point: the strategy, the number of devices, and the configuration.
      problem: the reason why the step has no modelled time; empty if it has one.
      timing: modelled seconds of the step; None if there is a `problem`.
      spent: the seconds of the step by cause; None if there is a `problem`.
      peak_bytes: peak memory of one device; None if unknown.
      fits: whether the step fits; None if the peak is too close to the capacity, or unknown.
    """

    point: Point
    problem: str = ""
    timing: Timing | None = None
    spent: Spent | None = None
    peak_bytes: int | None = None
    fits: bool | None = None

    @property
    def seconds(self) -> float:
        """Modelled seconds of a step; `timing` must not be None."""
        assert self.timing is not None
        return self.timing.step_seconds

    @property
    def rate(self) -> float:
        """Throughput in sequences per second; `timing` must not be None."""
        return self.point.batch_size / self.seconds

    @property
    def is_usable(self) -> bool:
        """Whether the row has a `timing` and its step may fit."""
        return self.timing is not None and self.fits is not False


@dataclasses.dataclass(frozen=True)
class Curve:
    """A strategy at every number of devices, with strong or weak scaling.

    Attributes:
      name: the strategy's name.
      kind: `strong` or `weak`.
      rows: one row for each number of devices, ascending.
    """

    name: str
    kind: str
    rows: tuple[Row, ...]

    @property
    def base(self) -> Row | None:
        """The row of the smallest number of devices on which the step may fit; None if it fits on none."""
        return next((row for row in self.rows if row.is_usable), None)

    def speedup(self, row: Row) -> float | None:
        """Returns the throughput of a row divided by the throughput of the base; None if the row is not usable."""
        return row.rate / self.base.rate if self.base and row.is_usable else None

    def efficiency(self, row: Row) -> float | None:
        """Returns the speedup of a row / (its devices / the base's devices); None if the row is not usable."""
        gained = self.speedup(row)
        if self.base is None or gained is None:
            return None
        return gained * self.base.point.num_devices / row.point.num_devices

    def serial_share(self, *rows: Row) -> float | None:
        """Returns the serial share of Amdahl's law that fits the speedups of `rows` best.

        Returns None for weak scaling, or if none of the rows is usable.
        """
        usable = [(row.point.num_devices, row.seconds) for row in rows if row.is_usable]
        if self.base is None or not usable or self.kind != STRONG:
            return None
        return fitted_serial_share([(self.base.point.num_devices, self.base.seconds), *usable])


def fitted_serial_share(steps: Sequence[tuple[int, float]]) -> float | None:
    """Returns the serial share of Amdahl's law that fits several step times best.

    >>> round(fitted_serial_share([(8, 1.0), (16, 0.55), (32, 0.325)]), 6)
    0.1

    Args:
      steps: (number of devices, seconds of a step of the same batch), the base first.

    Returns:
      The share; None if there is only the base.
    """
    above = below = 0.0
    for num_devices, seconds in steps[1:]:
        ideal = steps[0][0] / num_devices
        above += (seconds / steps[0][1] - ideal) * (1 - ideal)
        below += (1 - ideal) ** 2
    return above / below if below else None


def curves(rows: Sequence[Row], names: Sequence[str]) -> list[Curve]:
    """Groups rows into curves, strong scaling first.

    The curve `best` has the fastest row of all strategies at each number of devices.

    Args:
      rows: the rows of all strategies.
      names: the strategies, in the order of the curves.
    """
    made = []
    for kind in KINDS:
        of_kind = [row for row in rows if row.point.kind == kind]
        for name in names:
            own = [row for row in of_kind if row.point.way.name == name]
            if name == BEST:
                own = [_fastest(row, of_kind) for row in own]
            made.append(Curve(name, kind, tuple(own)))
    return made


def _fastest(row: Row, rows: Sequence[Row]) -> Row:
    same = [other for other in rows if other.point.num_devices == row.point.num_devices and other.is_usable]
    return max(same, key=lambda one: one.rate, default=row)
