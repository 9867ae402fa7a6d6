"""Cross-entropy against `jax.nn.log_softmax`, whole and with the vocabulary split over a manual axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.models import vocabulary

NUM_SHARDS = 4
VOCAB_SIZE, PADDED = 13, 16
EMBED_DIM = 6


def example(dtype=jnp.float32, scale=3.0):
    """Logits [2, 5, 16], targets, weights with a zero."""
    generator = np.random.default_rng(0)
    logits = jnp.asarray(scale * generator.normal(size=(2, 5, PADDED)), dtype)
    targets = jnp.asarray(generator.integers(0, VOCAB_SIZE, (2, 5)), jnp.int32)
    weights = jnp.asarray(generator.random((2, 5)), jnp.float32).at[1, 2].set(0.0)
    return logits, targets, weights


def expected_loss(logits, targets, weights):
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32)[..., :VOCAB_SIZE])
    picked = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * weights)


def test_loss_and_gradient_are_those_of_log_softmax():
    logits, targets, weights = example()
    got = jax.value_and_grad(lambda x: 3.0 * vocabulary.cross_entropy(x, targets, weights, VOCAB_SIZE))(logits)
    expected = jax.value_and_grad(lambda x: 3.0 * expected_loss(x, targets, weights))(logits)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-6)


def test_large_logits_stay_finite():
    logits, targets, weights = example(scale=1e4)
    value, gradient = jax.value_and_grad(vocabulary.cross_entropy)(logits, targets, weights, VOCAB_SIZE)
    np.testing.assert_allclose(value, expected_loss(logits, targets, weights), rtol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_padding_never_gets_probability(dtype):
    logits, targets, weights = example(dtype)
    tempting = logits.at[..., VOCAB_SIZE:].set(1e4)
    value, gradient = jax.value_and_grad(vocabulary.cross_entropy)(tempting, targets, weights, VOCAB_SIZE)
    assert value.dtype == jnp.float32
    assert gradient.dtype == dtype
    np.testing.assert_allclose(value, expected_loss(logits, targets, weights), rtol=1e-6)
    assert not np.any(gradient[..., VOCAB_SIZE:])
    probabilities = jax.nn.softmax(vocabulary.without_padding(tempting, VOCAB_SIZE))
    assert not np.any(probabilities[..., VOCAB_SIZE:])
    np.testing.assert_allclose(probabilities.sum(-1), 1.0, rtol=1e-6)


def test_bfloat16_logits_get_the_gradient_of_float32_rounded_once():
    logits, targets, weights = example(jnp.bfloat16)
    got = jax.grad(vocabulary.cross_entropy)(logits, targets, weights, VOCAB_SIZE)
    wide = jax.grad(vocabulary.cross_entropy)(logits.astype(jnp.float32), targets, weights, VOCAB_SIZE)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


def model(params, batch, axis):
    """Lookup, something nonlinear, logits, loss: the way of a decoder's ends. Splits the vocabulary over `axis`."""
    tokens, targets, weights = batch
    num_rows = params["table"].shape[0]
    row = tokens - vocabulary.first_column(num_rows, axis)
    here = (row >= 0) & (row < num_rows)
    x = jnp.where(here[..., None], params["table"][jnp.where(here, row, 0)], 0)
    x = jnp.tanh(vocabulary.from_one_shard(x, axis) @ params["inner"])
    logits = vocabulary.copy_to_shards(x, axis) @ params["kernel"]
    return vocabulary.cross_entropy(logits, targets, weights, VOCAB_SIZE, axis)


def ends():
    """(params, batch) of `model`, whole."""
    generator = np.random.default_rng(1)
    shapes = {"table": (PADDED, EMBED_DIM), "inner": (EMBED_DIM, EMBED_DIM), "kernel": (EMBED_DIM, PADDED)}
    params = {name: jnp.asarray(generator.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    _, targets, weights = example()
    tokens = jnp.asarray(generator.integers(0, VOCAB_SIZE, targets.shape), jnp.int32)
    return params, (tokens, targets, weights)


def split_value_and_grad(params, batch):
    """Loss and gradients from `NUM_SHARDS` devices, each with its part of the vocabulary."""
    mesh = Mesh(np.array(jax.devices()[:NUM_SHARDS]), ("pipeline",))
    specs = {"table": PartitionSpec("pipeline"), "inner": PartitionSpec(), "kernel": PartitionSpec(None, "pipeline")}
    whole = PartitionSpec()
    inside = jax.value_and_grad(functools.partial(model, axis="pipeline"))
    split = jax.shard_map(
        inside, mesh=mesh, in_specs=(specs, whole), out_specs=(whole, specs), axis_names={"pipeline"}, check_vma=False
    )
    return jax.jit(split)(params, batch)


def gaps(got, expected):
    """How far each gradient is off, as a share of its norm."""
    return {name: float(np.linalg.norm(got[name] - expected[name]) / np.linalg.norm(expected[name])) for name in got}


def test_split_vocabulary_changes_no_number():
    params, batch = ends()
    expected = jax.value_and_grad(functools.partial(model, axis=None))(params, batch)
    got = split_value_and_grad(params, batch)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    assert max(gaps(got[1], expected[1]).values()) < 1e-6


def auto_split(params, batch):
    """Loss and gradients with the kernel's columns split over `tensor` by the partitioner."""
    mesh = Mesh(np.array(jax.devices()[:NUM_SHARDS]), ("tensor",))
    kernel = jax.device_put(params["kernel"], NamedSharding(mesh, PartitionSpec(None, "tensor")))
    return jax.jit(jax.value_and_grad(functools.partial(model, axis=None)))({**params, "kernel": kernel}, batch)


@pytest.mark.parametrize("split", [None, split_value_and_grad, auto_split])
def test_one_pass_over_the_logits_gives_the_numbers_of_two(split, monkeypatch):
    """CPUs use two passes, so the test replaces them by the pass of GPUs."""
    params, batch = ends()
    expected = jax.value_and_grad(functools.partial(model, axis=None))(params, batch)
    monkeypatch.setattr(vocabulary, "_in_two_passes", vocabulary.max_and_sum)
    got = (split or jax.value_and_grad(functools.partial(model, axis=None)))(params, batch)
    np.testing.assert_allclose(got[0], expected[0], rtol=2e-6)
    assert max(gaps(got[1], expected[1]).values()) < 2e-6


def test_one_pass_takes_any_maximum_and_keeps_nan():
    x = jnp.array([[1e4, -1e4, 0, -jnp.inf], [-3e4, -3e4, -jnp.inf, -jnp.inf], [jnp.nan, 1, 2, 3], [jnp.inf, 1, 2, 3]])
    maximum, total = vocabulary.max_and_sum(x)
    np.testing.assert_array_equal(maximum, jnp.array([1e4, -3e4, jnp.nan, jnp.inf]))
    np.testing.assert_array_equal(total[:2], jnp.array([1.0, 2.0]))
    assert np.isnan(total[2])


@pytest.mark.parametrize("platform, num_passes", [("cuda", 2), ("cpu", 3)])
def test_gpus_reduce_the_logits_once_less(platform, num_passes):
    """The last pass sums the targets' logits, which XLA fuses with the gradient."""
    loss = jax.jit(functools.partial(vocabulary.token_losses, vocab_size=VOCAB_SIZE))
    text = loss.trace(*example()[:2]).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.reduce(") == num_passes


def test_missing_sum_of_cotangents_is_noticed(monkeypatch):
    params, batch = ends()
    expected = jax.grad(functools.partial(model, axis=None))(params, batch)
    monkeypatch.setattr(vocabulary, "copy_to_shards", lambda x, axis: x)
    found = gaps(split_value_and_grad(params, batch)[1], expected)
    assert found["kernel"] < 1e-6
    assert found["inner"] > 0.1
    assert found["table"] > 0.1


def test_missing_sum_of_lookups_is_noticed(monkeypatch):
    params, batch = ends()
    expected = jax.value_and_grad(functools.partial(model, axis=None))(params, batch)
    monkeypatch.setattr(vocabulary, "from_one_shard", lambda x, axis: x)
    got = split_value_and_grad(params, batch)
    assert abs(got[0] - expected[0]) > 1e-2 * expected[0]


def test_differentiating_through_a_psum_counts_each_shard_and_is_noticed(monkeypatch):
    params, batch = ends()
    expected = jax.grad(functools.partial(model, axis=None))(params, batch)
    monkeypatch.setattr(vocabulary, "from_one_shard", jax.lax.psum)
    got = split_value_and_grad(params, batch)[1]
    np.testing.assert_allclose(got["table"], NUM_SHARDS * expected["table"], rtol=1e-4, atol=1e-5)
    assert gaps(got, expected)["inner"] < 1e-6


def on_shards(function, arguments):
    """Returns `function` of each of 4 arrays stacked along the first dim, on a device of its own, jitted."""
    mesh = Mesh(np.array(jax.devices()[:NUM_SHARDS]), ("pipeline",))
    split, whole = PartitionSpec("pipeline"), PartitionSpec()
    return jax.jit(
        jax.shard_map(lambda x: function(x[0]), mesh=mesh, in_specs=split, out_specs=whole, check_vma=False)
    ).lower(arguments)


@pytest.mark.parametrize("width, sent", [(6, "ui32"), (5, "f32")])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_one_shard_has_crosses_with_its_bits(dtype, width, sent):
    given = np.zeros((NUM_SHARDS, 2, width), jnp.dtype(dtype))
    given[2] = np.random.default_rng(2).normal(size=(2, width))
    given[2, 0, :4] = [np.inf, np.finfo(jnp.float32).tiny * 2**5, -np.inf, 1]  # the second is subnormal or 0
    lowered = on_shards(lambda x: vocabulary.from_one_shard(x, "pipeline"), jnp.asarray(given))
    assert f"-> tensor<2x{width // 2 if sent == 'ui32' else width}x{sent}>" in lowered.as_text()
    got = np.asarray(lowered.compile()(jnp.asarray(given)))
    assert got.dtype == given.dtype
    np.testing.assert_array_equal(got.view(np.uint16), given[2].view(np.uint16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bool_])
def test_what_one_shard_has_keeps_other_dtypes(dtype):
    given = jnp.zeros((NUM_SHARDS, 3), dtype).at[1].set(jnp.array([1, 0, 1], dtype))
    got = on_shards(lambda x: vocabulary.psum_of_one(x, "pipeline"), given).compile()(given)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, given[1])


def test_cotangents_of_all_shards_are_summed_in_float32():
    given = jnp.stack([jnp.full((2,), value, jnp.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)])
    lowered = on_shards(lambda x: jax.vjp(lambda y: vocabulary.copy_to_shards(y, "pipeline"), x)[1](x)[0], given)
    np.testing.assert_array_equal(lowered.compile()(given).astype(jnp.float32), jnp.bfloat16(259.0))
