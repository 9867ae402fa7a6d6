"""Products of blocks of rows with their experts' weights on Hopper GPUs, by JAX's kernels in Pallas with Mosaic.

They replace `grouped_matmul_gpu.py` once JAX has no Pallas-Triton. On an H100 both have the same speed
(docs/results/accelerator.md), but these kernels do not read a layer of stacked weights in place. The functions have the
arguments of `grouped_matmul_tpu.py`.

E: experts, m: rows per block, R: rows of all blocks, D, F: dims of a weight.
"""

import functools
import importlib.util
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.hardware.accelerators import Capability

# Tiles of the result and of a contraction, and stages of the pipeline that reads them: the prototype's settings.
TILE, DEPTH, STAGES, COLUMNS_OF_TILES = 128, 64, 4, 4
MOST_EXPERTS = 16  # the kernel's loop over experts is unrolled; the tests compile this number
# Name scopes of the kernels, by which the planner recognizes them.
TIMES, OF_WEIGHTS = "times_of_blocks", "weights_of_blocks"


@functools.cache
def is_available() -> bool:
    """Returns whether this version of JAX has the kernels."""
    return importlib.util.find_spec("jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu") is not None


def takes(weights: tuple[int, ...], dtype: DTypeLike, capability: Capability | None) -> bool:
    """Returns whether the kernels are used for these shapes on this GPU.

    They need compute capability 9 (their instructions exist only on Hopper), 16-bit numbers, D and F that are multiples
    of 128, and at most 16 experts.

    Args:
      weights: shape of the experts' weights, (E, D, F).
      dtype: dtype of rows and weights.
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """
    is_hopper = capability is not None and capability[0] == 9
    fits = all(size % TILE == 0 for size in weights[1:]) and weights[0] <= MOST_EXPERTS
    return is_hopper and fits and jnp.dtype(dtype).itemsize == 2


def times(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, block_rows: int, transposed: bool, interpret: bool
) -> jax.Array:
    """Returns the product of each row with its expert's weight, [R, F], or [R, D] with `transposed`.

    The result has the dtype of `rows`; it is zeros for rows without an expert.

    Args:
      rows: R rows of activations sorted by expert, [R, D]; [R, F] with `transposed`.
      weights: weights of the E experts, [E, D, F].
      sizes: int32 [E], number of rows of each expert. The rows after these have no expert.
      block_rows: number of rows in a block; the kernel does not need it.
      transposed: whether rows are multiplied by the transposed weights, [F, D].
      interpret: must be False: the kernel runs only on GPUs.
    """
    assert not interpret, "Mosaic's kernels run only on GPUs"
    with jax.named_scope(TIMES):
        results: jax.Array = modules()[0].ragged_dot(
            rows, weights, group_sizes=sizes, transpose_rhs=transposed, **_settings()
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
      sizes: int32 [E], number of rows of each expert.
      block_rows: number of rows in a block; the kernel does not need it.
      interpret: must be False: the kernel runs only on GPUs.
    """
    assert not interpret, "Mosaic's kernels run only on GPUs"
    with jax.named_scope(OF_WEIGHTS):
        result: jax.Array = modules()[1].transposed_ragged_dot(rows, cotangent, group_sizes=sizes, **_settings())
    return result


def _settings() -> dict[str, int]:
    return {
        "block_m": TILE,
        "block_n": TILE,
        "block_k": DEPTH,
        "max_concurrent_steps": STAGES,
        "grid_block_n": COLUMNS_OF_TILES,
    }


def modules() -> tuple[ModuleType, ModuleType]:
    """Returns JAX's modules with the kernel of products, and with the kernel of the weights' cotangents."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    return ragged_dot_mgpu, transposed_ragged_dot_mgpu
