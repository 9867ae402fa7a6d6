"""Sinks of attention: a learned score a head that takes a part of the softmax and gives no value (Xiao et al. 2023).

A kernel hands back heads and the logarithms of the softmax's sums, without sinks. They are folded in afterwards, and
the kernel's own backward pass gets the folded results: from them it computes the probabilities with sinks, so the
cotangents of queries, keys and values are exact. No kernel is differentiated through its logarithms.

Each query has the sinks of its heads, so that what splits queries splits them alike, and no device sums a gradient.
"""

import jax
import jax.numpy as jnp


def folded(heads: jax.Array, log_sums: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns heads and logarithms with the sinks in the softmax.

    Args:
      heads: [..., H].
      log_sums: float32 [...].
      sinks: float32 [...].
    """
    both = jnp.logaddexp(log_sums, sinks)
    return (heads * jnp.exp(log_sums - both)[..., None]).astype(heads.dtype), both


def cotangent(heads: jax.Array, log_sums: jax.Array, sinks: jax.Array, of_heads: jax.Array) -> jax.Array:
    """Returns the cotangent of the sinks, float32 [...]: -exp(sink - log_sum) sum(heads of_heads).

    Args:
      heads: [..., H], folded.
      log_sums: float32 [...], folded.
      sinks: float32 [...].
      of_heads: the cotangent of `heads`.
    """
    inner = jnp.sum(heads.astype(jnp.float32) * of_heads.astype(jnp.float32), axis=-1)
    return -jnp.exp(sinks - log_sums) * inner
