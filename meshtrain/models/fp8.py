"""Products of activations with weights in 8-bit floats, forward and backward.

Inputs and weights are e4m3, gradients e5m2 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Each tensor has
one scale, computed from its current maximum, so there is no state.

The alternative, delayed scaling, computes scales from the maxima of earlier steps, so these maxima are a state. Flax's
`fp8_ops` passes the maxima as gradients that overwrite weights; gradient accumulation over microbatches would add them
up. Each clock tick of a pipeline would need the maxima. After a run is resumed or resized, a number could exceed the
range of its scale.

A scale is a power of two, which changes no mantissa. So the rounding of a number does not depend on the tensor's
maximum, unless the number becomes subnormal (below 2^-15 of the maximum in e4m3, 2^-30 in e5m2). Therefore results
hardly depend on the number of microbatches, which determines the tensors and their maxima.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import DTypeLike

from meshtrain.sharding.placement import Placement

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2

Residuals = tuple[jax.Array | None, jax.Array | None]  # x and w, or their gradients; None if not needed


def product(x: jax.Array, w: jax.Array, placement: Placement) -> jax.Array:
    """Returns the product of activations and a weight, summed over their common dims I..., in the dtype of `x`.

    If `placement.in_fp8` is true, the operands of this product and of both products of the backward pass are 8-bit
    floats. Otherwise the operands keep their dtype.

    Args:
      x: activations [b, T, I...].
      w: weight [I..., O...], in the dtype of `x`.
      placement: determines whether operands are 8-bit floats, and the shards over which a tensor's maximum is taken.

    Returns:
      [b, T, O...].
    """
    return _product(x, w, placement) if placement.in_fp8 else jnp.tensordot(x, w, axes=x.ndim - 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, w: jax.Array, placement: Placement) -> jax.Array:
    dims = (tuple(range(2, x.ndim)), tuple(range(x.ndim - 2)))
    return _scaled_product(x, w, dims, (FORWARD, FORWARD), placement)


def _forward(x: CustomVJPPrimal, w: CustomVJPPrimal, placement: Placement) -> tuple[jax.Array, Residuals]:
    # The residuals are the same as for a product in 16 bits, so `remat.policy` has the same meaning. If an operand has
    # no gradient (such as a frozen weight), the other operand is not saved.
    return _product(x.value, w.value, placement), (x.value if w.perturbed else None, w.value if x.perturbed else None)


def _backward(placement: Placement, residuals: Residuals, g: jax.Array | SymbolicZero) -> Residuals:
    x, w = residuals
    if isinstance(g, SymbolicZero):
        return None, None
    of_x = of_w = None
    if w is not None:
        outputs = tuple(range(2, g.ndim)), tuple(range(w.ndim - g.ndim + 2, w.ndim))
        of_x = _scaled_product(g, w, outputs, (BACKWARD, FORWARD), placement)
    if x is not None:
        of_w = _scaled_product(x, g, ((0, 1), (0, 1)), (FORWARD, BACKWARD), placement)
    return of_x, of_w


_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _scaled_product(
    a: jax.Array,
    b: jax.Array,
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[DTypeLike, DTypeLike],
    placement: Placement,
) -> jax.Array:
    """Returns the product of two arrays, each rounded to 8-bit floats times a scale, in the dtype of `a`.

    Args:
      a: left operand, in 16 or 32 bits.
      b: right operand, in 16 or 32 bits.
      summed: (dims of `a`, dims of `b`) that the product sums over.
      dtypes: the 8-bit dtypes of `a` and of `b`.
      placement: determines the shards over which a tensor's maximum is taken.
    """
    (low_a, scale_a), (low_b, scale_b) = (
        quantize(array, dtype, placement) for array, dtype in zip((a, b), dtypes, strict=True)
    )
    result = jax.lax.dot_general(low_a, low_b, (summed, ((), ())), preferred_element_type=a.dtype)
    # Multiplying by a power of two after rounding to the result's dtype is exact.
    return result * (scale_a * scale_b).astype(a.dtype)


def quantize(x: jax.Array, dtype: DTypeLike, placement: Placement) -> tuple[jax.Array, jax.Array]:
    """Returns an array divided by its scale as 8-bit floats, and the scale.

    The scale is the smallest power of two s for which m / s is in the dtype's range, where m is the largest magnitude
    over all shards.

    Args:
      x: any floating-point array; if a manual mesh axis splits the batch, this device's shard.
      dtype: dtype of the 8-bit floats.
      placement: determines the shards over which the maximum is taken.

    Returns:
      (8-bit floats of the same shape, float32 scalar).
    """
    largest = placement.largest(jnp.max(jnp.abs(x)).astype(jnp.float32))
    _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    # Within these exponents a scale and its inverse are normal numbers of float32 and of bfloat16.
    scale = jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -126, 126))
    return (x * (1 / scale).astype(x.dtype)).astype(dtype), scale
