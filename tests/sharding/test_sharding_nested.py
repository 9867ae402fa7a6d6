"""Manual regions inside a manual region: `placement.on_shards` under a region over an axis outside of all others.

Each group of the outer axis has a batch of its own, and has to get the gradients of that batch alone, computed on
half of the devices without an outer region.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshtrain.sharding import placement
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.param_sharding import param_sharding
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.rules import AXES, LayoutOptions, Rule, default_rules, extend

pytestmark = pytest.mark.quick

GROUP, DATA = "group", frozenset({"data"})
NUM_GROUPS, NUM_SEQUENCES, WIDTH, HIDDEN = 2, 8, 4, 16


def mesh_of(*, with_groups, data, fsdp):
    """Returns the mesh of one group, or of both with `group` as the outermost axis."""
    sizes = {GROUP: NUM_GROUPS} if with_groups else {}
    sizes |= dict.fromkeys(AXES, 1) | {"data": data, "fsdp": fsdp}
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def gradients(replicas, w, batch):
    """Returns the sum and the gradients of a loss, one sequence after the other, as a step adds them up."""

    def compute(w, batch):
        def add(total, x):
            loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
            return (total[0] + loss, total[1] + replicas.part(gradient, replicas.stored)), None

        return jax.lax.scan(add, (jnp.float32(0), replicas.zeros(w, replicas.stored)), batch)[0]

    return replicas.data_parallel(compute)(w, batch)


def replicas_on(mesh, level):
    rules = extend(default_rules(LayoutOptions()), Rule("embed"), Rule("mlp", ("fsdp",)))
    return GradientSync(mesh, param_sharding((WIDTH, HIDDEN), ("embed", "mlp"), rules, mesh.shape, level), level)


@pytest.mark.parametrize("level", [0, 2])
def test_gradients_of_replicas_are_the_same_inside_an_outer_region(level):
    inner, outer = (mesh_of(with_groups=some, data=2, fsdp=2) for some in (False, True))
    w, batches = draw(WIDTH, HIDDEN), draw(NUM_GROUPS, NUM_SEQUENCES, 2, WIDTH)
    alone = jax.jit(functools.partial(gradients, replicas_on(inner, level)))
    expected = [alone(w, batch) for batch in batches]

    def in_group(w, batches):
        loss, found = gradients(replicas_on(outer, level), w, batches[0])
        return loss[None], found[None]

    groups = PartitionSpec(GROUP)
    nested = on_shards(outer, in_group, (PartitionSpec(), groups), groups, axes=frozenset({GROUP}))
    losses, found = jax.jit(nested)(w, batches)
    inside = replicas_on(outer, level).stored.moment
    assert found.sharding.is_equivalent_to(jax.NamedSharding(outer, PartitionSpec(GROUP, *inside)), 3)
    losses, found = jax.device_get((losses, found))
    for index, (loss, gradient) in enumerate(jax.device_get(expected)):
        np.testing.assert_allclose(losses[index], loss, rtol=1e-6)
        assert np.linalg.norm(found[index] - gradient) <= 5e-6 * np.linalg.norm(gradient)


def test_an_axis_that_is_manual_already_is_neither_entered_nor_named():
    mesh = mesh_of(with_groups=True, data=2, fsdp=2)
    whole, over_data_axis = PartitionSpec(), PartitionSpec("data")

    def inside(x):
        # data is manual here: the same region asked for again runs the function on the shard that is there.
        again = on_shards(mesh, lambda x: x * jax.lax.axis_index("data"), (over_data_axis,), over_data_axis, axes=DATA)
        assert x.shape == (2,)
        rest = on_shards(mesh, lambda x: jax.lax.psum(x, "fsdp"), (over_data_axis,), whole)
        return again(rest(x))

    region = on_shards(mesh, inside, (over_data_axis,), over_data_axis, axes=DATA)
    assert jax.jit(region)(jnp.ones(4)).tolist() == [0, 0, 2, 2]


def test_an_axis_that_the_mesh_lacks_is_no_axis_to_enter():
    mesh = mesh_of(with_groups=False, data=2, fsdp=2)
    with pytest.raises(AssertionError, match="the mesh does not have the axes"):
        on_shards(mesh, lambda x: x, PartitionSpec(), PartitionSpec(), axes=frozenset({GROUP}))


def test_entering_with_the_concrete_mesh_is_noticed(monkeypatch):
    monkeypatch.setattr(placement, "_mesh_here", lambda mesh: mesh)
    with pytest.raises(ValueError, match="mesh"):
        test_gradients_of_replicas_are_the_same_inside_an_outer_region(0)
