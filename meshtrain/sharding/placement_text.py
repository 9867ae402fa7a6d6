"""Shardings as text: a line for each array with its logical axes, its mesh axes and its bytes on a device."""

import dataclasses
import math
from collections.abc import Collection, Sequence

from meshtrain.cli.tables import align, format_bytes
from meshtrain.sharding.offload import is_on_host
from meshtrain.sharding.param_sharding import Names, axes_of_dims
from meshtrain.sharding.trees import Arrays, leaves_with_paths, num_bytes, shard_bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """The sharding of one array.

    Attributes:
      path: the array's path in its pytree, such as `layers/mlp/up`.
      shape: the array's global shape.
      dtype: the name of the array's dtype.
      names: the logical axis of each dim, or None.
      axes: the mesh axes that split each dim, without axes of size 1.
      num_bytes: the bytes of the global array.
      num_bytes_per_device: the bytes of one device's shard.
      is_on_host: whether the shards are in host memory.
      is_frozen: whether this is a weight that is not trained.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: Names
    axes: tuple[tuple[str, ...], ...]
    num_bytes: int
    num_bytes_per_device: int
    is_on_host: bool = False
    is_frozen: bool = False


def rows(abstract: Arrays, names: Sequence[Names], frozen: Collection[str] = ()) -> list[Row]:
    """Returns a table row for each array of a pytree, with its sharding.

    Args:
      abstract: a pytree of arrays or `jax.ShapeDtypeStruct`s with shardings.
      names: the logical axes of each array, in the order of `jax.tree.leaves`.
      frozen: the paths of weights that are not trained.
    """
    result = []
    for (path, array), axes in zip(leaves_with_paths(abstract), names, strict=True):
        sharding, shape = array.sharding, tuple(array.shape)
        split = [
            tuple(axis for axis in dim if sharding.mesh.shape[axis] > 1)
            for dim in axes_of_dims(sharding.spec, len(shape))
        ]
        on_host, dtype = is_on_host(sharding), str(array.dtype)
        result.append(
            Row(path, shape, dtype, axes, tuple(split), num_bytes(array), shard_bytes(array), on_host, path in frozen)
        )
    return result


def table(rows: Sequence[Row]) -> str:
    """Returns rows as an aligned text table: a line for each array, and a line with the totals.

    `-` means a dim without a logical axis, or a dim that is not split. `a+b` means a dim split over a, then over b.
    """
    header = ("array", "shape", "dtype", "logical axes", "split over", "a device")
    lines = [
        (
            row.path,
            " x ".join(map(str, row.shape)) or "scalar",
            row.dtype,
            " ".join(name or "-" for name in row.names),
            " ".join("+".join(part) or "-" for part in row.axes),
            format_bytes(row.num_bytes_per_device) + " on its host" * row.is_on_host + ", frozen" * row.is_frozen,
        )
        for row in rows
    ]
    num_elements = sum(math.prod(row.shape) for row in rows)
    total = format_bytes(sum(row.num_bytes for row in rows))
    on_device, on_host = (
        format_bytes(sum(row.num_bytes_per_device for row in rows if row.is_on_host == where))
        for where in (False, True)
    )
    beside = f", {on_host} for each device in host memory" if any(row.is_on_host for row in rows) else ""
    text = align(lines, header, align="<<<<<>")
    return f"{text}\n\n{len(rows)} arrays, {num_elements:,} elements, {total}; {on_device} on each device{beside}\n"
