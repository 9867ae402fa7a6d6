"""Norms of each layer: the same numbers on every mesh, in layer order, and the layer of what is not finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.config import tasks
from meshtrain.models import metrics
from meshtrain.models.task import Sums
from meshtrain.observe.trackers import ObserveOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.pipeline.stages import Stack
from meshtrain.step import guard, health
from meshtrain.step.guard import GuardOptions
from meshtrain.step.state import init_state
from meshtrain.step.step import WeightUpdate, train_step
from tests.parity import runs

NUM_LAYERS = 3  # on two stages one place is empty
CONFIG = dataclasses.replace(
    runs.CONFIG,
    num_steps=2,
    model=dataclasses.replace(runs.LLAMA, num_layers=NUM_LAYERS),
    observe=ObserveOptions(layers="activations"),
    pipeline=PipelineOptions(schedule="1f1b", num_microbatches=2),
)


def two_steps(**axes):
    """(weights before, metrics, weights after) of the second step, on the host and in layer order."""
    shape = runs.sizes(**axes)
    assembly = assemble(CONFIG, shape, jax.devices()[: int(np.prod(list(shape.values())))])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(CONFIG.seed)))
    step = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    for batch in runs.example_batches(CONFIG.num_steps):
        before = runs.by_path(assembly.steps.to_kept(state).params)
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, metrics = step(state, placed)
    return before, jax.device_get(metrics), runs.by_path(assembly.steps.to_kept(state).params)


def expected(leaves):
    """Norms of each layer and of the other keys, of a tree by path."""
    of = lambda key: [np.square(leaf, dtype=np.float64) for path, leaf in leaves.items() if path.startswith(key + "/")]  # noqa: E731
    layers = np.sqrt(sum(leaf.reshape(NUM_LAYERS, -1).sum(axis=1) for leaf in of("layers")))
    return {"layers": layers} | {key: np.sqrt(sum(leaf.sum() for leaf in of(key))) for key in ("embedding", "head")}


@pytest.fixture(scope="module")
def one():
    """What one device says."""
    return two_steps()


def test_they_are_those_of_the_weights_and_of_what_moved_and_add_up_to_the_norm(one):
    before, metrics, after = one
    moved = {path: after[path] - leaf for path, leaf in before.items()}
    for what, leaves in (("weight", before), ("update", moved)):
        for key, norms in expected(leaves).items():
            np.testing.assert_allclose(metrics[f"{what}_norm_of/{key}"], norms, rtol=1e-6)
    squares = [np.square(norm).sum() for name, norm in metrics.items() if name.startswith("grad_norm_of/")]
    assert len(squares) == 3
    assert np.sqrt(sum(squares)) == pytest.approx(metrics["grad_norm"], rel=1e-6)
    assert len(set(metrics["grad_norm_of/layers"].tolist())) == NUM_LAYERS


@pytest.mark.parametrize("is_skipped", [False, True])
def test_the_update_is_the_change_of_the_stored_weights(is_skipped):
    """Of 4,096 weights in bfloat16 an update of 2^-12 moves a sixteenth by 2^-8; a skipped step moves none."""

    def gradients(params, batch, rng, seed):
        value = jnp.where(is_skipped, jnp.nan, 2.0**-12)
        return Sums(jnp.float32(1), jnp.float32(1), {}, {"scale": jnp.full(4096, value)})

    change = WeightUpdate(
        optax.sgd(1.0), lambda count: 1.0, 0.0, GuardOptions(), layers=health.Layers({"scale": ("norm",)})
    )
    before = init_state({"scale": jnp.ones(4096, jnp.bfloat16)}, optax.sgd(1.0), jax.random.key(0))
    after, metrics = train_step(gradients, change)(before, {"x": jnp.zeros((1, 1))})
    moved = np.asarray(after.params["scale"], np.float32) - 1
    assert np.count_nonzero(moved) == 0 if is_skipped else 150 < np.count_nonzero(moved) < 370
    np.testing.assert_allclose(metrics["update_norm_of/scale"], np.linalg.norm(moved), rtol=1e-6)


def test_every_mesh_has_the_same_numbers_in_layer_order(one):
    _, metrics, _ = two_steps(data=2, fsdp=2, pipeline=2)
    names = [name for name in one[1] if "_norm_of/" in name]
    assert len(names) == 9
    peaks = one[1]["largest_activation_of/layers"]
    assert len(set(peaks.tolist())) > 1
    assert one[1]["largest_activation"] == max(peaks)
    for name in [*names, "largest_activation_of/layers"]:
        np.testing.assert_allclose(metrics[name], one[1][name], rtol=1e-5, err_msg=name)


def test_the_largest_activation_of_a_layer_is_at_most_half_a_bin_off():
    for largest in (3e-3, 1.0, 700.0):
        x = jnp.array([[0.0, -largest], [largest / 3, 0.0]])
        of_all = jax.tree.map(jnp.add, metrics.peaks(x, 1, 3), metrics.peaks(x / 8, 1, 3))
        found = metrics.of_layers(of_all)
        assert found.tolist()[::2] == [0, 0]
        assert 2 ** (-1 / 16) <= float(found[1]) / largest <= 2 ** (1 / 16)
    for wrong in (jnp.nan, jnp.inf, 1e30):
        assert float(metrics.of_layers(metrics.peaks(jnp.array([1.0, wrong]), 0, 1))[0]) > 2**31
    logged = metrics.all_logged({metrics.PEAK: metrics.peaks(x, 1, 3)}, jnp.float32(7))
    assert sorted(logged) == ["largest_activation", "largest_activation_of/layers"]


def test_activations_are_refused_where_a_task_says_nothing_of_them():
    (line,) = tasks.watch_problems(CONFIG, tasks.find("seq2seq"))
    assert "nearest: observe.layers=norms" in line
    assert tasks.watch_problems(CONFIG, tasks.decoder) == []


NAMES = {"encoder/w": ("layers", "embed"), "encoder/scale": ("norm",), "head": ("embed",)}


def own_step(**arguments):
    """A step of a task of one's own, whose batch is the gradient of `encoder/w`."""
    params = {"encoder": {"w": jnp.ones((4, 3)), "scale": jnp.ones(2)}, "head": jnp.ones(3)}

    def gradients(params, batch, rng, seed):
        of_others = jax.tree.map(jnp.ones_like, params)
        found = {**of_others, "encoder": {**of_others["encoder"], "w": batch["w"]}}
        return Sums(jnp.float32(1), jnp.float32(1), {}, found)

    update = WeightUpdate(
        optax.sgd(0.5), lambda count: 0.5, 0.0, GuardOptions(), layers=health.Layers(NAMES), **arguments
    )
    return jax.jit(train_step(gradients, update)), init_state(params, optax.sgd(0.5), jax.random.key(0))


def test_other_tasks_have_groups_by_their_keys():
    step, state = own_step()
    _, metrics = step(state, {"w": jnp.arange(4.0)[:, None] * jnp.ones((4, 3))})
    np.testing.assert_allclose(metrics["grad_norm_of/encoder/layers"], np.sqrt(3) * np.arange(4), rtol=1e-6)
    np.testing.assert_allclose(metrics["update_norm_of/encoder/layers"], np.sqrt(3) * np.arange(4) / 2, rtol=1e-6)
    found = [float(metrics[f"weight_norm_of/{key}"]) for key in ("encoder", "head")]
    assert found == pytest.approx([np.sqrt(2), np.sqrt(3)])
    assert int(metrics[guard.ITS_LAYER]) == -1


def test_the_last_layer_that_is_not_finite_is_named():
    step, state = own_step()
    wrong = jnp.ones((4, 3)).at[0, 0].set(jnp.inf).at[2, 1].set(jnp.nan)
    after, metrics = step(state, {"w": wrong})
    assert int(after.skipped.total) == 1
    paths = [path for path, _ in guard.leaves_with_paths(after.params)]
    number, layer = int(metrics[guard.FIRST_NOT_FINITE]), int(metrics[guard.ITS_LAYER])
    assert guard.skip_reason(paths, number, layer) == "gradients/encoder/w, layer 2"
    assert guard.name_of_first(after.params, number, layer) == "gradients/encoder/w, layer 2"


def test_a_reduction_of_ones_own_has_the_norms_of_what_it_returns():
    step, state = own_step(
        reduce=lambda gradients, residual: (jax.tree.map(lambda leaf: 2 * leaf, gradients), residual)
    )
    _, metrics = step(state, {"w": jnp.ones((4, 3))})
    np.testing.assert_allclose(metrics["grad_norm_of/encoder/layers"], np.full(4, 2 * np.sqrt(3)), rtol=1e-6)
    assert float(metrics["grad_norm_of/head"]) == pytest.approx(2 * np.sqrt(3))


@pytest.mark.parametrize(("num_layers", "num_chunks"), [(3, 1), (3, 2), (8, 2)])
def test_layers_in_chunks_and_empty_places_are_in_layer_order(num_layers, num_chunks):
    stack = Stack(num_layers, 2, num_chunks)
    in_order = jnp.arange(1.0, num_layers + 1)[:, None] * jnp.ones((num_layers, 2))
    names = {"layers/w": (*stack.names, "embed")}
    found = health.squares(health.Layers(names, stack), {"layers": {"w": stack.of_layers(in_order)}})
    np.testing.assert_array_equal(found["layers/w"], 2 * np.arange(1.0, num_layers + 1) ** 2)
    assert list(health.norms("grad", found, names)) == ["grad_norm_of/layers"]


def test_sums_of_squares_of_each_array_are_those_of_clipping():
    tree = {"encoder": {"w": jnp.arange(12.0).reshape(4, 3), "scale": jnp.ones(2)}, "head": jnp.ones(3)}
    found = health.totals(health.squares(health.Layers(NAMES), tree))
    np.testing.assert_allclose(found, [2.0, np.square(np.arange(12.0)).sum(), 3.0])
