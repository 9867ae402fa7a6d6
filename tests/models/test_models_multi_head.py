"""The TPU's kernel, interpreted, against attention as JAX writes it out; and which implementation is chosen where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from jax.extend import core

from meshtrain.models.attention import splash, triton
from meshtrain.models.attention.attention import Attention, same_document
from meshtrain.models.attention.select import Case, chosen
from meshtrain.models.remat import HEADS, RematOptions
from meshtrain.models.task import SEQUENCE_INDEX
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.models.transformer.task import decoder
from meshtrain.sharding.axes import AXES
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import LayoutOptions, default_rules

BATCH_SIZE, NUM_HEADS, HEAD_DIM = 2, 4, 16


def arrays(length, num_kv_heads, dtype=jnp.float32):
    """(q, k, v, cotangent)."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (NUM_HEADS, num_kv_heads, num_kv_heads, NUM_HEADS)
    shapes = [(BATCH_SIZE, length, num, HEAD_DIM) for num in heads]
    return [2 * jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def documents_of(length):
    """Other borders in each sequence, the second of them in no multiple of a block."""
    place = np.arange(length)
    return jnp.asarray(np.stack([1 + (place >= length // 2), 1 + (place >= 37) + (place >= 131)]), jnp.int32)


def kernel(q, k, v, documents, causal, window=0):
    attention = Attention(NUM_HEADS, k.shape[2], HEAD_DIM, causal=causal, window=window)
    return splash.attend(q, k, v, documents, attention, name=HEADS, interpret=True)


def written_out(q, k, v, documents, causal, window=0):
    mask = same_document(*documents) if documents is not None else None
    if window:
        distance = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[1]))
        mask = (distance < window) if mask is None else mask & (distance < window)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation="xla")


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def both_ways(attend, arrays, documents, causal=True, window=0):
    """(heads, gradients of q, k, v)."""
    *inputs, cotangent = arrays
    heads, backward = jax.vjp(lambda q, k, v: attend(q, k, v, documents, causal, window), *inputs)
    return heads, *backward(cotangent)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize(("length", "num_kv_heads"), [(256, 2), (200, 1)])
def test_the_kernel_computes_attention(length, num_kv_heads, masked):
    given, documents = arrays(length, num_kv_heads), (documents_of(length),) * 2 if masked else None
    for got, expected in zip(
        both_ways(kernel, given, documents), both_ways(written_out, given, documents), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("window", "masked"), [(150, True), (128, False)], ids=["documents", "whole"])
def test_the_kernel_sees_a_window_and_skips_blocks_outside_of_it(window, masked):
    """Five blocks of 128, the last of them padded: three of them, or two, reach into the window of a block."""
    given, documents = arrays(600, 2), (documents_of(600),) * 2 if masked else None
    ways = [both_ways(way, given, documents, True, window) for way in (kernel, written_out)]
    for got, expected in zip(*ways, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "documents"])
def test_the_kernel_computes_attention_to_a_memory_of_another_length(masked):
    q, _, _, cotangent = arrays(200, 2)
    _, k, v, _ = arrays(300, 2)
    documents = (documents_of(200), documents_of(300)) if masked else None
    pairs = zip(*(both_ways(way, (q, k, v, cotangent), documents, False) for way in (kernel, written_out)), strict=True)
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_logits_softmax_and_sums_are_float32():
    q, k, v, cotangent = arrays(256, 2, jnp.bfloat16)
    documents, attention = (documents_of(256),) * 2, Attention(NUM_HEADS, 2, HEAD_DIM)
    attend = functools.partial(splash.attend, documents=documents, attention=attention, name=HEADS, interpret=False)
    jaxpr = jax.make_jaxpr(lambda *qkv: jax.vjp(attend, *qkv)[1](cotangent))(q, k, v)
    found = [e for e in inside(jaxpr.jaxpr, False) if e.primitive.name in ("dot_general", "exp", "reduce_sum")]
    assert len(found) >= 2 + 4 + 3
    assert {variable.aval.dtype for equation in found for variable in equation.outvars} == {jnp.dtype(jnp.float32)}


def inside(jaxpr, in_kernel):
    """Yields the operations inside of kernels."""
    for equation in jaxpr.eqns:
        if in_kernel:
            yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = part.jaxpr if isinstance(part, core.ClosedJaxpr) else part
                if isinstance(inner, core.Jaxpr):
                    yield from inside(inner, in_kernel or equation.primitive.name == "pallas_call")


MODEL = DecoderOptions(
    num_layers=1, embed_dim=32, mlp_dim=32, num_heads=4, num_kv_heads=2, vocab_size=11, qk_norm=True, window=40
)
SHAPE = (8, 128)


def batch():
    place = np.broadcast_to(np.arange(SHAPE[1]), SHAPE)
    return {
        "tokens": (7 * place % 11).astype(np.int32),
        "targets": (5 * place % 11).astype(np.int32),
        "segment_ids": (1 + (place >= 50)).astype(np.int32),
        "positions": np.where(place < 50, place, place - 50).astype(np.int32),
        "weights": np.ones(SHAPE, np.float32),
        SEQUENCE_INDEX: np.arange(SHAPE[0], dtype=np.int32),
    }


def gradients(implementation, placement=None, policy="none", model=MODEL):
    """(loss, gradients)."""
    options = dataclasses.replace(model, attention=implementation)
    task = decoder(
        options, batch_size=SHAPE[0], sequence_length=SHAPE[1], remat=RematOptions(policy), placement=placement
    )
    params = meta.unbox(jax.jit(task.init)(jax.random.key(0)))
    both = jax.value_and_grad(lambda params: task.loss(params, batch(), jax.random.key(1), True)[0])
    return jax.jit(both)(params)


@pytest.mark.parametrize(
    ("implementation", "window"), [("splash", 40), ("blockwise", 40), pytest.param("triton", 0, marks=pytest.mark.slow)]
)
def test_a_model_learns_the_same_from_the_kernel_on_a_mesh(implementation, window):
    model = dataclasses.replace(MODEL, window=window)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2}, jax.devices())
    placement = Placement(default_rules(LayoutOptions()), mesh)
    loss, got = gradients(implementation, placement, "save_attention", model)
    expected_loss, expected = gradients("xla", model=model)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-5 * np.abs(b).max()), got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["splash", "blockwise"])
def test_layers_with_a_window_and_without_take_the_kernel_of_their_own(implementation):
    """With scores that are scaled and capped."""
    model = dataclasses.replace(MODEL, num_layers=2, global_every=2, attention_cap=2.0, attention_scalar=5)
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"tensor": 2}, jax.devices())
    placement = Placement(default_rules(LayoutOptions()), mesh)
    loss, got = gradients(implementation, placement, "save_attention", model)
    expected_loss, expected = gradients("xla", model=model)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-5 * np.abs(b).max()), got, expected)


LONG, FAR = (8192, 8192), (8200, 8200)


def case(head_dim, lengths, dtype, platform, *, documents=False, memory=False, asked="auto", **options):
    return Case(Attention(8, 8, head_dim, asked, **options), lengths, dtype, platform, documents, memory)


@pytest.mark.parametrize(
    ("case", "name", "why"),
    [
        (case(128, LONG, jnp.bfloat16, "tpu", documents=True), "splash", "takes it"),
        (case(64, (128, 1280), jnp.bfloat16, "tpu", memory=True), "splash", "takes it"),
        (case(128, LONG, jnp.float32, "tpu"), "blockwise", "takes bfloat16"),
        (case(128, FAR, jnp.bfloat16, "tpu"), "blockwise", "multiples of 128"),
        (case(80, (512, 512), jnp.bfloat16, "tpu"), "xla", "small below 1,024"),
        (case(128, LONG, jnp.bfloat16, "gpu"), "cudnn", "takes it"),
        (case(64, FAR, jnp.float16, "cuda", window=100), "cudnn", "takes it"),
        (case(128, LONG, jnp.bfloat16, "gpu", documents=True), "triton", "cuDNN's kernel takes no documents, JAX's"),
        (case(128, LONG, jnp.bfloat16, "gpu", documents=True, window=8192), "triton", "no documents"),
        (case(256, (128, 128), jnp.bfloat16, "gpu"), "triton", "no heads of 256"),
        (case(128, (127, 127), jnp.bfloat16, "gpu", documents=True), "xla", "no sequences of 127 tokens"),
        (case(128, LONG, jnp.float32, "gpu", documents=True), "blockwise", "no float32 and no documents"),
        (case(512, LONG, jnp.bfloat16, "gpu"), "blockwise", "no heads of 512"),
        (case(128, LONG, jnp.bfloat16, "gpu", documents=True, window=100), "blockwise", "Pallas kernel no window"),
        (case(128, LONG, jnp.bfloat16, "gpu", cap=1.0), "blockwise", "no capped scores"),
        (case(128, LONG, jnp.bfloat16, "gpu", documents=True, memory=True), "blockwise", "no memory"),
        (case(128, (1024, 1024), jnp.bfloat16, "cpu"), "blockwise", "no kernel for cpu"),
        (case(128, (1023, 1024), jnp.bfloat16, "cpu", documents=True), "xla", "small below 1,024"),
        (case(80, LONG, jnp.float32, "cpu", asked="splash"), "splash", "model.attention=splash"),
    ],
)
def test_auto_is_the_kernel_that_fits(case, name, why):
    found, reason = chosen(case)
    assert found == name
    assert why in reason


def test_auto_does_without_a_kernel_that_this_version_of_jax_has_not(monkeypatch):
    monkeypatch.setattr(triton, "is_there", lambda: False)
    name, why = chosen(case(128, LONG, jnp.bfloat16, "gpu", documents=True))
    assert (name, why.rpartition("kernel ")[2]) == ("blockwise", "no call from this version of JAX")
