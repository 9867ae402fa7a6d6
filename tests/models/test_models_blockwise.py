"""Attention block by block: which blocks are computed, queries that see nothing, memory."""

import itertools

import jax
import numpy as np
import pytest

from meshtrain.models.attention import blockwise
from meshtrain.models.attention.attention import Attention
from tests.models.test_models_attention import arrays, both_ways, by, documents_of, written_out


def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient():
    given, documents = arrays(100, 200, 2), (documents_of(100).at[:, 10].set(9), documents_of(200))
    heads, dq, *of_memory = both_ways(by("blockwise", causal=False), given, documents)
    assert not heads[:, 10].any()
    assert not dq[:, 10].any()
    assert all(np.isfinite(x).all() for x in (heads, dq, *of_memory))


@pytest.mark.parametrize("window", [0, 1, 64, 65, 100])
@pytest.mark.parametrize("sizes", [(64, 64), (48, 64), (64, 48)], ids=str)
def test_the_blocks_that_are_computed_are_those_with_something_visible(window, sizes):
    length = 4 * sizes[0]
    num_keys = -(-length // sizes[1])
    made = blockwise.Blocks(4, num_keys, *sizes, Attention(4, 4, 16, window=window))
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
    linear, quadratic = (
        temporary_bytes(way, 2048) / temporary_bytes(way, 512) for way in (by("blockwise"), written_out())
    )
    assert linear < 4.1
    assert quadratic > 12
