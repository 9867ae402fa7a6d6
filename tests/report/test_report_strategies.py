"""What each way runs on each number of devices: mesh, batch, microbatches, or why it cannot."""

import dataclasses
import math

import pytest

from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.smaller import with_change
from meshtrain.data.sources import DataOptions
from meshtrain.plan.search import candidates, estimate
from meshtrain.report.scaling import strategies
from meshtrain.report.scaling.strategies import STRONG, WEAK
from meshtrain.sharding.rules import AXES
from tests.plan.conftest import config as small
from tests.plan.test_plan_candidates import LARGE, cluster_of

CONFIGURED = {"data": 2, "fsdp": 4}


def basis(config=None, capacity=math.inf, num_devices=8):
    config = config or small(CONFIGURED, accumulation_steps=1)
    return strategies.Basis(config, num_devices, estimate.weights_of(config), capacity, devices_each=4)


def plain(one, largest=64):
    return {way.name: way for way in strategies.basic_ways(one, dict.fromkeys(AXES, 1) | CONFIGURED, largest)}


def larger(point):
    return {axis: size for axis, size in point.shape.items() if size > 1}


def test_each_way_has_its_mesh():
    one = basis()
    found = {
        name: [larger(strategies.point(one, way, STRONG, size)) for size in (2, 4, 8)]
        for name, way in plain(one).items()
    }
    assert found == {
        "data": [{"data": 2}, {"data": 4}, {"data": 8}],
        "fsdp": [{"fsdp": 2}, {"fsdp": 4}, {"fsdp": 8}],
        "hybrid": [{"fsdp": 2}, {"fsdp": 4}, {"data": 2, "fsdp": 4}],
    }


# 16 sequences on 8 devices, two at a time on each.
@pytest.mark.parametrize(
    ("kind", "num_devices", "batch", "microbatch", "number"),
    [
        (STRONG, 1, 16, 2, 8),
        (STRONG, 4, 16, 2, 2),
        (STRONG, 8, 16, 2, 1),
        (STRONG, 16, 16, 1, 1),  # nothing is left but smaller microbatches
        (WEAK, 1, 2, 2, 1),
        (WEAK, 8, 16, 2, 1),
        (WEAK, 64, 128, 2, 1),
    ],
)
@pytest.mark.parametrize("name", ["data", "fsdp"])
def test_strong_scaling_keeps_the_batch_and_weak_scaling_that_of_a_device(
    name, kind, num_devices, batch, microbatch, number
):
    one = basis()
    point = strategies.point(one, plain(one)[name], kind, num_devices)
    assert (point.batch_size, point.microbatch, point.num_microbatches) == (batch, microbatch, number)
    assert point.config.batch_size == batch
    assert num_microbatches(point.config, point.shape) == number


def test_weak_scaling_gives_each_part_a_sequence_where_there_are_less():
    one = basis(num_devices=64)  # a quarter of a sequence each
    point = strategies.point(one, plain(one)["fsdp"], WEAK, 8)
    assert (point.batch_size, point.microbatch) == (8, 1)


def test_a_batch_that_does_not_divide_is_said():
    one = basis()
    point = strategies.point(one, plain(one)["data"], STRONG, 32)
    assert point.config is None
    assert point.problem == "16 sequences cannot be divided evenly over 32 devices"


def test_what_cannot_fit_is_said_and_a_copy_takes_as_many_hosts_as_hold_it():
    large = small(CONFIGURED, model=dataclasses.replace(small().model, **LARGE))  # 206 GB of training state
    one = basis(large, capacity=75e9)
    found = plain(one)
    point = strategies.point(one, found["data"], STRONG, 8)
    assert point.config is None
    assert point.problem.startswith("does not fit: about 1")
    assert found["hybrid"].fixed == {"fsdp": 4}
    assert plain(basis(large, capacity=30e9))["hybrid"].fixed == {"fsdp": 8}
    point = strategies.point(one, found["hybrid"], STRONG, 6)
    assert "not a multiple of the 4" in point.problem


def test_what_a_search_finds_is_a_way_of_any_size():
    config = small(CONFIGURED, data=DataOptions("synthetic"))
    cluster = cluster_of("h100", 2, 4)
    one = strategies.Basis(config, 8, estimate.weights_of(config), math.inf, 4)
    seen = set()
    for found in candidates.candidates(config, cluster, only_mesh=False)[::5]:
        way = strategies.way_of(found, config.batch_size, config)
        point = strategies.point(one, way, STRONG, 8)
        assert point.config == with_change(config, found.change), found
        doubled = strategies.point(one, way, STRONG, 16)
        if doubled.config is not None:
            others = {axis: size for axis, size in found.shape.items() if axis not in ("data", "fsdp")}
            assert others.items() <= doubled.shape.items()
            seen.add(doubled.shape["pipeline"])
    assert {1, 2} <= seen


def test_a_problem_of_the_configuration_is_the_points():
    one = basis()
    way = strategies.Way(strategies.BEST, "data", {"tensor": 8}, {}, 2)  # four heads
    point = strategies.point(one, way, STRONG, 8)
    assert point.config is None
    assert "tensor" in point.problem


def test_the_room_that_activations_take_is_that_of_the_points_own_batch():
    one = basis()
    way = plain(one)["data"]
    point = strategies.point(one, way, WEAK, 8)
    needed = estimate.estimate_bytes(point.config, point.shape, one.weights)
    close = dataclasses.replace(one, capacity_bytes=0.999 * needed / candidates.MODEST)
    # Two sequences at a time are too many, on any number of devices.
    assert [strategies.point(close, way, WEAK, size).microbatch for size in (1, 8, 64)] == [1, 1, 1]
    assert strategies.point(one, way, WEAK, 64).microbatch == 2
