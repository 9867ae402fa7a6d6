"""Logical axes and rules -> the sharding of one array.

A sharding that is impossible raises a UserError. There is no fallback to replication, which would cost memory and
communication without notice.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.layout.rules import Rules
from meshtrain.words.errors import UserError, unknown

Names = tuple[str | None, ...]
Column = Mapping[str, tuple[str, ...]]

# Logical axes of dims that stack the weights of several layers in one array.
STACKED = ("chunks", "layers")
# Logical axis of a dim of experts in what chooses them.
ROUTER = "router"


def problems(path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each reason why an array cannot be split as the rules say; none if it can.

    Args:
      path: what the array is called in the lines.
      shape: its shape.
      names: a logical axis for each dim; None keeps the dim whole.
      column: logical axis -> mesh axes: one column of the rules.
      mesh_shape: the size of each mesh axis.
    """
    lines = name_problems(path, shape, names, column, mesh_shape)
    if len(names) != len(shape):
        return lines
    where = f"{path}: shape {tuple(shape)}"
    for dim in uneven_dims(shape, names, column, mesh_shape):
        name = names[dim]
        assert name is not None
        lines.append(_uneven(f"{where}: dim {dim}", shape[dim], name, column[name], mesh_shape))
    return lines


def name_problems(
    path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]
) -> list[str]:
    """Returns one line for each problem with the names: unknown, too few, too many, or a mesh axis used twice.

    For the arguments see `problems`.
    """
    where = f"{path}: shape {tuple(shape)}"
    if len(names) != len(shape):
        fitted = (tuple(names) + (None,) * len(shape))[: len(shape)]
        return [
            f"{where}: got {len(names)} logical axes {tuple(names)} for {len(shape)} dims; "
            f"allowed: one for each dim; nearest: {fitted}"
        ]
    lines = []
    taken: dict[str, int] = {}
    for dim, name in enumerate(names):
        if name is None:
            continue
        if name not in column:
            lines.append(unknown(f"{where}: logical axis of dim {dim}", name, tuple(column)))
            continue
        shared = [axis for axis in column[name] if axis in taken]
        for axis in column[name]:
            if axis in shared[:1]:  # axes that split two dims together are one mistake
                freed = tuple(None if i == dim else n for i, n in enumerate(names))
                lines.append(
                    f"{where}: mesh axis '{axis}' (size {mesh_shape[axis]}) would split both dim {taken[axis]} "
                    f"'{names[taken[axis]]}' and dim {dim} '{name}'; allowed: one dim of an array for each mesh axis; "
                    f"nearest: {freed}"
                )
            taken.setdefault(axis, dim)
    return lines


def uneven_dims(shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]) -> list[int]:
    """Returns the dims of an array that their mesh axes do not divide; unknown names are skipped."""
    return [
        dim
        for dim, (size, name) in enumerate(zip(shape, names, strict=True))
        if name is not None and name in column and size % num_parts(column[name], mesh_shape)
    ]


def num_parts(axes: Sequence[str], mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of shards over some mesh axes: the product of their sizes."""
    return math.prod(mesh_shape[axis] for axis in axes)


def _uneven(where: str, size: int, name: str, axes: Sequence[str], mesh_shape: Mapping[str, int]) -> str:
    parts = num_parts(axes, mesh_shape)
    over = " x ".join(f"{axis} (size {mesh_shape[axis]})" for axis in axes)
    multiple = max(parts, (size + parts // 2) // parts * parts)
    fits = max(n for n in range(1, parts + 1) if size % n == 0)
    change = f"{axes[0]}={fits}" if len(axes) == 1 else f"{' x '.join(axes)} = {fits}"
    return (
        f"{where} has size {size}, and rule '{name}' splits it over {over}; allowed: multiples of {parts}; "
        f"nearest: {multiple}, or {change}"
    )


def spec(path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Returns the spec of one array.

    It has no mesh axes of size 1 and no trailing None, so equal shardings have equal specs.

    Args:
      path: what the array is called in an error.
      shape: its shape.
      names: a logical axis for each dim; None keeps the dim whole.
      column: logical axis -> mesh axes: `rules.parameters`, `.activations` or `.gathered`.
      mesh_shape: the size of each mesh axis.

    Raises:
      UserError: see `problems`.
    """
    lines = problems(path, shape, names, column, mesh_shape)
    if lines:
        raise UserError(*lines)
    return _spec(names, column, [axis for axis in mesh_shape if mesh_shape[axis] > 1])


def _spec(names: Names, column: Column, axes: Sequence[str]) -> PartitionSpec:
    """Returns the spec of names without problems, restricted to the mesh axes `axes`."""
    return spec_of_dims(
        [tuple(axis for axis in (column[name] if name is not None else ()) if axis in axes) for name in names]
    )


def spec_of_dims(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Returns the spec with these mesh axes for each dim, without trailing None: equal shardings have equal specs."""
    parts = [names[0] if len(names) == 1 else names or None for names in axes]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def axes_of_dims(spec: PartitionSpec, num_dims: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that split each dim of an array, () for none."""
    parts = (*spec, *(None,) * (num_dims - len(spec)))
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in parts]


def is_names(leaf: Any) -> TypeGuard[Names]:
    """Returns whether a node of a tree is the logical axes of one array, and not a container such as a namedtuple."""
    return type(leaf) is tuple and all(name is None or isinstance(name, str) for name in leaf)


def activation_sharding(
    shape: Sequence[int], names: Names, rules: Rules, mesh: Mesh, path: str = "activation"
) -> NamedSharding:
    """Returns the sharding of an activation or an input by the activation rules.

    Raises:
      UserError: see `problems`.
    """
    return NamedSharding(mesh, spec(path, shape, names, rules.activations, mesh.shape))
