"""What a decoder may see, what rematerialization changes, how large models are, and what their weights are called."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import meta

from meshtrain.models.decoder_options import NormOptions, RopeOptions
from meshtrain.models.metrics import Load
from meshtrain.models.remat import RematOptions
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions, run_layers
from meshtrain.models.transformer.task import count_parameters, decoder
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trees import leaves_with_paths

BATCH_SIZE, SEQUENCE_LENGTH, START = 2, 12, 5  # the second document starts at START
LLAMA = DecoderOptions(
    num_layers=2, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2, vocab_size=11, vocab_multiple=16, init_std=0.5
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
GEMMA = dataclasses.replace(
    LLAMA,
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
)
POLICIES = dataclasses.fields(RematOptions)[0].metadata["choices"]


def task_of(options, **changes):
    return decoder(options, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, **changes)


def batch():
    """Two documents a sequence."""
    generator, shape = np.random.default_rng(0), (BATCH_SIZE, SEQUENCE_LENGTH)
    place = np.broadcast_to(np.arange(SEQUENCE_LENGTH), shape)
    return {
        "tokens": generator.integers(0, 11, shape).astype(np.int32),
        "targets": generator.integers(0, 11, shape).astype(np.int32),
        "segment_ids": (1 + (place >= START)).astype(np.int32),
        "positions": np.where(place < START, place, place - START).astype(np.int32),
        "weights": generator.random(shape).astype(np.float32),
        SEQUENCE_INDEX: np.arange(BATCH_SIZE, dtype=np.int32),
    }


@functools.cache
def logits_of(options):
    """A function: tokens -> logits [B, T, V] of the batch with these tokens."""
    task = task_of(options)
    params = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
    run = jax.jit(task.logits)
    return lambda tokens: np.asarray(run(params, {**batch(), "tokens": tokens}))


def changed(place):
    """The batch's tokens with others at these places of every sequence."""
    tokens = batch()["tokens"].copy()
    tokens[:, place] = (tokens[:, place] + 1) % 11
    return tokens


def places_that_differ(options, place):
    before, after = (logits_of(options)(tokens) for tokens in (batch()["tokens"], changed(place)))
    return [i for i in range(SEQUENCE_LENGTH) if not np.array_equal(before[:, i], after[:, i])]


@pytest.mark.parametrize("options", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_documents_do_not_see_each_other(options):
    assert places_that_differ(options, slice(0, START)) == list(range(START))
    assert places_that_differ(options, slice(START, None)) == list(range(START, SEQUENCE_LENGTH))


@pytest.mark.parametrize("options", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_tokens_see_those_before_them_only(options):
    assert places_that_differ(options, 2) == [2, 3, 4]
    assert places_that_differ(options, 8) == [8, 9, 10, 11]


def test_documents_may_be_let_see_each_other():
    options = dataclasses.replace(LLAMA, within_documents=False)
    assert places_that_differ(options, 2) == list(range(2, SEQUENCE_LENGTH))


@pytest.mark.parametrize("within_documents", [True, False])
def test_tokens_see_as_many_as_the_window_has(within_documents):
    options = dataclasses.replace(LLAMA, num_layers=1, window=3, within_documents=within_documents)
    assert places_that_differ(options, 6) == [6, 7, 8]
    assert places_that_differ(options, 3) == ([3, 4] if within_documents else [3, 4, 5])


def test_every_second_layer_sees_all_of_the_document():
    """The second of two layers; where it would be the third, both have the window."""
    options = dataclasses.replace(LLAMA, window=3, global_every=2)
    assert places_that_differ(options, 5) == list(range(START, SEQUENCE_LENGTH))
    assert places_that_differ(dataclasses.replace(options, global_every=3), 5) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_padding_of_the_vocabulary_never_gets_probability(dtype):
    task = task_of(LLAMA, dtype=dtype)
    params = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
    params["head"]["kernel"] = params["head"]["kernel"].at[:, 11:].set(1e3)
    got = jax.jit(task.logits)(params, batch())
    assert got.shape == (BATCH_SIZE, SEQUENCE_LENGTH, 16)
    assert got.dtype == jnp.float32
    assert np.all(got[..., 11:] == -np.inf)
    assert np.isfinite(got[..., :11]).all()
    np.testing.assert_allclose(np.exp(jax.nn.log_softmax(got))[..., :11].sum(-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize(("size", "multiple", "padded"), [(257, 128, 384), (256, 128, 256), (1, 128, 128),
                                                           (51200, 280, 51240), (11, 1, 11)])  # fmt: skip
def test_padded_vocabulary(size, multiple, padded):
    assert DecoderOptions(vocab_size=size, vocab_multiple=multiple).padded_vocab_size == padded


@functools.cache
def operations(policy):
    """The traced gradients as text, dropout on. That no policy changes a number stands in tests/parity."""
    task = task_of(dataclasses.replace(LLAMA, dropout_rate=0.3), remat=RematOptions(policy))
    params = meta.unbox(jax.eval_shape(task.init, jax.random.key(0)))
    example, rng = batch(), jax.random.key(1)
    return str(jax.make_jaxpr(jax.value_and_grad(lambda params: task.loss(params, example, rng, True)[0]))(params))


def test_policies_compute_again_what_they_say():
    num_matmuls = {policy: operations(policy).count("dot_general[") for policy in POLICIES}
    # In each layer: q, k, v, output, up, gate, down have no batch dims; scores and what they weigh have.
    assert num_matmuls["dots"] - num_matmuls["none"] in (1, 2)
    assert num_matmuls["full"] - num_matmuls["dots"] >= 5
    assert num_matmuls["offload"] == num_matmuls["full"]
    assert "MemorySpace.Host" in operations("offload")
    assert "MemorySpace.Host" not in operations("full")


SIZES = {
    "gpt2": (
        dataclasses.replace(
            GPT2,
            num_layers=12,
            embed_dim=768,
            mlp_dim=3072,
            num_heads=12,
            num_kv_heads=12,
            vocab_size=50257,
            vocab_multiple=128,
        ),
        1024,
        124_439_808,
    ),
    "llama 3 8b": (
        dataclasses.replace(
            LLAMA,
            num_layers=32,
            embed_dim=4096,
            mlp_dim=14336,
            num_heads=32,
            num_kv_heads=8,
            vocab_size=128256,
            vocab_multiple=1000,
        ),
        8192,
        8_030_261_248,
    ),
    "mistral 7b": (
        dataclasses.replace(
            LLAMA,
            num_layers=32,
            embed_dim=4096,
            mlp_dim=14336,
            num_heads=32,
            num_kv_heads=8,
            vocab_size=32000,
            vocab_multiple=128 * 3,
            window=4096,
        ),
        8192,
        7_241_732_096,
    ),
    "qwen 2 0.5b": (
        dataclasses.replace(
            LLAMA,
            num_layers=24,
            embed_dim=896,
            mlp_dim=4864,
            num_heads=14,
            num_kv_heads=2,
            vocab_size=151936,
            vocab_multiple=1000,
            tied_embeddings=True,
            qkv_biases=True,
        ),
        8192,
        494_032_768,
    ),
    "qwen 3 0.6b": (
        dataclasses.replace(
            LLAMA,
            num_layers=28,
            embed_dim=1024,
            mlp_dim=3072,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            vocab_multiple=1000,
            tied_embeddings=True,
            norm=NormOptions(qk=True),
        ),
        8192,
        596_049_920,
    ),
    "gemma 2 2b": (
        dataclasses.replace(
            GEMMA,
            num_layers=26,
            embed_dim=2304,
            mlp_dim=9216,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            vocab_size=256000,
            vocab_multiple=384,
            norm=dataclasses.replace(GEMMA.norm, qk=False),
        ),
        8192,
        2_614_341_888,
    ),
    "gemma 3 1b": (
        dataclasses.replace(
            GEMMA,
            num_layers=26,
            embed_dim=1152,
            mlp_dim=6912,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            vocab_size=262144,
            vocab_multiple=1000,
        ),
        8192,
        999_885_952,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_parameter_counts(name):
    options, num_positions, expected = SIZES[name]
    assert options.padded_vocab_size > options.vocab_size
    assert count_parameters(options, num_positions) == expected


@pytest.mark.parametrize("options", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_count_is_that_of_the_weights_without_padding(options):
    task = task_of(options)
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    stored = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(meta.unbox(shapes)))
    num_tables = 1 if options.tied_embeddings else 2
    assert task.num_parameters == stored - num_tables * (16 - 11) * options.embed_dim


def test_flops_of_a_token():
    d, f, layers, heads, kv_heads, head_dim, v = 16, 24, 2, 4, 2, 4, 11
    matmuls = layers * (2 * d * heads * head_dim + 2 * d * kv_heads * head_dim + 3 * d * f) + v * d
    norms = (2 * layers + 1) * d
    scores = 12 * layers * SEQUENCE_LENGTH * heads * head_dim
    assert task_of(LLAMA).flops_per_token == 6 * (matmuls + norms) + scores


def test_flops_of_a_token_in_a_window():
    """In proportion to the keys that a token sees, where its own counts half: so causal is half of everything."""
    window, whole = 4, task_of(LLAMA).attention_flops_per_token
    num_causal, num_seen = (sum(min(i + 0.5, most) for i in range(SEQUENCE_LENGTH)) for most in (math.inf, window))
    assert num_causal == SEQUENCE_LENGTH**2 / 2
    windowed = task_of(dataclasses.replace(LLAMA, window=window))
    assert windowed.attention_flops_per_token == pytest.approx(whole * num_seen / num_causal, rel=1e-12)
    assert windowed.flops_per_token - task_of(LLAMA).flops_per_token == windowed.attention_flops_per_token - whole
    assert task_of(dataclasses.replace(LLAMA, window=SEQUENCE_LENGTH)).attention_flops_per_token == whole
    deep, windows = (dataclasses.replace(LLAMA, num_layers=5, window=size) for size in (0, window))
    alternating = task_of(dataclasses.replace(windows, global_every=2)).attention_flops_per_token
    of_layer = [task_of(options).attention_flops_per_token / 5 for options in (deep, windows)]
    assert alternating == pytest.approx(2 * of_layer[0] + 3 * of_layer[1], rel=1e-12)


QWEN = dataclasses.replace(LLAMA, qkv_biases=True, norm=NormOptions(qk=True))


def test_norms_after_attention_and_mlp_are_the_only_weights_more():
    options = dataclasses.replace(GEMMA, norm=dataclasses.replace(GEMMA.norm, qk=False), tied_embeddings=False)
    trees = (meta.unbox(jax.eval_shape(task_of(one).init, jax.random.key(0))) for one in (LLAMA, options))
    without, shapes = ({path: leaf.shape for path, leaf in leaves_with_paths(tree)} for tree in trees)
    more = {path: shapes[path] for path in shapes.keys() - without.keys()}
    assert more == {f"layers/{name}_post_norm/scale": (2, 16) for name in ("attention", "mlp")}


def test_biases_and_norms_of_queries_and_keys_are_the_only_weights_more():
    trees = (jax.eval_shape(task_of(options).init, jax.random.key(0)) for options in (LLAMA, QWEN))
    without, shapes = ({path: leaf.shape for path, leaf in leaves_with_paths(meta.unbox(tree))} for tree in trees)
    more = {path.removeprefix("layers/attention/"): shapes[path] for path in shapes.keys() - without.keys()}
    assert more == {
        "query_bias": (2, 4, 4),
        "key_bias": (2, 2, 4),
        "value_bias": (2, 2, 4),
        "query_norm/scale": (2, 4),
        "key_norm/scale": (2, 4),
    }


@pytest.mark.parametrize("options", [LLAMA, GPT2, QWEN, GEMMA], ids=["llama", "gpt2", "qwen", "gemma"])
def test_every_weight_names_each_of_its_dims(options):
    boxed = jax.eval_shape(task_of(options).init, jax.random.key(0))
    boxes = jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata))
    assert all(len(box.names) == box.value.ndim and None not in box.names for box in boxes)
    stacked = jax.tree.leaves(boxed["layers"], is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata))
    assert {(box.names[0], box.value.shape[0]) for box in stacked} == {("layers", 2)}


def test_initial_weights():
    options = dataclasses.replace(GPT2, embed_dim=64, mlp_dim=64, num_layers=8, init_std=0.02)
    params = meta.unbox(jax.jit(task_of(options).init)(jax.random.key(0)))
    outer = 0.02 / math.sqrt(2 * 8)  # as in GPT-2: the residual stream keeps its size with depth
    for name, std in {"query": 0.02, "key": 0.02, "value": 0.02, "output": outer}.items():
        np.testing.assert_allclose(np.std(params["layers"]["attention"][name]), std, rtol=0.05)
    for name, std in {"up": 0.02, "down": outer}.items():
        np.testing.assert_allclose(np.std(params["layers"]["mlp"][name]), std, rtol=0.05)
    queries = np.asarray(params["layers"]["attention"]["query"])
    assert not np.array_equal(queries[0], queries[1]), "layers start as copies of each other"
    assert np.all(np.asarray(params["head"]["norm"]["scale"]) == 1)
    assert not np.any(params["layers"]["mlp"]["up_bias"])


class Weighing(nn.Module):
    """x + tanh(w x), whose squares the layer adds to the loss; its row of a load is its index."""

    options: DecoderOptions
    placement: Placement
    dtype: jnp.dtype
    train: bool

    @nn.compact
    def __call__(self, x, layer, offset):
        w = self.param("w", nn.initializers.normal(1.0), (), jnp.float32)
        grown = jnp.tanh(w * x) + offset
        load = jnp.zeros((4, 2)).at[layer].set(jnp.stack([layer + 1.0, jnp.sum(x > 0)]))
        return x + grown, (jnp.sum(grown**2), {"load": Load(load), "sum": jnp.sum(grown)})


@pytest.mark.parametrize("remat", [RematOptions("none"), RematOptions("full"), RematOptions("full", every=2)])
def test_sums_of_layers_are_those_of_a_plain_loop(remat):
    weights, x, offset = jnp.linspace(-1.0, 2.0, 4), jnp.linspace(-1.0, 1.0, 6).reshape(1, 2, 3), jnp.float32(0.3)
    place = Placement.single_device()

    def stacked(weights):
        given = (LLAMA, {"w": weights}, x, jnp.arange(4), (offset,), place, jnp.float32, True, remat, Weighing)
        y, (loss, metrics) = run_layers(*given)
        return loss + jnp.sum(y), (metrics["sum"], metrics["load"].counts)

    def plain(weights):
        y, loss, total, load = x, 0.0, 0.0, []
        for index in range(4):
            grown = jnp.tanh(weights[index] * y) + offset
            load.append(jnp.stack([index + 1.0, jnp.sum(y > 0)]))
            loss, total, y = loss + jnp.sum(grown**2), total + jnp.sum(grown), y + grown
        return loss + jnp.sum(y), (total, jnp.stack(load))

    found, expected = (jax.jit(jax.value_and_grad(f, has_aux=True))(weights) for f in (stacked, plain))
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
