"""What moves after the optimizer's update, by counts of tokens: exact on any mesh, and no part of the norm.

B: sequences, T: tokens a sequence, D: embed dim, E: experts, L: layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import LogicallyPartitioned

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.lab.compression import CompressionOptions
from meshtrain.models.metrics import Load
from meshtrain.models.task import SEQUENCE_INDEX, Stages, Sums, Task, loss_of_stages, token_batch
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.guard import GuardOptions
from meshtrain.step.precision import PrecisionOptions
from meshtrain.step.state import init_state
from meshtrain.step.step import WeightUpdate, train_step

NUM_SEQUENCES, NUM_TOKENS, WIDTH, NUM_EXPERTS, NUM_LAYERS, VOCABULARY = 32, 61, 4, 4, 4, 11


def chosen(tokens, layer):
    """The expert of each token in a layer, some more often than others."""
    return (tokens * (layer + 2)) % 7 % NUM_EXPERTS


def first(outer, batch, rng, train, axis):
    return outer["table"][batch["tokens"]]


def repeated(layers, x, batch, rng, start, train):
    def one(x, layer):
        index, weights = layer
        hot = jax.nn.one_hot(chosen(batch["tokens"], index), NUM_EXPERTS)
        x = x + jnp.tanh(x @ weights["kernel"].astype(x.dtype))
        return x, jnp.zeros((NUM_LAYERS, NUM_EXPERTS)).at[index].set(hot.sum((0, 1)))

    indices = start + jnp.arange(layers["bias"].shape[0])
    y, rows = jax.lax.scan(one, x, (indices, layers))
    return y, (jnp.float32(0), {"load": Load(rows.sum(0))})


def last(outer, y, batch, axis):
    return jnp.sum(jnp.mean(y.astype(jnp.float32) ** 2, axis=-1) * batch["weights"]), jnp.sum(batch["weights"]), {}


STAGES = Stages(NUM_LAYERS, first, repeated, last)


def with_counts(params, metrics):
    """The counts themselves become the biases: their signs would hide an error."""
    layers = params["layers"]
    return {**params, "layers": {**layers, "bias": layers["bias"] + metrics["load"].counts}}


def make_task(config, placement):
    def init(rng):
        table, kernel = (jax.random.normal(key, shape) / 2 for key, shape in zip(jax.random.split(rng), (
            (VOCABULARY, WIDTH), (NUM_LAYERS, WIDTH, WIDTH)), strict=True))  # fmt: skip
        return {
            "table": LogicallyPartitioned(table, (None, None)),
            "layers": {
                "kernel": LogicallyPartitioned(kernel, ("layers", None, None)),
                "bias": LogicallyPartitioned(jnp.zeros((NUM_LAYERS, NUM_EXPERTS)), ("layers", "router")),
            },
        }

    batch = token_batch(config.batch_size, config.sequence_length)
    return Task(init, loss_of_stages(STAGES), batch, stages=STAGES, after_update=with_counts, takes_manual_axes=True)


def batch_of(number=0):
    generator, shape = np.random.default_rng(number), (NUM_SEQUENCES, NUM_TOKENS)
    ints = generator.integers(0, VOCABULARY, shape).astype(np.int32)
    names = ("tokens", "targets", "segment_ids", "positions")
    return {**dict.fromkeys(names, ints), "weights": np.ones(shape, np.float32)}


def counts_of(number):
    """How many tokens of a batch chose each expert of each layer."""
    tokens = batch_of(number)["tokens"]
    rows = [np.bincount(chosen(tokens, layer).ravel(), minlength=NUM_EXPERTS) for layer in range(NUM_LAYERS)]
    return np.stack(rows)


def stepped(sizes, num_steps=1, **changes):
    config = Config(batch_size=NUM_SEQUENCES, sequence_length=NUM_TOKENS, **changes)
    shape = dict.fromkeys(AXES, 1) | sizes
    assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(sizes.values())))], make_task)
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    for number in range(num_steps):
        placed = {name: jax.device_put(x, assembly.batch[name].sharding) for name, x in batch_of(number).items()}
        state, metrics = assembly.steps.train(state, placed)
    kept = jax.device_get(assembly.steps.to_kept(state).params)
    return kept["layers"]["bias"], jax.device_get(metrics)


@functools.cache
def norm_of_others():
    """The norm of the mean loss's gradients in plain JAX, without that of the biases."""
    key = jax.random.fold_in(jax.random.key(0), 0)
    params = jax.tree.map(lambda box: box.value, make_task(Config(), None).init(key), is_leaf=is_box)
    batch = {**batch_of(), SEQUENCE_INDEX: np.arange(NUM_SEQUENCES)}
    total = lambda params: loss_of_stages(STAGES)(params, batch, key, True)[0] / (NUM_SEQUENCES * NUM_TOKENS)  # noqa: E731
    gradients = jax.jit(jax.grad(total))(params)
    return optax.tree.norm({**gradients, "layers": gradients["layers"]["kernel"]})


def is_box(leaf):
    return isinstance(leaf, LogicallyPartitioned)


IN_BFLOAT16 = PrecisionOptions(policy="bfloat16", param_dtype="bfloat16", reduce_dtype="bfloat16")
CHUNKS = PipelineOptions(schedule="interleaved_1f1b", num_chunks=2, num_microbatches=4)
RUNS = {
    "a pipeline": ({"data": 2, "pipeline": 2}, {"precision": IN_BFLOAT16, "pipeline": CHUNKS}),
    "compression": ({"data": 2}, {"reduction": CompressionOptions("int8"), "accumulation_steps": 2}),
    "level 2": ({"data": 2}, {"precision": IN_BFLOAT16, "zero": ZeroOptions(level=2), "accumulation_steps": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_counts_move_weights_exactly(name):
    sizes, changes = RUNS[name]
    bias, metrics = stepped(sizes, **changes)
    expected = counts_of(0)
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(bias, expected)
    assert np.min(np.max(expected, axis=1)) > 512, "bfloat16 holds smaller ones, and some of these"
    np.testing.assert_allclose(metrics["grad_norm"], norm_of_others(), rtol=0.02)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_one_step_late_counts_are_those_of_the_gradients_that_are_applied(num_devices):
    """The first of three steps applies nothing, and each other one the gradients and counts of the one before."""
    bias, _ = stepped({"data": num_devices}, num_steps=3, reduction=ReductionOptions("one_step_late"))
    np.testing.assert_array_equal(bias, counts_of(0) + counts_of(1))


def test_a_frozen_weight_stays():
    bias, _ = stepped({"data": 2}, optimizer=OptimizerOptions(trainable="kernel|table"))
    assert not bias.any()


RECORD = optax.GradientTransformation(lambda params: params, lambda gradients, state, params: (gradients, gradients))


def update(metrics, options, state):
    """A step with the gradient (3, 4) of a sum over 2 targets, after which counts are added to `moved`."""

    def gradients(params, batch, rng, seed):
        found = {"a": seed * jnp.float32([3, 4]), "moved": jnp.zeros(2)}
        return Sums(jnp.float32(1), jnp.float32(2), {**metrics, "load": Load(jnp.float32([1000, 1]))}, found)

    def after_update(params, metrics):
        return {**params, "moved": params["moved"] + metrics["load"].counts}

    change = WeightUpdate(RECORD, lambda count: 0.1, 1.0, options, after_update=after_update)
    return train_step(gradients, change)(state, {"x": jnp.zeros((1, 1))})


def start():
    return init_state({"a": jnp.ones(2), "moved": jnp.zeros(2)}, RECORD, jax.random.key(0))


def test_counts_are_neither_divided_nor_clipped_nor_in_the_norm():
    after, metrics = update({}, GuardOptions(), start())
    assert metrics["grad_norm"] == 2.5
    np.testing.assert_allclose(after.opt_state["a"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(after.params["moved"], [1000, 1])
