"""Each implementation of attention against attention written out: numbers, roundings, and what is computed again."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from meshtrain.errors import UserError
from meshtrain.models.attention import blockwise, dot_product, flex, splash, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.models.remat import HEADS, saved_names
from meshtrain.models.split import keep_named
from meshtrain.sharding.placement import Placement

BATCH_SIZE, NUM_HEADS, HEAD_DIM, BLOCK = 2, 4, 16, 64
KERNELS = {
    "blockwise": (blockwise.attend, {"name": HEADS, "largest_block": BLOCK}),
    "splash": (splash.attend, {"name": HEADS, "interpret": True}),
    "triton": (triton.attend, {"name": HEADS, "interpret": True}),
    "xla": (dot_product.attend, {"how": "xla"}),
    "cudnn": (dot_product.attend, {"how": "cudnn"}),
    "flex": (flex.attend, {"name": HEADS}),
}
TRACED = {"blockwise": blockwise.TRACED_NAME, "triton": "mha_forward"}  # of a forward pass


def arrays(length, num_tokens, num_kv_heads, dtype=jnp.float32):
    """(q, k, v, cotangent)."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = [(length, NUM_HEADS), (num_tokens, num_kv_heads), (num_tokens, num_kv_heads), (length, NUM_HEADS)]
    shapes = [(BATCH_SIZE, *size, HEAD_DIM) for size in sizes]
    return [2 * jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def documents_of(length):
    """Other borders in each sequence, none of them at a block's."""
    place = np.arange(length)
    return jnp.asarray(np.stack([1 + (place >= length // 2 + 3), 1 + (place >= 37) + (place >= 131)]), jnp.int32)


def by(kernel, **options):
    """A function of q, k, v and documents."""
    attend, given = KERNELS[kernel]
    return lambda q, k, v, documents: attend(
        q, k, v, documents, Attention(NUM_HEADS, k.shape[2], HEAD_DIM, **options), **given
    )


def written_out(causal=True, window=0, scalar=HEAD_DIM, cap=0.0):
    def attend(q, k, v, documents):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * scalar**-0.5
        scores = cap * jnp.tanh(scores / cap) if cap else scores
        distance = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[1]))
        visible = (distance >= 0) if causal else np.full_like(distance, True, bool)
        visible = visible & (distance < window) if window else visible
        if documents is not None:
            visible = visible & (documents[0][:, None, :, None] == documents[1][:, None, None, :])
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(v.dtype)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return attend


def both_ways(attend, arrays, documents):
    """(heads, gradients of q, k, v)."""

    @jax.jit
    def run(q, k, v, cotangent):
        heads, backward = jax.vjp(lambda q, k, v: attend(q, k, v, documents), q, k, v)
        return heads, *backward(cotangent)

    return run(*arrays)


ALL = {"causal": False}
CASES = {
    # Lengths, key heads, whether documents are masked, options, and who computes it.
    "whole": ((256, 256), 2, False, {}, ("blockwise", "splash")),
    "padded": ((200, 200), 1, False, {"scalar": 4}, ("splash", "triton", "xla", "cudnn", "flex")),
    "documents": ((200, 200), 1, True, {}, ("blockwise", "splash", "triton", "cudnn", "flex")),
    "window": ((300, 300), 2, True, {"window": 100}, ("blockwise", "xla", "cudnn", "flex")),
    "blocks outside of a window": ((600, 600), 2, True, {"window": 150}, ("splash",)),
    "a window of one block": ((600, 600), 2, False, {"window": 128}, ("splash", "xla", "cudnn")),
    "cap": ((300, 300), 4, False, {"window": 64, "cap": 5.0, "scalar": 4}, ("blockwise", "splash", "xla")),
    "cap of documents": ((200, 200), 2, True, {"window": 64, "cap": 5.0}, ("flex",)),
    "all": ((200, 200), 4, True, ALL, ("blockwise", "triton")),
    "all, padded": ((200, 200), 2, False, ALL, ("triton",)),
    "memory": ((100, 200), 2, False, {**ALL, "cap": 5.0}, ("blockwise", "xla")),
    "memory, padded": ((200, 300), 2, False, ALL, ("splash",)),
    "memory of documents": ((200, 300), 2, True, ALL, ("splash", "cudnn", "flex")),
}


@pytest.mark.parametrize(("case", "kernel"), [(case, kernel) for case in CASES for kernel in CASES[case][-1]])
def test_a_kernel_computes_attention_and_its_gradients(case, kernel, cudnn_by_xla):
    lengths, num_kv_heads, masked, options, _ = CASES[case]
    given, documents = arrays(*lengths, num_kv_heads), tuple(map(documents_of, lengths)) if masked else None
    ways = [both_ways(way, given, documents) for way in (by(kernel, **options), written_out(**options))]
    for got, expected in zip(*ways, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


SINKS = {
    "xla": 0,
    "blockwise": 60,
    "splash": 60,
    "triton": 0,
    "flex": 60,
}  # kernel -> the window with which it is tried


@pytest.mark.parametrize("kernel", SINKS)
def test_sinks_take_a_part_of_each_softmax_and_get_their_gradients(kernel, cudnn_by_xla):
    """Documents begin with tokens that see themselves alone; one head's sink takes nearly all, one's nearly nothing."""
    length, window = 200, SINKS[kernel]
    *given, cotangent = arrays(length, length, 2)
    sinks, documents = jnp.float32([8.0, 1.0, -1.0, -20.0]), (documents_of(length),) * 2
    attend, options = KERNELS[kernel]

    def ours(q, k, v, sinks):
        own = jnp.broadcast_to(sinks, q.shape[:3])
        what = Attention(NUM_HEADS, k.shape[2], HEAD_DIM, window=window, sinks=True)
        return attend(q, k, v, documents, what, own, **options)

    def theirs(q, k, v, sinks):
        with_sink = jax.nn.softmax  # of scores with one more column, whose value is zero

        def softmax(scores, axis):
            column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
            return with_sink(jnp.concatenate([scores, column], axis=axis), axis=axis)[..., :-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.nn, "softmax", softmax)
            return written_out(window=window)(q, k, v, documents)

    def both(attend):
        heads, backward = jax.vjp(attend, *given, sinks)
        return heads, *backward(cotangent)

    for got, expected in zip(both(ours), both(theirs), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("blockwise", jnp.bfloat16), ("blockwise", jnp.float16), ("triton", jnp.bfloat16)]
)
def test_in_16_bits_it_errs_by_no_more_than_one_rounding(kernel, dtype):
    given, documents = arrays(200, 200, 2, dtype), (documents_of(200),) * 2
    exact = both_ways(written_out(), [x.astype(jnp.float32) for x in given], documents)
    for got, expected in zip(both_ways(by(kernel), given, documents), exact, strict=True):
        assert got.dtype == dtype
        error = np.linalg.norm(got.astype(jnp.float32) - expected) / np.linalg.norm(expected)
        assert error <= jnp.finfo(dtype).eps


@pytest.mark.parametrize(("policy", "num_forward"), [("none", 1), ("full", 2), ("save_attention", 1), ("dots", 2)])
@pytest.mark.parametrize(("kernel", "window"), [("blockwise", 0), ("triton", 0), ("blockwise", 16)])
def test_the_forward_pass_runs_again_where_the_policy_says_so(kernel, window, policy, num_forward):
    """With a window the layer alternates: it is local or global by a condition, whose branches are both counted."""
    given = arrays(128, 128, 2)
    which = {"is_global": jnp.bool_(True)} if window else {}

    def layer(weights, q, others):
        attend, settings = KERNELS[kernel]
        attention = Attention(NUM_HEADS, 2, HEAD_DIM, window=window)
        return jnp.sum(jnp.sin(attend(jnp.sin(q), *given[1:3], None, attention, **settings, **which))), None

    kept = layer if policy == "none" else keep_named(layer, saved_names(policy, Placement.single_device()))
    traced = jax.make_jaxpr(jax.grad(lambda q: kept({}, q, ())[0]))(given[0])
    assert num_runs(traced.jaxpr, TRACED[kernel]) == num_forward * (2 if window else 1)


def num_runs(jaxpr, name):
    """How often a traced function has a jitted function, or a kernel, of that name with results that are used."""
    here = sum(equation.params.get("name") == name and bool(equation.outvars) for equation in jaxpr.eqns)
    inside = (inner for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params))
    return here + sum(num_runs(inner, name) for inner in inside)


OTHER_FORMS = {"no kernel": types.SimpleNamespace(), "no segments": types.SimpleNamespace(mha=jax.jit(lambda q: q))}


@pytest.mark.parametrize("module", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_a_kernel_of_another_form_is_refused_in_one_line(monkeypatch, module):
    monkeypatch.setattr(triton, "_module", lambda: module)
    triton.is_available.cache_clear()
    with pytest.raises(UserError, match=r"^model.attention: got triton, but this version .*; nearest: "):
        by("triton")(*arrays(128, 128, 2)[:3], None)
    triton.is_available.cache_clear()
