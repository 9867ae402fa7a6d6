"""How one way scales: a row for each number of devices, and its speedup against the smallest that fits."""

import dataclasses
from collections.abc import Sequence

from meshtrain.plan import speedup
from meshtrain.plan.repriced import Spent
from meshtrain.plan.ways import BEST, KINDS, STRONG, Point

COMPILED, MODELLED = "compiled", "modelled"


@dataclasses.dataclass(frozen=True)
class Row:
    """One way on one number of devices, with what it takes.

    Attributes:
      point: the way, the number of devices, and what runs.
      how: `compiled`, `modelled` from programs of other sizes, or an empty text where there is no time.
      problem: why there is no time.
      spent: where the seconds of a step go.
      peak_bytes: of a device; None if unknown.
      fits: true, false, or None where the peak is too close to the capacity.
    """

    point: Point
    how: str = ""
    problem: str = ""
    spent: Spent | None = None
    peak_bytes: int | None = None
    fits: bool | None = None

    @property
    def seconds(self) -> float:
        """Of a step; the row has one."""
        assert self.spent is not None
        return self.spent.step

    @property
    def rate(self) -> float:
        """Sequences a second."""
        return self.point.batch_size / self.seconds

    @property
    def is_usable(self) -> bool:
        """Whether it has a time, and may fit."""
        return self.spent is not None and self.fits is not False


@dataclasses.dataclass(frozen=True)
class Curve:
    """One way at every number of devices, strong or weak.

    Attributes:
      name: of the way.
      kind: `strong` or `weak`.
      rows: one for each number of devices.
    """

    name: str
    kind: str
    rows: tuple[Row, ...]

    @property
    def base(self) -> Row | None:
        """The smallest number of devices on which the step may fit; None if it fits nowhere."""
        return next((row for row in self.rows if row.is_usable), None)

    def speedup(self, row: Row) -> float | None:
        """Returns the speedup of a row against the base."""
        if self.base is None or not row.is_usable:
            return None
        return speedup.speedup(row.rate, self.base.rate)

    def efficiency(self, row: Row) -> float | None:
        """Returns the efficiency of a row against the base."""
        base = self.base
        if base is None or not row.is_usable:
            return None
        return speedup.efficiency(row.rate, row.point.num_devices, base.rate, base.point.num_devices)

    def serial_share(self, row: Row) -> float | None:
        """Returns the serial share that explains a row's speedup; None for the base, and in weak scaling."""
        base = self.base
        if base is None or not row.is_usable or self.kind != STRONG:
            return None
        return speedup.serial_share(row.seconds, row.point.num_devices, base.seconds, base.point.num_devices)

    @property
    def fitted_serial_share(self) -> float | None:
        """Returns the serial share that explains all speedups best; None in weak scaling, or of a single row."""
        if self.kind != STRONG:
            return None
        usable = [row for row in self.rows if row.is_usable]
        return speedup.fitted_serial_share([(row.point.num_devices, row.seconds) for row in usable])


def curves(rows: Sequence[Row], names: Sequence[str]) -> list[Curve]:
    """Returns the rows as curves, strong ones first. The best way is the fastest of all at each number of devices."""
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
    return max([row, *same] if row.is_usable else same or [row], key=lambda one: one.rate if one.spent else 0.0)
