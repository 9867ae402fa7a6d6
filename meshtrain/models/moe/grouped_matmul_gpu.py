"""Products of blocks of rows with their experts' weights on GPUs: Pallas kernels, compiled through Triton.

Each program of a kernel's grid computes one tile of the result. Tiles that share rows are adjacent in the grid, so that
rows are read from the L2 cache. For a block without rows, a program only writes zeros.

K: layers in a stack, E: experts of a layer, m: rows per block, R: rows of all blocks, D, F: dims of a weight.
"""

import functools
import importlib.util
import math
from types import ModuleType

import jax
import jax.numpy as jnp

# Maximum rows and columns of a tile, and bytes of an operand's row that one step of the kernel's loop reads.
LARGEST_TILE, STEP_BYTES = 128, 128
GRANULE = 16  # minimum dims of an operand of Triton's products
# Triton computes offsets within an array in int32.
LARGEST_SIZE = 2**31
# The best of twelve combinations on an H100 (docs/results/accelerator.md).
NUM_WARPS, NUM_STAGES = 4, 3
# Names of the kernels, by which the planner recognizes them.
TIMES, OF_WEIGHTS = "times_of_blocks", "weights_of_blocks"


def takes(rows: tuple[int, ...], weights: tuple[int, ...], block_rows: int) -> bool:
    """Returns whether the kernels support these shapes.

    Args:
      rows: shape of the rows, (R, D).
      weights: shape of the experts' weights, (E, D, F).
      block_rows: number of rows in a block, m.
    """
    fits = all(size % GRANULE == 0 for size in (*weights[1:], block_rows))
    largest = max(math.prod(weights), rows[0] * max(weights[1:]))
    return fits and block_rows & (block_rows - 1) == 0 and block_rows <= LARGEST_TILE and largest < LARGEST_SIZE


@functools.cache
def is_available() -> bool:
    """Returns whether this version of JAX has Pallas's Triton compiler; JAX 0.11 announces its removal."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def times(rows: jax.Array, weights: jax.Array, owners: jax.Array, *, transposed: bool, interpret: bool) -> jax.Array:
    """Returns the product of each block of rows with its expert's weight, [R, F], or [R, D] with `transposed`.

    Products are summed in float32 and rounded to the dtype of `rows`; blocks without rows give zeros. R: rows, K:
    layers, E: experts of a layer.

    Args:
      rows: activations in blocks of m rows, [R, D]; [R, F] with `transposed`.
      weights: experts' weights of all layers, [K, E, D, F].
      owners: int32 [R / m], each block's expert among the experts of all layers, layer x E + expert, ascending; K E
        for a block without rows.
      transposed: whether rows are multiplied by the transposed weights, [F, D].
      interpret: whether to run the kernel as plain JAX, slowly, on a device that is no GPU.
    """
    pl, triton = _modules()
    (num_rows, contracted), num_blocks = rows.shape, owners.size
    width = weights.shape[2 if transposed else 3]
    block_rows, columns = num_rows // num_blocks, _tile(width)
    body = functools.partial(_times, pl, step=_step(contracted, rows), columns=columns, transposed=transposed)
    result: jax.Array = pl.pallas_call(
        body,
        grid=(width // columns, num_blocks),
        in_specs=[
            pl.BlockSpec(owners.shape, lambda j, i: (0,)),
            pl.BlockSpec((block_rows, contracted), lambda j, i: (i, 0)),
            pl.BlockSpec(weights.shape, lambda j, i: (0, 0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((block_rows, columns), lambda j, i: (i, j)),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), rows.dtype),
        interpret=interpret,
        name=TIMES,
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=NUM_STAGES),
    )(owners, rows, weights)
    return result


def _times(
    pl: ModuleType,
    owners: jax.Ref,
    rows: jax.Ref,
    weights: jax.Ref,
    result: jax.Ref,
    *,
    step: int,
    columns: int,
    transposed: bool,
) -> None:
    num_layers, num_experts = weights.shape[:2]
    owner, here = owners[pl.program_id(1)], pl.ds(pl.program_id(0) * columns, columns)
    has_rows = owner < num_layers * num_experts
    own = jnp.minimum(owner, num_layers * num_experts - 1)
    layer, expert = own // num_experts, own % num_experts

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        contracted = pl.ds(i * step, step)
        left = rows[:, contracted]
        right = weights[layer, expert, here, contracted] if transposed else weights[layer, expert, contracted, here]
        return sums + _product(left, right, 1, 1 if transposed else 0)

    num_steps = has_rows.astype(jnp.int32) * (rows.shape[1] // step)
    sums = jax.lax.fori_loop(jnp.int32(0), num_steps, add, jnp.zeros(result.shape, jnp.float32))
    result[...] = sums.astype(result.dtype)


def of_weights(
    rows: jax.Array, cotangent: jax.Array, bounds: jax.Array, *, block_rows: int, interpret: bool
) -> jax.Array:
    """Returns the cotangent of the weights of E experts, [E, D, F], in the dtype of `rows`, summed in float32.

    Args:
      rows: activations in blocks of m rows, [R, D] for R rows.
      cotangent: cotangent of the products, [R, F].
      bounds: int32 [E + 1], the index of each expert's first block, and the end of the last expert's blocks.
      block_rows: number of rows in a block, m.
      interpret: whether to run the kernel as plain JAX, slowly, on a device that is no GPU.
    """
    pl, triton = _modules()
    (num_rows, height), width, num_experts = rows.shape, cotangent.shape[1], bounds.size - 1
    tile, step = (_tile(height), _tile(width)), _step(block_rows, rows)
    body = functools.partial(_of_weights, pl, step=step, steps_a_block=block_rows // step)
    result: jax.Array = pl.pallas_call(
        body,
        grid=(width // tile[1], height // tile[0], num_experts),
        in_specs=[
            pl.BlockSpec(bounds.shape, lambda j, i, e: (0,)),
            pl.BlockSpec((num_rows, tile[0]), lambda j, i, e: (0, i)),
            pl.BlockSpec((num_rows, tile[1]), lambda j, i, e: (0, j)),
        ],
        out_specs=pl.BlockSpec((None, *tile), lambda j, i, e: (e, i, j)),
        out_shape=jax.ShapeDtypeStruct((num_experts, height, width), rows.dtype),
        interpret=interpret,
        name=OF_WEIGHTS,
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=NUM_STAGES),
    )(bounds, rows, cotangent)
    return result


def _of_weights(
    pl: ModuleType,
    bounds: jax.Ref,
    rows: jax.Ref,
    cotangent: jax.Ref,
    result: jax.Ref,
    *,
    step: int,
    steps_a_block: int,
) -> None:
    expert = pl.program_id(2)

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        here = pl.ds(i * step, step)
        return sums + _product(rows[here, :], cotangent[here, :], 0, 0)

    first, end = bounds[expert] * steps_a_block, bounds[expert + 1] * steps_a_block
    sums = jax.lax.fori_loop(first, end, add, jnp.zeros(result.shape, jnp.float32))
    result[...] = sums.astype(result.dtype)


def _product(left: jax.Array, right: jax.Array, of_left: int, of_right: int) -> jax.Array:
    """Returns the product of two matrices in float32, summed over dim `of_left` of `left` and `of_right` of `right`."""
    dims = (((of_left,), (of_right,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _tile(size: int) -> int:
    """Returns the size of a tile along a dim of the result: the largest power of two up to 128 that divides `size`."""
    return math.gcd(size, LARGEST_TILE)


def _step(size: int, array: jax.Array) -> int:
    """Returns the number of elements of a contracted dim that one step of a kernel's loop reads.

    It is the largest power of two that divides the dim's size and takes at most `STEP_BYTES`.

    Args:
      size: size of the contracted dim.
      array: an operand, whose dtype determines the bytes of an element.
    """
    return math.gcd(size, STEP_BYTES // array.dtype.itemsize)


def _modules() -> tuple[ModuleType, ModuleType]:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return pallas, triton
