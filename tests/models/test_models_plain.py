"""The decoder computes what a page of plain JAX computes: loss, every gradient, and the weights after some steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from meshtrain.config.schema import Config
from meshtrain.models.decoder_options import NormOptions
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.optim.learning_rate import LearningRateOptions
from scripts.benchmarks import plain_decoder, step

BATCH_SIZE, SEQUENCE_LENGTH = 3, 16
LLAMA = DecoderOptions(
    num_layers=2, embed_dim=24, mlp_dim=40, num_heads=4, num_kv_heads=2, vocab_size=29, vocab_multiple=32
)
GPT2 = dataclasses.replace(
    LLAMA,
    num_kv_heads=4,
    positions="learned",
    norm=NormOptions(name="layernorm"),
    activation="gelu",
    tied_embeddings=True,
    biases=True,
)
WINDOW = 5  # tokens; a document has more
QWEN = dataclasses.replace(LLAMA, qkv_biases=True, norm=NormOptions(qk=True), window=WINDOW)
FAMILIES = {
    "llama": (LLAMA, plain_decoder.llama_loss),
    "gpt2": (GPT2, plain_decoder.gpt2_loss),
    "mistral and qwen": (QWEN, functools.partial(plain_decoder.llama_loss, window=WINDOW)),
}


def config_of(options):
    return Config(
        num_steps=10,
        batch_size=BATCH_SIZE,
        sequence_length=SEQUENCE_LENGTH,
        model=options,
        learning_rate=LearningRateOptions(peak=1e-2, warmup_steps=2),
    )


def batch_of(options):
    """Two documents a sequence, and targets that do not count."""
    batch = step.example_batch(config_of(options))
    assert {0.0, 1.0} == set(np.unique(batch["weights"]))
    assert batch["segment_ids"].max() == 2
    return batch


def filled(task):
    """Weights far from their initial values: a bias of 0, a scale of 1 or flat attention would hide what is wrong."""
    params = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, moved)


@functools.cache
def both(family, dtype):
    """((loss, gradients) of the decoder, the same of the plain one)."""
    options, plain_loss = FAMILIES[family]
    task = decoder(options, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, dtype=dtype)
    params, batch = filled(task), batch_of(options)
    with_index = {**batch, SEQUENCE_INDEX: jnp.arange(BATCH_SIZE)}

    def mean(params):
        total, weight, _ = task.loss(params, with_index, jax.random.key(2), True)
        return total / weight

    plain = functools.partial(plain_loss, batch=batch, vocab_size=options.vocab_size, dtype=dtype)
    return jax.jit(jax.value_and_grad(mean))(params), jax.jit(jax.value_and_grad(plain))(params)


def compare(got, expected, rtol):
    """Each entry to `rtol`; or of the array's largest, or a tenth of that of all, where cancellation left little."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))

    def same(got, expected):
        atol = rtol * max(np.abs(expected).max(), 0.1 * largest)
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)

    jax.tree.map(same, got, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_in_float32(family):
    got, expected = both(family, jnp.float32)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    compare(got[1], expected[1], rtol=1e-5)
    idle = [leaf for leaf in jax.tree.leaves(expected[1]) if not np.any(leaf)]
    assert not idle, "a weight without a gradient compares nothing"


@pytest.mark.slow
def test_loss_and_gradients_in_bfloat16():
    got, expected = both("llama", jnp.bfloat16)
    assert got[0].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(got[1])} == {jnp.dtype("float32")}
    np.testing.assert_allclose(got[0], expected[0], rtol=5e-3)
    exact = both("llama", jnp.float32)[1][1]
    for mine, theirs, true in zip(*map(jax.tree.leaves, (got[1], expected[1], exact)), strict=True):
        # Rounding may differ, but not be worse: the plain step's own distance from float32 is the measure.
        assert np.linalg.norm(mine - true) <= 1.5 * np.linalg.norm(theirs - true) + 1e-3 * np.linalg.norm(true)


@pytest.mark.slow
def test_benchmark_compares_two_steps_that_do_the_same():
    config, batch = config_of(GPT2), batch_of(GPT2)
    steps, states = step.compiled_steps(config, jax.devices()[0], batch)
    first = jax.device_get(states["plain"][0])
    for _ in range(3):
        states["program"], metrics = steps["program"](states["program"], batch)
        states["plain"], loss = steps["plain"](states["plain"], batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    program, plain = jax.device_get((states["program"].params, states["plain"][0]))
    for params in (first, program, plain):
        # It adds the same to every score of a query, so its gradient is rounding noise, and Adam makes steps of noise.
        del params["layers"]["attention"]["key_bias"]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, program, plain)
    moved = jax.tree.map(lambda before, after: np.abs(before - after).max(), first, plain)
    assert min(jax.tree.leaves(moved)) > 1e-3
