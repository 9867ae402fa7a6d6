"""Reports why a pytree of weights cannot be stored according to rules and ZeRO level, with the nearest legal choice."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshtrain.errors import Problem, divisors, nearest, nearest_multiple
from meshtrain.sharding.param_sharding import (
    PARAMETERS_LEVEL,
    STACKED,
    Names,
    SizeOptions,
    axes_in,
    axes_of_dims,
    is_names,
    name_problems,
    num_parts,
    param_sharding,
    uneven_dims,
    uneven_line,
)
from meshtrain.sharding.rules import DATA, Rules
from meshtrain.sharding.trees import Arrays, Masks, NamesTree, Shaped, leaves_with_paths, num_bytes

# The maximum share of the bytes of all matrices that fsdp, or data at a ZeRO level, may leave unsharded.
MOST_WHOLE = 0.01
MOST_NAMED = 3  # number of weights that an error line lists


class _Weight(NamedTuple):
    path: str
    array: Shaped
    names: Names


def tree_problems(
    abstract: Arrays,
    axes_tree: NamesTree,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    level: int,
    *,
    options: SizeOptions | None = None,
    trained: Masks = None,
    elsewhere: Sequence[str] = (),
) -> list[Problem]:
    """Returns an error line for each reason why weights cannot be stored according to the rules and the ZeRO level.

    Args:
      abstract: a pytree of arrays or `jax.ShapeDtypeStruct`s, the weights.
      axes_tree: a pytree of the same structure; each leaf is a tuple with a logical axis or None for each dim.
      rules: the table of rules, with the storage axes of the level (`rules_of_level`).
      mesh_shape: the size of each mesh axis.
      level: the ZeRO level.
      options: logical axis -> (key, value) of the option that sets the size of its dims; the error lines then name this
        option. None: error lines name only weights.
      trained: a pytree of bool with the structure of `abstract`, true for each weight with gradients and moments; None:
        all weights are trained.
      elsewhere: logical axes that the caller checks: no line is returned if the mesh does not divide the size of a dim
        with such an axis.
    """
    if lines := _axis_problems(abstract, axes_tree, rules, mesh_shape):
        return lines
    weights = _weights(abstract, axes_tree)
    # (logical axis, size) -> (weight, index of the dim) for all weights with a dim that its mesh axes do not divide.
    uneven: dict[tuple[str, int], list[tuple[_Weight, int]]] = {}
    for one in weights:
        for dim, name in uneven_dims(one.array.shape, one.names, rules.parameters, mesh_shape):
            uneven.setdefault((name, one.array.shape[dim]), []).append((one, dim))
    if uneven:
        legal = _legal_sizes(weights, rules, mesh_shape)
        for (name, _), held in uneven.items():
            if name not in elsewhere:
                (path, array, _), dim = held[0]
                path += f" and {len(held) - 1} more" if len(held) > 1 else ""
                lines.append(uneven_line(path, array.shape, dim, name, rules.parameters, mesh_shape, legal, options))
        return lines
    matrices = [one for one in weights if _is_matrix(one.names)]
    lines = _unsharded_by_rules(matrices, rules, mesh_shape)
    if level > 0 and mesh_shape[DATA] > 1:
        if trained is not None and level < PARAMETERS_LEVEL:
            flags = dict(leaves_with_paths(trained))
            matrices = [one for one in matrices if flags[one.path]]
        lines += _unsharded_by_data(matrices, rules, mesh_shape, level)
    return lines


def _axis_problems(
    abstract: Arrays, axes_tree: NamesTree, rules: Rules, mesh_shape: Mapping[str, int]
) -> list[Problem]:
    """Returns an error line for each problem of logical axes that is independent of sizes.

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
        text = "has no logical axes" if names is None else f"got logical axes {names!r}"
        replicated = (None,) * len(array.shape)
        lines.append(
            Problem(
                path,
                fault=f"shape {tuple(array.shape)}: {text}",
                allowed="a tuple with a name or None for each dim",
                nearest=f"{replicated} (replicated on each device)",
            )
        )
    lines += [
        Problem(
            path,
            got=f"logical axes {names}, but there is no array with this path",
            allowed="paths of arrays",
            fix=nearest(path, arrays),
        )
        for path, names in axes.items()
        if path not in arrays and names != ()
    ]
    used = {name for names in axes.values() if is_names(names) for name in names if name is not None}
    # A user's rule that matches no weight is probably misspelt, and the intended weight would be replicated.
    lines += [
        Problem(
            f"rule '{name}' -> {' x '.join(f'{axis} (size {mesh_shape[axis]})' for axis in rules.parameters[name])}",
            fault="matches no array",
            allowed=", ".join(sorted(used)) or "none",
            fix=nearest(name, used),
        )
        for name in rules.own
        if rules.parameters[name] and name not in used
    ]
    return lines


def _weights(abstract: Arrays, axes_tree: NamesTree) -> list[_Weight]:
    """Returns each weight of a pytree with its path and logical axes, in the order of `jax.tree.leaves`.

    Call it only if `_axis_problems` returned no problems: then every weight has logical axes.
    """
    axes = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    return [_Weight(path, array, axes[path]) for path, array in leaves_with_paths(abstract)]


def _legal_sizes(weights: Sequence[_Weight], rules: Rules, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Returns mesh axis -> the largest size of this axis that splits every weight evenly; 0 means any size.

    Each divisor of the result splits every weight evenly too. All other axes are assumed to have the sizes in
    `mesh_shape`.
    """
    common = dict.fromkeys(mesh_shape, 0)
    for one in weights:
        for size, name in zip(one.array.shape, one.names, strict=True):
            split = rules.parameters[name] if name is not None else ()
            for axis in split:
                others = num_parts([other for other in split if other != axis], mesh_shape)
                common[axis] = math.gcd(common[axis], size // math.gcd(size, others))
    return common


def _unsharded_by_rules(matrices: Sequence[_Weight], rules: Rules, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each storage axis that leaves more than 1 % of the matrices' bytes unsharded.

    The data axis is not checked here (`_unsharded_by_data`).

    Weights with a dim that a user's rule names are treated as sharded, because the user chose their sharding.

    Args:
      matrices: all weights except norms and biases.
      rules: the table of rules.
      mesh_shape: the size of each mesh axis.
    """
    lines = []
    for axis in rules.storage_axes:
        if axis != DATA and mesh_shape[axis] > 1:
            chosen = [one for one in matrices if not set(one.names) & set(rules.own)]
            whole = [one for one in chosen if axis not in _axes_of(one, rules, mesh_shape, 0)]
            if _share(whole, matrices) > MOST_WHOLE:
                lines.append(
                    Problem(
                        f"mesh.{axis}",
                        got=(
                            f"{mesh_shape[axis]}, but no rule splits {_list_weights(whole)} over {axis}: "
                            f"{_share(whole, matrices):.0%} of the bytes of all matrices would be replicated on each "
                            "device"
                        ),
                        allowed=f"at most {MOST_WHOLE:.0%}",
                        nearest=f"mesh.{axis}=1, or a dim with the logical axis 'embed'",
                    )
                )
    return lines


def _unsharded_by_data(
    matrices: Sequence[_Weight], rules: Rules, mesh_shape: Mapping[str, int], level: int
) -> list[Problem]:
    """Returns an error line if the data axis leaves more than 1 % of the matrices' bytes unsharded, else [].

    Args:
      matrices: the weights that the level shards, except norms and biases.
      rules: the table of rules.
      mesh_shape: the size of each mesh axis.
      level: the ZeRO level, 1 to 3.
    """

    def whole_on(size: int) -> list[_Weight]:
        shape = {**mesh_shape, DATA: size}
        return [one for one in matrices if size > 1 and DATA not in _axes_of(one, rules, shape, level)]

    size = mesh_shape[DATA]
    whole = whole_on(size)
    if _share(whole, matrices) <= MOST_WHOLE:
        return []
    path, array, names = max(whole, key=lambda one: num_bytes(one.array))
    what = {1: "moments", 2: "moments and gradient sums", 3: "weights, gradients and moments"}[level]
    dims = axes_of_dims(param_sharding(array.shape, names, rules, mesh_shape, 0).parameter, len(array.shape))
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
        Problem(
            "mesh.data",
            got=(
                f"{size} at ZeRO level {level}, but {size} divides no dim of {_list_weights(whole)}: the {what} of "
                f"{_share(whole, matrices):.0%} of the bytes of all matrices would be replicated on each device"
            ),
            allowed=f"at most {MOST_WHOLE:.0%}",
            nearest=f"mesh.data={legal}, or {path} of shape {mended}",
            depends_on=["zero.level", "zero.strategy"],
        )
    ]


def _axes_of(one: _Weight, rules: Rules, mesh_shape: Mapping[str, int], level: int) -> tuple[str, ...]:
    """Returns the mesh axes that split the moments of a weight at a ZeRO level."""
    return axes_in(param_sharding(one.array.shape, one.names, rules, mesh_shape, level, one.path).moment)


def _is_matrix(names: Names) -> bool:
    """Returns whether a weight has at least two feature dims.

    Heads and a head_dim directly after them count as one dim. Dims that stack layers do not count.
    """
    features = 0
    for name in names:
        features += name not in STACKED and not (name == "head_dim" and features)
    return features >= 2


def _share(some: Sequence[_Weight], every: Sequence[_Weight]) -> float:
    total = sum(num_bytes(one.array) for one in every)
    return sum(num_bytes(one.array) for one in some) / total if total else 0.0


def _list_weights(weights: Sequence[_Weight]) -> str:
    """Returns the paths and shapes of the largest weights as text, and the number of further weights."""
    largest = sorted(weights, key=lambda one: -num_bytes(one.array))
    text = ", ".join(f"{one.path} {tuple(one.array.shape)}" for one in largest[:MOST_NAMED])
    more = len(largest) - MOST_NAMED
    return f"{text} and {more} more" if more > 0 else text
