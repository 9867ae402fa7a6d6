"""Context parallelism: attention if mesh axes split each sequence, with an exchange between the devices of a sequence.

    outside      q [b, T / n, N, H]   a device has some tokens of all heads
    by heads     q [b, T, N / n, H]   a device has all tokens of some heads of q, k and v; any implementation works
    by keys      q [b, T / n, N, H]   a device has some queries, and k and v [b, S, G, H] of all tokens

The exchange by heads is an all-to-all before attention and an all-to-all after it (DeepSpeed-Ulysses, Jacobs et al.
2023). It requires at least one head for each device. With fewer heads, keys and values are gathered instead, and their
gradients are reduce-scattered. Then a device multiplies its queries with all keys, including later keys. Skipping later
keys would save no time, because all devices wait for the device with the last queries, which attend to all keys. Tokens
keep their order, so masks, windows and documents are the same as for the complete sequence.

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
    """Wraps attention so that devices with parts of a sequence exchange tokens for heads, before and after attention.

    The returned function runs inside `jax.shard_map` and takes this device's part of q, k, v and documents. Key and
    value heads are repeated if n does not divide their number.

    Args:
      attend: attention over complete sequences.
      axes: mesh axes that split sequences into n parts; n divides the number of query heads.
    """

    def exchanged(
        q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents, *others: jax.Array | None
    ) -> jax.Array:
        num_parts = jax.lax.axis_size(axes)
        assert q.shape[2] % num_parts == 0, "the number of heads is a multiple of the parts of a sequence"
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
    """Wraps attention so that devices with parts of a sequence gather all keys and values before attention.

    The returned function runs inside `jax.shard_map` and takes this device's part of q, k, v and documents.

    Args:
      attend: attention of a part of the queries with all keys. If `causal`, it is called with `first`, the position of
        the first query.
      axes: mesh axes that split sequences.
      causal: whether a query attends only to keys up to its position.
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
    """Returns keys or values [b, S, G, H] with each head repeated, [b, S, num_heads, H].

    The cotangents of the copies are summed in float32.
    """
    times = num_heads // x.shape[2]
    return x if times == 1 else jnp.repeat(x.astype(jnp.float32), times, axis=2).astype(x.dtype)


def _gather(tree: Arrays, axes: tuple[str, ...]) -> Arrays:
    """Gathers each array of a pytree from [b, T / n, ...] to [b, T, ...], over manual mesh axes of n devices."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), tree)
