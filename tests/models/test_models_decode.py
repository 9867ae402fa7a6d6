"""Tokens one after the other, with a cache, against the forward pass over the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from meshtrain.models.decoder_options import LatentOptions, MoeOptions, NormOptions, RopeOptions
from meshtrain.models.lora import LoraOptions, with_adapters
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.named import unbox

NUM_ROWS, LENGTH, VOCABULARY = 3, 12, 11
PROMPTS = np.array([5, 3, 1])  # tokens of each row's prompt; all are padded to the longest
GROUPED = DecoderOptions(
    num_layers=2, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2, vocab_size=VOCABULARY, vocab_multiple=16,
    init_std=0.5,
)  # fmt: skip
FAMILIES = {
    "rotary positions, grouped queries": GROUPED,
    "window, biases and norms of queries and keys": dataclasses.replace(
        GROUPED, qkv_biases=True, norm=NormOptions(qk=True), window=3
    ),
    "layers with a window and without, caps, four norms": dataclasses.replace(
        GROUPED,
        norm=NormOptions(centered_scales=True, post=True, qk=True),
        activation="geglu",
        tied_embeddings=True,
        scaled_embeddings=True,
        window=3,
        global_every=2,
        rope=RopeOptions(local_base=50.0),
        attention_scalar=9,
        attention_cap=5.0,
        logit_cap=3.0,
    ),
    "learned positions, tied, biases": dataclasses.replace(
        GROUPED,
        num_kv_heads=4,
        positions="learned",
        norm=NormOptions(name="layernorm"),
        activation="gelu",
        tied_embeddings=True,
        biases=True,
    ),
    "experts": dataclasses.replace(
        GROUPED, moe=MoeOptions(num_experts=4, expert_dim=8, router="sigmoid", shared_experts=1)
    ),
    "latents, a dense layer before experts in groups": dataclasses.replace(
        GROUPED,
        num_layers=3,
        num_kv_heads=4,
        latent=LatentOptions(dim=6, query_dim=5, rope_dim=2, value_dim=3),
        head_dim=3,
        moe=MoeOptions(num_experts=8, expert_dim=8, router_groups=4, groups_per_token=2, dense_layers=1, dense_dim=12),
    ),
    "latents, sinks": dataclasses.replace(GROUPED, num_kv_heads=4, latent=LatentOptions(dim=6, rope_dim=2), sinks=True),
}


def tokens_of_rows():
    return np.random.default_rng(0).integers(0, VOCABULARY, (NUM_ROWS, LENGTH)).astype(np.int32)


def whole(task, params, tokens):
    """Logits [R, T, V] of one forward pass over all tokens."""
    shape = tokens.shape
    batch = {
        "tokens": tokens,
        "positions": np.broadcast_to(np.arange(shape[1]), shape),
        "segment_ids": np.ones(shape, np.int32),
        SEQUENCE_INDEX: np.arange(shape[0]),
    }
    return np.asarray(jax.jit(task.logits)(params, batch))


def one_by_one(decode, params, tokens):
    """Yields logits [R, V]: those after the prompts, then those after each further token of the rows."""
    num_rows, prompt_length = len(tokens), PROMPTS.max()
    num_steps = LENGTH - prompt_length
    empty = {name: jnp.zeros(e.shape, e.dtype) for name, e in decode.cache(num_rows, prompt_length, num_steps).items()}
    padding = np.arange(prompt_length) >= PROMPTS[:, None]
    prompts = np.where(padding, VOCABULARY - 1, tokens[:, :prompt_length])
    logits, cache = jax.jit(decode.prefill)(params, prompts, PROMPTS, empty)
    yield np.asarray(logits)
    step = jax.jit(decode.step)
    for index in range(num_steps):
        logits, cache = step(params, tokens[np.arange(num_rows), PROMPTS + index], cache)
        yield np.asarray(logits)
    assert step._cache_size() == 1, "one compiled step serves all positions"


@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_cached_logits_are_those_of_the_whole_sequence(options):
    task = decoder(options, batch_size=NUM_ROWS, sequence_length=LENGTH)
    params = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
    tokens = tokens_of_rows()
    expected = whole(task, params, tokens)
    rows = np.arange(NUM_ROWS)
    for index, got in enumerate(one_by_one(task.decode, params, tokens)):
        wanted = expected[rows, PROMPTS - 1 + index]
        assert np.array_equal(np.isfinite(got), np.isfinite(wanted))
        real = np.isfinite(wanted)
        np.testing.assert_allclose(got[real], wanted[real], rtol=0, atol=1e-5 * np.abs(wanted[real]).max())


def test_a_cache_has_the_dtype_of_the_activations_and_weights_are_cast_once():
    normed = dataclasses.replace(GROUPED, norm=NormOptions(qk=True))
    task = decoder(normed, batch_size=NUM_ROWS, sequence_length=LENGTH, dtype=jnp.bfloat16)
    entries = task.decode.cache(NUM_ROWS, 5, 7)
    assert entries["keys"].shape == entries["values"].shape == (2, NUM_ROWS, 12, 2, 4)
    assert {entries[name].dtype for name in ("keys", "values")} == {jnp.bfloat16}
    abstract = jax.eval_shape(lambda: meta.unbox(task.init(jax.random.key(0))))
    cast = jax.eval_shape(task.decode.cast, abstract)
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(cast)}
    assert {dtype for path, dtype in dtypes.items() if "norm" in path} == {jnp.dtype(jnp.float32)}
    assert {dtype for path, dtype in dtypes.items() if "norm" not in path} == {jnp.dtype(jnp.bfloat16)}


def test_a_cache_of_latents_has_no_heads():
    latent = FAMILIES["latents, a dense layer before experts in groups"]
    entries = decoder(latent, batch_size=1, sequence_length=LENGTH).decode.cache(NUM_ROWS, 5, 7)
    assert entries["latents"].shape == (3, NUM_ROWS, 12, 6 + 2)
    assert "keys" not in entries


def test_adapters_count_where_latents_are_attended_to():
    options = dataclasses.replace(
        FAMILIES["latents, a dense layer before experts in groups"],
        num_layers=1,
        moe=dataclasses.replace(FAMILIES["latents, a dense layer before experts in groups"].moe, num_experts=0),
    )
    task = with_adapters(decoder(options, batch_size=NUM_ROWS, sequence_length=LENGTH), LoraOptions(rank=2))
    params = unbox(jax.jit(task.init)(jax.random.key(0)))
    params = jax.tree.map(lambda x: x + 0.1, params)  # factors that start at zero count as well
    tokens = tokens_of_rows()
    expected = whole(task, params, tokens)
    for index, got in enumerate(one_by_one(task.decode, params, tokens)):
        wanted = expected[np.arange(NUM_ROWS), PROMPTS - 1 + index]
        real = np.isfinite(wanted)
        np.testing.assert_allclose(got[real], wanted[real], rtol=0, atol=1e-5 * np.abs(wanted[real]).max())


def test_positions_of_a_table_are_the_most_that_there_are():
    learned = FAMILIES["learned positions, tied, biases"]
    of = functools.partial(decoder, batch_size=1, sequence_length=LENGTH)
    assert of(GROUPED).decode.max_positions == 0
    assert of(learned).decode.max_positions == of(learned).decode.trained_positions == LENGTH
    assert of(dataclasses.replace(learned, max_positions=40)).decode.max_positions == 40
