"""Decodes matrices in the format MXFP4 while they are read.

A block encodes 32 consecutive numbers: 16 bytes with two 4-bit numbers each, the lower four bits first (1 sign, 2
exponent and 1 mantissa bits), and one byte for a power of 2 with a bias of 127 (255: not a number). Source: Open
Compute Project, Microscaling Formats 1.0 (2023). gpt-oss stores the 16 bytes in the tensor `NAME_blocks` and the
exponents in `NAME_scales`. bfloat16 represents all of these numbers below 2^128 exactly.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

BLOCK = 32
BYTES = 16
BLOCKS, SCALES, DTYPE = "_blocks", "_scales", "U8"
_BYTE = np.arange(256, dtype=np.uint8)
_NUMBERS = np.stack([_BYTE & 15, _BYTE >> 4], axis=-1).view(jnp.float4_e2m1fn).astype(np.float32)
_PAIRS = _NUMBERS.view(np.complex64)[:, 0]  # byte -> both numbers as one element, since one look-up is faster than two


def shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of the two uint8 tensors (blocks and scales) that encode a tensor in MXFP4.

    Args:
      name: the name of the encoded tensor, without `_blocks` or `_scales`.
      shape: the shape of the encoded tensor; blocks of 32 numbers are along its last dim.
    """
    blocks = (*shape[:-1], -(-shape[-1] // BLOCK))
    return {f"{name}{BLOCKS}": (*blocks, BYTES), f"{name}{SCALES}": blocks}


@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix [rows, columns] in MXFP4; indexing decodes only the requested part.

    Each block encodes 32 consecutive rows of one column.

    Attributes:
      numbers: the 4-bit numbers of each block, two in a byte: uint8 [blocks, columns, 16], a view of a file.
      exponents: the exponent of each block's power of 2: uint8 [blocks, columns], a view of a file.
    """

    numbers: np.ndarray
    exponents: np.ndarray

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Decodes a part of the matrix to float32 [rows, columns].

        Args:
          part: a slice of rows and a slice of columns, both with explicit start and stop.
        """
        rows, columns = part
        first = rows.start // BLOCK
        blocks = slice(first, -(-rows.stop // BLOCK))
        values = _PAIRS[self.numbers[blocks, columns]].view(np.float32)  # [blocks, columns, 32]
        values *= self.exponents[blocks, columns].view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
        of_rows = values.swapaxes(1, 2).reshape(-1, values.shape[1])
        return of_rows[rows.start - first * BLOCK : rows.stop - first * BLOCK]
