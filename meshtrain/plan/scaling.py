"""How a configuration scales, before the devices are bought: data, fsdp, hybrid and the search's best. MODELLED.

Few programs are compiled (`prices.py` tells which, and how the steps between them are priced). The search runs at three
numbers of devices, and what it has found is used between them.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from meshtrain.config.config import Config
from meshtrain.launch.hardware import usable_bytes
from meshtrain.launch.links import Link
from meshtrain.plan import planner, search
from meshtrain.plan.curves import Curve, curves
from meshtrain.plan.guess import weights_of
from meshtrain.plan.prices import Prices, ends
from meshtrain.plan.sample import Sample, compile_point, sample_of
from meshtrain.plan.sizes import resized
from meshtrain.plan.timing import Assumptions
from meshtrain.plan.topology import Cluster, open_cluster
from meshtrain.plan.ways import BEST, KINDS, STRONG, Basis, Point, Way, plain_ways, point, way_of
from meshtrain.words.errors import UserError

MOST_PROGRAMS = 40
NUM_SEARCHES = 3
MOST_A_SEARCH = 4
PROGRAMS_A_SEARCH = 4  # there is a search for each four of the programs allowed
FOR_THE_BEST = 10  # programs for the search's best on other numbers of devices

Search = Callable[[Config, Cluster, Assumptions, int], search.Found]


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
      checks: see `Prices.checks`.
      links: see `Prices.links`.
      assumptions: of the model of time.
    """

    cluster: Cluster
    basis: Basis
    sizes: tuple[int, ...]
    curves: tuple[Curve, ...]
    searched: tuple[int, ...]
    num_compiled: int
    checks: tuple[float, ...]
    links: Mapping[tuple[str, str], Link | None]
    assumptions: Assumptions


def basis_of(config: Config, cluster: Cluster) -> Basis:
    """Returns what is scaled.

    Raises:
      UserError: the mesh does not fit the cluster, or nothing is known about the speed of its devices.
    """
    if cluster.accelerator is None:
        raise UserError(
            f"--scaling: got --cluster={cluster.text}, whose speed is not known; allowed: GPUs and TPUs; "
            f"nearest: --cluster=h100:1x8"
        )
    shape = planner.shape_on(config, cluster)
    return Basis(
        config=config,
        num_devices=math.prod(shape.values()),
        weights=weights_of(config),
        capacity_bytes=usable_bytes(cluster.accelerator),
        devices_each=max(1, len(cluster.devices) // cluster.num_hosts),
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
    if problems:
        raise UserError(*problems)
    return opened


def best_guesses(config: Config, cluster: Cluster, assumptions: Assumptions, most: int) -> search.Found:
    """Searches with at most so many programs."""
    return search.search(config, cluster, assumptions, only_mesh=False, most=most)


def scaling(
    config: Config,
    cluster: Cluster,
    sizes: Sequence[int],
    assumptions: Assumptions,
    *,
    programs: int = MOST_PROGRAMS,
    say: Callable[[str], None] = print,
    compile_step: Callable[[Point, Cluster], Sample] = compile_point,
    run_search: Search = best_guesses,
) -> Scaling:
    """Models each way at each number of devices, strong and weak.

    Args:
      config: to scale; its mesh fits `cluster`, where strong and weak scaling meet.
      cluster: which kind of devices and hosts.
      sizes: numbers of devices, ascending.
      assumptions: of the model of time.
      programs: at most so many are compiled.
      say: called with a line before the first is compiled, and with one for each that is.
      compile_step: compiles a point; another one in tests.
      run_search: (configuration, cluster, assumptions, most programs) -> what a search has found; another one in tests.

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
    prices = Prices(basis, clusters, assumptions, _told(compile_step, say))
    shares = shares_of(programs, len({one.config for one in ends(plain)}))
    say(shares.line())
    prices.compile(ends(plain), shares.plain)
    rows = prices.rows(plain)
    fitting = min((row.point.num_devices for row in rows if row.is_usable), default=sizes[0])
    larger = [size for size in sizes if size >= fitting]
    found, num_searched = searched(basis, clusters, larger, shares, prices, run_search)
    best = nearest_points(basis, found, sizes) if found else []
    prices.compile(ends(best), shares.rest)
    names = [*(way.name for way in ways), *([BEST] if found else [])]
    made = curves([*rows, *prices.rows(best)], names)
    return Scaling(
        cluster=cluster,
        basis=basis,
        sizes=tuple(sizes),
        curves=tuple(made),
        searched=tuple(found),
        num_compiled=prices.num_compiled + num_searched,
        checks=tuple(prices.checks),
        links=prices.links,
        assumptions=assumptions,
    )


def _told(
    compile_step: Callable[[Point, Cluster], Sample], say: Callable[[str], None]
) -> Callable[[Point, Cluster], Sample]:
    """Returns a function that compiles a point and says so, with the seconds that it took."""

    def compiled(one: Point, cluster: Cluster) -> Sample:
        start = time.perf_counter()
        made = compile_step(one, cluster)
        seconds = time.perf_counter() - start
        say(f"compiled     {one.way.name} on {one.num_devices:,} devices, {one.kind} scaling, in {seconds:.0f} s")
        return made

    return compiled


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


def shares_of(programs: int, wanted: int) -> Shares:
    """Returns how many programs are compiled for what; with few of them there are fewer searches.

    >>> shares_of(40, 12)
    Shares(plain=12, searches=3, each=4, rest=10)
    >>> shares_of(16, 12)
    Shares(plain=9, searches=3, each=1, rest=4)
    >>> shares_of(9, 12)
    Shares(plain=5, searches=2, each=1, rest=2)

    Args:
      programs: all of them.
      wanted: by data, fsdp and hybrid.
    """
    searches = min(NUM_SEARCHES, programs // PROGRAMS_A_SEARCH)
    each = min(MOST_A_SEARCH, max(1, (programs - wanted - FOR_THE_BEST) // NUM_SEARCHES))
    left = programs - searches * each
    rest = min(FOR_THE_BEST, max(left // 3, left - wanted)) if searches else 0
    return Shares(min(wanted, left - rest), searches, each, rest)


def searched(
    basis: Basis,
    clusters: Mapping[int, Cluster],
    sizes: Sequence[int],
    shares: Shares,
    prices: Prices,
    run_search: Search,
) -> tuple[dict[int, Way], int]:
    """Searches on the smallest number of devices where something may fit, on the largest, and between the two.

    Args:
      basis: what is scaled; its batch stays as configured.
      clusters: number of devices -> cluster.
      sizes: numbers of devices, from the smallest on which some other way may fit.
      shares: how many searches, and how many programs each.
      prices: gets the programs of the best.
      run_search: see `scaling`.

    Returns:
      (number of devices -> the best way found, where one may fit; the number of programs compiled).
    """
    found, num_programs, most = dict[int, Way](), 0, shares.searches * shares.each
    left = list(sizes)
    while left and len(found) < shares.searches and num_programs < most:
        size = left.pop(0)
        try:
            result = run_search(basis.config, clusters[size], prices.assumptions, min(shares.each, most - num_programs))
        except UserError:
            continue  # no mesh is legal here and may fit
        num_programs += len(result.ranked)
        if not result.ranked or result.ranked[0][1].memory.fits is False:
            continue
        candidate, plan = result.ranked[0]
        found[size] = way_of(candidate, basis.config.batch_size, basis.config)
        one = point(basis, found[size], STRONG, size)
        if one.config is not None:
            prices.add(sample_of(one, plan.compiled))
        if len(found) == 1 and left:
            left = [*dict.fromkeys([left[(len(left) - 1) // 2], left[-1]])][-max(1, shares.searches - 1) :]
    return found, num_programs


def nearest_points(basis: Basis, found: Mapping[int, Way], sizes: Sequence[int]) -> list[Point]:
    """Returns what runs where searches have found the best: the way of the nearest search that can run there.

    Args:
      basis: what is scaled.
      found: the number of devices of a search -> the best way that it found.
      sizes: all numbers of devices.
    """
    chosen = []
    for kind in KINDS:
        for size in sizes:
            order = sorted(found, key=lambda at, size=size: abs(math.log(at / size)))  # type: ignore[misc]
            tried = [point(basis, found[at], kind, size) for at in order]
            legal = [one for one in tried if one.config is not None]
            chosen += legal[:1] or tried[:1]
    return chosen
