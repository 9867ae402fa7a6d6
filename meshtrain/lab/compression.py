"""Compressed gradient reduction across replicas: int8 blocks with scales, or the largest elements of each block.

    int8    rows -> pack -> all-to-all -> unpack, sum in float32 -> pack -> all-gather -> unpack
    topk    blocks -> the K largest of each -> all-gather -> add the lists of all devices, in order

The reduction is written here because no library has an all-reduce of blocks with scales. A block's scale is sent in
the same array as its elements, so that each half of the reduction is a single collective.

Error feedback: Seide et al. 2014; Karimireddy et al. 2019. The input of a sum is gradient + residual. The next residual
is the input minus the part of it that was sent. Every array is split into n rows. With int8, device i sums and packs
row i, and its residual also gets the rounding error of this packing. So, up to float32 rounding, the residuals of all
devices add up to the sum of the inputs minus the result. Later steps send the missing part.

n: devices along the axis, S: elements in a block, K: elements of a block that are sent, R: elements in a row,
N: elements of the gradients on one device.

    name   what a device sends in a step                         n = 8, S = 256, K = 8
    sum    2 (n - 1) / n x 4 N, or x 2 N in bfloat16             7 N or 3.5 N
    int8   2 (n - 1) / n x (1 + 4 / S) N, at ZeRO level 1 half   1.78 N
    topk   (n - 1) x 4 K / S N, which grows with n               0.88 N
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.config.schema import Config
from meshtrain.errors import Problem
from meshtrain.hardware.links import wire_share
from meshtrain.options import WITH_OPTIONS, Except, Options, option
from meshtrain.sharding.reduction import NAMES, SUM, Dims, Reduction, ReductionOptions, nothing
from meshtrain.sharding.trees import Arrays

LARGEST = 127.0  # largest int8 magnitude in use; symmetric around 0
SMALL_BYTES = 64 * 1024  # smaller arrays are sent together: each would need padding to n blocks
SCALE_BYTES = 4  # bytes of a block's float32 scale
PAIR_BYTES = 4  # bytes of each element that topk sends: a bfloat16 and its uint16 index in the block
MAX_BLOCK = 2**16  # an index in a block fits 16 bits
# Memory traffic in bytes per element, with and without feedback. Gradient and residual are read once for the scales and
# once for packing; the packed bytes are written and read; sum and residual are written. This is an estimate: kernels
# with less fusion move more.
MOVED_BYTES = {True: 24, False: 16}
SEVERAL = {"mesh.data": Except(1)}  # a single replica sends no gradients, so options of the reduction are unused


@dataclasses.dataclass(frozen=True)
class CompressionOptions(ReductionOptions):
    """Options of the compressed reductions."""

    name: str = option(SUM, "int8 or topk", choices=NAMES, names=WITH_OPTIONS, only_for=SEVERAL)
    block: int = option(
        256,
        "int8: elements that share a scale; topk: elements in a block",
        minimum=8,
        maximum=MAX_BLOCK,
        only_for=SEVERAL,
    )
    kept: int = option(
        8, "topk: elements of each block that are sent", minimum=1, only_for={**SEVERAL, "name": ("topk",)}
    )
    feedback: bool = option(
        True, "error feedback: add unsent parts to the next gradient (4 bytes a parameter, saved)",
        only_for=SEVERAL,
    )  # fmt: skip


def int8(options: CompressionOptions, dtype: DTypeLike) -> Reduction:
    """Returns the gradient reduction that sends int8 blocks with one scale per block.

    Args:
      options: the options of the compressed reductions.
      dtype: not used; a part of the interface of `reduction.name`.
    """
    return _reduction(options, functools.partial(_int8_bytes, options.block))


def topk(options: CompressionOptions, dtype: DTypeLike) -> Reduction:
    """Returns the gradient reduction that sends the largest elements of each block.

    Args:
      options: the options of the compressed reductions.
      dtype: not used; a part of the interface of `reduction.name`.
    """

    def sent_bytes(elements: float, replicas: int, is_scattered: bool) -> float:
        return elements * (replicas - 1) * PAIR_BYTES * options.kept / options.block

    def larger_than_int8(replicas: int, is_scattered: bool) -> list[tuple[str, str]]:
        sent, whole = sent_bytes(1, replicas, is_scattered), _int8_bytes(options.block, 1, replicas, is_scattered)
        if sent < whole:
            return []
        what = (
            f"top-k sends {sent:.3g} bytes per parameter between {replicas} replicas, which grows with their "
            "number, and "
        )
        return [(f"{what}int8 sends {whole:.3g}", "reduction.name=int8, which also loses less precision")]

    return dataclasses.replace(_reduction(options, sent_bytes), advice=larger_than_int8)


def check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line if top-k would send more elements than a block has, else []."""
    options: Options = config.reduction
    if options.kept <= options.block:
        return []
    return [
        Problem(
            "reduction.kept",
            got=options.kept,
            allowed=f"1 to reduction.block = {options.block}",
            nearest=options.block,
            depends_on=["reduction.block"],
        )
    ]


int8.options = topk.options = CompressionOptions  # type: ignore[attr-defined]
topk.check = check  # type: ignore[attr-defined]


def _reduction(options: CompressionOptions, sent_bytes: Callable[[float, int, bool], float]) -> Reduction:
    return Reduction(
        update=functools.partial(reduce, options),
        sent_bytes=sent_bytes,
        init=(lambda shapes: shapes) if options.feedback else nothing,
        moved_bytes=MOVED_BYTES[options.feedback],
        unread=("precision.reduce_dtype",),
    )


def _int8_bytes(block: int, elements: float, replicas: int, is_scattered: bool) -> float:
    share = wire_share("reduce-scatter" if is_scattered else "all-reduce", replicas)
    return elements * share * (1 + SCALE_BYTES / block)


def reduce(
    options: CompressionOptions, gradients: Arrays, residual: Arrays, over: str, scattered: Dims
) -> tuple[Arrays, Arrays]:
    """Returns the gradient sums over an axis, and the next residual; the interface is that of `Reduction.update`.

    Args:
      options: the options of the compressed reductions.
      gradients: a pytree of this device's float32 gradients.
      residual: a pytree of float32 arrays, the unsent parts of earlier sums; () without error feedback.
      over: the name of a manual axis.
      scattered: a pytree of int: the dim along which each device gets its shard of the sum, counted from the end; 0:
        each device gets the complete sum.
    """
    leaves, structure = jax.tree.flatten(gradients)
    waiting = jax.tree.leaves(residual)
    # A single device sends no gradients, so there is no residual of this step. It adds the residual that was saved when
    # the run had several replicas.
    if jax.lax.axis_size(over) == 1:
        whole = [leaf + left for leaf, left in zip(leaves, waiting, strict=True)] if waiting else leaves
        return jax.tree.unflatten(structure, whole), jax.tree.map(jnp.zeros_like, residual)
    dims = jax.tree.leaves(scattered)
    sums, left = compressed_sums(leaves, waiting or [None] * len(leaves), dims, options, over)
    after = [leaf for leaf in left if leaf is not None]
    return jax.tree.unflatten(structure, sums), jax.tree.unflatten(jax.tree.structure(residual), after)


def pack(x: jax.Array) -> jax.Array:
    """Quantizes blocks of S elements: float32 [..., S] -> int8 [..., S + 4]; the last four bytes are a float32 scale.

    If a block has a value that is not finite, `unpack` returns NaN for the block. The scale is set to NaN explicitly:
    int8 of NaN is 0, and compilers may drop NaN from a maximum that is fused with other operations.
    """
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST
    scale = jnp.where(jnp.all(jnp.isfinite(x), axis=-1, keepdims=True), scale, jnp.nan)
    data = jnp.round(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return jnp.concatenate([data, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def unpack(data: jax.Array) -> jax.Array:
    """Dequantizes blocks of S elements, the result of `pack`: int8 [..., S + 4] -> float32 [..., S]."""
    scale = jax.lax.bitcast_convert_type(data[..., -SCALE_BYTES:], jnp.float32)[..., None]
    return data[..., :-SCALE_BYTES].astype(jnp.float32) * scale


def compressed_sum(
    x: jax.Array, residual: jax.Array | None, options: CompressionOptions, axis: str, dim: int = 0
) -> tuple[jax.Array, jax.Array | None]:
    """Sums an array over a manual axis with compression.

    Args:
      x: this device's input, float32 of any shape.
      residual: the unsent part of earlier sums, with the shape of `x`; None without error feedback.
      options: the options; `name` is int8 or topk.
      axis: a manual axis of the mesh, or an axis name of `jax.vmap`.
      dim: the dim to scatter, counted from the end (-1 is the last): each device gets its shard of the sum along this
        dim, whose size n must divide. 0: every device gets the complete sum, bitwise equal.

    Returns:
      The sum, float32, and the residual for the next sum. The residual is None if `residual` is None.
    """
    num_devices = jax.lax.axis_size(axis)
    total = x if residual is None else x + residual
    rows = _rows(total, num_devices, dim)
    num_elements = rows.shape[1]
    blocks = jnp.pad(rows, ((0, 0), (0, -num_elements % options.block))).reshape(num_devices, -1, options.block)
    if options.name == "int8":
        reduced, sent = _by_int8(blocks, axis, is_scattered=dim != 0)
    else:
        reduced, sent = _by_largest(blocks, options.kept, axis, is_scattered=dim != 0)
    trimmed = reduced.reshape(*reduced.shape[:-2], -1)[..., :num_elements]
    if dim == 0:
        result = _from_rows(trimmed, x.shape, 0)
    else:
        shape = list(x.shape)
        shape[dim] //= num_devices
        result = trimmed.reshape(shape)
    if residual is None:
        return result, None
    return result, _from_rows((blocks - sent).reshape(num_devices, -1)[:, :num_elements], x.shape, dim)


def compressed_sums(
    leaves: Sequence[jax.Array],
    residuals: Sequence[jax.Array | None],
    dims: Sequence[int],
    options: CompressionOptions,
    axis: str,
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Sums several arrays over a manual axis with compression; small arrays are sent together.

    Arrays below `SMALL_BYTES` with dim 0 are concatenated. Each is padded to a multiple of the block size, so that no
    two arrays share a scale.

    Args:
      leaves: this device's inputs, float32 of any shapes.
      residuals: the unsent parts of earlier sums, in the shapes of `leaves`; all None without error feedback.
      dims: for each array the dim to scatter, counted from the end; 0: every device gets the complete sum.
      options: the options; `name` is int8 or topk.
      axis: a manual axis of the mesh, or an axis name of `jax.vmap`.

    Returns:
      The sums, float32, and the residuals for the next sums (None if the residual is None).
    """
    together = [i for i, leaf in enumerate(leaves) if dims[i] == 0 and leaf.nbytes < SMALL_BYTES]
    sums, left = list(leaves), list(residuals)
    for i, leaf in enumerate(leaves):
        if i not in together:
            sums[i], left[i] = compressed_sum(leaf, residuals[i], options, axis, dims[i])
    if together:
        joined = _join([leaves[i] for i in together], options.block)
        waiting = [one for i in together if (one := residuals[i]) is not None]
        before = _join(waiting, options.block) if waiting else None
        total, after = compressed_sum(joined, before, options, axis)
        start = 0
        for i in together:
            shape, end = leaves[i].shape, start + leaves[i].size
            sums[i] = total[start:end].reshape(shape)
            left[i] = None if after is None else after[start:end].reshape(shape)
            start = end + -end % options.block
    return sums, left


def _join(leaves: Sequence[jax.Array], block: int) -> jax.Array:
    """Concatenates flattened arrays, each padded with zeros to a multiple of the block size."""
    return jnp.concatenate([jnp.pad(leaf.reshape(-1), (0, -leaf.size % block)) for leaf in leaves])


def _rows(x: jax.Array, n: int, dim: int) -> jax.Array:
    """Splits an array into n rows with R elements each, [n, R], one row for each device.

    Args:
      x: an array of any shape.
      n: the number of rows.
      dim: the dim along which the array is split, counted from the end (-1 is the last); n divides its size. Each row
        is one flattened shard. 0: the flattened array is padded with zeros to a multiple of n, and split.
    """
    if dim == 0:
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
    at = x.ndim + dim
    parts = x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])
    return jnp.moveaxis(parts, at, 0).reshape(n, -1)


def _from_rows(rows: jax.Array, shape: Sequence[int], dim: int) -> jax.Array:
    """Joins n rows with R elements each into one array; the inverse of `_rows`.

    Args:
      rows: the rows [n, R], one for each device.
      shape: the shape of the result.
      dim: the dim along which `_rows` split the array, counted from the end (-1 is the last): each row is one flattened
        shard. 0: the rows are the flattened array, with padding at the end, which is dropped.
    """
    if dim == 0:
        return rows.reshape(-1)[: math.prod(shape)].reshape(shape)
    n, at = rows.shape[0], len(shape) + dim
    parts = rows.reshape(n, *shape[:at], shape[at] // n, *shape[at + 1 :])
    return jnp.moveaxis(parts, 0, at).reshape(shape)


def _by_int8(blocks: jax.Array, axis: str, *, is_scattered: bool) -> tuple[jax.Array, jax.Array]:
    """Sums blocks over an axis; devices send them as int8 with a scale for each block.

    Args:
      blocks: this device's input, float32 [n, blocks, S]: n rows (one for each device) of blocks with S elements.
      axis: the name of a manual axis.
      is_scattered: whether to return only this device's row of the sum.

    Returns:
      The sum, float32 [n, blocks, S], or this device's row of it, [blocks, S]; and the part of the input that this
      device sent, float32 [n, blocks, S].
    """
    packed = pack(blocks)
    row = jnp.sum(unpack(jax.lax.all_to_all(packed, axis, 0, 0, tiled=True)), axis=0)
    sent = unpack(packed)
    if is_scattered:
        return row, sent
    reduced = pack(row)
    # The rounding error of packing the summed row is treated as unsent, so that it goes into this device's residual.
    sent = sent.at[jax.lax.axis_index(axis)].add(unpack(reduced) - row)
    return unpack(jax.lax.all_gather(reduced, axis)), sent


def _by_largest(blocks: jax.Array, num_kept: int, axis: str, *, is_scattered: bool) -> tuple[jax.Array, jax.Array]:
    """Sums blocks over an axis; for each block a device sends K bfloat16 values and their uint16 indices.

    Args:
      blocks: this device's input, float32 [n, blocks, S]: n rows (one for each device) of blocks with S elements.
      num_kept: K, the number of elements per block that are sent: the elements with the largest magnitudes.
      axis: the name of a manual axis.
      is_scattered: whether to return only this device's row of the sum.

    Returns:
      The sum, float32 [n, blocks, S], or this device's row of it, [blocks, S]; and the part of the input that this
      device sent, float32 [n, blocks, S].
    """
    each = blocks.reshape(-1, blocks.shape[-1])
    _, places = jax.lax.top_k(jnp.abs(each), num_kept)
    values = jnp.take_along_axis(each, places, axis=-1).astype(jnp.bfloat16)
    pairs = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.uint16), places.astype(jnp.uint16)], axis=-1)
    at = jnp.arange(each.shape[0])[:, None]

    # The lists are added in sequence: indices within a list are unique, so the order of additions is fixed. If all
    # lists were added at once, a GPU could add in any order, and the replicas' weights would diverge.
    def add(total: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
        theirs = jax.lax.bitcast_convert_type(one[..., 0], jnp.bfloat16).astype(jnp.float32)
        return total.at[at, one[..., 1].astype(jnp.int32)].add(theirs, unique_indices=True), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(each), jax.lax.all_gather(pairs, axis))
    sent = jnp.zeros_like(each).at[at, places].set(values.astype(jnp.float32), unique_indices=True)
    total, sent = total.reshape(blocks.shape), sent.reshape(blocks.shape)
    return (total[jax.lax.axis_index(axis)] if is_scattered else total), sent
