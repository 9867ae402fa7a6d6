"""Encodes blocks of a weight's elements as 8-bit codes with one scale per block (Dettmers et al. 2022).

This is dynamic quantization. With y = |x| / scale, where scale is the maximum |x| of the block, the code n = 2^i + f
with 0 <= f < 2^i represents

    y = 10^(i - top) (0.1 + 0.9 (f + 1) / 2^i),  and n = 0 for y = 0,

so that each decade has twice as many levels as the decade below. Signed numbers have top = 6 and int8 codes from -127
to 127. For nonnegative numbers, square roots are encoded, with top = 7 and uint8 codes up to 255.

A block is a tile: it has an extent along each dim of one weight, and extent 1 along dims that stack layers. Extents are
chosen such that the numbers of blocks along all dims have about the same power of two, because a mesh splits dims by
powers of two. A mesh never splits the dim `head_dim`, so blocks extend along this dim first.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshtrain.sharding.param_kinds import matrix_dims, num_stacked
from meshtrain.sharding.param_sharding import Names

SMALLEST_BLOCK = 32  # elements; in smaller blocks a float32 scale would take more than an eighth of the codes' bytes
LARGEST_BLOCK = 4096
NOT_SPLIT = "head_dim"


def extents(shape: Sequence[int], axes: Names, block: int) -> tuple[int, ...] | None:
    """Returns the extent of a block along each dim of a weight; None for a weight that is not stored in 8 bits.

    Only matrices and tables are stored in 8 bits, and only if their dims have enough factors of two for
    `SMALLEST_BLOCK` elements.

    >>> extents((32, 4096, 14336), ("layers", "embed", "mlp"), 256)
    (1, 16, 16)
    >>> extents((32, 4096, 32, 128), ("layers", "embed", "heads", "head_dim"), 256)
    (1, 2, 1, 128)

    Args:
      shape: the weight's shape.
      axes: the weight's logical axes.
      block: the number of elements of a block, a power of two; blocks are smaller if the dims have fewer factors of
        two.
    """
    if matrix_dims(axes) is None:
        return None
    result = [1] * len(shape)

    def twos_left(dim: int) -> tuple[float, int]:
        left = shape[dim] // result[dim]
        twos = (left & -left).bit_length() - 1
        return (math.inf if axes[dim] == NOT_SPLIT and twos else twos), dim

    while math.prod(result) < block:
        twos, dim = max(twos_left(dim) for dim in range(num_stacked(axes), len(shape)))
        if twos == 0:
            break
        result[dim] *= 2
    return tuple(result) if math.prod(result) >= SMALLEST_BLOCK else None


def num_blocks(shape: Sequence[int], extent: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of blocks of a weight along each dim, which is the shape of its scales.

    Args:
      shape: the weight's shape.
      extent: the size of a block along each dim.
    """
    return tuple(size // part for size, part in zip(shape, extent, strict=True))


def encode(
    x: jax.Array, random: jax.Array | None, extent: Sequence[int], *, is_signed: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of an array, int8 or uint8 in its shape, and the scales of its blocks, float32.

    For an unsigned array, square roots are encoded: updates divide by square roots, and the levels of square roots are
    closer to each other. A number above zero is encoded at least as the lowest level above zero.

    With random bits, rounding is stochastic: a root between two levels is rounded up with the probability that makes
    the mean exact. Rounded to the nearest level, a second moment could keep its level forever while the gradient is
    zero, because a step changes it only by a share 1 - beta2. A first moment needs no random bits: it changes by more
    than the distance of two levels.

    Args:
      x: a float32 array; nonnegative unless `is_signed`.
      random: random bits, uint16 in the shape of `x`; None: round to the nearest level.
      extent: the size of a block along each dim, a divisor of the dim's size.
      is_signed: whether elements may be negative.
    """
    top = 6 if is_signed else 7
    blocks = _in_blocks(jnp.abs(x) if is_signed else jnp.sqrt(x), extent)
    scales = jnp.max(blocks, axis=tuple(range(1, 2 * x.ndim, 2)), keepdims=True)
    tiny = jnp.finfo(jnp.float32).tiny
    levels = _level(jnp.where(scales > tiny, blocks / jnp.maximum(scales, tiny), 0.0), top)
    between = 0.5 if random is None else _in_blocks(random, extent).astype(jnp.float32) * 2.0**-16
    codes = jnp.floor(levels + between)
    codes = jnp.clip(codes, 0 if is_signed else jnp.sign(levels), 2 ** (top + 1) - 1).reshape(x.shape)
    scales = scales.reshape(num_blocks(x.shape, extent))
    return (jnp.sign(x) * codes).astype(jnp.int8) if is_signed else codes.astype(jnp.uint8), scales


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Decodes the codes and scales that `encode` returned; returns float32 in the shape of the codes.

    Codes of dtype int8 are decoded as signed numbers, uint8 as square roots of nonnegative numbers.
    """
    extent = num_blocks(codes.shape, scales.shape)
    top = 6 if codes.dtype == jnp.int8 else 7
    blocks = _in_blocks(codes, extent)
    share = _share(jnp.abs(blocks.astype(jnp.int32)), top) * jnp.sign(blocks).astype(jnp.float32)
    of_blocks = scales.reshape([size for count in scales.shape for size in (count, 1)])
    numbers = (share * of_blocks).reshape(codes.shape)
    return numbers if codes.dtype == jnp.int8 else jnp.square(numbers)


def _level(y: jax.Array, top: int) -> jax.Array:
    """Returns the real-valued code of each number, by linear interpolation between the numbers that codes represent.

    Args:
      y: float32 numbers from 0 to 1.
      top: the largest exponent i of a code 2^i + f (formula of the module): 6 for signed arrays, 7 for unsigned arrays.
    """
    # Below the lowest level, the interpolation ends at zero.
    result = y * 10.0**top
    for i in range(1, top + 1):
        in_decade = 2.0**i - 1 + (y * 10.0 ** (top - i) - 0.1) / 0.9 * 2.0**i
        result = jnp.where(y > 10.0 ** (i - 1 - top), in_decade, result)
    return result


def _share(code: jax.Array, top: int) -> jax.Array:
    """Returns the float32 number from 0 to 1 that each code represents.

    Args:
      code: nonnegative integers.
      top: the largest exponent i of a code 2^i + f (formula of the module): 6 for signed arrays, 7 for unsigned arrays.
    """
    result = code.astype(jnp.float32) * 10.0**-top
    for i in range(1, top + 1):
        in_decade = 10.0 ** (i - top) * (0.1 + 0.9 * (code - (2**i - 1)).astype(jnp.float32) / 2.0**i)
        result = jnp.where(code >= 2**i, in_decade, result)
    return result


def _in_blocks(x: jax.Array, extent: Sequence[int]) -> jax.Array:
    """Splits every dim of `x` into two, blocks and elements in a block: [.., size, ..] -> [.., size / n, n, ..].

    `extent` has n, the extent of a block, for each dim.
    """
    return x.reshape([n for size, part in zip(x.shape, extent, strict=True) for n in (size // part, part)])
