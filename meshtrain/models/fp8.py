"""Products of activations with weights whose operands are 8-bit floats, forward and backward.

Inputs and weights are e4m3, gradients e5m2 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Each tensor has
one scale, of the largest number that it has at that moment, so there is no state. Delayed scaling would read the maxima
of steps before (Flax's `fp8_ops` does, by gradients that overwrite weights, which sums over microbatches would add up);
a pipeline's rows would each need them, and a resumed or resized run could meet a number beyond its scale.

A scale is a power of two. Then it changes no mantissa, and a number is rounded alike whatever the largest one beside it
is, unless it is so small (2^-15 of the largest in e4m3, 2^-30 in e5m2) that it becomes subnormal. So the number of
microbatches, which decides what one tensor is, hardly matters either.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import DTypeLike

from meshtrain.sharding.placement import Placement

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2

Residuals = tuple[jax.Array | None, jax.Array | None]  # x and w, or their gradients; None where no gradient needs it


def product(x: jax.Array, w: jax.Array, placement: Placement) -> jax.Array:
    """Returns the sum over the last dims of `x` and the first dims of `w`, in the dtype of `x`.

    With `placement.in_fp8` operands are 8-bit floats, and so they are in both products of the backward pass. Otherwise
    they are as given.

    Args:
      x: [b, T, I...].
      w: [I..., O...], in the dtype of `x`.
      placement: over whose shards a tensor's maximum is taken.

    Returns:
      [b, T, O...].
    """
    return _product(x, w, placement) if placement.in_fp8 else jnp.tensordot(x, w, axes=x.ndim - 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, w: jax.Array, placement: Placement) -> jax.Array:
    dims = (tuple(range(2, x.ndim)), tuple(range(x.ndim - 2)))
    return _scaled(x, w, dims, (FORWARD, FORWARD), placement)


def _forward(x: CustomVJPPrimal, w: CustomVJPPrimal, placement: Placement) -> tuple[jax.Array, Residuals]:
    # The residuals are those of a product in 16 bits, so `remat.policy` means what it means there. Of a frozen weight
    # (or an input without a gradient) the other one is not needed.
    return _product(x.value, w.value, placement), (x.value if w.perturbed else None, w.value if x.perturbed else None)


def _backward(placement: Placement, residuals: Residuals, g: jax.Array | SymbolicZero) -> Residuals:
    x, w = residuals
    if isinstance(g, SymbolicZero):
        return None, None
    of_x = of_w = None
    if w is not None:
        outputs = tuple(range(2, g.ndim)), tuple(range(w.ndim - g.ndim + 2, w.ndim))
        of_x = _scaled(g, w, outputs, (BACKWARD, FORWARD), placement)
    if x is not None:
        of_w = _scaled(x, g, ((0, 1), (0, 1)), (FORWARD, BACKWARD), placement)
    return of_x, of_w


_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _scaled(
    a: jax.Array,
    b: jax.Array,
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[DTypeLike, DTypeLike],
    placement: Placement,
) -> jax.Array:
    """Returns the product of two arrays, each rounded to an 8-bit float times its scale, in the dtype of `a`."""
    (low_a, scale_a), (low_b, scale_b) = (
        quantized(array, dtype, placement) for array, dtype in zip((a, b), dtypes, strict=True)
    )
    result = jax.lax.dot_general(low_a, low_b, (summed, ((), ())), preferred_element_type=a.dtype)
    # Multiplied by a power of two after rounding to the result's dtype: exact, as would be before.
    return result * (scale_a * scale_b).astype(a.dtype)


def quantized(x: jax.Array, dtype: DTypeLike, placement: Placement) -> tuple[jax.Array, jax.Array]:
    """Returns an array divided by its scale as 8-bit floats, and the scale.

    The scale is the least power of two with which the largest number of all shards is in the dtype's range.

    Args:
      x: any floating-point array; on a manual axis that splits the batch, one shard.
      dtype: of 8-bit floats.
      placement: over whose shards the maximum is taken.

    Returns:
      (8-bit floats of the same shape, float32 scalar).
    """
    largest = placement.largest(jnp.max(jnp.abs(x)).astype(jnp.float32))
    _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    # Within these exponents a scale and its inverse are normal numbers of float32 and of bfloat16.
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -126, 126))
    return (x * (1 / scale).astype(x.dtype)).astype(dtype), scale
