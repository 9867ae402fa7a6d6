"""The share of a card's peak that one matrix product reaches: the card's own share, times what its shape costs. No JAX.

A GPU cuts the result into tiles, and each of its units (streaming multiprocessors) computes one tile at a time. A tile
that reaches over the border computes zeros. The last wave of tiles leaves units without work. A short contraction does
not fill the units' pipelines, and a small tile reads its operands more often. (NVIDIA, Matrix Multiplication Background
User's Guide: tile and wave quantization.) Libraries try several tiles and split long contractions; the model takes the
best of them.
"""

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.plan.hlo import grouped_products
from meshtrain.plan.hlo.flops import CONTRACTED_BY_LIBRARY
from meshtrain.plan.hlo.parse import Instruction
from meshtrain.plan.hlo.shapes import dims

# Rows x columns of a tile -> its speed over that of the largest. An assumption: operands are read again for each tile,
# so a tile of 64 x 64 reads almost three times the bytes for the same work.
TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.92, (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.55}
# Parts of a contraction that different units compute and then add.
SPLITS = (1, 2, 4, 8)
# Contracted elements that take as long as filling and draining the pipeline of a tile: an assumption.
FILLING = 64


@dataclasses.dataclass(frozen=True)
class Product:
    """The dims of a matrix product: `batch` times [rows, contracted] x [contracted, columns]."""

    batch: int
    rows: int
    columns: int
    contracted: int


def shape_share(product: Product, num_units: int) -> float:
    """Returns the speed of a product over that of a large one on the same card, in (0, 1].

    Args:
      product: its dims.
      num_units: of the card that compute tiles at the same time; 0: not known, and every shape is as fast.
    """
    if not num_units:
        return 1.0
    return max(_tiled(product, tile, speed, parts, num_units) for tile, speed in TILES.items() for parts in SPLITS)


def _tiled(product: Product, tile: tuple[int, int], speed: float, parts: int, num_units: int) -> float:
    """Returns the same for one tile and one number of parts of the contraction."""
    rows, columns = (math.ceil(size / side) for size, side in zip((product.rows, product.columns), tile, strict=True))
    num_tiles = product.batch * rows * columns
    on_data = product.batch * product.rows * product.columns / (num_tiles * math.prod(tile))
    num_waves = math.ceil(num_tiles * parts / num_units)
    busy = num_tiles * parts / (num_waves * num_units)
    # Each part fills its own pipeline, and adds what it has computed to the others.
    depth = product.contracted / parts
    filled = depth / (depth + FILLING * (1 if parts == 1 else 2))
    return speed * on_data * busy * filled


def product_of(line: Instruction, shapes: Mapping[str, str], shares: Mapping[str, float]) -> Product | None:
    """Returns the dims of a `dot`, or of a kernel's product; None for a convolution, which only TPUs make of products.

    Args:
      line: the operation.
      shapes: of the operands.
      shares: see `Program.shares`.
    """
    if line.opcode == "dot":
        contracted, batch = (
            [int(dim) for dim in (line.attribute(name) or "").split(",") if dim]
            for name in ("lhs_contracting_dims", "lhs_batch_dims")
        )
    elif grouped_products.kernel(line):
        return Product(*(max(1, round(size)) for size in grouped_products.product(line, shapes, shares)))
    elif line.opcode == "custom-call":
        contracted, batch = (
            [int(dim.strip(' "')) for dim in found[1].split(",") if dim.strip()] if found else []
            for found in (pattern.search(line.rest) for pattern in CONTRACTED_BY_LIBRARY)
        )
    else:
        return None
    left = dims(shapes[line.operands[0]])
    num_batch, depth = (math.prod(left[dim] for dim in chosen) for chosen in (batch, contracted))
    rows = math.prod(left) // max(1, num_batch * depth)
    columns = math.prod(dims(line.shape)) // max(1, num_batch * rows)
    return Product(num_batch, rows, columns, depth)
