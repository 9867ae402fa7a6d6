"""Residuals of compressed gradients: in a step that is refused, and on another number of replicas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assembly.extensions import restoring
from meshtrain.lab.compression import CompressionOptions
from meshtrain.lab.local_steps import Local
from meshtrain.models.task import Sums
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import in_equal_parts
from meshtrain.sharding.rules import AXES
from meshtrain.step.guard import GuardOptions
from meshtrain.step.state import init_state
from meshtrain.step.step import WeightUpdate, train_step
from tests.step.conftest import CONFIG, assembled, batch_of, same

ADAM = optax.adam(0.5)


def trained(config, num_steps, broken=(), **axes):
    """The states after each step, on their devices, and the last metrics."""
    assembly = assembled(config, tuple(axes.items()), False)
    step = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    states = [assembly.steps.init(jax.random.key_data(jax.random.key(0)))]
    for number in range(1, num_steps + 1):
        batch = batch_of(number, number in broken, False)
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        given = jax.tree.map(jnp.copy, states[-1])
        state, metrics = step(given, placed)
        states.append(state)
    return states, metrics


@pytest.mark.parametrize(
    ("kind", "level", "axes"),
    [
        ("int8", 0, {"data": 4}),
        pytest.param("int8", 1, {"data": 2, "fsdp": 2, "pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_that_is_refused_keeps_the_residual_and_replicas_agree(kind, level, axes):
    config = dataclasses.replace(CONFIG, reduction=CompressionOptions(kind), zero=ZeroOptions(level))
    (_, first, second, third), metrics = trained(config, 3, broken=(2,), **axes)
    same((second.params, second.opt_state, second.extra), (first.params, first.opt_state, first.extra))
    assert int(third.skipped.total) == 1
    assert float(metrics["loss"]) < np.log(100) * 1.05
    for leaf in jax.tree.leaves(third.params):
        shards = {}
        for shard in leaf.addressable_shards:
            shards.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all((one == copies[0]).all() for copies in shards.values() for one in copies)
    for before, leaf in zip(jax.tree.leaves(first.extra), jax.tree.leaves(third.extra), strict=True):
        assert leaf.sharding.spec[0] == "data"
        assert np.abs(leaf).max() > 0
        assert (np.asarray(leaf) != np.asarray(before)).any()


def test_a_nan_that_packing_loses_is_seen_before_it():
    params = {"a": jnp.ones(3)}

    def gradients(params, batch, rng, seed):
        return Sums(jnp.float32(1), jnp.float32(1), {}, {"a": batch["a"]})

    def reduce(gradients, residual):
        return jax.tree.map(jnp.nan_to_num, gradients), jax.tree.map(lambda leaf: leaf + 1, residual)

    update = WeightUpdate(ADAM, lambda count: 0.5, 1.0, GuardOptions(), reduce=reduce)
    step = jax.jit(train_step(gradients, update))
    start = init_state(params, ADAM, jax.random.key(0), extra={"a": jnp.zeros((2, 3))})
    good, _ = step(start, {"a": jnp.ones(3)})
    assert np.all(good.extra["a"] == 1)
    for bad in (np.nan, np.inf):
        after, metrics = step(good, {"a": jnp.float32([1.0, bad, 1.0])})
        same((after.params, after.opt_state, after.extra), (good.params, good.opt_state, good.extra))
        assert (int(after.skipped.total), int(metrics["first_not_finite"])) == (1, 1)
        assert not np.isfinite(metrics["grad_norm"])


def test_the_norm_is_that_of_the_reduced_gradients():
    def gradients(params, batch, rng, seed):
        return Sums(jnp.float32(1), jnp.float32(1), {}, {"a": batch["a"]})

    update = WeightUpdate(ADAM, lambda count: 0.5, 1.0, GuardOptions(), reduce=lambda leaves, left: (
        jax.tree.map(lambda leaf: leaf.sum(axis=0), leaves), left
    ))  # fmt: skip
    start = init_state({"a": jnp.ones(2)}, ADAM, jax.random.key(0), extra={"a": jnp.zeros((2, 2))})
    _, metrics = jax.jit(train_step(gradients, update))(start, {"a": jnp.float32([[3, 0], [0, 4]])})
    assert metrics["grad_norm"] == 5


@pytest.mark.parametrize(("num_saved", "num_now"), [(8, 4), (8, 1), (3, 2), (2, 4)])
def test_another_number_of_replicas_keeps_the_sum(num_saved, num_now):
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": num_now, "fsdp": 2}, jax.devices()[: 2 * num_now])
    sharding = NamedSharding(mesh, PartitionSpec("data" if num_now > 1 else None, None, "fsdp"))
    state = init_state({"w": jnp.ones((3, 4))}, ADAM, jax.random.key(0), extra={"w": jnp.zeros((num_now, 3, 4))})
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    here = jax.ShapeDtypeStruct((num_now, 3, 4), jnp.float32, sharding=sharding)
    abstract = dataclasses.replace(abstract, extra={"w": here})
    saved = np.random.default_rng(0).standard_normal((num_saved, 3, 4)).astype(np.float32)

    def read(wanted):
        assert wanted.extra["w"].shape == saved.shape
        return dataclasses.replace(state, extra={"w": jax.device_put(saved, wanted.extra["w"].sharding)})

    restored = restoring(in_equal_parts)(read, {"extra/w": saved.shape}, abstract)
    found = restored.extra["w"]
    assert (found.shape, found.sharding) == (here.shape, sharding)
    np.testing.assert_allclose(np.sum(found, axis=0), saved.sum(axis=0), rtol=1e-6, atol=1e-6)
    assert (np.asarray(found) == np.asarray(found)[0]).all()
    assert dataclasses.replace(restored, extra=()) == dataclasses.replace(state, extra=())


def test_groups_keep_their_weights_where_their_residual_is_resharded():
    """Local steps with a reduction: of their extra state only the residual has a row for each replica."""
    saved, groups = np.arange(24, dtype=np.float32).reshape(2, 3, 4), jnp.full((4, 3, 4), 7.0)
    extra = Local({"w": groups}, (), {"w": jnp.zeros((1, 3, 4))})
    state = init_state({"w": jnp.ones((3, 4))}, ADAM, jax.random.key(0), extra=extra)
    sharding = NamedSharding(make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]), PartitionSpec())
    here = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state)
    shapes = {"extra/params/w": groups.shape, "extra/residual/w": saved.shape}

    def read(wanted):
        assert wanted.extra.residual["w"].shape == saved.shape
        assert wanted.extra.params["w"].shape == groups.shape
        return dataclasses.replace(state, extra=dataclasses.replace(extra, residual={"w": jnp.asarray(saved)}))

    restored = restoring(in_equal_parts, "extra/residual/")(read, shapes, here)
    np.testing.assert_array_equal(restored.extra.residual["w"], saved.sum(axis=0, keepdims=True))
    np.testing.assert_array_equal(restored.extra.params["w"], groups)
