"""Wraps attention kernels that compute their own gradients, and adds sinks to their results.

A sink is a learned score of a head that takes a part of the softmax and gives no value (Xiao et al. 2023). A kernel
returns heads and the logarithms of the softmax's sums, without sinks. Sinks are then included in both, and the kernel's
backward pass gets the heads and logarithms with sinks. It computes the probabilities from these logarithms, so the
cotangents of queries, keys and values are exact. No kernel is differentiated through its logarithms.

Sinks are repeated for each query, so a split of queries also splits the sinks, and no gradient is summed over devices.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.models.attention.attention import Documents, pad
from meshtrain.sharding.saved import mark

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
      name: name of heads and log sums, as marked values for remat policies.
      unit: factor that converts the kernel's log sums to natural logarithms, such as ln 2 for logarithms to base 2.
      of_global: the value of `static` for a layer without a window, if layers with and without a window alternate.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    static: Hashable
    name: str
    unit: float = 1.0
    of_global: Hashable = None


def attend(
    kernel: Kernel, sinks: jax.Array | None, q: jax.Array, *others: Given, is_global: jax.Array | None = None
) -> jax.Array:
    """Returns the attention output of each head computed by a kernel, with sinks, in the shape of q.

    Args:
      kernel: forward and backward pass.
      sinks: scores of attention sinks, float32 [b, T, N]; None: no sinks. If q is padded to more than T tokens, this
        function pads the sinks as well.
      q: queries in the shape that the kernel takes, [b, padded T, ..., H].
      others: the arguments of the kernel after q: keys, values, and further arguments such as document ids.
      is_global: bool scalar, whether `kernel.of_global` replaces `kernel.static`; None: it does not.
    """
    own = None if sinks is None else pad(sinks, q.shape[1]).reshape(q.shape[:-1]).swapaxes(1, 2)
    given: tuple[Any, ...] = (is_global, own, q, *others)
    # The results are marked outside of `_attach`, because its forward pass may be traced when no tape is there.
    results: tuple[jax.Array, ...] = _forward(kernel, *jax.lax.stop_gradient(given))
    results = tuple(mark(x, kernel.name, has_gradient=False) for x in results)
    heads: jax.Array = _attach(kernel, given, results)
    return heads


def _forward(
    kernel: Kernel, is_global: jax.Array | None, sinks: jax.Array | None, *given: Given
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention output of each head in the shape of q, and the log sums, both with sinks."""
    heads, log_sums = _choose(kernel.forward, kernel, is_global, *given)
    if sinks is not None:
        heads, log_sums = fold_sinks(heads.swapaxes(1, 2), log_sums * kernel.unit, sinks)
        heads, log_sums = heads.swapaxes(1, 2), log_sums / kernel.unit
    return heads, log_sums


def _choose(run: Callable[..., Any], kernel: Kernel, is_global: jax.Array | None, *given: Given) -> Any:
    """Runs `kernel.forward` or `kernel.backward` for a layer with a window, or without a window if `is_global`."""
    if is_global is None:
        return run(kernel.static, *given)
    # The branches have no collectives: stages of a pipeline may take different branches.
    of_both = [functools.partial(run, static) for static in (kernel.of_global, kernel.static)]
    return jax.lax.cond(is_global, *of_both, *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(kernel: Kernel, given: tuple[Given, ...], results: tuple[jax.Array, ...]) -> jax.Array:
    """Returns the heads, the first of the kernel's results, with the kernel's backward pass.

    Args:
      kernel: forward and backward pass.
      given: `is_global`, sinks (None, or in the shape of the log sums), q, k, v and further arguments of the kernel.
      results: heads and log sums, from `_forward`.
    """
    return results[0]


def _backward(kernel: Kernel, residuals: Any, of_heads: jax.Array) -> tuple[Any, None]:
    (is_global, sinks, *given), (heads, log_sums) = residuals
    of_sinks = None
    if sinks is not None:
        of_sinks = cotangent(heads.swapaxes(1, 2), log_sums * kernel.unit, sinks, of_heads.swapaxes(1, 2))
    of_q, of_k, of_v = _choose(kernel.backward, kernel, is_global, *given, heads, log_sums, of_heads)
    return (None, of_sinks, of_q, of_k, of_v, *[None] * (len(given) - 3)), None


_attach.defvjp(lambda kernel, given, results: (results[0], (given, results)), _backward)


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
