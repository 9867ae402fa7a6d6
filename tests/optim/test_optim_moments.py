"""Moments in fewer bytes: how many, the same on a mesh without a collective, still falling, near those of float32."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshtrain.optim.eight_bits import decode, extents
from meshtrain.optim.moments import StoredMoments, round_weights, to_bfloat16
from meshtrain.optim.optimizers import OptimizerOptions, check, optimizer
from meshtrain.optim.states import state_axes
from meshtrain.sharding.param_sharding import is_names
from meshtrain.sharding.trees import leaves_with_paths

KINDS = ("bfloat16", "8bit")
AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "layers": {"up": ("layers", "embed", "mlp"), "norm": {"scale": ("layers", "norm")}},
}
SIZES = {"vocab": 64, "embed": 64, "layers": 2, "mlp": 128, "norm": 64}


def tree(seed):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda names: generator.normal(size=[SIZES[name] for name in names]).astype(np.float32), AXES, is_leaf=is_names
    )


def build(kind, name="adamw", rate=1e-2, **changes):
    return optimizer(OptimizerOptions(name=name, moments=kind, **changes), lambda count: jnp.float32(rate), AXES)


def num_bytes(state):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_each_optimizer_stores_all_its_moments_in_fewer_bytes(name):
    params = jax.eval_shape(lambda: tree(0))
    whole, half, quarter = (jax.eval_shape(build(kind, name).init, params) for kind in ("float32", *KINDS))
    norm = math.prod(SIZES[axis] for axis in AXES["layers"]["norm"]["scale"])
    count = num_bytes(whole) - 4 * sum(leaf.size for leaf in jax.tree.leaves(whole) if leaf.size > 3)
    num_moments = 2 if name == "adamw" else 1
    assert num_bytes(half) == (num_bytes(whole) - count) / 2 + count + 4, "half, and the number of updates"
    if name != "muon":  # of which the norms alone have two moments
        matrices = sum(leaf.size for leaf in jax.tree.leaves(params)) - norm
        assert num_bytes(quarter) == num_moments * (matrices * (1 + 4 / 256) + 4 * norm) + count + 4
    for kind, state in zip(KINDS, (half, quarter), strict=True):
        updates, after = jax.eval_shape(build(kind, name).update, params, state, params)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"float32"}
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    dtypes = {path: leaf.dtype.name for path, leaf in leaves_with_paths(quarter) if "/inner/" in path and leaf.size > 3}
    of_second = {dtypes[path] for path in dtypes if "/nu/" in path and "norm" not in path}
    assert of_second <= {"uint8"}
    assert {dtypes[path] for path in dtypes if "/nu/" not in path and "norm" not in path} == {"int8"}


def test_adafactor_has_no_moments_to_store_otherwise():
    params = jax.eval_shape(lambda: tree(0))
    plain, other = (jax.eval_shape(build(kind, "adafactor").init, params) for kind in ("float32", "8bit"))
    assert jax.tree.structure(plain) == jax.tree.structure(other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_changes_no_bit_and_sends_nothing(kind, exact_bits):
    mesh = jax.make_mesh((2, 2, 2), ("pipeline", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    placed = {"layers": "pipeline", "embed": "fsdp", "mlp": "tensor", "vocab": "tensor"}

    def sharding(names):
        return NamedSharding(mesh, PartitionSpec(*[placed.get(axis) for axis in names]))

    transformation, params, gradients = build(kind), tree(0), tree(1)
    state = jax.jit(transformation.init)(params)
    step = jax.jit(transformation.update)
    _, once = step(gradients, state, params)
    _, twice = step(gradients, once, params)

    structure = jax.tree.structure(state)
    of_params = jax.tree.map(sharding, AXES, is_leaf=is_names)
    of_state = jax.tree.unflatten(structure, [sharding(names) for names in state_axes(transformation, params, AXES)])
    on_mesh = jax.jit(transformation.update, out_shardings=(of_params, of_state))
    given = [
        jax.device_put(values, of) for values, of in ((gradients, of_params), (once, of_state), (params, of_params))
    ]
    compiled = on_mesh.lower(*given).compile()
    _, got = compiled(*given)
    for (path, one), (_, other) in zip(leaves_with_paths(got), leaves_with_paths(twice), strict=True):
        if path.endswith("up"):
            assert math.prod(one.sharding.shard_shape(one.shape)) == one.size / 8, path
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=path)
    text = compiled.as_text()
    assert not any(what in text for what in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_moment_falls_after_a_large_gradient(kind):
    """To the nearest, bfloat16 keeps the largest one forever: 0.999 of a number rounds to the number.

    One element of each block keeps its gradient, so that the others have to fall in their codes, not in their scale.
    """
    axes, shape, num_steps = {"up": ("embed", "mlp")}, (64, 128), 300
    options = OptimizerOptions(name="adam", beta2=0.999, moments=kind)
    transformation = optimizer(options, lambda count: jnp.float32(0.0), axes)
    extent = extents(shape, axes["up"], options.moment_block)
    stays = np.all([index % part == 0 for index, part in zip(np.indices(shape), extent, strict=True)], axis=0)
    params, later = {"up": jnp.zeros(shape)}, {"up": jnp.asarray(stays, jnp.float32)}

    @jax.jit
    def last(first):
        _, state = transformation.update(first, transformation.init(params), params)
        body = lambda _, state: transformation.update(later, state, params)[1]  # noqa: E731
        return jax.lax.fori_loop(0, num_steps, body, state)

    [stored] = [part for part in last({"up": jnp.ones(shape)}) if isinstance(part, StoredMoments)]
    second = stored.inner.nu["up"]
    second = np.asarray(decode(second, stored.scales.nu["up"]) if kind == "8bit" else second, np.float64)
    # In 8 bits the mean of the roots is right, and that of their squares larger by their variance.
    bound = 0.03 if kind == "bfloat16" else 0.08
    assert np.mean(second[~stays]) == pytest.approx(0.001 * 0.999**num_steps, rel=bound)
    assert np.mean(second[stays]) == pytest.approx(1 - 0.999 ** (num_steps + 1), rel=bound)
    assert int(stored.num_updates) == num_steps + 1


def test_rounding_to_bfloat16_has_the_right_mean_and_keeps_what_is_not_finite():
    random = jnp.arange(2**16, dtype=jnp.uint16)
    for value in (1.003, -7.7e-12, 3.0):
        rounded = np.asarray(to_bfloat16(jnp.full(2**16, value, jnp.float32), random), np.float64)
        assert len(np.unique(rounded)) == (1 if value == 3.0 else 2)
        np.testing.assert_allclose(np.mean(rounded), np.float32(value), rtol=1e-6)
    strange = to_bfloat16(jnp.asarray([jnp.inf, -jnp.inf, jnp.nan]), jnp.full(3, 2**16 - 1, jnp.uint16))
    assert np.array_equal(np.asarray(strange, np.float32), [np.inf, -np.inf, np.nan], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_each_array_is_rounded_with_random_bits_of_its_own(kind):
    axes = dict.fromkeys(("one", "other"), ("embed", "mlp"))
    transformation = optimizer(OptimizerOptions(moments=kind), lambda count: jnp.float32(0.0), axes)
    gradient = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    params = dict.fromkeys(axes, jnp.asarray(gradient))
    _, state = jax.jit(transformation.update)(params, transformation.init(params), params)
    [stored] = [part for part in state if isinstance(part, StoredMoments)]
    differing = np.mean(np.asarray(stored.inner.nu["one"]) != np.asarray(stored.inner.nu["other"]))
    assert 0.1 < differing < 0.9


def test_weights_in_bfloat16_move_by_the_mean_of_small_updates():
    """The distance of bfloat16 numbers below 1 is 2^-8: rounded to nearest, no update of 1e-4 would happen."""
    stored = {"scale": jnp.ones(4096, jnp.bfloat16), "bias": jnp.ones(4096), "other": jnp.ones(4096, jnp.bfloat16)}
    for num_updates in range(100):
        moved = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) - 1e-4, stored)
        stored = round_weights(moved, stored, jnp.int32(num_updates))
    assert [leaf.dtype.name for leaf in jax.tree.leaves(stored)] == ["float32", "bfloat16", "bfloat16"]
    means = {name: float(jnp.mean(leaf.astype(jnp.float32))) for name, leaf in stored.items()}
    # The standard deviation of a mean is below sqrt(100 * 4e-3 * 1e-4 / 4096) = 1e-4.
    assert all(mean == pytest.approx(0.99, abs=4e-4) for mean in means.values())
    assert not np.array_equal(stored["scale"], stored["other"])


def test_a_mesh_changes_no_bit_of_rounded_weights(exact_bits):
    shape = (4, 6, 8)
    weights, stored = {"up": np.random.default_rng(0).normal(size=shape).astype(np.float32)}, {"up": jnp.bfloat16(0)}
    expected = jax.jit(lambda weights: round_weights(weights, stored, jnp.int32(7)))(weights)["up"]
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    for spec in (PartitionSpec("fsdp"), PartitionSpec(None, "tensor", "fsdp")):
        placed = jax.device_put(weights, NamedSharding(mesh, spec))
        found = jax.jit(lambda weights: round_weights(weights, stored, jnp.int32(7)))(placed)["up"]
        np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_the_block_of_another_size_is_a_power_of_two():
    wrong = OptimizerOptions(moments="8bit", moment_block=100)
    assert check(wrong) == ["optimizer.moment_block: got 100; allowed: a power of two from 32 to 4096; nearest: 64"]
    assert check(dataclasses.replace(wrong, moment_block=64)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_ten_updates_stay_near_those_of_float32(kind):
    def after_ten(transformation):
        @jax.jit
        def run(params, gradients):
            def body(carry, factor):
                params, state = carry
                scaled = jax.tree.map(lambda gradient: factor * gradient + 0.3, gradients)
                updates, state = transformation.update(scaled, state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(body, (params, transformation.init(params)), jnp.linspace(1.0, 0.2, 10))[0][0]

        return run(tree(0), tree(1))

    start, plain, stored = tree(0), after_ten(build("float32")), after_ten(build(kind))
    for (path, one), other, before in zip(
        leaves_with_paths(stored), jax.tree.leaves(plain), jax.tree.leaves(start), strict=True
    ):
        share = float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other - before))
        assert share < (0.01 if kind == "bfloat16" else 0.1), path
        if kind == "8bit" and path.endswith("scale"):
            assert share == 0, "norms keep float32"
