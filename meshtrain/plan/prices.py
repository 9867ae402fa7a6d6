"""The seconds of many points from few compiled programs. MODELLED.

Compiling each way on each number of devices would be a hundred programs. Instead, each way falls into lines: numbers
of devices on which it runs the same microbatches with the same kinds of collectives (`line_of`). Only the two ends of
a line are compiled. A step between them is priced from both (`repriced.py`), and the two are mixed: by the number of
microbatches where that changes, since a step is linear in it, else by the logarithm of the number of devices.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshtrain.config.config import Config
from meshtrain.launch.links import Link
from meshtrain.layout.mesh import make_mesh
from meshtrain.plan.curves import COMPILED, MODELLED, Row
from meshtrain.plan.guess import state_bytes
from meshtrain.plan.memory import TEMPORARY_UNCERTAINTY, fits
from meshtrain.plan.repriced import Spent, mixed, regrouped, spent
from meshtrain.plan.sample import Sample
from meshtrain.plan.timing import Assumptions, links_of
from meshtrain.plan.topology import Cluster
from meshtrain.plan.ways import Basis, Point

NOT_COMPILED = "not compiled: the programs allowed were used up"


def line_of(one: Point) -> tuple[object, ...]:
    """Returns what points of a line have in common: programs that differ in the sizes of groups and loops only."""
    crossed = tuple(axis for axis, size in one.shape.items() if size > 1)
    return one.way, one.kind, crossed, one.microbatch, one.num_microbatches > 1


def ends(points: Iterable[Point]) -> list[Point]:
    """Returns the points to compile, the most telling first: the first and the last of each line.

    Without the second end of a line whose number of microbatches stays, its points can still be priced from the first;
    so such ends come last, and ends of long lines come before those of short ones.
    """
    lines: dict[tuple[object, ...], list[Point]] = {}
    for one in points:
        if one.config is not None:
            lines.setdefault(line_of(one), []).append(one)
    ranked = []
    for line in lines.values():
        ranked.append((int(len(line) == 1), -len(line), line[0]))
        if len(line) > 1:
            only_refines = line[0].num_microbatches == line[-1].num_microbatches
            ranked.append((2 if only_refines else 0, -len(line), line[-1]))
    return [one for _, _, one in sorted(ranked, key=lambda entry: entry[:2])]


class Prices:
    """Prices points from the programs that were compiled.

    Attributes:
      num_compiled: programs compiled here.
      checks: for both ends of each line with one number of microbatches, by which share the program of one end, priced
        for the other, differs from the program that was compiled there.
      links: (axes, kind of collective) -> a measured link that was used, or None; empty if none were given.
    """

    def __init__(
        self,
        basis: Basis,
        clusters: Mapping[int, Cluster],
        assumptions: Assumptions,
        compile_step: Callable[[Point, Cluster], Sample],
    ) -> None:
        """Stores the inputs; `clusters` has one for each number of devices."""
        self.basis, self.clusters, self.assumptions = basis, clusters, assumptions
        self.compile_step = compile_step
        self.samples: dict[Config, Sample] = {}
        self.num_compiled = 0
        self.checks: list[float] = []
        self.links: dict[tuple[str, str], Link | None] = {}

    def add(self, sample: Sample) -> None:
        """Adds a program that was compiled elsewhere."""
        assert sample.point.config is not None
        self.samples[sample.point.config] = sample

    def compile(self, points: Iterable[Point], most: int) -> None:
        """Compiles points, each configuration once, at most so many."""
        for one in points:
            if most <= 0 or one.config in self.samples:
                continue
            self.add(self.compile_step(one, self.clusters[one.num_devices]))
            self.num_compiled += 1
            most -= 1

    def at(self, sample: Sample, one: Point) -> Spent:
        """Returns where the time of a compiled program goes on the mesh of a point."""
        assert sample.program is not None
        cluster = self.clusters[one.num_devices]
        mesh = make_mesh(one.shape, cluster.devices)
        found = regrouped(sample.found, one.shape)
        if self.assumptions.links:
            self.links |= links_of(found, mesh, self.assumptions)
        return spent(sample.program, found, mesh, cluster, self.assumptions, sample.idle_share)

    def rows(self, points: Sequence[Point]) -> list[Row]:
        """Returns a row for each point."""
        lines: dict[tuple[object, ...], list[Point]] = {}
        for one in points:
            if one.config is not None and one.config in self.samples and self.samples[one.config].program is not None:
                lines.setdefault(line_of(one), []).append(one)
        for known in lines.values():
            self._check(known[0], known[-1])
            self._check(known[-1], known[0])
        return [self._row(one, lines) for one in points]

    def _check(self, one: Point, other: Point) -> None:
        """Prices the program of one end of a line for the other, where its number of microbatches is the same."""
        if one.num_devices != other.num_devices and one.num_microbatches == other.num_microbatches:
            priced, compiled = (self.at(self._sample(end), other).step for end in (one, other))
            self.checks.append(priced / compiled - 1)

    def _sample(self, one: Point) -> Sample:
        assert one.config is not None
        return self.samples[one.config]

    def _row(self, one: Point, lines: Mapping[tuple[object, ...], Sequence[Point]]) -> Row:
        if one.config is None:
            return Row(one, problem=one.problem)
        if one.config in self.samples:
            sample = self._sample(one)
            if sample.program is None:
                return Row(one, problem=f"does not fit: {sample.refusal}", fits=False)
            return self._priced(one, COMPILED, self.at(sample, one), float(sample.peak_bytes))
        key = line_of(one)
        first, last = _beside(one, lines[key]) if key in lines else (None, None)
        share = _share(one, first, last) if first and last else None
        if share is None or first is None or last is None:
            return Row(one, problem=NOT_COMPILED)
        near = self._sample(first), self._sample(last)
        made = mixed(self.at(near[0], one), self.at(near[1], one), share)
        return self._priced(one, MODELLED, made, self._peak(one, *near, share))

    def _peak(self, one: Point, first: Sample, last: Sample, share: float) -> float:
        """Returns the peak: those of the ends less their training state, which the point's own takes the place of."""
        state = self._state(one)
        others = [sample.peak_bytes - self._state(sample.point) for sample in (first, last)]
        return state + others[0] + share * (others[1] - others[0])

    def _state(self, one: Point) -> int:
        assert one.config is not None
        return state_bytes(one.config, one.shape, self.basis.weights)

    def _priced(self, one: Point, how: str, made: Spent, peak: float) -> Row:
        uncertainty = TEMPORARY_UNCERTAINTY[self.clusters[one.num_devices].platform] * (peak - self._state(one))
        fit = fits(int(peak), int(self.basis.capacity_bytes), int(max(0, uncertainty)), refused=False)
        return Row(one, how, "", made, int(peak), fit)


def _beside(one: Point, known: Sequence[Point]) -> tuple[Point, Point]:
    """Returns the compiled points of its line next to a point: below and above, or two ends where it is outside."""
    below = [other for other in known if other.num_devices <= one.num_devices]
    above = [other for other in known if other.num_devices >= one.num_devices]
    return (below or known)[-1 if below else 0], (above or known)[0 if above else -1]


def _share(one: Point, first: Point, last: Point) -> float | None:
    """Returns how much of `last` is mixed in; None if the two say nothing about this number of microbatches."""
    if first.num_microbatches != last.num_microbatches:
        return (one.num_microbatches - first.num_microbatches) / (last.num_microbatches - first.num_microbatches)
    if one.num_microbatches != first.num_microbatches:
        return None
    if first.num_devices == last.num_devices:
        return 0.0
    return math.log(one.num_devices / first.num_devices) / math.log(last.num_devices / first.num_devices)
