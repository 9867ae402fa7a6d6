"""Attention block by block against attention written out: numbers, what is skipped, memory, what is computed again."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from meshtrain.models.attention import blockwise
from meshtrain.models.attention.attention import Attention
from meshtrain.models.remat import HEADS, RematOptions, checkpoint_policy
from meshtrain.sharding.placement import Placement

BATCH_SIZE, NUM_HEADS, HEAD_DIM, BLOCK = 2, 4, 16, 64


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


def attention(k, **options):
    return Attention(NUM_HEADS, k.shape[2], HEAD_DIM, **options)


def blocks(q, k, v, documents, **options):
    return blockwise.attend(q, k, v, documents, attention(k, **options), name=HEADS, largest_block=BLOCK)


def written_out(q, k, v, documents, causal=True, window=0, scalar=HEAD_DIM, cap=0.0):
    k, v = (jnp.repeat(x, NUM_HEADS // k.shape[2], axis=2) for x in (k, v))
    products = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    scores = products * scalar**-0.5
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    distance = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[1]))
    visible = (distance >= 0) if causal else np.full_like(distance, True, bool)
    visible = visible & (distance < window) if window else visible
    if documents is not None:
        visible = visible & (documents[0][:, None, :, None] == documents[1][:, None, None, :])
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def both_ways(attend, arrays, documents, **options):
    """(heads, gradients of q, k, v)."""

    @jax.jit
    def run(q, k, v, cotangent):
        heads, backward = jax.vjp(lambda q, k, v: attend(q, k, v, documents, **options), q, k, v)
        return heads, *backward(cotangent)

    return run(*arrays)


@pytest.mark.parametrize(
    ("lengths", "num_kv_heads", "masked", "options"),
    [
        ((256, 256), 2, False, {}),
        ((200, 200), 1, True, {}),
        ((300, 300), 2, True, {"window": 100}),
        ((300, 300), 4, False, {"window": 64, "cap": 5.0, "scalar": 4}),
        ((200, 200), 4, True, {"causal": False}),
        ((100, 200), 2, False, {"causal": False, "cap": 5.0}),
    ],
    ids=["whole", "documents", "window", "cap", "all", "memory"],
)
def test_it_computes_attention_and_its_gradients(lengths, num_kv_heads, masked, options):
    given = arrays(*lengths, num_kv_heads)
    documents = tuple(map(documents_of, lengths)) if masked else None
    ways = [both_ways(way, given, documents, **options) for way in (blocks, written_out)]
    for got, expected in zip(*ways, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_in_16_bits_it_errs_by_no_more_than_one_rounding(dtype):
    given, documents = arrays(200, 200, 2, dtype), (documents_of(200),) * 2
    exact = both_ways(written_out, [x.astype(jnp.float32) for x in given], documents)
    for got, expected in zip(both_ways(blocks, given, documents), exact, strict=True):
        assert got.dtype == dtype
        error = np.linalg.norm(got.astype(jnp.float32) - expected) / np.linalg.norm(expected)
        assert error <= jnp.finfo(dtype).eps


def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient():
    given, documents = arrays(100, 200, 2), (documents_of(100).at[:, 10].set(9), documents_of(200))
    heads, dq, *of_memory = both_ways(blocks, given, documents, causal=False)
    assert not heads[:, 10].any()
    assert not dq[:, 10].any()
    assert all(np.isfinite(x).all() for x in (heads, dq, *of_memory))


@pytest.mark.parametrize("window", [0, 1, 64, 65, 100])
@pytest.mark.parametrize("sizes", [(64, 64), (48, 64), (64, 48)], ids=str)
def test_the_blocks_that_are_computed_are_those_with_something_visible(window, sizes):
    length = 4 * sizes[0]
    num_keys = -(-length // sizes[1])
    made = blockwise.Blocks(4, num_keys, *sizes, Attention(4, 4, 16, window=window), HEADS)
    distance = np.subtract.outer(np.arange(length), np.arange(num_keys * sizes[1]))
    visible = (distance >= 0) & (distance < (window or length))
    cut = visible.reshape(4, sizes[0], num_keys, sizes[1]).any(axis=(1, 3))
    pairs = [(i, j) for i in range(4) for j in range(made.first(i), made.last(i) + 1)]
    assert pairs == [pair for pair in itertools.product(range(4), range(num_keys)) if cut[pair]]
    walked, at = [], blockwise._start(made)
    for _ in range(made.num_pairs):
        walked.append(tuple(map(int, at)))
        at = blockwise._next(made, *at)
    assert walked == pairs


def temporary_bytes(attend, length):
    given, documents = arrays(length, length, 2), (documents_of(length),) * 2
    both = jax.jit(lambda *qkv: jax.vjp(lambda *qkv: attend(*qkv, documents), *qkv)[1](given[3]))
    return both.lower(*given[:3]).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_length_and_not_with_its_square():
    linear, quadratic = (temporary_bytes(way, 2048) / temporary_bytes(way, 512) for way in (blocks, written_out))
    assert linear < 4.1
    assert quadratic > 12


@pytest.mark.parametrize(("policy", "num_forward"), [("none", 1), ("full", 2), ("save_attention", 1), ("dots", 2)])
def test_the_forward_pass_runs_again_where_the_policy_says_so(policy, num_forward):
    given = arrays(100, 100, 2)
    remat = RematOptions(policy)

    def loss(q):
        attended = blocks(jnp.sin(q), *given[1:3], None)
        return jnp.sum(jnp.sin(attended))

    kept = jax.checkpoint(loss, policy=checkpoint_policy(remat.policy, Placement.nowhere()))
    traced = jax.make_jaxpr(jax.grad(loss if policy == "none" else kept))(given[0])
    assert num_runs(traced.jaxpr) == num_forward


def num_runs(jaxpr, name=blockwise.TRACED_NAME):
    """How often a traced function has a jitted function, or a kernel, of that name with results that are used."""
    here = sum(equation.params.get("name") == name and bool(equation.outvars) for equation in jaxpr.eqns)
    inside = (inner for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params))
    return here + sum(num_runs(inner, name) for inner in inside)
