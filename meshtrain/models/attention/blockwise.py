"""Attention in plain JAX, by blocks of queries and blocks of keys: memory grows linearly with the sequence.

The softmax is computed online (Milakov and Gimelshein 2018). The backward pass recomputes the probabilities of a block
from the logarithms of the softmax's sums (FlashAttention-2, Dao 2023).

b, T, S, N, G, H: see `attention.py`; R: query heads per key head (N / G), t: queries in a block, s: keys in a block.
"""

import dataclasses
import functools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from meshtrain.models.attention import kernel
from meshtrain.models.attention.attention import Attention, Documents, pad, pad_documents, same_document
from meshtrain.sharding.trees import Arrays

# Scores of a block take b N 512 512 numbers. Larger blocks on the diagonal would compute more scores that are masked.
LARGEST_BLOCK = 512
# Minimum tokens for `auto` to select this implementation. Scores of shorter sequences take little memory, and loops
# take longer to compile.
FROM = 1024
# Blocks are multiples of the size of matrix units.
GRANULE = 16
LOWEST = -1e30  # below every score, and finite: the difference of two of them is 0
# Dims of the operands of a product: (contracted, batch).
OF_SCORES = (((4,), (3,)), ((0, 2), (0, 2)))  # [b, t, G, R, H] x [b, s, G, H] -> [b, G, t, R, s]
OF_SUMS = (((4,), (1,)), ((0, 1), (0, 2)))  # [b, G, t, R, s] x [b, s, G, H] -> [b, G, t, R, H]
OF_KEYS = (((2, 3), (1, 3)), ((0, 1), (0, 2)))  # [b, G, t, R, s] x [b, t, G, R, H] -> [b, G, s, H]

# Name of the function `blockwise_forward`, by which the planner recognizes this implementation in a trace.
TRACED_NAME = "blockwise_forward"

Index: TypeAlias = Any  # index of a block: an int, or a traced int32 scalar
Pair = tuple[jax.Array, jax.Array]  # indices of a block of queries and a block of keys
Sums: TypeAlias = Arrays  # sums of a pass over blocks: three arrays


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The pairs (block of queries, block of keys) for which attention is computed.

    Attributes:
      num_queries: number of blocks of queries.
      num_keys: number of blocks of keys.
      queries: number of queries in a block, t.
      keys: number of keys in a block, s.
      attention: settings of attention; causal masks and windows exclude pairs.
      is_part: whether the queries are only a part of the sequence. The part's position is known only on the device, so
        all pairs of blocks are computed.
    """

    num_queries: int
    num_keys: int
    queries: int
    keys: int
    attention: Attention
    is_part: bool = False

    def first(self, i: Index) -> Index:
        """Returns the index of the first block of keys that some query in block `i` of queries attends to.

        The result is an int or a traced int32 scalar, like `i`.
        """
        if not self.attention.window or self.is_part:
            return 0 * i
        largest = max if isinstance(i, int) else jnp.maximum
        return largest(0, (i * self.queries - self.attention.window + 1) // self.keys)

    def last(self, i: Index) -> Index:
        """Returns the index of the last block of keys that some query in block `i` of queries attends to.

        The result is an int or a traced int32 scalar, like `i`.
        """
        if not self.attention.causal or self.is_part:
            return 0 * i + self.num_keys - 1
        return ((i + 1) * self.queries - 1) // self.keys

    @property
    def num_pairs(self) -> int:
        """The number of computed pairs of blocks."""
        return sum(self.last(i) - self.first(i) + 1 for i in range(self.num_queries))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    attention: Attention,
    sinks: jax.Array | None = None,
    *,
    name: str,
    largest_block: int = LARGEST_BLOCK,
    first: jax.Array | None = None,
    is_global: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention output of each head, [b, T, N, H], computed block by block.

    Blocks of keys outside of the window are not computed. The output of a query that attends to no key is zeros;
    implementations that store all scores return the mean of all values for such a query. `largest_block` is the maximum
    number of tokens in a block; `attention.py` describes the other arguments.
    """
    (num_sequences, length, num_heads, head_dim), (num_tokens, num_groups), dtype = q.shape, k.shape[1:3], q.dtype
    causal = attention.causal
    assert not causal or length == num_tokens or first is not None, "causal attention has as many queries as keys"
    assert causal or not attention.window, "a window requires causal attention"
    if dtype == jnp.float16:
        # Only GPUs have a product of float16 with a float32 result.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    (num_queries, queries), (num_keys, keys) = (_blocks(size, largest_block) for size in (length, num_tokens))
    lengths = (num_queries * queries, num_keys * keys)
    documents = pad_documents(documents, q, k, lengths, causal)
    q = q.reshape(num_sequences, length, num_groups, num_heads // num_groups, head_dim)
    q, k, v = pad(q, lengths[0]), pad(k, lengths[1]), pad(v, lengths[1])
    blocks = Blocks(num_queries, num_keys, queries, keys, attention, first is not None)
    everywhere = dataclasses.replace(blocks, attention=dataclasses.replace(attention, window=0))
    by_blocks = kernel.Kernel(blockwise_forward, blockwise_backward, blocks, name, of_global=everywhere)
    heads = kernel.attend(by_blocks, sinks, q, k, v, documents, first, is_global=is_global)
    return heads[:, :length].reshape(num_sequences, length, num_heads, head_dim).astype(dtype)


def _blocks(length: int, largest: int) -> tuple[int, int]:
    """Returns (number of blocks, tokens per block) that cover `length` tokens with little padding.

    A block has a multiple of `GRANULE` tokens, at most `largest` rounded up to such a multiple.
    """
    number = math.ceil(length / largest)
    size = math.ceil(length / number / GRANULE) * GRANULE
    return math.ceil(length / size), size


@functools.partial(jax.jit, static_argnums=0)
def blockwise_forward(
    blocks: Blocks, q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents, first: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention output of each head, [b, T, G, R, H], and the logarithms of the softmax's sums.

    The logarithms are float32 [b, G, T, R]. G: key heads, R: query heads per key head.

    Args:
      blocks: the pairs of blocks to compute.
      q: queries [b, T, G, R, H], grouped by key head.
      k: keys [b, S, G, H].
      v: values [b, S, G, H].
      documents: int32 [b, T] and [b, S], the document ids of queries and of keys; None: one document.
      first: int32 scalar, the position of the first query among the keys; None: 0.
    """

    def add(carry: tuple[Pair, Sums], nothing: None) -> tuple[tuple[Pair, Sums], None]:
        (i, j), (sums, most, total) = carry
        scores, _, visible = _scores(blocks, q, k, documents, first, i, j)
        most_before, total_before = _block(most, i, blocks.queries, 2), _block(total, i, blocks.queries, 2)
        most_now = jnp.maximum(most_before, jnp.max(scores, axis=-1))
        shrink = jnp.exp(most_before - most_now)
        weights = _where(visible, jnp.exp(scores - most_now[..., None]))
        added = _product(weights.astype(v.dtype), _block(v, j, blocks.keys), OF_SUMS)
        sums_now = _block(sums, i, blocks.queries, 2) * shrink[..., None] + added
        total_now = total_before * shrink + jnp.sum(weights, axis=-1)
        parts = (sums_now, most_now, total_now)
        pasted = [_paste(x, part, i, blocks.queries) for x, part in zip((sums, most, total), parts, strict=True)]
        return (_next(blocks, i, j), tuple(pasted)), None

    num_sequences, length, num_groups, per_group, head_dim = q.shape
    shape = (num_sequences, num_groups, length, per_group)
    empty = (jnp.zeros((*shape, head_dim), jnp.float32), jnp.full(shape, LOWEST), jnp.zeros(shape, jnp.float32))
    (_, (sums, most, total)), _ = jax.lax.scan(add, (_start(blocks), empty), None, length=blocks.num_pairs)
    total = jnp.where(total == 0, 1, total)  # a query that attends to no key has sum 0
    heads = (sums / total[..., None]).swapaxes(1, 2).astype(q.dtype)
    return heads, most + jnp.log(total)


@functools.partial(jax.jit, static_argnums=0)
def blockwise_backward(
    blocks: Blocks,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    first: jax.Array | None,
    heads: jax.Array,
    log_sums: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the cotangents of q, k and v, given the cotangent of the attention output.

    G: key heads, R: query heads per key head.

    Args:
      blocks: the pairs of blocks to compute.
      q: queries [b, T, G, R, H], grouped by key head.
      k: keys [b, S, G, H].
      v: values [b, S, G, H].
      documents: document ids of queries and of keys, see `blockwise_forward`.
      first: position of the first query, see `blockwise_forward`.
      heads: attention output of each head, [b, T, G, R, H], returned by `blockwise_forward`.
      log_sums: logarithms of the softmax's sums, float32 [b, G, T, R], returned by `blockwise_forward`.
      cotangent: cotangent of `heads`, [b, T, G, R, H].
    """
    # For a row of probabilities p with cotangents c, the softmax's backward is p (c - sum(p c)); `inner` is this sum.
    inner = jnp.sum(heads.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    def add(carry: tuple[Pair, Sums], nothing: None) -> tuple[tuple[Pair, Sums], None]:
        (i, j), (dq, dk, dv) = carry
        scores, slope, visible = _scores(blocks, q, k, documents, first, i, j)
        weights = _where(visible, jnp.exp(scores - _block(log_sums, i, blocks.queries, 2)[..., None]))
        of_heads = _block(cotangent, i, blocks.queries)
        of_weights = _product(of_heads, _block(v, j, blocks.keys), OF_SCORES)
        of_scores = weights * (of_weights - _block(inner, i, blocks.queries, 2)[..., None]) * slope
        of_scores = of_scores.astype(q.dtype)
        parts = (
            (dq, _product(of_scores, _block(k, j, blocks.keys), OF_SUMS), i, blocks.queries),
            (dk, _product(of_scores, _block(q, i, blocks.queries), OF_KEYS), j, blocks.keys),
            (dv, _product(weights.astype(q.dtype), of_heads, OF_KEYS), j, blocks.keys),
        )
        pasted = [_paste(x, _block(x, at, size, 2) + part, at, size) for x, part, at, size in parts]
        return (_next(blocks, i, j), tuple(pasted)), None

    empty = [jnp.zeros(x.swapaxes(1, 2).shape, jnp.float32) for x in (q, k, v)]
    (_, cotangents), _ = jax.lax.scan(add, (_start(blocks), tuple(empty)), None, length=blocks.num_pairs)
    dq, dk, dv = (x.swapaxes(1, 2).astype(q.dtype) for x in cotangents)
    return dq, dk, dv


def _start(blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    return jnp.int32(0), jnp.int32(blocks.first(0))


def _next(blocks: Blocks, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the pair of blocks after (i, j) as indices (block of queries, block of keys).

    The blocks of keys for one block of queries come one after the other, then the next block of queries follows.
    """
    is_last = j == blocks.last(i)
    return jnp.where(is_last, i + 1, i), jnp.where(is_last, blocks.first(i + 1), j + 1)


def _scores(
    blocks: Blocks,
    q: jax.Array,
    k: jax.Array,
    documents: Documents,
    first: jax.Array | None,
    i: jax.Array,
    j: jax.Array,
) -> tuple[jax.Array, jax.Array | float, jax.Array | None]:
    """Returns the scores of one pair of blocks, their derivative and the mask.

    The scores are float32 [b, G, t, R, s], and `LOWEST` if a query does not attend to a key. The derivative is with
    respect to the unscaled product of query and key. The mask is bool [b or 1, 1, t, 1, s], true if a query attends to
    a key; None: all queries attend to all keys.

    G: key heads, R: query heads per key head, t: queries in a block, s: keys in a block.

    Args:
      blocks: the sizes of blocks and the settings of attention.
      q: queries [b, T, G, R, H].
      k: keys [b, S, G, H].
      documents: document ids of queries and of keys, see `blockwise_forward`.
      first: position of the first query, see `blockwise_forward`.
      i: index of the block of queries.
      j: index of the block of keys.
    """
    attention = blocks.attention
    slope: jax.Array | float = attention.scale
    scores = slope * _product(_block(q, i, blocks.queries), _block(k, j, blocks.keys), OF_SCORES)
    if attention.cap:
        bounded = jnp.tanh(scores / attention.cap)
        scores, slope = attention.cap * bounded, slope * (1 - bounded**2)
    visible: jax.Array | None = None
    if attention.causal:
        of_queries = i * blocks.queries + jnp.arange(blocks.queries) + (0 if first is None else first)
        distance = of_queries[:, None] - (j * blocks.keys + jnp.arange(blocks.keys))
        visible = (distance >= 0) & (distance < attention.window) if attention.window else distance >= 0
        visible = visible[None, None, :, None]
    if documents is not None:
        mine, theirs = _block(documents[0], i, blocks.queries), _block(documents[1], j, blocks.keys)
        same = same_document(mine, theirs)[..., None, :]
        visible = same if visible is None else visible & same
    return scores if visible is None else jnp.where(visible, scores, LOWEST), slope, visible


def _where(visible: jax.Array | None, weights: jax.Array) -> jax.Array:
    # If a query attends to no key of a block, all scores are `LOWEST`, and the exponential of their difference is 1.
    return weights if visible is None else jnp.where(visible, weights, 0)


def _product(a: jax.Array, b: jax.Array, dims: jax.lax.DotDimensionNumbers) -> jax.Array:
    product: jax.Array = jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
    return product


def _block(x: jax.Array, index: jax.Array, size: int, dim: int = 1) -> jax.Array:
    part: jax.Array = jax.lax.dynamic_slice_in_dim(x, index * size, size, dim)
    return part


def _paste(x: jax.Array, part: jax.Array, index: jax.Array, size: int) -> jax.Array:
    whole: jax.Array = jax.lax.dynamic_update_slice_in_dim(x, part, index * size, 2)
    return whole
