"""A model with an auxiliary loss and activations of three leaves, on a pipeline with two replicas, and its breaks.

M: microbatches, b: sequences in one, T: tokens a sequence, D: embed dim, L: layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import LogicallyPartitioned
from jax.sharding import PartitionSpec

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.errors import UserError
from meshtrain.models import vocabulary
from meshtrain.models.metrics import Load
from meshtrain.models.task import SEQUENCE_INDEX, Stages, Task, loss_of_stages, token_batch, with_layer_sums
from meshtrain.pipeline import executor, inference, stages
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.program import executable
from meshtrain.pipeline.pullback import SplitLayer
from meshtrain.pipeline.schedules import PipelineOptions, build
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import ParamSharding
from meshtrain.sharding.rules import AXES

NUM_MICROBATCHES, NUM_SEQUENCES, NUM_TOKENS, WIDTH, VOCABULARY, NUM_STAGES = 4, 4, 3, 4, 12, 2
MOST_LAYERS = 8
SEED, KEY = 2.0, jax.random.key_data  # gradients come out multiplied by the seed
SIZES = dict.fromkeys(AXES, 1) | {"data": 2, "pipeline": NUM_STAGES}


def first(outer, batch, rng, train, axis):
    """Activations, a gate for each token, and a counter of layers, which has no gradient."""
    rows = outer["table"].shape[0]
    row = batch["tokens"] - vocabulary.first_column(rows, axis)
    here = (row >= 0) & (row < rows)
    found = jnp.take(outer["table"], jnp.where(here, row, 0), axis=0, mode="clip")
    x = vocabulary.from_one_shard(jnp.where(here[..., None], found, 0), axis)
    return {"x": x, "gate": jnp.cos(x[..., 0]), "depth": jnp.zeros(x.shape[:1], jnp.int32)}


def repeated(layers, activations, batch, rng, start, train):
    """Layers of which each adds a square of its gates to the loss; the layer's number is what the counter says.

    Its row of the load, counted from `start`, says how many gates are open and how many are not.
    """

    def one(activations, layer):
        index, weights = layer
        x, depth = activations["x"], activations["depth"]
        gate = jax.nn.sigmoid(x @ weights["router"] + activations["gate"])
        kept = (batch[SEQUENCE_INDEX] * 5 + depth * 3) % 7 > 1
        grown = jnp.tanh(x @ weights["kernel"]) * gate[..., None]
        x = x + (jnp.where(kept[:, None, None], grown, 0) if train else grown)
        balance = jnp.sum(jnp.mean(gate, axis=-1) ** 2)
        opened = jnp.sum(gate > 0.5)
        load = jnp.zeros((MOST_LAYERS, 2)).at[index].set(jnp.stack([opened, gate.size - opened]))
        metrics = {"balance": balance, "load": Load(load)}
        return {"x": x, "gate": gate, "depth": depth + 1}, (0.5 * balance, metrics)

    indices = start + jnp.arange(layers["router"].shape[0])
    y, sums = jax.lax.scan(one, activations, (indices, layers))
    return y, jax.tree.map(lambda each: jnp.sum(each, axis=0), sums)


def last(outer, y, batch, axis):
    """A head that reads the gates too."""
    x = vocabulary.copy_to_shards(y["x"] * y["gate"][..., None], axis)
    total = vocabulary.cross_entropy(x @ outer["head"], batch["targets"], batch["weights"], VOCABULARY, axis)
    return total, jnp.sum(batch["weights"]), {"sequences": jnp.float32(x.shape[0])}


def stages_of(num_layers):
    return Stages(num_layers, first, repeated, last)


def parameters(num_layers):
    generator = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)  # noqa: E731
    layers = {"kernel": draw(num_layers, WIDTH, WIDTH), "router": draw(num_layers, WIDTH)}
    return {"table": draw(VOCABULARY, WIDTH), "layers": layers, "head": draw(WIDTH, VOCABULARY)}


def batch_of():
    """[b, M, ...]."""
    generator, shape = np.random.default_rng(2), (NUM_SEQUENCES, NUM_MICROBATCHES, NUM_TOKENS)
    return {
        "tokens": jnp.asarray(generator.integers(0, VOCABULARY, shape), jnp.int32),
        "targets": jnp.asarray(generator.integers(0, VOCABULARY, shape), jnp.int32),
        "weights": jnp.asarray(generator.random(shape) < 0.8, jnp.float32),
        SEQUENCE_INDEX: jnp.arange(shape[0] * shape[1], dtype=jnp.int32).reshape(shape[:2]),
    }


def whole_batch():
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch_of())


@functools.cache
def reference(num_layers):
    """(loss, weight, metrics) and gradients of the whole batch at once on one device."""

    def total(params):
        loss, weight, metrics = loss_of_stages(stages_of(num_layers))(params, whole_batch(), jax.random.key(3), True)
        return SEED * loss, (loss, weight, metrics)

    both = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, sums), gradients = both(parameters(num_layers))
    return jax.device_get((sums, gradients))


def specs_of(num_chunks):
    layers = PartitionSpec("pipeline") if num_chunks == 1 else PartitionSpec(None, "pipeline")
    return {
        "table": PartitionSpec("pipeline"),
        "layers": {"kernel": layers, "router": layers},
        "head": PartitionSpec(None, "pipeline"),
    }


def stored(num_layers, num_chunks):
    params = parameters(num_layers)
    return {**params, "layers": stages.Stack(num_layers, NUM_STAGES, num_chunks).of_layers(params["layers"])}


def mesh():
    return make_mesh(SIZES, jax.devices()[:4])


def run(name, num_chunks=1, num_empty=0):
    """Returns (loss, weight, metrics) and gradients by the executor, two layers a chunk, gradients in layer order."""
    num_layers = 2 * NUM_STAGES * num_chunks - num_empty
    program = executable(build(name, num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, num_chunks=num_chunks))
    params = stored(num_layers, num_chunks)
    where = jax.tree.map(lambda leaf, spec: ParamSharding.same(spec, leaf.ndim), params, specs_of(num_chunks))
    compute = functools.partial(executor.gradients, stages_of(num_layers), program, GradientSync(mesh(), where))
    sums = jax.device_get(jax.jit(compute)(params, batch_of(), jax.random.key(3), SEED))
    like = parameters(num_layers)
    gradients = jax.tree.map(lambda leaf, like: stages.reshape_stack(leaf, like.shape, None), sums.gradients, like)
    return (sums.loss, sums.weight, sums.metrics), gradients


def assert_right(found, expected):
    """Sums to 1e-6, each leaf of the gradients to 5e-6 of its norm."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found[0], expected[0])
    for (path, g), reference in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.linalg.norm(g - reference) <= 5e-6 * np.linalg.norm(reference), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "name, num_chunks, num_empty", [("gpipe", 1, 0), ("1f1b", 1, 1), ("1f1b", 1, 0), ("interleaved_1f1b", 2, 0)]
)
def test_sums_of_layers_reach_loss_metrics_and_gradients(name, num_chunks, num_empty):
    assert_right(run(name, num_chunks, num_empty), reference(2 * NUM_STAGES * num_chunks - num_empty))


def test_the_auxiliary_loss_is_no_trifle():
    (loss, _, metrics), gradients = reference(4)
    assert 0.5 * metrics["balance"] > 0.01 * loss
    assert all(np.linalg.norm(leaf) > 0 for leaf in jax.tree.leaves(gradients))
    num_gates = NUM_SEQUENCES * NUM_MICROBATCHES * NUM_TOKENS
    assert (metrics["load"].counts.sum(axis=1) == 4 * [num_gates] + 4 * [0]).all()
    assert len(np.unique(metrics["load"].counts[:4, 0])) > 2


right_forward, right_backward, right_add_if = SplitLayer.forward, SplitLayer.backward, ring.add_if
right_run_layers = ring.run_layers


def counted_twice(unit, *given):
    y, sums, residuals = right_forward(unit, *given)
    return y, jax.tree.map(lambda leaf: 2 * leaf, sums), residuals


def without_its_cotangent(*given):
    y, (loss, metrics) = right_run_layers(*given)
    return y, (jax.lax.stop_gradient(loss), metrics)


def not_scaled(unit, kept, weights, given, cotangent, seed):
    return right_backward(unit, kept, weights, given, cotangent, seed / SEED)


def idle_ones_too(condition, total, part):
    is_of_layers = isinstance(total, tuple) and len(total) == 2
    return right_add_if(True if is_of_layers else condition, total, part)


BREAKS = {
    "counted twice": (SplitLayer, "forward", counted_twice),
    "no cotangent": (ring, "run_layers", without_its_cotangent),
    "a cotangent without the seed": (SplitLayer, "backward", not_scaled),
    "idle rows counted": (ring, "add_if", idle_ones_too),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_break_is_noticed(broken, monkeypatch):
    expected = reference(4)
    monkeypatch.setattr(*BREAKS[broken])
    found = run("gpipe")
    with pytest.raises(AssertionError):
        assert_right(found, expected)


def check_evaluation(num_chunks, num_empty=0):
    num_layers = 2 * NUM_STAGES * num_chunks - num_empty
    compute = functools.partial(inference.evaluate, stages_of(num_layers), num_chunks, mesh(), specs_of(num_chunks))
    run = jax.jit(compute)
    found = jax.device_get(run(stored(num_layers, num_chunks), batch_of(), jax.random.key(0)))
    plain = loss_of_stages(stages_of(num_layers))
    expected = jax.jit(lambda params: plain(params, whole_batch(), jax.random.key(0), False))(parameters(num_layers))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, jax.device_get(expected))


@pytest.mark.parametrize("num_empty", [0, 3])
def test_evaluation_adds_sums_of_layers(num_empty):
    check_evaluation(2, num_empty)


def test_evaluation_that_counts_idle_rows_is_noticed(monkeypatch):
    monkeypatch.setattr(ring, "add_if", idle_ones_too)
    with pytest.raises(AssertionError):
        check_evaluation(1)


def make_task(config, placement):
    def init(rng):
        names = {
            "table": ("vocab", "embed"),
            "layers": {"kernel": ("layers", None, None), "router": ("layers", None)},
            "head": ("embed", "vocab"),
        }
        return jax.tree.map(LogicallyPartitioned, parameters(4), names)

    stages = stages_of(4)
    return Task(init, loss_of_stages(stages), token_batch(config.batch_size, config.sequence_length), stages=stages)


def test_the_assembled_step_is_that_of_one_device_with_accumulation():
    def step(shape, **changes):
        config = Config(batch_size=NUM_SEQUENCES * NUM_MICROBATCHES, sequence_length=NUM_TOKENS, **changes)
        shape = dict.fromkeys(AXES, 1) | shape
        assembly = assemble(config, shape, jax.devices()[: np.prod(list(shape.values()))], make_task)
        batch = {name: x.astype(jnp.int32 if name != "weights" else jnp.float32) for name, x in whole_batch().items()}
        batch = {**dict.fromkeys(("segment_ids", "positions"), batch["tokens"]), **batch}
        del batch[SEQUENCE_INDEX]
        state = assembly.steps.init(KEY(jax.random.key(0)))
        evaluated = assembly.steps.evaluate(state.params, batch)
        state, metrics = assembly.steps.train(state, batch)
        return jax.device_get((metrics, evaluated))

    pipeline = PipelineOptions(schedule="1f1b", num_microbatches=2)
    found, found_evaluated = step({"data": 2, "pipeline": 2}, accumulation_steps=2, pipeline=pipeline)
    expected, expected_evaluated = step({})
    for name in ("loss", "balance", "load", "sequences", "weight"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found_evaluated, expected_evaluated)
    np.testing.assert_array_equal(found_evaluated["load"].counts, expected_evaluated["load"].counts)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=5e-6)


def test_metrics_of_one_name_are_added_up():
    of_head = (1.0, 2.0, {"correct": 3.0, "sequences": 4.0})
    assert with_layer_sums(of_head, None, "") == of_head
    both = with_layer_sums(of_head, (0.5, {"balance": 6.0, "sequences": 7.0}), "")
    assert both == (1.5, 2.0, {"correct": 3.0, "sequences": 11.0, "balance": 6.0})


@pytest.mark.parametrize(
    "returned, words",
    [
        (lambda x: x, ["got float32[2, 3]", "nearest: return activations, None"]),
        (lambda x: (x[0], None), ["got activations float32[3]", "its input, float32[2, 3]"]),
        (lambda x: (x, jnp.float32(0)), ["got sums float32[]", "nearest: (loss, {})"]),
        (lambda x: (x, (jnp.zeros(3), {})), ["got sums (float32[3], {})"]),
        (lambda x: (x, (jnp.zeros((), jnp.bfloat16), {})), ["got sums (bfloat16[], {})"]),
        (lambda x: (x, (jnp.zeros(()), {"n": jnp.zeros(3)})), ["got sums (float32[], {n: float32[3]})"]),
    ],
)
def test_layers_that_return_something_else_are_one_line(returned, words):
    stages = Stages(1, first, lambda layers, x, *_: returned(x), last)
    with pytest.raises(UserError) as error:
        jax.eval_shape(lambda x: ring.run_layers(stages, {}, x, {}, None, 0, True), jnp.zeros((2, 3)))
    (line,) = error.value.problems
    assert all(word in line for word in ["stages.repeated: ", "allowed: ", *words]), line
