"""Matrices in the format MXFP4, decoded where they are read.

A block is 32 numbers one after the other: 16 bytes of two numbers each, the lower four bits first (1 sign, 2 exponent
and 1 mantissa bits), and a byte that is an exponent of 2 with a bias of 127 (255: not a number). Published by the Open
Compute Project as Microscaling Formats 1.0 (2023). Files of gpt-oss have the bytes in `NAME_blocks` and the exponents
in `NAME_scales`. bfloat16 has every such number below 2^128.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

BLOCK = 32
BYTES = 16
BLOCKS, SCALES, DTYPE = "_blocks", "_scales", "U8"
_BYTE = np.arange(256, dtype=np.uint8)
_NUMBERS = np.stack([_BYTE & 15, _BYTE >> 4], axis=-1).view(jnp.float4_e2m1fn).astype(np.float32)
_PAIRS = _NUMBERS.view(np.complex64)[:, 0]  # byte -> both numbers; one element is looked up faster than two


def shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of the two uint8 tensors that hold one of `shape`, whose last dim is that of blocks."""
    blocks = (*shape[:-1], -(-shape[-1] // BLOCK))
    return {f"{name}{BLOCKS}": (*blocks, BYTES), f"{name}{SCALES}": blocks}


@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix [rows, columns] whose columns are cut into blocks; indexing decodes the part that is asked for.

    Attributes:
      numbers: uint8 [blocks, columns, 16], a view of a file.
      exponents: uint8 [blocks, columns], likewise.
    """

    numbers: np.ndarray
    exponents: np.ndarray

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Returns float32 [rows, columns] of two slices that have begin and end."""
        rows, columns = part
        first = rows.start // BLOCK
        blocks = slice(first, -(-rows.stop // BLOCK))
        values = _PAIRS[self.numbers[blocks, columns]].view(np.float32)  # [blocks, columns, 32]
        values *= self.exponents[blocks, columns].view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
        of_rows = values.swapaxes(1, 2).reshape(-1, values.shape[1])
        return of_rows[rows.start - first * BLOCK : rows.stop - first * BLOCK]
