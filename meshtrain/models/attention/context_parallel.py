"""Context parallelism: attention if mesh axes split each sequence, with an exchange between the devices of a sequence.

    outside      q [b, T / n, N, H]   a device has some tokens of all heads
    by heads     q [b, T, N / n, H]   all tokens of some heads, also for k and v; works with any implementation
    by keys      q [b, T / n, N, H]   its own queries, and k and v [b, S, G, H] of all tokens

The exchange by heads is an all-to-all before attention and one after it (DeepSpeed-Ulysses, Jacobs et al. 2023). It
requires a head for each device. With fewer heads, keys and values are gathered instead, and their gradients are
reduce-scattered. Then a device multiplies its queries with all keys, including later ones: the last part of the
sequence sees all keys, and the other devices would wait for it anyway. Tokens keep their order, so masks, windows and
documents are the same as for the complete sequence.

b, T, S, N, G, H: see `attention.py`, with the heads of one shard of the tensor axis; n: parts of a sequence.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshtrain.models.attention.attention import Documents
from meshtrain.sharding.trees import Arrays

# (q [b, T, N, H], k and v [b, S, G, H], the documents of queries and keys or None, further arguments, which are [b, T,
# N] if they belong to queries) -> [b, T, N, H]
Attend = Callable[..., jax.Array]


def by_heads(attend: Attend, axes: tuple[str, ...]) -> Attend:
    """Wraps attention for `jax.shard_map` over split sequences: exchanges tokens for heads before and after it.

    Key and value heads are repeated if n does not divide their number.

    Args:
      attend: attention over complete sequences.
      axes: the mesh axes that split sequences, n devices; n divides N.
    """

    def exchanged(
        q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents, *others: jax.Array | None
    ) -> jax.Array:
        num_parts = jax.lax.axis_size(axes)
        assert q.shape[2] % num_parts == 0, "the parts of a sequence divide the heads"
        k, v = (_repeat_heads(x, math.lcm(x.shape[2], num_parts)) for x in (k, v))
        q, k, v = (jax.lax.all_to_all(x, axes, 2, 1, tiled=True) for x in (q, k, v))
        of_queries = [x is not None and x.ndim == q.ndim - 1 for x in others]
        others = tuple(
            jax.lax.all_to_all(x, axes, 2, 1, tiled=True) if exchanges else x
            for x, exchanges in zip(others, of_queries, strict=True)
        )
        heads = attend(q, k, v, _gather(documents, axes), *others)
        whole: jax.Array = jax.lax.all_to_all(heads, axes, 1, 2, tiled=True)
        return whole

    return exchanged


def by_keys(attend: Attend, axes: tuple[str, ...], *, causal: bool) -> Attend:
    """Wraps attention for `jax.shard_map` over split sequences: gathers keys and values before it.

    Args:
      attend: attention of a part of the queries with all keys; if causal, it takes `first`, the position of the first
        query.
      axes: the mesh axes that split sequences.
      causal: whether a query attends only to the keys up to its own position.
    """

    def exchanged(
        q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents, *others: jax.Array | None
    ) -> jax.Array:
        k, v = (_gather(x, axes) for x in (k, v))
        if documents is not None:
            documents = (documents[0], _gather(documents[1], axes))
        place = {"first": jax.lax.axis_index(axes) * q.shape[1]} if causal else {}
        return attend(q, k, v, documents, *others, **place)

    return exchanged


def _repeat_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Returns keys or values with each head repeated; the cotangents of the copies are summed in float32."""
    times = num_heads // x.shape[2]
    return x if times == 1 else jnp.repeat(x.astype(jnp.float32), times, axis=2).astype(x.dtype)


def _gather(tree: Arrays, axes: tuple[str, ...]) -> Arrays:
    """Gathers arrays [b, T / n, ...] to [b, T, ...]."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), tree)
