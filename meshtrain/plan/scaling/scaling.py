"""How a configuration scales, before the devices are bought: data, fsdp, hybrid and the search's best. MODELLED.

Each way is planned on each number of devices, as `plan` does it, while there are programs left. The search runs at
three numbers of devices, and what it has found is used between them.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

from meshtrain.config.config import Config, check_filled
from meshtrain.errors import UserError, refuse
from meshtrain.launch.hardware import usable_bytes
from meshtrain.launch.links import Link
from meshtrain.plan import planner
from meshtrain.plan.cost.lower_bound import idle_share
from meshtrain.plan.scaling.cluster_sizes import resized
from meshtrain.plan.scaling.efficiency import Curve, Row, curves, spent
from meshtrain.plan.scaling.strategies import BEST, KINDS, STRONG, Basis, Point, Way, plain_ways, point, way_of
from meshtrain.plan.scheduled_dump import Work
from meshtrain.plan.search import ranking
from meshtrain.plan.search.candidates import candidates
from meshtrain.plan.search.estimate import weights_of
from meshtrain.plan.target.clusters import Cluster, open_cluster
from meshtrain.plan.target.compile import Compiler, compile_step, program_of, with_tiles
from meshtrain.plan.target.compile_thread import waiting_for
from meshtrain.plan.timing.streams import Assumptions

MOST_PROGRAMS = 64
MOST_WHOLE = 40  # unless told otherwise, where each is compiled whole, which takes twice as long
NUM_SEARCHES = 3
MOST_A_SEARCH = 4
PROGRAMS_A_SEARCH = 4  # there is a search for each four of the programs allowed
NOT_COMPILED = "not compiled: the programs allowed were used up"


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The result.

    Attributes:
      cluster: as the user named it.
      basis: what was scaled.
      sizes: numbers of devices.
      curves: each way, strong, then each way, weak.
      searched: numbers of devices at which a search ran.
      num_compiled: programs that were compiled.
      assumptions: of the model of time.
    """

    cluster: Cluster
    basis: Basis
    sizes: tuple[int, ...]
    curves: tuple[Curve, ...]
    searched: tuple[int, ...]
    num_compiled: int
    assumptions: Assumptions

    @property
    def links(self) -> dict[tuple[str, str], Link | None]:
        """(axes, kind of collective) -> a measured link that was used, or None; empty if none were given."""
        timings = [row.timing for curve in self.curves for row in curve.rows if row.timing]
        return {key: link for timing in timings for key, link in timing.links.items()}


def basis_of(config: Config, cluster: Cluster) -> Basis:
    """Returns what is scaled.

    Raises:
      UserError: the configuration does not fit the cluster, or nothing is known about the speed of its devices.
    """
    if cluster.accelerator is None:
        raise UserError(
            f"--scaling: got --cluster={cluster.text}, whose speed is not known; allowed: GPUs and TPUs; "
            f"nearest: --cluster=h100:1x8"
        )
    shape = planner.shape_on(config, cluster)
    refuse(check_filled(config, shape))
    return Basis(
        config=config,
        num_devices=math.prod(shape.values()),
        weights=weights_of(config),
        capacity_bytes=usable_bytes(cluster.accelerator),
        devices_each=cluster.devices_each,
    )


def open_clusters(cluster: Cluster, sizes: Sequence[int]) -> dict[int, Cluster]:
    """Returns number of devices -> a cluster of that size with the same hosts.

    Raises:
      UserError: a line for each size that no such cluster has.
    """
    opened, problems = dict[int, Cluster](), list[str]()
    for size in sizes:
        try:
            opened[size] = open_cluster(resized(cluster.text, size))
        except UserError as error:
            problems += error.problems
    refuse(problems)
    return opened


def scaling(
    config: Config,
    cluster: Cluster,
    sizes: Sequence[int],
    assumptions: Assumptions,
    *,
    programs: int = MOST_PROGRAMS,
    say: Callable[[str], None] = print,
    plan_point: Callable[[Point, Cluster, Assumptions], Row],
) -> Scaling:
    """Plans each way at each number of devices, strong and weak.

    Args:
      config: to scale; its mesh fits `cluster`, where strong and weak scaling meet.
      cluster: which kind of devices and hosts.
      sizes: numbers of devices, ascending.
      assumptions: of the model of time.
      programs: at most so many are compiled.
      say: called with a line before the first is compiled, and with one for each that is.
      plan_point: plans a point, see `planned`.

    Raises:
      UserError: the mesh does not fit the cluster, or a size or the kind of device is not possible.
    """
    basis = basis_of(config, cluster)
    ways = plain_ways(basis, planner.shape_on(config, cluster), sizes[-1])
    clusters = open_clusters(cluster, sizes)
    if sizes[0] > 1 and any(point(basis, way, kind, 1).config for way in ways for kind in KINDS):
        # One device is what the others are compared with; no slice of some TPUs is a single chip.
        with contextlib.suppress(UserError):
            clusters |= open_clusters(cluster, [1])
            sizes = [1, *sizes]
    plain = [point(basis, way, kind, size) for way in ways for kind in KINDS for size in sizes]
    wanted = {one.config for one in plain if one.config is not None}
    shares = shares_of(programs, len(wanted), len(KINDS) * len(sizes))
    say(shares.line())
    rows = Rows(lambda one: plan_point(one, clusters[one.num_devices], assumptions), say)
    rows.plan(in_order(plain), shares.plain)
    usable = [one.num_devices for one in plain if rows.of(one).is_usable]
    fitting = min(usable, default=sizes[0])
    found = searched(basis, {size: clusters[size] for size in sizes if size >= fitting}, shares, rows)
    best = [nearest_point(basis, found, kind, size) for kind in KINDS for size in sizes] if found else []
    rows.plan(in_order(best), shares.most - len(rows.made))
    rows.plan(in_order(plain), shares.most - len(rows.made))
    names = [*(way.name for way in ways), *([BEST] if found else [])]
    return Scaling(
        cluster=cluster,
        basis=basis,
        sizes=tuple(sizes),
        curves=tuple(curves([rows.of(one) for one in [*plain, *best]], names)),
        searched=tuple(found),
        num_compiled=len(rows.made),
        assumptions=assumptions,
    )


def in_order(points: Sequence[Point]) -> list[Point]:
    """Returns what can be planned, in turns of the ways: the smallest number of devices first, then the largest on."""
    ranked, legal = list[tuple[int, Point]](), [one for one in points if one.config is not None]
    for name, kind in dict.fromkeys((one.way.name, one.kind) for one in legal):
        first, *others = [one for one in legal if (one.way.name, one.kind) == (name, kind)]
        ranked += enumerate([first, *reversed(others)])
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def planned(one: Point, cluster: Cluster, assumptions: Assumptions, elsewhere: Work | None = None) -> Row:
    """Plans a point, while the terminal shows the seconds.

    Args:
      one: can run.
      cluster: of its size.
      assumptions: of the model of time.
      elsewhere: see `scheduled_dump.server`; None: its program is compiled whole. So is what comes to no end there.
    """
    what, row = f"{one.way.name} on {one.num_devices:,} devices", None
    if elsewhere is not None:
        row = waiting_for(what, lambda: elsewhere(_planned_on, one, cluster.text, assumptions))
    return row or waiting_for(what, lambda: _planned(with_tiles, one, cluster, assumptions))


def _planned_on(by: Compiler, one: Point, name: str, assumptions: Assumptions) -> Row:
    return _planned(by, one, open_cluster(name), assumptions)


def _planned(by: Compiler, one: Point, cluster: Cluster, assumptions: Assumptions) -> Row:
    assert one.config is not None
    try:
        plan = planner.plan(one.config, one.shape, cluster, assumptions, None, functools.partial(compile_step, by=by))
    except UserError as error:
        return Row(one, problem=error.problems[0])
    program, assembly, stats = program_of(plan.compiled), plan.compiled.assembly, plan.memory.compiler
    if program is None or stats is None:
        refusal = plan.compiled.refusal.strip().partition("\n")[0]
        return Row(one, problem=f"does not fit: {refusal}", fits=False)
    parts = spent(program, assembly.mesh, cluster, assumptions, idle_share(assembly))
    return Row(one, "", plan.timing, parts, stats.peak_bytes, plan.memory.fits)


class Rows:
    """The rows of points; each configuration is planned once.

    Attributes:
      made: configuration -> its row.
    """

    def __init__(self, plan_point: Callable[[Point], Row], say: Callable[[str], None]) -> None:
        """Stores what plans a point, and what is called with a line for each that was."""
        self.plan_point, self.say = plan_point, say
        self.made: dict[Config, Row] = {}

    def plan(self, points: Sequence[Point], most: int) -> None:
        """Plans the first points that were not planned yet, at most so many."""
        for one in points:
            if most > 0 and one.config is not None and one.config not in self.made:
                start, most = time.perf_counter(), most - 1
                self.made[one.config] = self.plan_point(one)
                seconds = time.perf_counter() - start
                where = f"{one.way.name} on {one.num_devices:,} devices, {one.kind} scaling"
                self.say(f"compiled     {where}, in {seconds:.0f} s")

    def of(self, one: Point) -> Row:
        """Returns the row of a point, which says why it has no time."""
        if one.config is None:
            return Row(one, problem=one.problem)
        if one.config not in self.made:
            return Row(one, problem=NOT_COMPILED)
        return dataclasses.replace(self.made[one.config], point=one)


@dataclasses.dataclass(frozen=True)
class Shares:
    """How many programs are compiled for what.

    Attributes:
      plain: for data, fsdp and hybrid.
      searches: number of searches.
      each: for each search.
      rest: for what the searches find, on other numbers of devices.
    """

    plain: int
    searches: int
    each: int
    rest: int

    @property
    def most(self) -> int:
        """All programs."""
        return self.plain + self.searches * self.each + self.rest

    def line(self) -> str:
        """Returns what will be compiled, as one line."""
        return (
            f"scaling      compiles at most {self.most} programs: {self.plain} for data, fsdp and hybrid, "
            f"{self.searches} search{'es' * (self.searches != 1)} of at most {self.each}, "
            f"{self.rest} for what they find on other sizes"
        )


def shares_of(programs: int, plain: int, rest: int) -> Shares:
    """Returns how many programs are compiled for what; with few of them there are fewer searches.

    >>> shares_of(64, 30, 20)
    Shares(plain=30, searches=3, each=4, rest=20)
    >>> shares_of(40, 30, 20)
    Shares(plain=21, searches=3, each=3, rest=10)
    >>> shares_of(9, 30, 20)
    Shares(plain=5, searches=2, each=1, rest=2)

    Args:
      programs: all of them.
      plain: as many as data, fsdp and hybrid have.
      rest: as many as what the searches find may have, on other numbers of devices.
    """
    searches = min(NUM_SEARCHES, programs // PROGRAMS_A_SEARCH)
    each = min(MOST_A_SEARCH, max(1, programs // (NUM_SEARCHES * PROGRAMS_A_SEARCH)))
    left = programs - searches * each
    rest = min(rest, max(left // 3, left - plain)) if searches else 0
    return Shares(min(plain, left - rest), searches, each, rest)


def searched(basis: Basis, clusters: Mapping[int, Cluster], shares: Shares, rows: Rows) -> dict[int, Way]:
    """Searches on the smallest number of devices where something may fit, on the largest, and between the two.

    Args:
      basis: what is scaled; its batch stays as configured.
      clusters: number of devices -> cluster, from the smallest on which some other way may fit.
      shares: how many searches, and how many programs each.
      rows: gets those of what is compiled.

    Returns:
      Number of devices -> the best way found, where one may fit.
    """
    found, left = dict[int, Way](), list(clusters)
    room = len(rows.made) + shares.searches * shares.each
    while left and len(found) < shares.searches and len(rows.made) < room:
        size = left.pop(0)
        most = min(shares.each, room - len(rows.made))
        chosen = ranking.chosen_of(candidates(basis.config, clusters[size], only_mesh=False), most, clusters[size])
        ways = [way_of(one, basis.config.batch_size, basis.config) for one in chosen]
        points = [point(basis, way, STRONG, size) for way in ways]
        rows.plan(points, most)
        usable = [row for row in map(rows.of, points) if row.is_usable]
        if not usable:
            continue
        found[size] = min(usable, key=lambda row: (row.fits is None, row.seconds)).point.way
        if len(found) == 1 and left:
            left = [*dict.fromkeys([left[(len(left) - 1) // 2], left[-1]])][-max(1, shares.searches - 1) :]
    return found


def nearest_point(basis: Basis, found: Mapping[int, Way], kind: str, num_devices: int) -> Point:
    """Returns what runs where searches have found the best: the way of the nearest search that can run there.

    Args:
      basis: what is scaled.
      found: the number of devices of a search -> the best way that it found; at least one.
      kind: `strong` or `weak`.
      num_devices: on which it is to run; if no way can, the point says why the nearest cannot.
    """
    nearest = sorted(found, key=lambda searched_at: abs(math.log(searched_at / num_devices)))
    tried = [point(basis, found[searched_at], kind, num_devices) for searched_at in nearest]
    return next((one for one in tried if one.config is not None), tried[0])
