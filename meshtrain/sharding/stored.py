"""Where each stored array lives, and why it cannot live there: one line with the nearest legal choice for each reason.

The rules split a weight over the mesh axes of its logical axes, in the same way at every level of ZeRO over the data
axis (Rajbhandari et al. 2020). The data axis replicates weights at level 0, and splits one more dim at higher levels:

    level   parameters   moments      sums of gradients   what crosses the network in a step of M microbatches
    0       replicated   replicated   replicated          gradients all-reduced once
    1       replicated   sharded      replicated          gradients reduce-scattered, new weights all-gathered, once
    2       replicated   sharded      sharded             gradients reduce-scattered M times, new weights gathered once
    3       sharded      sharded      sharded             weights gathered 2 M times, gradients reduce-scattered M times

Parameters are the master weights, float32 unless `precision.param_dtype` says otherwise. A pipeline that computes in 16
bits stores them sharded at levels 1 and 2 too, and gathers them in 16 bits before its first row
(`step.shardings.splits_masters`). The `fsdp` axis does what
level 3 does, over an axis of its own: its rules split every weight. `fsdp` inside a host with level 0 over `data`
across hosts is hybrid sharding.

There is no fallback to replication, which would cost memory and communication without notice. The checks read only
shapes, logical axes and rules, so they hold for any task and any table of rules.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from meshtrain.errors import divisors, nearest, nearest_divisor, nearest_multiple, refuse, unknown
from meshtrain.options import AllBut, option
from meshtrain.sharding.rules import DATA, Rules
from meshtrain.sharding.trees import Arrays, Masks, NamesTree, Shaped, Tree, leaves_with_paths, num_bytes, path_text

Names = tuple[str | None, ...]
Column = Mapping[str, tuple[str, ...]]
# Logical axis -> (key in the configuration, value): the option whose value, or a multiple of it, is the dim's size.
SizeOptions = Mapping[str, tuple[str, int]]
StoredTree: TypeAlias = Any  # leaves are `Stored`

# Logical axes of dims that stack the weights of several layers in one array.
STACKED = ("chunks", "layers", "first_layers")
# Logical axis of a dim of experts in what chooses them.
ROUTER = "router"

STRATEGIES = {"no_shard": 0, "hybrid_shard": 0, "shard_grad_op": 3, "full_shard": 3}
# The level from which on the data axis splits an array.
MOMENTS_LEVEL, GRADIENTS_LEVEL, PARAMETERS_LEVEL = 1, 2, 3
MAX_LEVEL = PARAMETERS_LEVEL
_OVER_DATA = {f"mesh.{DATA}": AllBut(1)}

# The largest share of the bytes of all matrices that fsdp, or data at a ZeRO level, may leave unsharded.
MOST_WHOLE = 0.01
MOST_NAMED = 3  # weights that a line lists


@dataclasses.dataclass(frozen=True)
class ZeroOptions:
    """What is sharded over the data axis."""

    level: int = option(
        0, "shards over data: 0 nothing, 1 moments, 2 also gradient sums, 3 also parameters", minimum=0,
        only_for=_OVER_DATA,
    )  # fmt: skip
    strategy: str = option(
        "", "the level by its name in PyTorch's FSDP; empty: zero.level", choices=("", *STRATEGIES), only_for=_OVER_DATA
    )

    @property
    def effective_level(self) -> int:
        """The level of `strategy`, or `level` where that is empty."""
        return STRATEGIES[self.strategy] if self.strategy else self.level

    @property
    def keeps_gathered(self) -> bool:
        """Whether the backward pass reuses the weights gathered in the forward pass instead of gathering them again."""
        return self.strategy == "shard_grad_op"


def level_problems(options: ZeroOptions, num_replicas: int, fsdp: int) -> list[str]:
    """Returns one line for each value that is not allowed, or not with the others.

    Args:
      options: each within its own bounds.
      num_replicas: the size of the data axis, or -1 where it is not known yet.
      fsdp: the size of the fsdp axis, likewise.
    """
    lines = []
    if options.level > MAX_LEVEL:
        lines.append(f"zero.level: got {options.level}; allowed: 0 to {MAX_LEVEL}; nearest: {MAX_LEVEL}")
    if options.strategy and options.level not in (0, options.effective_level):
        lines.append(
            f"zero.level: got {options.level} with zero.strategy = {options.strategy}, which is level "
            f"{options.effective_level}; allowed: one of the two; nearest: zero.level=0 (left to the strategy)"
        )
    if options.strategy == "hybrid_shard" and 1 in (num_replicas, fsdp):
        lines.append(
            f"zero.strategy: got hybrid_shard with mesh.data = {num_replicas} and mesh.fsdp = {fsdp}; allowed: both "
            "above 1 (weights split over fsdp, copied over data); nearest: zero.strategy=full_shard"
        )
    return lines


def rules_of_level(rules: Rules, level: int) -> Rules:
    """Returns the rules with the storage axes of a level: at level 3 data is one, as fsdp is at every level."""
    if level < MAX_LEVEL or DATA in rules.storage_axes:
        return rules
    return dataclasses.replace(rules, storage_axes=(*rules.storage_axes, DATA))


@dataclasses.dataclass(frozen=True)
class Stored:
    """The sharding of a weight and of the arrays that have its shape.

    Attributes:
      parameter: of the weight.
      gradient: of the float32 sum to which the gradient of each microbatch is added.
      moment: of the optimizer's moments, and of the gradient that the optimizer gets.
      num_dims: the weight's number of dims.
      data_dim: the dim that data splits in the arrays of the level, counted from the end (-1 is the last); 0: none.
    """

    parameter: PartitionSpec
    gradient: PartitionSpec
    moment: PartitionSpec
    num_dims: int
    data_dim: int = 0

    @classmethod
    def alike(cls, spec: PartitionSpec, num_dims: int) -> "Stored":
        """Returns one sharding for all three, as at level 0."""
        return cls(spec, spec, spec, num_dims)

    @property
    def is_scattered(self) -> bool:
        """Whether a replica gets one shard of the gradient: at levels 1 and 2, where data divides a dim."""
        return self.moment != self.parameter

    @property
    def scattered_dim(self) -> int:
        """The dim along which a replica gets its shard of the gradient, counted from the end; 0: it gets all of it."""
        return self.data_dim if self.is_scattered else 0


def stored(
    shape: Sequence[int],
    names: Names,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    level: int,
    path: str = "array",
) -> Stored:
    """Returns the sharding of a weight and of the arrays of its shape.

    Args:
      shape: of the weight, or of an array of the optimizer's state.
      names: a logical axis or None for each dim.
      rules: the table, whose column `parameters` is read.
      mesh_shape: the size of each mesh axis.
      level: of ZeRO.
      path: what the array is called in an error.

    Raises:
      UserError: see `array_problems`.
    """
    by_rules = spec(path, shape, names, rules.parameters, mesh_shape)
    dim = _data_dim(by_rules, shape, names, mesh_shape)
    if dim == 0:
        return Stored.alike(by_rules, len(shape))
    parts = axes_of_dims(by_rules, len(shape))
    parts[dim] = (*parts[dim], DATA)
    sharded = spec_of_dims(parts)
    parameter, gradient, moment = (
        sharded if level >= first else by_rules for first in (PARAMETERS_LEVEL, GRADIENTS_LEVEL, MOMENTS_LEVEL)
    )
    return Stored(parameter, gradient, moment, len(shape), dim)


def _data_dim(spec: PartitionSpec, shape: Sequence[int], names: Names, mesh_shape: Mapping[str, int]) -> int:
    """Returns the dim of an array that data splits, counted from the end; 0 for none.

    It is the first dim whose shard divides by the size of data. The dim that stacks layers is never split, because the
    layers are computed one after the other.
    """
    dims = axes_of_dims(spec, len(shape))
    if mesh_shape[DATA] == 1 or any(DATA in axes for axes in dims):
        return 0
    for dim, (size, name, axes) in enumerate(zip(shape, names, dims, strict=True)):
        if name not in STACKED and size % (num_parts(axes, mesh_shape) * mesh_shape[DATA]) == 0:
            return dim - len(shape)
    return 0


def named_params(init: Callable[[jax.Array], Arrays], *, on_one_device: bool = False) -> tuple[Arrays, NamesTree]:
    """Returns abstract parameters in layer order, and their logical axes; touches no device.

    JAX caches what it traces by the function: for the same `init` the model is traced once.

    Args:
      init: rng -> parameters; a leaf may be boxed with its logical axes.
      on_one_device: a leaf without a box then has a None for each dim; otherwise it has no axes (None).

    Raises:
      UserError: one line for each weight whose box has no tuple of names, such as an NNX variable without axes.
    """
    boxed = jax.eval_shape(init, _abstract_key())
    is_box = lambda leaf: isinstance(leaf, meta.AxisMetadata)  # noqa: E731
    params, problems = meta.unbox(boxed), list[str]()

    def names(path: KeyPath, leaf: Any) -> Names | None:
        if not is_box(leaf):
            return (None,) * leaf.ndim if on_one_device else None
        axes = tuple(leaf.names) if isinstance(leaf.names, tuple | list) else (0,)
        if not is_names(axes):
            shape = tuple(meta.unbox(leaf).shape)
            problems.append(
                f"{path_text(path)}: shape {shape}: got {leaf.names!r} as logical axes; allowed: a name or None for "
                f"each dim; nearest: {(None,) * len(shape)}"
            )
        return axes

    axes_tree = jax.tree_util.tree_map_with_path(names, boxed, is_leaf=is_box)
    refuse(problems)
    return params, axes_tree


@functools.cache
def _abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def stored_tree(
    abstract: Arrays, axes_tree: NamesTree, rules: Rules, mesh_shape: Mapping[str, int], level: int
) -> StoredTree:
    """Returns `Stored` for each weight of a tree; for the arguments see `tree_problems`.

    Raises:
      UserError: the first weight that cannot be split; `tree_problems` returns the problems of all weights.
    """
    leaves = [
        stored(array.shape, names, rules, mesh_shape, level, path) for path, array, names in _named(abstract, axes_tree)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def spec(path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Returns the spec of one array, without mesh axes of size 1: equal shardings have equal specs.

    For the arguments see `array_problems`; the column is `rules.parameters`, `.activations` or `.gathered`.

    Raises:
      UserError: see `array_problems`.
    """
    refuse(array_problems(path, shape, names, column, mesh_shape))
    dims = [column[name] if name is not None else () for name in names]
    return spec_of_dims([tuple(axis for axis in axes if mesh_shape[axis] > 1) for axes in dims])


def activation_sharding(
    shape: Sequence[int], names: Names, rules: Rules, mesh: Mesh, path: str = "activation"
) -> NamedSharding:
    """Returns the sharding of an activation or an input by the activation rules.

    Raises:
      UserError: see `array_problems`.
    """
    return NamedSharding(mesh, spec(path, shape, names, rules.activations, mesh.shape))


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


def split_elsewhere(
    spec: PartitionSpec, shape: Sequence[int], axes: tuple[str, ...], mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    """Returns a spec with these mesh axes added to the first dim whose shards they divide; the same where none is."""
    dims = axes_of_dims(spec, len(shape))
    for dim, (size, split) in enumerate(zip(shape, dims, strict=True)):
        if size % num_parts((*split, *axes), mesh_shape) == 0:
            return spec_of_dims([*dims[:dim], (*split, *axes), *dims[dim + 1 :]])
    return spec


def axes_in(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes in a spec, in their order."""
    return tuple(axis for dim in axes_of_dims(spec, len(spec)) for axis in dim)


def num_parts(axes: Sequence[str], mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of shards over some mesh axes: the product of their sizes."""
    return math.prod(mesh_shape[axis] for axis in axes)


def is_names(leaf: Tree) -> TypeGuard[Names]:
    """Returns whether a node of a tree is the logical axes of one array, and not a container such as a namedtuple."""
    return type(leaf) is tuple and all(name is None or isinstance(name, str) for name in leaf)


def array_problems(
    path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]
) -> list[str]:
    """Returns one line for each reason why an array cannot be split as the rules say; none if it can.

    Args:
      path: what the array is called in the lines.
      shape: its shape.
      names: a logical axis for each dim; None keeps the dim whole.
      column: logical axis -> mesh axes: one column of the rules.
      mesh_shape: the size of each mesh axis.
    """
    lines = _name_problems(path, shape, names, column, mesh_shape)
    if len(names) != len(shape):
        return lines
    uneven = _uneven_dims(shape, names, column, mesh_shape)
    return lines + [_uneven_line(path, shape, dim, name, column, mesh_shape) for dim, name in uneven]


def _name_problems(
    path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]
) -> list[str]:
    """Returns one line for each problem with the names: unknown, too few, too many, or a mesh axis used twice."""
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


def _uneven_dims(
    shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]
) -> list[tuple[int, str]]:
    """Returns the dims of an array that their mesh axes do not divide, and their names; unknown names are skipped."""
    return [
        (dim, name)
        for dim, (size, name) in enumerate(zip(shape, names, strict=True))
        if name is not None and name in column and size % num_parts(column[name], mesh_shape)
    ]


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
) -> list[str]:
    """Returns one line for each reason why a tree of weights cannot be stored as the rules and the level say.

    Args:
      abstract: arrays or `jax.ShapeDtypeStruct`s.
      axes_tree: the same structure; each leaf is a tuple with a logical axis or None for each dim.
      rules: the table, with the storage axes of the level (`rules_of_level`).
      mesh_shape: the size of each mesh axis.
      level: of ZeRO.
      options: which option sizes the dims of a logical axis, so that lines name it; None: lines name weights alone.
      trained: a tree of bool like `abstract`, true for each weight with gradients and moments; None: all.
      elsewhere: logical axes that are left out of the check of sizes, because the caller checks them.
    """
    if lines := _unnamed(abstract, axes_tree, rules, mesh_shape):
        return lines
    weights = _named(abstract, axes_tree)
    # (logical axis, size) -> the weights with such a dim that its mesh axes do not divide, and the index of the dim.
    uneven: dict[tuple[str, int], list[tuple[_Weight, int]]] = {}
    for one in weights:
        for dim, name in _uneven_dims(one.array.shape, one.names, rules.parameters, mesh_shape):
            uneven.setdefault((name, one.array.shape[dim]), []).append((one, dim))
    if uneven:
        legal = _legal_sizes(weights, rules, mesh_shape)
        for (name, _), held in uneven.items():
            if name not in elsewhere:
                (path, array, _), dim = held[0]
                path += f" and {len(held) - 1} more" if len(held) > 1 else ""
                lines.append(_uneven_line(path, array.shape, dim, name, rules.parameters, mesh_shape, legal, options))
        return lines
    matrices = [one for one in weights if _is_matrix(one.names)]
    lines = _left_whole_by_rules(matrices, rules, mesh_shape)
    if level > 0 and mesh_shape[DATA] > 1:
        if trained is not None and level < PARAMETERS_LEVEL:
            flags = dict(leaves_with_paths(trained))
            matrices = [one for one in matrices if flags[one.path]]
        lines += _left_whole_by_data(matrices, rules, mesh_shape, level)
    return lines


def _unnamed(abstract: Arrays, axes_tree: NamesTree, rules: Rules, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each problem with logical axes, independent of sizes.

    The problems are: an array without logical axes, axes without an array, unknown names, a mesh axis that splits two
    dims of one array, and a user's rule that matches no array.
    """
    arrays = dict(leaves_with_paths(abstract))
    axes = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    lines = []
    for path, array in arrays.items():
        names = axes[path] if path in axes else None
        if is_names(names):
            lines += _name_problems(path, array.shape, names, rules.parameters, mesh_shape)
            continue
        text = "has no logical axes" if names is None else f"got logical axes {names!r}"
        replicated = (None,) * len(array.shape)
        lines.append(
            f"{path}: shape {tuple(array.shape)}: {text}; allowed: a tuple with a name or None for each dim; "
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


def _named(abstract: Arrays, axes_tree: NamesTree) -> list[_Weight]:
    """Returns the weights of a tree in which `_unnamed` has no problems."""
    axes = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    return [_Weight(path, array, axes[path]) for path, array in leaves_with_paths(abstract)]


def _legal_sizes(weights: Sequence[_Weight], rules: Rules, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Returns for each mesh axis a number whose divisors, as its size, split every weight evenly; 0: any size does.

    The sizes of the other axes are those of `mesh_shape`.
    """
    common = dict.fromkeys(mesh_shape, 0)
    for one in weights:
        for size, name in zip(one.array.shape, one.names, strict=True):
            split = rules.parameters[name] if name is not None else ()
            for axis in split:
                others = num_parts([other for other in split if other != axis], mesh_shape)
                common[axis] = math.gcd(common[axis], size // math.gcd(size, others))
    return common


def _uneven_line(
    path: str,
    shape: Sequence[int],
    dim: int,
    name: str,
    column: Column,
    mesh_shape: Mapping[str, int],
    legal: Mapping[str, int] | None = None,
    options: SizeOptions | None = None,
) -> str:
    """Returns the line about a dim that its axes do not divide; `legal` is of `_legal_sizes`, None: of this array."""
    size, axes = shape[dim], [axis for axis in column[name] if mesh_shape[axis] > 1]
    parts = num_parts(axes, mesh_shape)
    over = " x ".join(f"mesh.{axis} = {mesh_shape[axis]}" for axis in axes)
    if len(axes) == 1:
        change = f"mesh.{axes[0]}={nearest_divisor(legal[axes[0]] if legal else size, mesh_shape[axes[0]])}"
    else:
        change = f"{' x '.join(f'mesh.{axis}' for axis in axes)} = {nearest_divisor(size, parts)}"
    if options and name in options and size % options[name][1] == 0:
        key, value = options[name]
        made = "" if value == size else f", which makes {size},"
        return (
            f"{key}: got {value}{made} for dim '{name}' of {path}; allowed: a multiple of {parts}, as it "
            f"is split over {over}; nearest: {nearest_multiple(value, parts)}, or {change}"
        )
    return (
        f"{path}: shape {tuple(shape)}: dim {dim} has size {size}, and rule '{name}' splits it over "
        f"{over}; allowed: multiples of {parts}; nearest: {nearest_multiple(size, parts)}, or {change}"
    )


def _left_whole_by_rules(matrices: Sequence[_Weight], rules: Rules, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each storage axis but data that leaves more than `MOST_WHOLE` of the bytes unsharded.

    Norms and biases do not count. Weights with a dim that one of the user's own rules names count as sharded, because
    the user chose their sharding.
    """
    lines = []
    for axis in rules.storage_axes:
        if axis != DATA and mesh_shape[axis] > 1:
            chosen = [one for one in matrices if not set(one.names) & set(rules.own)]
            whole = [one for one in chosen if axis not in _axes_of(one, rules, mesh_shape, 0)]
            if _share(whole, matrices) > MOST_WHOLE:
                lines.append(
                    f"mesh.{axis}: got {mesh_shape[axis]}, and no rule splits {_listed(whole)} over {axis}: "
                    f"{_share(whole, matrices):.0%} of the bytes of all matrices would be whole on each device; "
                    f"allowed: at most {MOST_WHOLE:.0%}; nearest: mesh.{axis}=1, or a dim with the logical axis 'embed'"
                )
    return lines


def _left_whole_by_data(
    matrices: Sequence[_Weight], rules: Rules, mesh_shape: Mapping[str, int], level: int
) -> list[str]:
    """Returns one line where data at this level leaves more than `MOST_WHOLE` of the bytes unsharded."""

    def whole_on(size: int) -> list[_Weight]:
        shape = {**mesh_shape, DATA: size}
        return [one for one in matrices if size > 1 and DATA not in _axes_of(one, rules, shape, level)]

    size = mesh_shape[DATA]
    whole = whole_on(size)
    if _share(whole, matrices) <= MOST_WHOLE:
        return []
    path, array, names = max(whole, key=lambda one: num_bytes(one.array))
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


def _axes_of(one: _Weight, rules: Rules, mesh_shape: Mapping[str, int], level: int) -> tuple[str, ...]:
    """Returns the mesh axes that split the moments of a weight."""
    return axes_in(stored(one.array.shape, one.names, rules, mesh_shape, level, one.path).moment)


def _is_matrix(names: Names) -> bool:
    """Returns whether a weight has at least two feature dims.

    Heads and the head_dim after them count as one dim. Dims that stack layers do not count.
    """
    features = 0
    for name in names:
        features += name not in STACKED and not (name == "head_dim" and features)
    return features >= 2


def _share(some: Sequence[_Weight], every: Sequence[_Weight]) -> float:
    total = sum(num_bytes(one.array) for one in every)
    return sum(num_bytes(one.array) for one in some) / total if total else 0.0


def _listed(weights: Sequence[_Weight]) -> str:
    """Returns the largest weights by path and shape, and how many more there are."""
    largest = sorted(weights, key=lambda one: -num_bytes(one.array))
    text = ", ".join(f"{one.path} {tuple(one.array.shape)}" for one in largest[:MOST_NAMED])
    more = len(largest) - MOST_NAMED
    return f"{text} and {more} more" if more > 0 else text
