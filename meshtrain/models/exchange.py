"""Attention where mesh axes split each sequence: the devices of a sequence exchange parts before it and after it.

    before     q [b, T / n, N, H]   a device has some tokens of all heads
    during     q [b, T, N / n, H]   and all tokens of some heads: any implementation of attention computes them
    after      heads as q was before

The first exchange and the last are all-to-alls (DeepSpeed-Ulysses, Jacobs et al. 2023). Tokens stay in their order, so
masks, windows and documents are those of the whole sequence.

b: sequences in a microbatch, T: tokens a sequence, S: tokens of the memory (T in self-attention), n: parts of a
sequence, N: query heads, G: key and value heads, H: head dim; heads are those of one shard of the tensor axis.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# (q [b, T, N, H], k and v [b, S, G, H], the documents of queries and keys or None, further arguments) -> [b, T, N, H]
Attend = Callable[..., jax.Array]


def by_heads(attend: Attend, axes: tuple[str, ...]) -> Attend:
    """Returns attention of one device's part of each sequence, for `jax.shard_map`: heads are split in its place.

    Key and value heads are repeated where n does not divide their number.

    Args:
      attend: of whole sequences.
      axes: the mesh axes that split sequences, n devices; n divides N.
    """

    def exchanged(q: jax.Array, k: jax.Array, v: jax.Array, documents: Any, *others: Any) -> jax.Array:
        num_parts = jax.lax.axis_size(axes)
        assert q.shape[2] % num_parts == 0, "the parts of a sequence divide the heads"
        k, v = (_repeated(x, math.lcm(x.shape[2], num_parts)) for x in (k, v))
        q, k, v = (jax.lax.all_to_all(x, axes, 2, 1, tiled=True) for x in (q, k, v))
        heads = attend(q, k, v, _gathered(documents, axes), *others)
        whole: jax.Array = jax.lax.all_to_all(heads, axes, 1, 2, tiled=True)
        return whole

    return exchanged


def _repeated(x: jax.Array, num_heads: int) -> jax.Array:
    """Returns keys or values with each head repeated; the repetitions' cotangents are added in float32."""
    times = num_heads // x.shape[2]
    return x if times == 1 else jnp.repeat(x.astype(jnp.float32), times, axis=2).astype(x.dtype)


def _gathered(tree: Any, axes: tuple[str, ...]) -> Any:
    """Returns arrays [b, T / n, ...] as [b, T, ...]."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), tree)
