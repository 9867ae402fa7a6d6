"""One collective on one axis: its value against numpy on eight devices, and its time by a planted clock."""

import jax
import numpy as np
import pytest

from meshtrain.hardware.links import OPERATIONS, RING
from meshtrain.probe.bench import operations, timed
from meshtrain.probe.bench.timed import Timed
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.rules import AXES

SHAPE = dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(SHAPE, jax.devices())


def by_hand(name, everyones, mine):
    """What a device has afterwards, from the arrays of its whole group [n, E]."""
    size = len(everyones)
    chunks = everyones.reshape(size, size, -1)
    if name in ("all-reduce", RING):
        return everyones.sum(0)
    if name == "all-gather":
        return np.concatenate([chunks[j, j] for j in range(size)])
    if name == "reduce-scatter":
        kept = chunks[mine].copy()
        kept[mine] = chunks[:, mine].sum(0)
        return kept.reshape(-1)
    if name == "all-to-all":
        return np.concatenate([chunks[j, mine] for j in range(size)])
    return everyones[(mine - 1) % size] if name == "collective-permute" else everyones[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_numpy_expects_is_what_the_operation_means(name):
    common, rows = operations.base(24), [1, 5, 9]
    everyones = np.stack([common + operations.shift(row) for row in rows])
    for mine in range(3):
        np.testing.assert_array_equal(operations.expected(name, common, rows, mine), by_hand(name, everyones, mine))


@pytest.mark.parametrize("axis", ["data", "fsdp"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_are_right_on_every_axis_and_times_are_of_one_collective(mesh, name, axis):
    ticks = iter([0.0, 5.0, 10.0, 13.0])
    found = timed.measure_collective(mesh, axis, name, 100, num_rounds=2, clock=lambda: next(ticks))
    assert found.wrong == ()
    assert (found.axis, found.operation, found.group_size) == (axis, name, SHAPE[axis])
    assert found.num_bytes == {"data": 104, "fsdp": 112}[axis]  # float32 that divide by the axis
    assert found.seconds == pytest.approx((5 / 51, 3 / 51), rel=1e-12)  # 51 collectives in a round


def test_the_slowest_process_counts_and_each_reports_its_wrong_values(mesh, monkeypatch):
    def two(_, own):
        return [own, {"seconds": [0.5, 0.001], "wrong": "device 7 ..."}]

    monkeypatch.setattr(timed.peers, "gather_values", two)
    ticks = iter([0.0, 5.1, 10.0, 15.1])
    found = timed.measure_collective(mesh, "fsdp", "all-reduce", 64, num_rounds=2, clock=lambda: next(ticks))
    assert found.seconds == pytest.approx((0.5, 0.1), rel=1e-12)
    assert found.wrong == ("process 1: device 7 ...",)


def test_a_wrong_value_is_named(mesh):
    rows = np.array(timed.inputs(mesh, 8))
    rows[:] = [operations.expected("all-reduce", operations.base(8), [r % 4, r % 4 + 4], r // 4) for r in range(8)]
    sharding = timed.inputs(mesh, 8).sharding
    assert timed.difference(mesh, "data", "all-reduce", jax.device_put(rows, sharding)) == ""
    rows[6, 3] += 1
    said = timed.difference(mesh, "data", "all-reduce", jax.device_put(rows, sharding))
    assert said.startswith(
        "all-reduce on data: device 6, number 1 of its group, has 1 wrong elements of 8; element 3 is "
    )


def test_bandwidths_are_those_of_the_fastest_round():
    found = Timed("data", "all-reduce", 4, 1000, (3e-6, 2e-6, 2.5e-6))
    assert found.algorithm_bytes_per_second == pytest.approx(5e8)
    assert found.bus_bytes_per_second == pytest.approx(7.5e8)
    assert found.spread == pytest.approx(1.25)


def test_small_collectives_are_repeated_more_often():
    assert [timed.repeats(size) for size in (2**10, 2**20, 2**23, 2**30)] == [51, 51, 9, 5]


def test_a_gpu_has_a_broadcast_of_its_own(mesh):
    function = operations.operation("collective-broadcast", "fsdp", 4, "gpu")
    spec = jax.sharding.PartitionSpec(mesh.axis_names)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    text = mapped.trace(jax.ShapeDtypeStruct((64,), np.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "collective_broadcast" in text
    assert "all_reduce" not in text
