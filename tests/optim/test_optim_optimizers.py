"""Every optimizer: downhill, each stacked layer as if alone, the same on a mesh; states with axes; optax as reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshtrain.errors import UserError
from meshtrain.optim.masks import is_axes, num_stacked
from meshtrain.optim.optimizers import NAMES, OptimizerOptions, check, optimizer, state_axes

NUM_LAYERS = 2
AXES = {
    "embedding": {"table": ("vocab", "embed"), "positions": ("positions", "embed")},
    "layers": {
        "attention": {
            "query": ("layers", "embed", "heads", "head_dim"),
            "query_bias": ("layers", "heads", "head_dim"),
            "output": ("layers", "heads", "head_dim", "embed"),
        },
        "mlp": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "up_bias": ("layers", "mlp")},
        "norm": {"scale": ("layers", "norm")},
    },
    "head": {"norm": {"scale": ("norm",)}, "kernel": ("embed", "vocab")},
}
SIZES = {
    "vocab": 192, "embed": 128, "positions": 16, "layers": NUM_LAYERS, "heads": 4, "head_dim": 32, "mlp": 160, "norm": 128,
}  # fmt: skip
MATRICES = {"table", "positions", "query", "output", "up", "down", "kernel"}


def tree(seed, axes=AXES):
    """Weights or gradients whose layers differ in size by far, so that anything mixed between them shows."""
    leaves, structure = jax.tree.flatten(axes, is_leaf=is_axes)
    generator = np.random.default_rng(seed)
    arrays = []
    for names in leaves:
        array = generator.normal(size=[SIZES[name] for name in names]).astype(np.float32)
        arrays.append(array * np.float32(100.0) ** np.arange(NUM_LAYERS).reshape(-1, *[1] * (len(names) - 1))
                      if num_stacked(names) else array)  # fmt: skip
    return jax.tree.unflatten(structure, [jnp.asarray(array, jnp.float32) for array in arrays])


def build(name, axes=AXES, rate=1e-2, **changes):
    return optimizer(OptimizerOptions(name=name, **changes), lambda count: jnp.float32(rate), axes)


@functools.partial(jax.jit, static_argnums=0)
def run(transformation, params, gradients):
    """Two updates with different gradients; returns parameters and state."""
    state = transformation.init(params)
    for factor in (1.0, -0.5):
        scaled = jax.tree.map(lambda gradient, factor=factor: factor * gradient + 0.1, gradients)
        updates, state = transformation.update(scaled, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(got, expected, rtol=1e-5):
    def close(path, one, other):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_on_a_quadratic_go_down(name):
    target, params = tree(1), jax.tree.map(jnp.zeros_like, tree(0))
    transformation = build(name, rate=1e-3 if name == "sgd" else 1e-2, weight_decay=0.0)

    def loss(params):
        return sum(
            jnp.mean(jnp.square(x - y)) for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True)
        )

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = transformation.init(params), []
    for _ in range(11):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert all(later < earlier for earlier, later in zip(losses[:-1], losses[1:], strict=True)), losses


@pytest.mark.parametrize("name", NAMES)
def test_each_stacked_layer_moves_as_if_it_were_alone(name):
    params, gradients = tree(0), tree(1)
    together, _ = run(build(name), params, gradients)
    alone_axes = jax.tree.map(lambda names: names[num_stacked(names) :], AXES, is_leaf=is_axes)
    for layer in range(NUM_LAYERS):

        def pick(stacked, layer=layer):
            return {**stacked, "layers": jax.tree.map(lambda leaf: leaf[layer], stacked["layers"])}

        alone, _ = run(build(name, alone_axes), pick(params), pick(gradients))
        assert_close(pick(together), alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_changes_where_states_live_and_not_what_they_are(name):
    mesh = jax.make_mesh((2, 2, 2), ("pipeline", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    placed = {"layers": "pipeline", "embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

    def sharding(names):
        return NamedSharding(mesh, PartitionSpec(*[placed.get(axis) for axis in names]))

    transformation, params, gradients = build(name), tree(0), tree(1)
    expected, expected_state = run(transformation, params, gradients)
    shardings = jax.tree.map(sharding, AXES, is_leaf=is_axes)
    abstract = jax.eval_shape(transformation.init, params)
    of_state = [sharding(names) for names in state_axes(transformation, params, AXES)]
    results = (shardings, jax.tree.unflatten(jax.tree.structure(abstract), of_state))
    spread = jax.jit(run.__wrapped__, static_argnums=0, out_shardings=results)
    got, got_state = spread(transformation, *(jax.device_put(values, shardings) for values in (params, gradients)))
    assert_close(got, expected)
    assert_close(got_state, expected_state)


@pytest.mark.parametrize("name", NAMES)
def test_state_axes_name_every_dim_of_every_array(name):
    transformation, params = build(name), jax.eval_shape(lambda: tree(0))
    state = jax.eval_shape(transformation.init, params)
    axes = state_axes(transformation, params, AXES)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    assert len(axes) == len(leaves)
    named = set()
    for (path, leaf), names in zip(leaves, axes, strict=True):
        assert len(names) == leaf.ndim, path
        assert all(SIZES[axis] == size for axis, size in zip(names, leaf.shape, strict=True) if axis), path
        # What is large must be named, or it would lie whole on each device.
        assert leaf.size <= 3 or any(names), path
        named.add(names)
    large = set(jax.tree.leaves(AXES, is_leaf=is_axes))
    if name == "adafactor":
        assert ("layers", "embed", None, None) in named
        assert ("layers", None, "heads", "head_dim") in named
        assert ("layers", "heads", "head_dim", "embed") not in named
    else:
        assert large <= named


def test_state_axes_of_other_optimizers_and_ambiguous_paths():
    params = {"a": jnp.zeros((3, 4)), "b": {"a": jnp.zeros((4, 3)), "mu": jnp.zeros(5)}}
    axes = {"a": ("x", "y"), "b": {"a": ("u", "v"), "mu": ("w",)}}
    for foreign in (
        optax.adam(1.0),
        optax.chain(optax.clip(1.0), optax.masked(optax.adam(1.0), {"a": True, "b": True})),
    ):
        named = [names for names in state_axes(foreign, params, axes) if names]
        assert named == [("x", "y"), ("u", "v"), ("w",)] * 2
    assert state_axes(optax.adam(1.0), jnp.zeros((2, 3)), ("x", "y")) == [(), ("x", "y"), ("x", "y")]
    factored = state_axes(optax.adafactor(1.0, min_dim_size_to_factor=3), params, axes)
    state = jax.eval_shape(optax.adafactor(1.0, min_dim_size_to_factor=3).init, params)
    assert [len(names) for names in factored] == [leaf.ndim for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("name", NAMES)
def test_states_are_float32_and_keep_their_types(name):
    transformation, params = build(name), tree(0)
    state = jax.eval_shape(transformation.init, params)
    updates, later = jax.eval_shape(transformation.update, params, state, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} <= {"float32", "int32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"float32"}
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == [(x.shape, x.dtype) for x in jax.tree.leaves(later)]
    assert jax.tree.structure(state) == jax.tree.structure(later)


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_shrinks_matrices_alone_and_adam_none(name):
    params = tree(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    transformation = build(name, weight_decay=0.5)
    updates, _ = transformation.update(zeros, transformation.init(params), params)
    for (path, update), weight in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        decayed = path[-1].key in MATRICES and name != "adam"
        expected = -1e-2 * 0.5 * weight if decayed else jnp.zeros_like(weight)
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_adamw_and_lion_are_those_of_optax():
    params, gradients = tree(0), tree(1)
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in MATRICES, params)
    assert_close(run(build("adamw"), params, gradients)[0],
                 run(optax.adamw(1e-2, 0.9, 0.95, weight_decay=0.1, mask=mask), params, gradients)[0])  # fmt: skip
    assert_close(run(build("lion", beta2=0.99), params, gradients)[0],
                 run(optax.lion(1e-2, weight_decay=0.1, mask=mask), params, gradients)[0])  # fmt: skip
    assert_close(run(build("sgd", weight_decay=0.0, momentum=0.9), params, gradients)[0],
                 run(optax.sgd(1e-2, 0.9), params, gradients)[0])  # fmt: skip


def test_adafactor_on_plain_matrices_is_that_of_optax():
    axes = {"large": ("embed", "mlp"), "small": ("positions", "embed"), "bias": ("mlp",)}
    params, gradients = tree(0, axes), tree(1, axes)
    assert_close(run(build("adafactor", axes, weight_decay=0.0), params, gradients)[0],
                 run(optax.adafactor(1e-2), params, gradients)[0])  # fmt: skip


def test_adafactor_survives_rows_without_gradient_beside_small_ones():
    axes = {"table": ("vocab", "embed")}
    params = tree(0, axes)
    gradients = {"table": (1e-9 * tree(1, axes)["table"]).at[5].set(0.0)}
    transformation = build("adafactor", axes, weight_decay=0.0)
    updates, _ = jax.jit(transformation.update)(gradients, transformation.init(params), params)
    assert bool(jnp.all(jnp.isfinite(updates["table"])))
    assert bool(jnp.all(updates["table"][5] == 0))


def test_adafactor_remembers_far_less_than_adam():
    params = tree(0)
    sizes = {
        name: sum(leaf.size for leaf in jax.tree.leaves(build(name).init(params))) for name in ("adafactor", "adam")
    }
    assert sizes["adafactor"] < sizes["adam"] / 25


def test_muon_makes_each_hidden_matrix_orthogonal_and_leaves_the_rest_to_adam():
    params, gradients = tree(0), tree(1)
    muon, adam = (build(name, rate=1.0, weight_decay=0.0) for name in ("muon", "adam"))
    updates, _ = jax.jit(muon.update)(gradients, muon.init(params), params)
    of_adam, _ = jax.jit(adam.update)(gradients, adam.init(params), params)
    for layer in range(NUM_LAYERS):
        attention, mlp = (
            jax.tree.map(lambda leaf: leaf[layer], updates["layers"][part]) for part in ("attention", "mlp")
        )  # noqa: B023
        flat = [attention["query"].reshape(128, 128), attention["output"].reshape(128, 128), mlp["up"], mlp["down"]]
        for matrix in flat:
            singular = np.linalg.svd(np.asarray(matrix), compute_uv=False) / (0.2 * max(matrix.shape) ** 0.5)
            # Newton-Schulz with Muon's coefficients ends near 1; the smallest values of a square matrix lag behind.
            assert 0.6 < np.median(singular) < 1.2
            assert singular.max() < 1.3
    for part, names in (("attention", ["query_bias"]), ("mlp", ["up_bias"]), ("norm", ["scale"])):
        assert_close({n: updates["layers"][part][n] for n in names}, {n: of_adam["layers"][part][n] for n in names})
    assert_close((updates["embedding"], updates["head"]), (of_adam["embedding"], of_adam["head"]))


def test_the_schedule_sets_the_size_of_each_update():
    params = {"bias": jnp.zeros(3)}
    transformation = optimizer(OptimizerOptions(name="lion"), lambda count: 0.5 ** (count + 1.0), {"bias": ("mlp",)})
    state, gradients = transformation.init(params), {"bias": jnp.ones(3)}
    for expected in (0.5, 0.25, 0.125):
        updates, state = transformation.update(gradients, state, params)
        np.testing.assert_array_equal(updates["bias"], np.full(3, -expected, np.float32))


@pytest.mark.parametrize(
    "changes, line",
    [
        (
            {"name": "adamx"},
            "optimizer.name: got 'adamx'; allowed: adamw, adam, sgd, lion, adafactor, muon; did you mean",
        ),
        ({"beta2": 1.0}, "optimizer.beta2: got 1.0; allowed: at least 0 and below 1"),
        ({"momentum": 2.0}, "optimizer.momentum: got 2.0; allowed: at least 0 and below 1"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay: got -1.0; allowed: at least 0"),
    ],
)
def test_each_mistake_is_one_line(changes, line):
    with pytest.raises(UserError) as caught:
        optimizer(dataclasses.replace(OptimizerOptions(), **changes), lambda count: 0.1, AXES)
    assert len(caught.value.problems) == 1
    assert line in caught.value.problems[0]
    assert check(OptimizerOptions()) == []
