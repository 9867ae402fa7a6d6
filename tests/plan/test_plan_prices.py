"""Few compiled steps, and the seconds of many: steps are imagined, so that those between are known exactly."""

import dataclasses
import itertools

import pytest

from meshtrain.layout.axes import AXES
from meshtrain.plan import guess, prices, ways
from meshtrain.plan.curves import COMPILED, MODELLED
from meshtrain.plan.timing import Assumptions
from meshtrain.plan.ways import KINDS, STRONG, WEAK
from tests.plan.conftest import config as small
from tests.plan.imagined import sample
from tests.plan.test_plan_candidates import cluster_of

SIZES = (1, 2, 4, 8)
ROOM = 73e9


@pytest.fixture(scope="module")
def basis():
    config = small({"data": 8}, batch_size=128, accumulation_steps=8)
    return ways.Basis(config, 8, guess.weights_of(config), ROOM, devices_each=4)


@pytest.fixture(scope="module")
def clusters():
    return {size: cluster_of("h100", 1, size) for size in SIZES}


@pytest.fixture(scope="module")
def points(basis):
    plain = ways.plain_ways(basis, dict.fromkeys(AXES, 1) | {"data": 8}, 8)
    return [ways.point(basis, way, kind, size) for way in plain for kind in KINDS for size in SIZES]


def priced(basis, clusters, points, most=40, compile_step=sample, assumptions=None):
    made = prices.Prices(basis, clusters, assumptions or Assumptions(), compile_step)
    made.compile(prices.ends(points), most)
    return made, made.rows(points)


def key(point):
    return point.way.name, point.kind, point.num_devices


def test_steps_between_are_what_compiling_them_would_have_said(basis, clusters, points):
    made, rows = priced(basis, clusters, points)
    assert made.num_compiled < len({point.config for point in points})
    assert {row.how for row in rows} == {COMPILED, MODELLED}
    for row in rows:
        exact = made.at(sample(row.point), row.point)
        assert row.seconds == pytest.approx(exact.step, rel=1e-12), key(row.point)
        assert row.spent.waiting == pytest.approx(exact.waiting, rel=1e-12)
        assert row.fits is True


def test_only_the_ends_of_lines_are_compiled(points):
    ends = {key(point) for point in prices.ends(points)}
    # One device and two differ in their collectives; from two to eight the microbatches alone change.
    assert {size for name, kind, size in ends if (name, kind) == ("fsdp", STRONG)} == {1, 2, 8}
    assert {size for name, kind, size in ends if (name, kind) == ("data", WEAK)} == {1, 2, 8}


def test_a_line_has_one_kind_of_program(points):
    by_line = sorted(((str(prices.line_of(point)), point) for point in points), key=lambda pair: pair[0])
    for _, line in itertools.groupby(by_line, key=lambda pair: pair[0]):
        line = [point for _, point in line]
        assert len({(point.way.name, point.kind, point.microbatch) for point in line}) == 1
        assert len({tuple(size > 1 for size in point.shape.values()) for point in line}) == 1
        assert len({point.num_microbatches == 1 for point in line}) == 1


def test_smaller_microbatches_are_a_line_of_their_own(basis, clusters):
    config = dataclasses.replace(basis.config, batch_size=24)
    other = dataclasses.replace(basis, config=config)
    way = ways.Way("data", "data", (), (), 2)
    points = [ways.point(other, way, STRONG, size) for size in SIZES]
    assert [(point.num_microbatches, point.microbatch) for point in points] == [(12, 2), (6, 2), (3, 2), (3, 1)]
    made, rows = priced(other, clusters, points)
    assert made.num_compiled == 4
    for row in rows:
        assert row.seconds == pytest.approx(made.at(sample(row.point), row.point).step, rel=1e-12)


def test_the_ends_that_refine_a_line_come_last(basis, clusters, points):
    order = [key(point) for point in prices.ends(points)]
    assert order.index(("data", STRONG, 8)) < order.index(("data", WEAK, 8))
    few = [point for point in points if (point.way.name, point.kind) == ("data", WEAK)]
    _, rows = priced(basis, clusters, few, most=2)
    # One and two devices are compiled; the others are priced from the one end of their line.
    assert [row.how for row in rows] == [COMPILED, COMPILED, MODELLED, MODELLED]


def test_without_programs_there_are_no_times(basis, clusters, points):
    few = [point for point in points if (point.way.name, point.kind) == ("data", STRONG)]
    made, rows = priced(basis, clusters, few, most=1)
    assert made.num_compiled == 1
    assert sum(row.spent is not None for row in rows) == 1
    assert {row.problem for row in rows if row.spent is None} == {prices.NOT_COMPILED}


def test_each_program_is_compiled_once(basis, clusters, points):
    seen = []

    def compiled(point, cluster):
        seen.append(point.config)
        assert len(cluster.devices) == point.num_devices
        return sample(point)

    made, _ = priced(basis, clusters, points, compile_step=compiled)
    assert len(seen) == len(set(seen)) == made.num_compiled


def test_a_program_that_changes_with_its_size_shows_in_the_checks(basis, clusters, points):
    line = [point for point in points if (point.way.name, point.kind) == ("data", WEAK) and point.num_devices > 1]
    made, _ = priced(basis, clusters, line)
    assert made.checks == pytest.approx([0, 0], abs=1e-12)

    def slower(point, _):
        taken = sample(point)
        return sample(dataclasses.replace(point, microbatch=2 * point.microbatch)) if point.num_devices == 8 else taken

    made, rows = priced(basis, clusters, line, compile_step=slower)
    assert [abs(check) > 0.02 for check in made.checks] == [True, True]
    assert min(made.checks) < 0 < max(made.checks)
    first, between, last = (row.seconds for row in rows)
    assert first < between < last


def test_the_peak_follows_the_training_state(basis, clusters, points):
    _, rows = priced(basis, clusters, [point for point in points if point.way.name == "fsdp"])
    found = {key(row.point): row for row in rows}
    one, other = (found["fsdp", WEAK, size] for size in (2, 4))
    state = [guess.state_bytes(row.point.config, row.point.shape, basis.weights) for row in (one, other)]
    # Between 2 and 8 devices the rest of the peak changes too, by the logarithm.
    end = found["fsdp", WEAK, 8]
    rest = [row.peak_bytes - guess.state_bytes(row.point.config, row.point.shape, basis.weights) for row in (one, end)]
    assert other.how == MODELLED
    assert other.peak_bytes == pytest.approx(state[1] + rest[0] + (rest[1] - rest[0]) / 2, abs=1)


def test_what_the_compiler_gave_up_does_not_fit(basis, clusters, points):
    one = next(point for point in points if point.config)

    def refused(point, _):
        return dataclasses.replace(sample(point), program=None, found=(), refusal="RESOURCE_EXHAUSTED: too much")

    _, (row,) = priced(basis, clusters, [one], compile_step=refused)
    assert (row.fits, row.spent) == (False, None)
    assert "RESOURCE_EXHAUSTED" in row.problem
