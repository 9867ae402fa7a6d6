"""Every optimizer: downhill, each stacked layer as if alone, the same on a mesh, states with axes, optax's results."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshtrain.optim.optimizers import NAMES, OptimizerOptions, optimizer
from meshtrain.optim.states import state_axes
from meshtrain.sharding.param_kinds import num_stacked
from meshtrain.sharding.param_sharding import is_names
from meshtrain.sharding.trees import leaves_with_paths

NUM_LAYERS = 2
AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "layers": {
        "query": ("layers", "embed", "heads", "head_dim"),
        "query_bias": ("layers", "heads", "head_dim"),
        "output": ("layers", "heads", "head_dim", "embed"),
        "up": ("layers", "embed", "mlp"),
        "norm": {"scale": ("layers", "norm")},
    },
    "head": {"kernel": ("embed", "vocab")},
}
SIZES = {
    "vocab": 192, "embed": 128, "positions": 16, "layers": 2, "heads": 4, "head_dim": 32, "mlp": 512, "norm": 128
}  # fmt: skip
MATRICES = {"table", "query", "output", "up", "kernel"}


def tree(seed, axes=AXES):
    """NumPy weights or gradients whose layers differ in size by far, so that anything mixed between them shows."""
    leaves, structure = jax.tree.flatten(axes, is_leaf=is_names)
    generator = np.random.default_rng(seed)
    arrays = []
    for names in leaves:
        array = generator.normal(size=[SIZES[name] for name in names]).astype(np.float32)
        arrays.append(array * np.float32(100.0) ** np.arange(NUM_LAYERS).reshape(-1, *[1] * (len(names) - 1))
                      if num_stacked(names) else array)  # fmt: skip
    return jax.tree.unflatten(structure, [array.astype(np.float32) for array in arrays])


def build(name, axes=AXES, rate=1e-2, **changes):
    return optimizer(OptimizerOptions(name=name, **changes), lambda count: jnp.float32(rate), axes)


def run(transformation, params, gradients, shardings=None):
    """Two updates with different gradients; returns parameters and state, which live in `shardings` where given."""

    @functools.partial(jax.jit, out_shardings=shardings)
    def step(params, state, gradients, factor):
        scaled = jax.tree.map(lambda gradient: factor * gradient + 0.1, gradients)
        updates, state = transformation.update(scaled, state, params)
        return optax.apply_updates(params, updates), state

    init = jax.jit(transformation.init, out_shardings=shardings and shardings[1])
    state = init(params)
    params, state = step(params, state, gradients, 1.0)
    return step(params, state, gradients, -0.5)


def update_once(transformation, gradients, params):
    """The first updates."""

    @jax.jit
    def update(gradients, params):
        return transformation.update(gradients, transformation.init(params), params)[0]

    return update(gradients, params)


def assert_close(got, expected, rtol=1e-5):
    def close(path, one, other):
        scale = np.max(np.abs(other))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_on_a_quadratic_go_down(name):
    target, params = tree(1), jax.tree.map(np.zeros_like, tree(0))
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

    state, losses = jax.jit(transformation.init)(params), []
    for _ in range(11):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert all(later < earlier for earlier, later in itertools.pairwise(losses)), losses


@pytest.mark.parametrize("name", NAMES)
def test_each_stacked_layer_moves_as_if_it_were_alone(name):
    params, gradients = tree(0), tree(1)
    together, _ = run(build(name), params, gradients)
    alone_axes = jax.tree.map(lambda names: names[num_stacked(names) :], AXES, is_leaf=is_names)
    transformation = build(name, alone_axes)
    for layer in range(NUM_LAYERS):

        def pick(stacked, layer=layer):
            return {**stacked, "layers": jax.tree.map(lambda leaf: np.asarray(leaf)[layer], stacked["layers"])}

        alone, _ = run(transformation, pick(params), pick(gradients))
        assert_close(pick(together), alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_changes_where_states_live_and_not_what_they_are(name):
    mesh = jax.make_mesh((2, 2, 2), ("pipeline", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    placed = {"layers": "pipeline", "embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

    def sharding(names):
        return NamedSharding(mesh, PartitionSpec(*[placed.get(axis) for axis in names]))

    transformation, params, gradients = build(name), tree(0), tree(1)
    expected, expected_state = run(transformation, params, gradients)
    shardings = jax.tree.map(sharding, AXES, is_leaf=is_names)
    abstract = jax.eval_shape(transformation.init, params)
    of_state = [sharding(names) for names in state_axes(transformation, params, AXES)]
    results = (shardings, jax.tree.unflatten(jax.tree.structure(abstract), of_state))
    params, gradients = (jax.device_put(values, shardings) for values in (params, gradients))
    got, got_state = run(transformation, params, gradients, results)
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
    large = set(jax.tree.leaves(AXES, is_leaf=is_names))
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
    zeros = jax.tree.map(np.zeros_like, params)
    transformation = build(name, weight_decay=0.5)
    updates = update_once(transformation, zeros, params)
    for (path, update), weight in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        decayed = path[-1].key in MATRICES and name != "adam"
        expected = -1e-2 * 0.5 * weight if decayed else np.zeros_like(weight)
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", NAMES)
def test_a_router_s_bias_stays_and_changes_nothing_for_other_weights(name):
    """It stays whatever its gradient; and it has no moments, so that states of runs are what they were."""
    axes = {"up": ("layers", "embed", "mlp"), "norm": ("norm",), "router": ("embed", "router")}
    sizes = SIZES | {"router": 4}
    params = {at: jnp.full([sizes[axis] for axis in of], 0.5) for at, of in axes.items()}

    def moved(params, axes):
        made = build(name, axes, rate=0.1)
        gradients = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), params)
        # As arguments: what is constant is computed by the compiler, which takes twenty seconds for muon.
        updates, state = jax.jit(lambda given, at: made.update(given, made.init(at), at))(gradients, params)
        return updates, dict(leaves_with_paths(state))

    found, state = moved({**params, "bias": jnp.full((2, 4), 7.0)}, {**axes, "bias": ("layers", "router")})
    expected, state_without = moved(params, axes)
    assert not found.pop("bias").any()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert list(state) == [f"inner_states/others/inner_state/{path}" for path in state_without]


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


def test_adafactor_survives_rows_and_columns_without_gradient():
    axes = {"table": ("vocab", "embed")}
    params, gradients = tree(0, axes), tree(1, axes)
    gradients["table"][5], gradients["table"][:, 7] = 0, 0
    updates = update_once(build("adafactor", axes, weight_decay=0.0), gradients, params)
    np.testing.assert_array_equal(updates["table"] == 0, gradients["table"] == 0)
    assert bool(jnp.all(jnp.isfinite(updates["table"])))


def test_adafactor_remembers_far_less_than_adam():
    params = tree(0)
    states = {name: jax.eval_shape(build(name).init, params) for name in ("adafactor", "adam")}
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(state)) for name, state in states.items()}
    assert sizes["adafactor"] < sizes["adam"] / 25


def test_muon_makes_each_hidden_matrix_orthogonal_and_leaves_the_rest_to_adam():
    axes = {**AXES, "layers": {**AXES["layers"], "down": ("layers", "mlp", "embed")}}
    params, gradients = tree(0, axes), tree(1, axes)
    muon, adam = (build(name, axes, rate=1.0, weight_decay=0.0) for name in ("muon", "adam"))
    updates = update_once(muon, gradients, params)
    of_adam = update_once(adam, gradients, params)
    layers = updates["layers"]
    for layer in range(NUM_LAYERS):
        for name, num_rows in {"query": 128, "output": 128, "up": 128, "down": 512}.items():
            matrix = np.asarray(layers[name])[layer].reshape(num_rows, -1)
            singular = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(matrix.shape) ** 0.5)
            # Newton-Schulz with Muon's coefficients ends near 1; the smallest values of a square matrix lag behind.
            assert 0.6 < np.median(singular) < 1.2
            assert singular.max() < 1.3

    def others(tree):
        return tree["embedding"], tree["head"], tree["layers"]["query_bias"], tree["layers"]["norm"]

    assert_close(others(updates), others(of_adam))


@pytest.mark.parametrize("bias_correction", [False, True])
def test_muon_has_the_momentum_of_jordan_or_of_optax(bias_correction):
    """As in torch.optim.Muon: b <- m b + (1 - m) g, and the update is the orthogonalized (1 - m) g + m b."""
    axes, momentum, generator = {"up": ("embed", "mlp")}, 0.9, np.random.default_rng(0)
    gradients = [generator.normal(size=(6, 8)).astype(np.float32) for _ in range(3)]
    muon = build("muon", axes, rate=1.0, weight_decay=0.0, momentum=momentum, muon_bias_correction=bias_correction)
    state, buffer = muon.init({"up": gradients[0]}), np.zeros((6, 8), np.float32)
    for step, gradient in enumerate(gradients, start=1):
        updates, state = muon.update({"up": jnp.asarray(gradient)}, state, {"up": jnp.zeros((6, 8))})
        buffer = momentum * buffer + (1 - momentum) * gradient
        corrections = [1 - momentum ** (step + 1), 1 - momentum**step] if bias_correction else [1, 1]
        mixed = momentum * buffer / corrections[0] + (1 - momentum) * gradient / corrections[1]
        expected = -0.2 * np.sqrt(8) * newton_schulz(mixed)
        np.testing.assert_allclose(updates["up"], expected, rtol=0, atol=2e-5)


def newton_schulz(matrix):
    """Returns five steps of the quintic iteration of Jordan et al. 2024; the matrix has no more rows than columns."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


def test_the_schedule_sets_the_size_of_each_update():
    params = {"bias": jnp.zeros(3)}
    transformation = optimizer(OptimizerOptions(name="lion"), lambda count: 0.5 ** (count + 1.0), {"bias": ("mlp",)})
    state, gradients = transformation.init(params), {"bias": jnp.ones(3)}
    for expected in (0.5, 0.25, 0.125):
        updates, state = transformation.update(gradients, state, params)
        np.testing.assert_array_equal(updates["bias"], np.full(3, -expected, np.float32))
