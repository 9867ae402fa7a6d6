"""Products of blocks of rows with their experts' weights on TPUs, by JAX's Pallas kernels ("megablox").

The kernels compute only blocks that have an expert. They leave the results of other blocks unwritten, so this module
sets these results to zeros.

E: experts, m: rows per block, R: rows of all blocks, D, F: dims of a weight.
"""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LANES = 128
# Maximum columns and bytes of a tile of weights, which stays in a core's memory for all blocks of one expert.
COLUMNS, WEIGHT_BYTES = 512, 2**22
# Maximum bytes of a dim of a tile of the weights' cotangent, whose float32 sums stay in a core's memory as well.
SUMS_BYTES = 2048
# Name scopes of the kernels, by which the planner recognizes them.
TIMES, OF_WEIGHTS = "times_of_blocks", "weights_of_blocks"


def takes(weights: tuple[int, ...], block_rows: int, dtype: DTypeLike) -> bool:
    """Returns whether the kernels are used for these shapes and this dtype.

    They are used in bfloat16 and float32 if D and F are multiples of 128 and m of 16; the tests compile such cases.

    Args:
      weights: shape of the experts' weights, (E, D, F).
      block_rows: number of rows in a block, m.
      dtype: dtype of rows and weights.
    """
    is_known = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    return is_known and all(size % LANES == 0 for size in weights[1:]) and block_rows % 16 == 0


@functools.cache
def is_available() -> bool:
    """Returns whether this version of JAX has the kernels."""
    return importlib.util.find_spec("jax.experimental.pallas.ops.tpu.megablox") is not None


def times(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, block_rows: int, transposed: bool, interpret: bool
) -> jax.Array:
    """Returns the product of each row with its expert's weight, [R, F], or [R, D] with `transposed`.

    The result has the dtype of `rows`; it is zeros for rows without an expert.

    Args:
      rows: R rows of activations sorted by expert, [R, D]; [R, F] with `transposed`.
      weights: weights of the E experts, [E, D, F].
      sizes: int32 [E], number of rows of each expert, multiples of m. The rows after these have no expert.
      block_rows: number of rows in a block, m.
      transposed: whether rows are multiplied by the transposed weights, [F, D].
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
    """Returns the cotangent of the weights of E experts, [E, D, F], in the dtype of `rows`, summed in float32.

    Args:
      rows: R rows of activations sorted by expert, [R, D].
      cotangent: cotangent of the products, [R, F].
      sizes: int32 [E], number of rows of each expert, multiples of m.
      block_rows: number of rows in a block, m.
      interpret: whether to run the kernel as plain JAX, slowly, on a device that is no TPU.
    """
    largest = SUMS_BYTES // rows.dtype.itemsize
    tiling = (block_rows, min(largest, rows.shape[1]), min(largest, cotangent.shape[1]))
    columns = rows.swapaxes(0, 1)
    with jax.named_scope(OF_WEIGHTS):
        result: jax.Array = _module().tgmm(columns, cotangent, sizes, rows.dtype, tiling, interpret=interpret)
    return result


def _module() -> ModuleType:
    from jax.experimental.pallas.ops.tpu.megablox import ops

    # The package exports a function under the module's name; its attribute `backend` has the kernels for both passes.
    module: Any = ops
    return module.backend
