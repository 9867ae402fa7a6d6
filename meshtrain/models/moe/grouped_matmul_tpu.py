"""Products of blocks of rows with their owners' weights on TPUs, by JAX's Pallas kernels ("megablox").

The kernels visit the blocks that have rows, and leave those of no expert unwritten: these become zeros here.

E: experts, m: rows a block, R: rows of all blocks, D, F: dims of a weight.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LANES = 128
# Of a tile of weights, which stays in a core's memory while blocks of one expert pass by: columns, and bytes.
COLUMNS, WEIGHT_BYTES = 512, 2**22
# Of a dim of a tile of the weights' cotangent, whose float32 sums stay there as well.
SUMS_BYTES = 2048
# Scopes of the kernels, by which the planner finds them.
TIMES, OF_WEIGHTS = "times_of_blocks", "weights_of_blocks"


def takes(weights: tuple[int, ...], block_rows: int, dtype: DTypeLike) -> bool:
    """Returns whether the kernels take these shapes: the tests compile them for such.

    Args:
      weights: (E, D, F).
      block_rows: m.
      dtype: of rows and weights.
    """
    is_known = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    return is_known and all(size % LANES == 0 for size in weights[1:]) and block_rows % 16 == 0


def times(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, block_rows: int, transposed: bool, interpret: bool
) -> jax.Array:
    """Returns [R, F], or [R, D]: each block of rows times the weight of its owner, see `grouped_matmul.product`.

    Args:
      rows: [R, D]; [R, F] with `transposed`. Those of the first expert stand first, and so on.
      weights: [E, D, F].
      sizes: int32 [E], rows of each expert, multiples of m; rows after them have none.
      block_rows: m.
      transposed: whether weights are multiplied as [E, F, D].
      interpret: whether to run the kernel as plain JAX, slowly, on a device that is no TPU.
    """
    contracted, columns = rows.shape[1], min(COLUMNS, weights.shape[1 if transposed else 2])
    most = WEIGHT_BYTES // (columns * rows.dtype.itemsize)
    tiling = (block_rows, contracted if contracted <= most else most // LANES * LANES, columns)
    with jax.named_scope(TIMES):
        results: jax.Array = _module().gmm(
            rows, weights, sizes, rows.dtype, tiling, transpose_rhs=transposed, interpret=interpret
        )
    is_written = jax.lax.broadcasted_iota(jnp.int32, results.shape, 0) < jnp.sum(sizes)
    return jnp.where(is_written, results, jnp.zeros((), rows.dtype))


def of_weights(
    rows: jax.Array, cotangent: jax.Array, sizes: jax.Array, *, block_rows: int, interpret: bool
) -> jax.Array:
    """Returns the cotangent of the weights [E, D, F], of the rows' dtype, summed in float32.

    Args:
      rows: [R, D].
      cotangent: [R, F], of the products.
      sizes: see `times`.
      block_rows: m.
      interpret: see `times`.
    """
    largest = SUMS_BYTES // rows.dtype.itemsize
    tiling = (block_rows, min(largest, rows.shape[1]), min(largest, cotangent.shape[1]))
    columns = rows.swapaxes(0, 1)
    with jax.named_scope(OF_WEIGHTS):
        result: jax.Array = _module().tgmm(columns, cotangent, sizes, rows.dtype, tiling, interpret=interpret)
    return result


def _module() -> ModuleType:
    from jax.experimental.pallas.ops.tpu.megablox import ops

    # The package has a function in place of the module, whose cotangents of the weights this one has as well.
    module: Any = ops
    return module.backend
