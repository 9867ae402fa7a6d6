"""The executor against `jax.grad` of the same small model on one device, and broken on purpose.

M: microbatches, b: sequences in one, T: tokens a sequence, D: embed dim, V: vocabulary, L: layers.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshtrain.errors import UserError
from meshtrain.models import vocabulary
from meshtrain.models.task import SEQUENCE_INDEX, Stages, Sums
from meshtrain.pipeline import executor, inference, stages
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.program import executable
from meshtrain.pipeline.schedules import Action, Schedule, build
from meshtrain.sharding import placement as placement_module
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import ParamSharding
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.rules import AXES
from meshtrain.sharding.trees import leaves_with_paths
from tests.parity.comparison import SCALAR_BOUND, assert_gradients
from tests.pipeline.test_pipeline_program import late_table

NUM_MICROBATCHES, NUM_SEQUENCES, NUM_TOKENS, WIDTH, VOCABULARY = 4, 2, 3, 4, 12


def first(outer, batch, rng, train, axis):
    """An embedding whose rows may be split."""
    rows = outer["table"].shape[0]
    row = batch["tokens"] - vocabulary.first_column(rows, axis)
    here = (row >= 0) & (row < rows)
    found = jnp.take(outer["table"], jnp.where(here, row, 0), axis=0, mode="clip")
    return vocabulary.from_one_shard(jnp.where(here[..., None], found, 0), axis)


def repeated(layers, x, batch, rng, start, train):
    """Layers that leave some sequences out, each layer others."""

    def one(x, layer):
        index, weights = layer
        # As a random number would: by sequence and layer, wherever they are computed.
        kept = (batch[SEQUENCE_INDEX] * 5 + index * 3) % 7 > 1
        grown = jnp.tanh(x @ weights["kernel"]) * weights["scale"]
        return x + (jnp.where(kept[:, None, None], grown, 0) if train else grown), None

    indices = start + jnp.arange(layers["scale"].shape[0])
    return jax.lax.scan(one, x, (indices, layers))[0], None


def last(outer, y, batch, axis):
    """A head whose columns may be split."""
    logits = vocabulary.copy_to_shards(y, axis) @ outer["head"]
    weights = batch["weights"]
    total = vocabulary.cross_entropy(logits, batch["targets"], weights, VOCABULARY, axis)
    return total, jnp.sum(weights), {"sequences": jnp.float32(y.shape[0])}


def model(num_layers):
    return Stages(num_layers, first, repeated, last)


def parameters(num_layers):
    generator = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)  # noqa: E731
    # Small, so that rounding in the gradients stays rounding through twelve layers.
    layers = {"kernel": 0.5 * draw(num_layers, WIDTH, WIDTH), "scale": draw(num_layers, WIDTH)}
    return {"table": draw(VOCABULARY, WIDTH), "layers": layers, "head": draw(WIDTH, VOCABULARY)}


def batch_of(num_microbatches):
    """[b, M, ...]."""
    generator, shape = np.random.default_rng(2), (NUM_SEQUENCES, num_microbatches, NUM_TOKENS)
    return {
        "tokens": jnp.asarray(generator.integers(0, VOCABULARY, shape), jnp.int32),
        "targets": jnp.asarray(generator.integers(0, VOCABULARY, shape), jnp.int32),
        "weights": jnp.asarray(generator.random(shape) < 0.8, jnp.float32),
        SEQUENCE_INDEX: jnp.arange(NUM_SEQUENCES * num_microbatches, dtype=jnp.int32).reshape(shape[:2]),
    }


@functools.cache
def reference(num_layers, num_microbatches):
    """Sums and gradients of the whole batch at once, without any stage."""
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch_of(num_microbatches))

    def total(params):
        x = first(params, batch, jax.random.key(3), True, None)
        x, _ = repeated(params["layers"], x, batch, jax.random.key(3), 0, True)
        loss, weight, _ = last(params, x, batch, None)
        return loss, weight

    both = jax.jit(jax.value_and_grad(total, has_aux=True))
    (loss, weight), gradients = both(parameters(num_layers))
    return Sums(loss, weight, {"sequences": jnp.float32(NUM_SEQUENCES * num_microbatches)}, gradients)


def mesh_of(num_stages, num_replicas=1):
    sizes = dict.fromkeys(AXES, 1) | {"pipeline": num_stages, "data": num_replicas}
    return make_mesh(sizes, jax.devices()[: num_stages * num_replicas])


def num_places(schedule):
    """Two layers a chunk."""
    return 2 * schedule.num_stages * schedule.num_chunks


def compute_on(mesh, schedule, params, num_empty=0):
    """Returns the executor's function of (params, batch, key), two places for layers a chunk, the last ones empty."""
    num_layers = num_places(schedule) - num_empty
    over_stages = PartitionSpec("pipeline") if schedule.num_chunks == 1 else PartitionSpec(None, "pipeline")
    specs = {
        "table": PartitionSpec("pipeline"),
        "layers": jax.tree.map(lambda _: over_stages, params["layers"]),
        "head": PartitionSpec(None, "pipeline"),
    }
    stored = jax.tree.map(lambda leaf, spec: ParamSharding.same(spec, leaf.ndim), params, specs)
    return functools.partial(executor.gradients, model(num_layers), executable(schedule), GradientSync(mesh, stored))


def run(schedule, num_replicas=1, num_empty=0, in_empty=0.0):
    """Returns what the executor makes of two places for layers a chunk, gradients in the order of places.

    The last places are empty: their weights are `in_empty`.
    """
    num_layers = num_places(schedule) - num_empty
    params = parameters(num_layers)
    stack = stages.Stack(num_layers, schedule.num_stages, schedule.num_chunks)
    is_layer = stack.of_layers(jax.tree.map(jnp.ones_like, params["layers"]))
    layers = stack.of_layers(params["layers"])
    params["layers"] = jax.tree.map(lambda here, leaf: jnp.where(here > 0, leaf, in_empty), is_layer, layers)
    compute = compute_on(mesh_of(schedule.num_stages, num_replicas), schedule, params, num_empty)
    run_once = jax.jit(compute)
    sums = jax.device_get(run_once(params, batch_of(schedule.num_microbatches), jax.random.key(3)))
    num_dims = len(stack.shape)
    in_order = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[num_dims:]), sums.gradients["layers"])
    return sums._replace(gradients={**sums.gradients, "layers": in_order})


def assert_right(sums, schedule, num_empty=0):
    """Sums to 1e-5, gradients leaf by leaf and layer by layer, relative to each one's norm; of empty places zeros."""
    num_layers = num_places(schedule) - num_empty
    expected = reference(num_layers, schedule.num_microbatches)
    found = sums.gradients["layers"]
    places = stages.Stack(num_layers, schedule.num_stages, schedule.num_chunks).places_of_layers
    places = np.arange(num_layers) if places is None else places
    assert not any(np.delete(leaf, places, axis=0).any() for leaf in found.values()), "an empty place has a gradient"
    of_layers = {name: leaf[places] for name, leaf in found.items()}
    sums = sums._replace(gradients={**sums.gradients, "layers": of_layers})
    assert sums.weight == expected.weight
    assert sums.metrics == expected.metrics
    np.testing.assert_allclose(sums.loss, expected.loss, rtol=SCALAR_BOUND)
    assert_gradients(leaves(sums.gradients), leaves(expected.gradients))


def leaves(tree):
    return {path: np.asarray(leaf) for path, leaf in leaves_with_paths(tree)}


def schedule_of(name, num_stages=2, num_microbatches=NUM_MICROBATCHES, num_chunks=1):
    return build(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)


def waiting_table():
    """The first stage idles between its backward rows, and no head comes in between: what has left it has to wait."""
    one = lambda kind, m, stage: tuple(Action(kind, m) if s == stage else None for s in range(3))  # noqa: E731
    forward = [one("F", m, stage) for m in range(2) for stage in range(3)]
    heads = [one("B", m, 2) for m in range(2)]
    return Schedule("waiting", 3, 2, 1, (*forward, *heads, *(one("B", m, stage) for m in range(2) for stage in (1, 0))))


@pytest.mark.parametrize(
    "schedule",
    [
        schedule_of("gpipe", 4),
        schedule_of("1f1b", 4),
        schedule_of("1f1b", 4, 2),
        schedule_of("interleaved_1f1b", 2, 4, 3),
        late_table(NUM_MICROBATCHES),
        waiting_table(),
    ],
    ids=["gpipe", "1f1b", "fewer microbatches than stages", "interleaved", "random table", "waiting"],
)
def test_sums_and_gradients_are_those_of_one_device(schedule):
    assert_right(run(schedule), schedule)


@pytest.mark.parametrize(
    "schedule, num_empty, in_empty",
    [
        (schedule_of("1f1b", 4), 2, np.nan),  # 2 + 2 + 1 + 1 layers
        pytest.param(schedule_of("1f1b", 4), 1, np.nan, marks=pytest.mark.slow),
        (schedule_of("interleaved_1f1b", 2, 4, 2), 3, np.inf),
        pytest.param(schedule_of("gpipe", 2), 1, np.nan, marks=pytest.mark.slow),
    ],
    ids=["1f1b spread", "1f1b", "interleaved", "gpipe"],
)
def test_empty_places_are_passed_by_whatever_their_numbers_are(schedule, num_empty, in_empty):
    assert_right(run(schedule, num_empty=num_empty, in_empty=in_empty), schedule, num_empty)


def test_a_unit_of_layers_and_empty_places_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "model", lambda n: Stages(n, first, repeated, last, num_together=2))
    with pytest.raises(
        UserError, match=r"num_together: got 2; allowed: a divisor of the 2 .* all 3 layers; nearest: 1"
    ):
        run(schedule_of("1f1b"), num_empty=1)


def test_replicas_of_a_pipeline_sum_their_gradients():
    schedule = schedule_of("1f1b", 2, 3)
    assert_right(run(schedule, num_replicas=2), schedule)


def test_a_pipeline_inside_an_outer_region_computes_the_same():
    """Two groups, each with the same batch and a pipeline of its own: both get what one device gets."""
    schedule, sizes = schedule_of("1f1b", 2), {"group": 2} | dict.fromkeys(AXES, 1) | {"pipeline": 2}
    devices = np.array(jax.devices()[:4]).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    def in_group(params, batch):
        sums = compute_on(mesh, schedule, params)(params, batch, jax.random.key(3))
        return jax.tree.map(lambda leaf: leaf[None], sums)

    whole, groups = PartitionSpec(), PartitionSpec("group")
    region = on_shards(mesh, in_group, (whole, whole), groups, axes=frozenset({"group"}))
    both = jax.device_get(jax.jit(region)(parameters(4), batch_of(NUM_MICROBATCHES)))
    for group in range(2):
        assert_right(jax.tree.map(lambda leaf, group=group: leaf[group], both), schedule)


def poison(monkeypatch, garbage):
    """Fills what nobody wants with garbage in every row, so that idle stages compute with it and send it on."""
    start, write = executor.Rows.start, executor._write

    def dirty(rows):
        carry = start(rows)
        fill = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, garbage), tree)  # noqa: E731
        embedded = jnp.where(rows.stage == 0, carry.inputs[0], garbage)
        return carry._replace(
            inputs=fill(carry.inputs).at[0].set(embedded),
            kept=fill(carry.kept),
            outputs=fill(carry.outputs),
            cotangents=fill(carry.cotangents),
        )

    def written(buffer, tree, slot):
        return jax.tree.map(lambda leaf: leaf.at[-1].set(garbage), write(buffer, tree, slot))

    monkeypatch.setattr(executor.Rows, "start", dirty)
    monkeypatch.setattr(executor, "_write", written)


@pytest.mark.parametrize(
    "name, num_chunks, garbage",
    [
        pytest.param("gpipe", 1, np.inf, marks=pytest.mark.slow),
        ("1f1b", 1, np.inf),
        ("interleaved_1f1b", 2, np.nan),
    ],
)
def test_garbage_on_idle_stages_changes_no_bit(name, num_chunks, garbage, monkeypatch, exact_bits):
    schedule = schedule_of(name, num_chunks=num_chunks)
    clean = run(schedule)
    poison(monkeypatch, garbage)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, run(schedule), clean)))


def multiplied_mask(total, part, place, active):
    """0 x infinity is not 0."""
    return right_add_at(total, jax.tree.map(lambda leaf: leaf * active, part), place, jnp.bool_(True))


def no_mask(total, part, place, active):
    return right_add_at(total, part, place, jnp.bool_(True))


def key_in_microbatch(batch, index):
    return {**right_microbatch(batch, index), SEQUENCE_INDEX: jnp.arange(NUM_SEQUENCES)}


def without_manual_axes(specs, axes):
    return jax.tree.map(lambda _: PartitionSpec(), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def identity(x, axis):
    return x


def from_every_stage(x, here):
    return vocabulary.psum_float32(x, "pipeline")


right_add_at, right_microbatch = ring.add_at, ring.microbatch
BREAKS = {
    "an idle stage's layers are added": (ring, "add_at", no_mask),
    "the mask multiplies": (ring, "add_at", multiplied_mask),
    "what is handed out comes from every stage": (ring, "from_stage", from_every_stage),
    "no sum of the head's cotangents": (vocabulary, "copy_to_shards", identity),
    "no sum of the embedding": (vocabulary, "from_one_shard", identity),
    "a sum that is differentiated": (vocabulary, "from_one_shard", lambda x, a: x if a is None else jax.lax.psum(x, a)),
    "dropout by the place in the microbatch": (ring, "microbatch", key_in_microbatch),
    "layers counted from each stage's first": (ring, "first_layer", lambda *_: 0),
    "activations stay where they are": (ring, "to_next", lambda x, _: x),
    "cotangents stay where they are": (ring, "to_previous", lambda x, _: x),
    "replicas keep their gradients to themselves": (GradientSync, "_sent", lambda self, x, *_: x),
    "a dropped spec": (placement_module, "manual_specs", without_manual_axes),
}  # fmt: skip


@pytest.mark.parametrize("broken", BREAKS)
def test_what_is_broken_is_noticed(broken, monkeypatch):
    schedule = schedule_of("1f1b", 2, 3)
    reference(4, 3)
    # Zeros, with which the buffers start, have no gradient.
    if broken in ("the mask multiplies", "an idle stage's layers are added"):
        poison(monkeypatch, np.inf)
    monkeypatch.setattr(*BREAKS[broken])
    num_replicas = 2 if broken.startswith("replicas") else 1
    sums = run(schedule, num_replicas)  # a break that cannot be traced shows nothing: it has to run, and to be wrong
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|^gradient: "):
        assert_right(sums, schedule)


def test_evaluation_drops_nothing_and_sums_the_batch():
    num_layers = 4
    params, batch = parameters(num_layers), batch_of(NUM_MICROBATCHES)
    specs = {
        "table": PartitionSpec("pipeline"),
        "layers": {"kernel": PartitionSpec("pipeline"), "scale": PartitionSpec("pipeline")},
        "head": PartitionSpec(None, "pipeline"),
    }
    compute = functools.partial(inference.evaluate, model(num_layers), 1, mesh_of(2), specs)
    loss, weight, metrics = jax.jit(compute)(params, batch, jax.random.key(0))
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    y = first(params, whole, None, False, None)
    y, _ = repeated(params["layers"], y, whole, jax.random.key(0), 0, False)
    expected_loss, expected_weight, _ = last(params, y, whole, None)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert weight == expected_weight
    assert metrics["sequences"] == NUM_SEQUENCES * NUM_MICROBATCHES
