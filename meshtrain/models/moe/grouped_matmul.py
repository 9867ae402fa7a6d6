"""Products of rows with the weights of each row's expert; rows are grouped into blocks of one expert each.

A choice is an expert chosen by a token. A row contains the activations for one choice, or padding. The owner of a block
is the expert whose weight multiplies the block's rows. No row is dropped, and no shape depends on the routing: each
expert's rows are padded to full blocks. Products are computed by kernels on GPUs (`grouped_matmul_gpu.py`) and TPUs
(`grouped_matmul_tpu.py`), otherwise by a loop over blocks. Blocks without rows are skipped.

C: choices, K: layers in a stack, E: experts, m: rows per block, R: rows of all blocks, D, F: dims of a weight.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.hardware.accelerators import GPU, Capability, runs_kernels
from meshtrain.models.fallback import NEWER_GPU, WITH_KERNELS, missing
from meshtrain.models.moe import grouped_matmul_gpu, grouped_matmul_mosaic, grouped_matmul_tpu

NEEDED_ON_GPU = "widths per device that are multiples of 16, and arrays with fewer than 2^31 elements"
NEEDED_ON_TPU = "widths per device that are multiples of 128, in float32 or bfloat16"
WIDTHS = "model.moe.expert_dim / mesh.tensor and model.embed_dim that are such multiples, or more microbatches"
# Kernels of rows that are sorted by expert, as modules with the functions `times` and `of_weights`.
SORTED: dict[str, Any] = {"tpu": grouped_matmul_tpu, "mosaic": grouped_matmul_mosaic}
WITH_ROWS = "blocks_with_rows"  # the scope of all products, see `Cost.shares`


class Blocks(NamedTuple):
    """The assignment of C choices (an expert chosen by a token) to R rows, and of blocks of m rows to E experts.

    Attributes:
      rows: int32 [R], the index of the choice in each row; C for padding.
      owners: int32 [R / m], the expert of each block, ascending; E for a block without rows.
    """

    rows: jax.Array
    owners: jax.Array


def arrange_blocks(chosen: jax.Array, num_experts: int, block_rows: int) -> Blocks:
    """Sorts choices (an expert chosen by a token) by expert into blocks of rows; each block has one expert.

    The order of an expert's choices is kept, and its last block is padded. There are ceil(C / m) + E blocks, enough for
    any choices; blocks without rows come last.

    Args:
      chosen: int32 [C], the expert of each choice, from 0 to E. E means an expert of another device; such a choice gets
        no row.
      num_experts: number of this device's experts, E.
      block_rows: number of rows in a block, m.
    """
    (num_choices,) = chosen.shape
    num_blocks = -(-num_choices // block_rows) + num_experts
    ordered, order = jax.lax.sort((chosen, jnp.arange(num_choices, dtype=jnp.int32)), num_keys=1, is_stable=True)
    bounds = first_of(ordered, num_experts)
    sizes = bounds[1:] - bounds[:-1]
    counts = (sizes + block_rows - 1) // block_rows
    ends = jnp.cumsum(counts)
    owners = jnp.sum(jnp.arange(num_blocks)[:, None] >= ends, axis=1, dtype=jnp.int32)
    # Blocks without an expert read the last expert's entries; `is_real` is false for these blocks.
    safe = jnp.minimum(owners, num_experts - 1)
    place = (jnp.arange(num_blocks) - (ends - counts)[safe])[:, None] * block_rows + jnp.arange(block_rows)
    is_real = (place < sizes[safe][:, None]) & (owners < num_experts)[:, None]
    index = jnp.clip(bounds[safe][:, None] + place, 0, num_choices - 1)
    return Blocks(jnp.where(is_real, order[index], num_choices).reshape(-1), owners)


def first_of(ordered: jax.Array, num: int) -> jax.Array:
    """Returns the index of the first element that is at least n, for each n from 0 to `num`: int32 [num + 1].

    The index equals the number of smaller elements.

    Args:
      ordered: one-dimensional array of integers in ascending order.
      num: the largest number n.
    """
    # `compare_all` takes one pass over the array; a binary search is a loop, which is slower on accelerators.
    wanted = jnp.arange(num + 1, dtype=ordered.dtype)
    return jnp.searchsorted(ordered, wanted, method="compare_all").astype(jnp.int32)


class How(NamedTuple):
    """The selected kernel for products.

    Attributes:
      kernel: `gpu` (Pallas through Triton), `mosaic` (Pallas with Mosaic), `tpu` (megablox) or `loop` (plain JAX).
      interpret: whether a kernel runs as plain JAX, slowly, on a platform for which it is not made.
    """

    kernel: str
    interpret: bool = False


def kernel_for(
    platform: str,
    rows: tuple[int, ...],
    weights: tuple[int, ...],
    block_rows: int,
    dtype: DTypeLike,
    capability: Capability | None = None,
) -> str:
    """Returns the kernel that computes products on a platform: `gpu`, `mosaic`, `tpu`, or `loop` (no kernel).

    `mosaic` is used only if JAX has no Pallas-Triton: it has the speed of `gpu`, but copies each layer's weights.

    Args:
      platform: platform of the devices as JAX names it, such as `cpu`, `tpu`, `gpu` or `cuda`.
      rows: shape of the rows, (R, D).
      weights: shape of the experts' weights, (E, D, F).
      block_rows: number of rows in a block, m.
      dtype: dtype of rows and weights.
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """
    if no_kernel(platform, rows, weights, block_rows, dtype, capability) is not None:
        return "loop"
    if platform not in GPU:
        return platform
    return "gpu" if grouped_matmul_gpu.is_available() else "mosaic"


def no_kernel(
    platform: str,
    rows: tuple[int, ...],
    weights: tuple[int, ...],
    block_rows: int,
    dtype: DTypeLike,
    capability: Capability | None = None,
) -> tuple[str, str] | None:
    """Returns (reason why no kernel computes products, change after which a kernel does); None if a kernel does.

    The change is '' for platforms without kernels. The arguments are described in `kernel_for`.
    """
    if platform in GPU:
        if not runs_kernels(capability):
            return "no kernel supports this GPU", NEWER_GPU
        if not grouped_matmul_gpu.takes(rows, weights, block_rows):
            return f"the kernels need {NEEDED_ON_GPU}", WIDTHS
        by_mosaic = grouped_matmul_mosaic.takes(weights, dtype, capability)
        if grouped_matmul_gpu.is_available() or (by_mosaic and grouped_matmul_mosaic.is_available()):
            return None
        return missing("Pallas for these shapes on this GPU"), WITH_KERNELS
    if platform == "tpu":
        if not grouped_matmul_tpu.takes(weights, block_rows, dtype):
            return f"the kernels need {NEEDED_ON_TPU}", WIDTHS
        return None if grouped_matmul_tpu.is_available() else (missing("megablox kernels"), WITH_KERNELS)
    return f"there is no kernel for {platform}", ""


class Stack(NamedTuple):
    """A stack of the weights of all layers, from which a kernel reads the weights of one layer.

    If the kernel got a slice of the stack, XLA would first copy the slice. So the kernel gets the stack and the index
    of the layer. The stack has no gradient. The gradient is computed for the argument `weights` of `product`, which has
    the same values and which the kernel does not read.

    Attributes:
      weights: weights of E experts in K layers, [K, E, D, F].
      layer: int32 scalar, the index of the layer that is read.
    """

    weights: jax.Array
    layer: jax.Array


def product(
    rows: jax.Array,
    weights: jax.Array,
    owners: jax.Array,
    stack: Stack | None = None,
    *,
    platform: str = "cpu",
    capability: Capability | None = None,
) -> jax.Array:
    """Returns the product of each block of rows with its expert's weight, [R, F], summed in float32.

    The result is zeros for blocks without an expert. CPUs have no kernel; if a test selects a kernel on a CPU, it runs
    in interpret mode.

    Args:
      rows: activations in blocks of m rows, [R, D] for R rows.
      weights: weights of the E experts, [E, D, F], in the dtype of `rows`.
      owners: int32 [R / m], the expert of each block, ascending; E for a block without rows.
      stack: the same weights in a stack of all layers, which only kernels on GPUs read; None: no stack.
      platform: platform of the device as JAX names it.
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """
    block_rows, shape = rows.shape[0] // owners.size, weights.shape
    kernel = kernel_for(platform, rows.shape, shape, block_rows, rows.dtype, capability)
    if stack is not None:
        of_all = math.prod(stack.weights.shape[:2]), *shape[1:]
        takes_all = kernel_for(platform, rows.shape, of_all, block_rows, rows.dtype, capability) == "gpu"
        stack = stack if takes_all else None
    return compute_blocks(How(kernel, interpret=platform == "cpu"), rows, weights, owners, stack)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def compute_blocks(
    how: How, rows: jax.Array, weights: jax.Array, owners: jax.Array, stack: Stack | None = None
) -> jax.Array:
    """Returns the product of each block of rows with its expert's weight, [R, F], by the kernel in `how`.

    `rows` are [R, D] for R rows, `weights` [E, D, F] for E experts; `product` describes the arguments. Only the kernel
    `gpu` reads `stack`.
    """
    return _times(how, rows, weights, owners, stack, transposed=False)


def _times(
    how: How, rows: jax.Array, weights: jax.Array, owners: jax.Array, stack: Stack | None, *, transposed: bool
) -> jax.Array:
    """Returns the product of each block of rows with its expert's weight, or with the transposed weight.

    For weights [E, D, F] of E experts, the R rows are [R, D] and the result is [R, F]. With `transposed`, rows are [R,
    F] and the result is [R, D]. The other arguments are described in `product`.
    """
    if how.kernel == "loop":
        return _times_in_loop(rows, weights.swapaxes(1, 2) if transposed else weights, owners)
    with jax.named_scope(WITH_ROWS):
        if how.kernel == "gpu":
            of_layers = weights[None]
            if stack is not None:
                num_experts, of_layers = weights.shape[0], stack.weights
                own, none = owners + stack.layer * num_experts, of_layers.shape[0] * num_experts
                owners = jnp.where(owners < num_experts, own, none)
            return grouped_matmul_gpu.times(rows, of_layers, owners, transposed=transposed, interpret=how.interpret)
        sizes = _sizes(rows, owners, weights.shape[0])
        block_rows = rows.shape[0] // owners.size
        result: jax.Array = SORTED[how.kernel].times(
            rows, weights, sizes, block_rows=block_rows, transposed=transposed, interpret=how.interpret
        )
        return result


def _of_weights(how: How, rows: jax.Array, cotangent: jax.Array, owners: jax.Array, num_experts: int) -> jax.Array:
    """Returns the cotangent of the experts' weights, [E, D, F]: the sum of rows^T cotangent over each expert's blocks.

    Args:
      how: the kernel.
      rows: activations in blocks of m rows, [R, D].
      cotangent: cotangent of the products, [R, F].
      owners: int32 [R / m], the expert of each block, ascending.
      num_experts: number of experts, E.
    """
    if how.kernel == "loop":
        return _of_weights_in_loop(rows, cotangent, owners, num_experts)
    block_rows = rows.shape[0] // owners.size
    with jax.named_scope(WITH_ROWS):
        if how.kernel == "gpu":
            bounds = first_of(owners, num_experts)
            return grouped_matmul_gpu.of_weights(
                rows, cotangent, bounds, block_rows=block_rows, interpret=how.interpret
            )
        sizes = _sizes(rows, owners, num_experts)
        result: jax.Array = SORTED[how.kernel].of_weights(
            rows, cotangent, sizes, block_rows=block_rows, interpret=how.interpret
        )
        return result


def _sizes(rows: jax.Array, owners: jax.Array, num_experts: int) -> jax.Array:
    """Returns the number of rows in each expert's blocks, including padding, int32 [num_experts]."""
    return jnp.diff(first_of(owners, num_experts)) * (rows.shape[0] // owners.size)


def _times_in_loop(rows: jax.Array, weights: jax.Array, owners: jax.Array) -> jax.Array:
    width, dtype = weights.shape[2], rows.dtype

    def times(block: jax.Array, owner: jax.Array) -> jax.Array:
        return jnp.dot(block, weights[owner], preferred_element_type=jnp.float32).astype(dtype)

    def of_block(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        block, owner = given
        empty = jnp.zeros((block.shape[0], width), dtype)
        with jax.named_scope(WITH_ROWS):
            result: jax.Array = jax.lax.cond(owner < weights.shape[0], times, lambda *_: empty, block, owner)
        return result

    blocks = rows.reshape(owners.size, -1, rows.shape[1])
    results: jax.Array = jax.lax.map(of_block, (blocks, owners))
    return results.reshape(-1, width)


def _of_weights_in_loop(rows: jax.Array, cotangent: jax.Array, owners: jax.Array, num_experts: int) -> jax.Array:
    def add(sums: jax.Array, block: jax.Array, of_result: jax.Array, owner: jax.Array) -> jax.Array:
        product = jnp.dot(block.T, of_result, preferred_element_type=jnp.float32)
        return sums.at[owner].add(product)

    def of_block(sums: jax.Array, given: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        with jax.named_scope(WITH_ROWS):
            return jax.lax.cond(given[2] < num_experts, add, lambda sums, *_: sums, sums, *given), None

    blocks, of_results = (x.reshape(owners.size, -1, x.shape[1]) for x in (rows, cotangent))
    zeros = jnp.zeros((num_experts, rows.shape[1], cotangent.shape[1]), jnp.float32)
    sums: jax.Array = jax.lax.scan(of_block, zeros, (blocks, of_results, owners))[0]
    return sums.astype(rows.dtype)


Residuals = tuple[jax.Array, jax.Array, jax.Array, Stack | None]


def _forward(
    how: How, rows: jax.Array, weights: jax.Array, owners: jax.Array, stack: Stack | None
) -> tuple[jax.Array, Residuals]:
    return _times(how, rows, weights, owners, stack, transposed=False), (rows, weights, owners, stack)


def _backward(how: How, residuals: Residuals, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    rows, weights, owners, stack = residuals
    of_rows = _times(how, cotangent, weights, owners, stack, transposed=True)
    return of_rows, _of_weights(how, rows, cotangent, owners, weights.shape[0]), None, None


compute_blocks.defvjp(_forward, _backward)
