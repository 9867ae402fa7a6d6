"""Plans how a configuration scales before devices are bought: data, fsdp, hybrid and the best of a search (MODELLED).

Each strategy is planned on each number of devices, as `plan` does it, until the allowed number of programs is used up.
The search runs at three numbers of devices; its results are also used at the other numbers.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence

from meshtrain.config.mesh_checks import check_filled
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.hardware.accelerators import usable_bytes
from meshtrain.hardware.links import Link
from meshtrain.plan import planner
from meshtrain.plan.cluster.clusters import Cluster, open_cluster
from meshtrain.plan.cluster.compile import Compiler, compile_step, program_of, with_tiles
from meshtrain.plan.cluster.compile_thread import waiting_for
from meshtrain.plan.cost.lower_bound import idle_share
from meshtrain.plan.scheduled_hlo import Work
from meshtrain.plan.search import ranking
from meshtrain.plan.search.candidates import candidates
from meshtrain.plan.search.estimate import weights_of
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.report.scaling.cluster_sizes import resize
from meshtrain.report.scaling.efficiency import Curve, Row, curves, spent
from meshtrain.report.scaling.strategies import BEST, KINDS, STRONG, Basis, Point, Way, basic_ways, point, way_of

NUM_SEARCHES = 3
MOST_A_SEARCH = 4
PROGRAMS_A_SEARCH = 4  # one search for every four allowed programs
NOT_COMPILED = "not compiled: the limit of programs was reached"


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The result of `plan --scaling`.

    Attributes:
      cluster: the cluster that the user named.
      basis: the configuration whose scaling was planned.
      sizes: the numbers of devices, ascending.
      curves: each strategy with strong scaling, then each with weak scaling.
      searched: the numbers of devices at which a search ran and some candidate may fit.
      num_compiled: number of compiled programs.
      assumptions: the assumptions of the time model.
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
        """(axes, kind of collective) -> the measured link that models the collectives of this kind along these axes.

        None: no such link was measured. The mapping is empty if `plan` was called without a file of measured links.
        """
        timings = [row.timing for curve in self.curves for row in curve.rows if row.timing]
        return {key: link for timing in timings for key, link in timing.links.items()}


def basis_of(config: Config, cluster: Cluster) -> Basis:
    """Returns the configuration to scale, with the sizes of its weights and the memory of a device of the cluster.

    Args:
      config: the configuration to scale.
      cluster: the cluster that the user named.

    Raises:
      UserError: the configuration does not fit the cluster, or the speed of its devices is unknown.
    """
    if cluster.accelerator is None:
        raise UserError(
            Problem(
                "--scaling",
                got=f"--cluster={cluster.text}, whose speed is not known",
                allowed="GPUs and TPUs",
                nearest="--cluster=h100:1x8",
            )
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
    """Returns number of devices -> a cluster of this size with the same kind of hosts.

    Args:
      cluster: the cluster that the user named.
      sizes: the numbers of devices.

    Raises:
      UserError: some sizes are impossible; one line for each of them.
    """
    opened, problems = dict[int, Cluster](), list[str]()
    for size in sizes:
        try:
            opened[size] = open_cluster(resize(cluster.text, size))
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
    programs: int,
    say: Callable[[str], None] = print,
    plan_point: Callable[[Point, Cluster, Assumptions], Row],
) -> Scaling:
    """Plans each strategy at each number of devices, with strong and weak scaling.

    Args:
      config: the configuration to scale; its mesh fits `cluster`. With the number of devices of this mesh, strong and
        weak scaling have the same batch.
      cluster: the cluster that defines the kind of devices and hosts.
      sizes: numbers of devices, ascending.
      assumptions: the assumptions of the time model.
      programs: maximum number of compiled programs.
      say: function that prints a line; called before the first compilation and after each compilation.
      plan_point: function that plans a strategy on one number of devices and returns its row.

    Raises:
      UserError: the mesh does not fit the cluster, or a size or the kind of device is not possible.
    """
    basis = basis_of(config, cluster)
    ways = basic_ways(basis, planner.shape_on(config, cluster), sizes[-1])
    clusters = open_clusters(cluster, sizes)
    if sizes[0] > 1 and any(point(basis, way, kind, 1).config for way in ways for kind in KINDS):
        # One device is the base of the comparison; some TPUs have no slice with a single chip.
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
    found = search(basis, {size: clusters[size] for size in sizes if size >= fitting}, shares, rows)
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
    """Returns the points that can be planned, in the order of compilation, alternating between strategies.

    For each strategy, the smallest number of devices comes first, then the other numbers in descending order.
    """
    ranked, legal = list[tuple[int, Point]](), [one for one in points if one.config is not None]
    for name, kind in dict.fromkeys((one.way.name, one.kind) for one in legal):
        first, *others = [one for one in legal if (one.way.name, one.kind) == (name, kind)]
        ranked += enumerate([first, *reversed(others)])
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def plan_point(one: Point, cluster: Cluster, assumptions: Assumptions, elsewhere: Work | None = None) -> Row:
    """Plans a strategy on one number of devices, while the terminal shows the elapsed seconds.

    Args:
      one: the strategy and the number of devices; it has a configuration.
      cluster: a cluster with this number of devices.
      assumptions: the assumptions of the time model.
      elsewhere: the function that `scheduled_hlo.server` returned; it compiles the program in another process, only up
        to scheduling. If it is None or fails, the program is compiled completely, in this process.
    """
    what, row = f"{one.way.name} on {one.num_devices:,} devices", None
    if elsewhere is not None:
        row = waiting_for(what, lambda: elsewhere(_plan_on, one, cluster.text, assumptions))
    return row or waiting_for(what, lambda: _plan(with_tiles, one, cluster, assumptions))


def _plan_on(by: Compiler, one: Point, name: str, assumptions: Assumptions) -> Row:
    return _plan(by, one, open_cluster(name), assumptions)


def _plan(by: Compiler, one: Point, cluster: Cluster, assumptions: Assumptions) -> Row:
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
    """Plans points and stores their rows; each configuration is planned once.

    Attributes:
      made: configuration -> its row.
    """

    def __init__(self, plan_point: Callable[[Point], Row], say: Callable[[str], None]) -> None:
        """Creates an empty store of rows.

        Args:
          plan_point: function that plans a point and returns its row.
          say: function that prints a line for each planned point.
        """
        self.plan_point, self.say = plan_point, say
        self.made: dict[Config, Row] = {}

    def plan(self, points: Sequence[Point], most: int) -> None:
        """Plans points in order, until `most` are planned; skips points whose configuration is None or has a row."""
        for one in points:
            if most > 0 and one.config is not None and one.config not in self.made:
                start, most = time.perf_counter(), most - 1
                self.made[one.config] = self.plan_point(one)
                seconds = time.perf_counter() - start
                where = f"{one.way.name} on {one.num_devices:,} devices, {one.kind} scaling"
                self.say(f"compiled     {where}, in {seconds:.0f} s")

    def of(self, one: Point) -> Row:
        """Returns the row of a point; if the point was not planned, a row whose `problem` is the reason."""
        if one.config is None:
            return Row(one, problem=one.problem)
        if one.config not in self.made:
            return Row(one, problem=NOT_COMPILED)
        return dataclasses.replace(self.made[one.config], point=one)


@dataclasses.dataclass(frozen=True)
class Shares:
    """The maximum numbers of programs to compile, by purpose.

    Attributes:
      plain: number of programs for the strategies data, fsdp and hybrid.
      searches: number of searches for the best strategy; each search is for another number of devices.
      each: number of programs that a search compiles.
      rest: number of programs for the strategies found by searches, each on the numbers of devices without a search.
    """

    plain: int
    searches: int
    each: int
    rest: int

    @property
    def most(self) -> int:
        """Maximum number of programs in total."""
        return self.plain + self.searches * self.each + self.rest

    def line(self) -> str:
        """Returns a line for the terminal: the maximum number of programs to compile, in total and by purpose."""
        return (
            f"scaling      compiles at most {self.most} programs: {self.plain} for data, fsdp and hybrid, "
            f"{self.searches} search{'es' * (self.searches != 1)} of at most {self.each}, "
            f"{self.rest} for their results on other sizes"
        )


def shares_of(programs: int, plain: int, rest: int) -> Shares:
    """Divides the allowed number of programs among the purposes in `Shares`.

    There is one search for every four allowed programs, up to three searches. Each search compiles up to four programs.
    At least a third of the remaining programs goes to `rest` if so many are needed, and the others go to `plain`.

    >>> shares_of(64, 30, 20)
    Shares(plain=30, searches=3, each=4, rest=20)
    >>> shares_of(40, 30, 20)
    Shares(plain=21, searches=3, each=3, rest=10)
    >>> shares_of(9, 30, 20)
    Shares(plain=5, searches=2, each=1, rest=2)

    Args:
      programs: number of programs that may be compiled in total.
      plain: number of programs needed to plan data, fsdp and hybrid on all numbers of devices.
      rest: number of programs needed to plan the strategies found by searches on all numbers of devices.
    """
    searches = min(NUM_SEARCHES, programs // PROGRAMS_A_SEARCH)
    each = min(MOST_A_SEARCH, max(1, programs // (NUM_SEARCHES * PROGRAMS_A_SEARCH)))
    left = programs - searches * each
    rest = min(rest, max(left // 3, left - plain)) if searches else 0
    return Shares(min(plain, left - rest), searches, each, rest)


def search(basis: Basis, clusters: Mapping[int, Cluster], shares: Shares, rows: Rows) -> dict[int, Way]:
    """Searches for the best strategy at up to three numbers of devices.

    These are the smallest number on which a candidate may fit, the largest, and one between.

    Args:
      basis: the configuration to scale; the candidates have its batch size.
      clusters: number of devices -> cluster, ascending from the smallest number on which data, fsdp or hybrid may fit.
      shares: the maximum numbers of searches and of programs for each search.
      rows: plans the candidates and stores their rows.

    Returns:
      Number of devices -> the best strategy; a number of devices on which no candidate may fit has no entry.
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
    """Returns the strategy of the nearest search, on another number of devices.

    The strategies in `found` are tried in the order of distance between the search's number of devices and
    `num_devices`. The result contains the first strategy that can run on `num_devices`. If none can, the result
    contains the first strategy, and the reason in `problem`.

    Args:
      basis: the configuration to scale.
      found: number of devices at which a search ran -> the best strategy of this search; at least one entry.
      kind: `strong` or `weak`.
      num_devices: the number of devices to run on.
    """
    nearest = sorted(found, key=lambda searched_at: abs(math.log(searched_at / num_devices)))
    tried = [point(basis, found[searched_at], kind, num_devices) for searched_at in nearest]
    return next((one for one in tried if one.config is not None), tried[0])
