"""What the GPU compiler makes of the programs that are timed: every collective is there, and nothing beside it."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.hardware.links import OPERATIONS, RING
from meshtrain.plan.cluster import clusters
from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.probe.bench import timed
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.rules import AXES
from tests.plan.counted import copies_in_loops

pytestmark = pytest.mark.gpu_compiler
NUM_ELEMENTS, NUM_REPEATS = 2**16, 11


@pytest.mark.parametrize("axis", ["data", "fsdp"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_repeat_is_one_collective_and_no_copy(name, axis):
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4}, clusters.open_cluster("h100:2x4").devices)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    x = jax.ShapeDtypeStruct((8, NUM_ELEMENTS), np.float32, sharding=sharding)
    run = timed.program(mesh, axis, name, NUM_REPEATS)
    program = parse.read(run.trace(x).lower(lowering_platforms=("cuda",)).compile().as_text())
    found = collectives(program, dict(mesh.shape))
    assert {one.kind for one in found} == {"collective-permute" if name == RING else name}
    assert {one.axes for one in found} == {axis}
    one = timed.Timed(axis, name, mesh.shape[axis], 4 * NUM_ELEMENTS, (1.0,))
    assert sum(each.count * each.wire_bytes for each in found) == pytest.approx(NUM_REPEATS * one.wire_bytes)
    assert copies_in_loops(program, {("f32", (NUM_ELEMENTS,))}) == []
