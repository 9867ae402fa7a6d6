"""Wraps attention kernels that compute their own gradients, and adds sinks to their results.

A sink is a learned score of a head that takes a part of the softmax and gives no value (Xiao et al. 2023). A kernel
returns heads and the logarithms of the softmax's sums, without sinks. Sinks are then included in both, and the kernel's
backward pass gets the heads and logarithms with sinks. It computes the probabilities from these logarithms, so the
cotangents of queries, keys and values are exact. No kernel is differentiated through its logarithms.

Sinks are repeated for each query, so a split of queries also splits the sinks, and no gradient is summed over devices.
"""

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain.models.attention.attention import Documents, pad

Given = jax.Array | Documents  # an array argument of a kernel, or a pair of document ids; may be None


class Kernel(NamedTuple):
    """The forward and backward pass of an attention kernel.

    Attributes:
      forward: (static, q [b, T, ..., H], k, v, further arguments) -> (heads, log sums). The heads are the attention
        output in the shape of q. The log sums are the logarithms of the softmax's sums, float32, in the shape of
        `heads.swapaxes(1, 2)[..., 0]`.
      backward: (static, q, k, v, further arguments, heads, log sums, cotangent of the heads) -> cotangents of q, k and
        v.
      static: hashable first argument of both functions, for settings that are not arrays.
      name: checkpoint name of heads and log sums, for `jax.checkpoint` policies.
      unit: factor that converts the kernel's log sums to natural logarithms, such as ln 2 for logarithms to base 2.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    static: Hashable
    name: str
    unit: float = 1.0


def attend(kernel: Kernel, sinks: jax.Array | None, q: jax.Array, *others: Given) -> jax.Array:
    """Returns the attention output of each head computed by a kernel, with sinks, in the shape of q.

    Args:
      kernel: forward and backward pass.
      sinks: scores of attention sinks, float32 [b, T, N]; None: no sinks. If q is padded to more than T tokens, this
        function pads the sinks as well.
      q: queries in the shape that the kernel takes, [b, padded T, ..., H].
      others: the arguments of the kernel after q: keys, values, and further arguments such as document ids.
    """
    own = None if sinks is None else pad(sinks, q.shape[1]).reshape(q.shape[:-1]).swapaxes(1, 2)
    heads: jax.Array = _attend(kernel, own, q, *others)
    return heads


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, sinks: jax.Array | None, *given: Given) -> jax.Array:
    """Returns the attention output of each head, with sinks, in the shape of q.

    `given` are the arguments of the kernel: q, k, v and further arguments. `sinks` is None or has the shape of the
    kernel's log sums.
    """
    return _forward(kernel, sinks, *given)[0]


def _forward(kernel: Kernel, sinks: jax.Array | None, *given: Given) -> tuple[jax.Array, tuple[Given, ...]]:
    heads, log_sums = kernel.forward(kernel.static, *given)
    if sinks is not None:
        heads, log_sums = fold_sinks(heads.swapaxes(1, 2), log_sums * kernel.unit, sinks)
        heads, log_sums = heads.swapaxes(1, 2), log_sums / kernel.unit
    heads, log_sums = (checkpoint_name(x, kernel.name) for x in (heads, log_sums))
    return heads, (sinks, *given, heads, log_sums)


def _backward(kernel: Kernel, kept: tuple[jax.Array, ...], of_heads: jax.Array) -> tuple[jax.Array | None, ...]:
    sinks, *given, heads, log_sums = kept
    of_sinks = None
    if sinks is not None:
        of_sinks = cotangent(heads.swapaxes(1, 2), log_sums * kernel.unit, sinks, of_heads.swapaxes(1, 2))
    of_q, of_k, of_v = kernel.backward(kernel.static, *given, heads, log_sums, of_heads)
    return of_sinks, of_q, of_k, of_v, *[None] * (len(given) - 3)


_attend.defvjp(_forward, _backward)


def fold_sinks(heads: jax.Array, log_sums: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the attention output of heads and the logarithms of the softmax's sums, with sinks in the softmax.

    Args:
      heads: attention output without sinks, [..., H].
      log_sums: natural logarithms of the softmax's sums without sinks, float32 [...].
      sinks: scores of the sinks, float32 [...].
    """
    both = jnp.logaddexp(log_sums, sinks)
    return (heads * jnp.exp(log_sums - both)[..., None]).astype(heads.dtype), both


def cotangent(heads: jax.Array, log_sums: jax.Array, sinks: jax.Array, of_heads: jax.Array) -> jax.Array:
    """Returns the cotangent of the sinks, float32 [...]: -exp(sink - log_sum) sum(heads of_heads).

    Args:
      heads: attention output with sinks in the softmax, [..., H].
      log_sums: natural logarithms of the softmax's sums, including the sinks, float32 [...].
      sinks: scores of the sinks, float32 [...].
      of_heads: cotangent of `heads`, [..., H].
    """
    inner = jnp.sum(heads.astype(jnp.float32) * of_heads.astype(jnp.float32), axis=-1)
    return -jnp.exp(sinks - log_sums) * inner
