"""Checks whether the rules and the ZeRO level can shard weights on a mesh: one line for each reason why they cannot.

The checks read only shapes, logical axes and rules, so they hold for any task and any table of rules.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.layout.axes import DATA
from meshtrain.layout.partition import STACKED, Names, axes_of_dims, is_names, name_problems, num_parts, uneven_dims
from meshtrain.layout.placement import axes_in
from meshtrain.layout.rules import Rules
from meshtrain.layout.stored import stored
from meshtrain.layout.trees import leaves_with_paths, num_bytes
from meshtrain.words.errors import nearest
from meshtrain.words.numbers import divisors, nearest_divisor, nearest_multiple

# The largest share of the bytes of all matrices that fsdp, or data at a ZeRO level, may leave unsharded.
MOST_WHOLE = 0.01
MOST_NAMED = 3  # weights that a line lists

# Logical axis -> (key in the configuration, value): the option whose value, or a multiple of it, is the dim's size.
SizeOptions = Mapping[str, tuple[str, int]]


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Dims of one logical axis and one size, in one weight or several, that their mesh axes do not divide.

    Attributes:
      name: the logical axis.
      size: the size of the dims.
      axes: the mesh axes that would split them, without those of size 1.
      weights: path and shape of each weight.
      dim: the index of the dim in the first weight.
    """

    name: str
    size: int
    axes: tuple[str, ...]
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    dim: int


def problems(
    abstract: Any,
    axes_tree: Any,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    level: int,
    *,
    options: SizeOptions | None = None,
    trained: Any = None,
    elsewhere: Sequence[str] = (),
) -> list[str]:
    """Returns one line for each reason why a tree of weights cannot be stored as the rules and the level say.

    Args:
      abstract: arrays or `jax.ShapeDtypeStruct`s.
      axes_tree: the same structure; each leaf is a tuple with a logical axis or None for each dim.
      rules: the table, with the storage axes of the level (`zero.rules_of_level`).
      mesh_shape: the size of each mesh axis.
      level: of ZeRO.
      options: which option sizes the dims of a logical axis, so that lines name it; None: lines name weights alone.
      trained: a tree of bool like `abstract`, true for each weight with gradients and moments; None: all.
      elsewhere: logical axes that are left out of the check of sizes, because the caller checks them.
    """
    lines = unnamed(abstract, axes_tree, rules, mesh_shape)
    if lines:
        return lines
    groups = uneven(abstract, axes_tree, rules, mesh_shape)
    if any(group.name in elsewhere for group in groups):
        groups = [group for group in groups if group.name not in elsewhere]
        if not groups:
            return []
    if groups:
        legal = _legal_sizes(abstract, axes_tree, rules, mesh_shape)
        return [_uneven_line(group, mesh_shape, legal, options or {}) for group in groups]
    return left_whole(abstract, axes_tree, rules, mesh_shape, level, trained=trained)


def unnamed(abstract: Any, axes_tree: Any, rules: Rules, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each problem with logical axes, independent of sizes; for the arguments see `problems`.

    The problems are: an array without logical axes, axes without an array, unknown names, a mesh axis that splits two
    dims of one array, and a user's rule that matches no array.
    """
    arrays = dict(leaves_with_paths(abstract))
    axes = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    lines = []
    for path, array in arrays.items():
        names = axes[path] if path in axes else None
        if is_names(names):
            lines += name_problems(path, array.shape, names, rules.parameters, mesh_shape)
            continue
        said = "has no logical axes" if names is None else f"got logical axes {names!r}"
        replicated = (None,) * len(array.shape)
        lines.append(
            f"{path}: shape {tuple(array.shape)}: {said}; allowed: a tuple with a name or None for each dim; "
            f"nearest: {replicated} (replicated on each device)"
        )
    lines += [
        f"{path}: got logical axes {names}, but there is no such array; allowed: paths of arrays{nearest(path, arrays)}"
        for path, names in axes.items()
        if path not in arrays and names != ()
    ]
    used = {name for names in axes.values() if is_names(names) for name in names if name is not None}
    # A user's rule that matches no weight is probably misspelt, and the weight it was meant for would be replicated.
    lines += [
        f"rule '{name}' -> {' x '.join(f'{axis} (size {mesh_shape[axis]})' for axis in rules.parameters[name])}: "
        f"matches no array; allowed: {', '.join(sorted(used)) or 'none'}{nearest(name, used)}"
        for name in rules.own
        if rules.parameters[name] and name not in used
    ]
    return lines


def _named(abstract: Any, axes_tree: Any) -> list[tuple[str, Any, Names]]:
    """Returns (path, array, logical axes) for each array of a tree in which `unnamed` has no problems."""
    axes = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    return [(path, array, axes[path]) for path, array in leaves_with_paths(abstract)]


def uneven(abstract: Any, axes_tree: Any, rules: Rules, mesh_shape: Mapping[str, int]) -> list[Uneven]:
    """Returns the dims that the mesh does not divide, grouped by logical axis and size; see `problems`."""
    groups: dict[tuple[str, int], list[tuple[str, tuple[int, ...], int]]] = {}
    for path, array, names in _named(abstract, axes_tree):
        for dim in uneven_dims(array.shape, names, rules.parameters, mesh_shape):
            name = names[dim]
            assert name is not None
            groups.setdefault((name, array.shape[dim]), []).append((path, tuple(array.shape), dim))
    return [
        Uneven(
            name,
            size,
            tuple(axis for axis in rules.parameters[name] if mesh_shape[axis] > 1),
            tuple((path, shape) for path, shape, _ in held),
            held[0][2],
        )
        for (name, size), held in groups.items()
    ]


def _legal_sizes(abstract: Any, axes_tree: Any, rules: Rules, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Returns for each mesh axis a number whose divisors, as its size, split every weight evenly; 0: any size does.

    The sizes of the other axes are those of `mesh_shape`.
    """
    common = dict.fromkeys(mesh_shape, 0)
    for _, array, names in _named(abstract, axes_tree):
        for size, name in zip(array.shape, names, strict=True):
            split = rules.parameters[name] if name is not None else ()
            for axis in split:
                others = num_parts([other for other in split if other != axis], mesh_shape)
                common[axis] = math.gcd(common[axis], size // math.gcd(size, others))
    return common


def _uneven_line(group: Uneven, mesh_shape: Mapping[str, int], legal: Mapping[str, int], options: SizeOptions) -> str:
    parts = num_parts(group.axes, mesh_shape)
    more = f" and {len(group.weights) - 1} more" if len(group.weights) > 1 else ""
    path, shape = group.weights[0]
    over = " x ".join(f"mesh.{axis} = {mesh_shape[axis]}" for axis in group.axes)
    if len(group.axes) == 1:
        change = f"mesh.{group.axes[0]}={nearest_divisor(legal[group.axes[0]], mesh_shape[group.axes[0]])}"
    else:
        change = f"{' x '.join(f'mesh.{axis}' for axis in group.axes)} = {nearest_divisor(group.size, parts)}"
    if group.name in options and group.size % options[group.name][1] == 0:
        key, value = options[group.name]
        made = "" if value == group.size else f", which makes {group.size},"
        return (
            f"{key}: got {value}{made} for dim '{group.name}' of {path}{more}; allowed: a multiple of {parts}, as it "
            f"is split over {over}; nearest: {nearest_multiple(value, parts)}, or {change}"
        )
    return (
        f"{path}{more}: shape {shape}: dim {group.dim} has size {group.size}, and rule '{group.name}' splits it over "
        f"{over}; allowed: multiples of {parts}; nearest: {nearest_multiple(group.size, parts)}, or {change}"
    )


def left_whole(
    abstract: Any,
    axes_tree: Any,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    level: int,
    *,
    trained: Any = None,
) -> list[str]:
    """Returns one line for each mesh axis that leaves too many bytes unsharded: fsdp, and data from ZeRO level 1 on.

    Such an axis may leave at most `MOST_WHOLE` of the bytes of all matrices unsharded. Norms and biases do not count.
    For fsdp, weights with a dim that one of the user's own rules names count as sharded, because the user chose their
    sharding. For the arguments see `problems`. The tree has to be free of other problems.
    """
    lines = []
    matrices = [one for one in _named(abstract, axes_tree) if _is_matrix(one[2])]
    for axis in rules.storage_axes:
        if axis != DATA and mesh_shape[axis] > 1:
            chosen = [one for one in matrices if not set(one[2]) & set(rules.own)]
            whole = [one for one in chosen if axis not in _axes_of(one, rules, mesh_shape, 0)]
            if _share(whole, matrices) > MOST_WHOLE:
                lines.append(
                    f"mesh.{axis}: got {mesh_shape[axis]}, and no rule splits {_listed(whole)} over {axis}: "
                    f"{_share(whole, matrices):.0%} of the bytes of all matrices would be whole on each device; "
                    f"allowed: at most {MOST_WHOLE:.0%}; nearest: mesh.{axis}=1, or a dim with the logical axis 'embed'"
                )
    if level > 0 and mesh_shape[DATA] > 1:
        if trained is not None and level < 3:
            flags = dict(leaves_with_paths(trained))
            matrices = [one for one in matrices if flags[one[0]]]
        lines += _left_whole_by_data(matrices, rules, mesh_shape, level)
    return lines


def _left_whole_by_data(
    matrices: Sequence[tuple[str, Any, Names]], rules: Rules, mesh_shape: Mapping[str, int], level: int
) -> list[str]:
    def whole_on(size: int) -> list[tuple[str, Any, Names]]:
        shape = {**mesh_shape, DATA: size}
        return [one for one in matrices if size > 1 and DATA not in _axes_of(one, rules, shape, level)]

    size = mesh_shape[DATA]
    whole = whole_on(size)
    if _share(whole, matrices) <= MOST_WHOLE:
        return []
    path, array, names = max(whole, key=lambda one: num_bytes(one[1]))
    what = {1: "moments", 2: "moments and sums of gradients", 3: "weights, gradients and moments"}[level]
    dims = axes_of_dims(stored(array.shape, names, rules, mesh_shape, 0).parameter, len(array.shape))
    local = [size // num_parts(axes, mesh_shape) for size, axes in zip(array.shape, dims, strict=True)]
    sizes = sorted(
        {n for dim, name in zip(local, names, strict=True) if name not in STACKED for n in divisors(dim)},
        key=lambda n: (abs(n - size), -n),
    )
    legal = next((n for n in sizes if _share(whole_on(n), matrices) <= MOST_WHOLE), 1)
    dim = next(i for i, name in enumerate(names) if name not in STACKED)
    unit = size * array.shape[dim] // local[dim]
    mended = (*array.shape[:dim], nearest_multiple(array.shape[dim], unit), *array.shape[dim + 1 :])
    return [
        f"mesh.data: got {size} at ZeRO level {level}, and {size} divides no dim of {_listed(whole)}: the {what} of "
        f"{_share(whole, matrices):.0%} of the bytes of all matrices would be whole on each device; "
        f"allowed: at most {MOST_WHOLE:.0%}; nearest: mesh.data={legal}, or {path} of shape {mended}"
    ]


def _axes_of(one: tuple[str, Any, Names], rules: Rules, mesh_shape: Mapping[str, int], level: int) -> tuple[str, ...]:
    """Returns the mesh axes that split the moments of a weight."""
    path, array, names = one
    return axes_in(stored(array.shape, names, rules, mesh_shape, level, path).moment)


def _is_matrix(names: Names) -> bool:
    """Returns whether a weight has at least two feature dims.

    Heads and the head_dim after them count as one dim. Dims that stack layers do not count.
    """
    features = 0
    for name in names:
        features += name not in STACKED and not (name == "head_dim" and features)
    return features >= 2


def _share(some: Sequence[tuple[str, Any, Names]], every: Sequence[tuple[str, Any, Names]]) -> float:
    total = sum(num_bytes(array) for _, array, _ in every)
    return sum(num_bytes(array) for _, array, _ in some) / total if total else 0.0


def _listed(weights: Sequence[tuple[str, Any, Names]]) -> str:
    """Returns the largest weights by path and shape, and how many more there are."""
    largest = sorted(weights, key=lambda one: -num_bytes(one[1]))
    text = ", ".join(f"{path} {tuple(array.shape)}" for path, array, _ in largest[:MOST_NAMED])
    more = len(largest) - MOST_NAMED
    return f"{text} and {more} more" if more > 0 else text
