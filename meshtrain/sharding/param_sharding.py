"""The sharding of each stored array, and the errors of an array that the rules cannot split.

The rules split a weight over the mesh axes of its logical axes, in the same way at every level of ZeRO over the data
axis (Rajbhandari et al. 2020). At level 0 the data axis replicates all arrays; at higher levels it shards one more dim:

    level   parameters   moments      sums of gradients   what crosses the network in a step of M microbatches
    0       replicated   replicated   replicated          gradients all-reduced once
    1       replicated   sharded      replicated          gradients reduce-scattered, new weights all-gathered, once
    2       replicated   sharded      sharded             gradients reduce-scattered M times, new weights gathered once
    3       sharded      sharded      sharded             weights gathered 2 M times, gradients reduce-scattered M times

Parameters are the master weights, float32 by default (`precision.param_dtype`). A pipeline that computes in 16 bits
stores the master weights sharded at levels 1 and 2 too, and gathers them in 16 bits before its first clock tick
(`step.shardings.splits_masters`). The `fsdp` axis is equivalent to level 3 over a separate axis: its rules split every
weight. `fsdp` within a host with level 0 over `data` across hosts is hybrid sharding.

There is no fallback to replication, which would cost memory and communication without notice. The checks read only
shapes, logical axes and rules, so they apply to any task and any table of rules.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from meshtrain.errors import Problem, nearest_divisor, nearest_multiple, refuse, unknown
from meshtrain.options import Except, option
from meshtrain.sharding.named import is_boxed, unbox, value_and_names
from meshtrain.sharding.rules import DATA, Rules
from meshtrain.sharding.trees import Arrays, NamesTree, Tree, leaves_with_paths, path_text

Names = tuple[str | None, ...]
Column = Mapping[str, tuple[str, ...]]
# Logical axis -> (key in the configuration, value): the option whose value, or a multiple of it, is the dim's size.
SizeOptions = Mapping[str, tuple[str, int]]
ParamShardings: TypeAlias = Any  # leaves are `ParamSharding`

# Logical axes of dims that stack the weights of several layers in one array.
STACKED = ("chunks", "layers", "first_layers")
# Logical axis of the dim of experts in the router's weights.
ROUTER = "router"

STRATEGIES = {"no_shard": 0, "hybrid_shard": 0, "shard_grad_op": 3, "full_shard": 3}
# The first level at which the data axis splits an array.
MOMENTS_LEVEL, GRADIENTS_LEVEL, PARAMETERS_LEVEL = 1, 2, 3
MAX_LEVEL = PARAMETERS_LEVEL
_OVER_DATA = {f"mesh.{DATA}": Except(1)}


@dataclasses.dataclass(frozen=True)
class ZeroOptions:
    """Selects the arrays that are sharded over the data axis (ZeRO)."""

    level: int = option(
        0, "sharded over data: 0 nothing, 1 moments, 2 also gradient sums, 3 also parameters", minimum=0,
        only_for=_OVER_DATA,
    )  # fmt: skip
    strategy: str = option(
        "",
        "the level as a strategy name of PyTorch's FSDP; '': use zero.level",
        choices=("", *STRATEGIES),
        only_for=_OVER_DATA,
    )

    @property
    def effective_level(self) -> int:
        """The ZeRO level, 0 to 3: the level that `strategy` names, or `level` if `strategy` is empty."""
        return STRATEGIES[self.strategy] if self.strategy else self.level

    @property
    def keeps_gathered(self) -> bool:
        """Whether the backward pass reuses the weights gathered in the forward pass instead of gathering them again."""
        return self.strategy == "shard_grad_op"


def level_problems(options: ZeroOptions, num_replicas: int, fsdp: int) -> list[Problem]:
    """Returns an error line for each ZeRO option that is out of range or contradicts another option.

    Args:
      options: the ZeRO options; the minimum and the choices of each option are already checked.
      num_replicas: the size of the data axis, or -1 if unknown.
      fsdp: the size of the fsdp axis, or -1 if unknown.
    """
    lines = []
    if options.level > MAX_LEVEL:
        lines.append(Problem("zero.level", got=options.level, allowed=f"0 to {MAX_LEVEL}", nearest=MAX_LEVEL))
    if options.strategy and options.level not in (0, options.effective_level):
        lines.append(
            Problem(
                "zero.level",
                got=(
                    f"{options.level} with zero.strategy = {options.strategy}, which is level {options.effective_level}"
                ),
                allowed="one of the two",
                nearest="zero.level=0 (the strategy sets the level)",
                depends_on=["zero.strategy"],
            )
        )
    if options.strategy == "hybrid_shard" and 1 in (num_replicas, fsdp):
        lines.append(
            Problem(
                "zero.strategy",
                got=f"hybrid_shard with mesh.data = {num_replicas} and mesh.fsdp = {fsdp}",
                allowed="both above 1 (weights split over fsdp, copied over data)",
                nearest="zero.strategy=full_shard",
                depends_on=["mesh.data", "mesh.fsdp"],
            )
        )
    return lines


def rules_of_level(rules: Rules, level: int) -> Rules:
    """Returns the rules for a ZeRO level: at level 3 the data axis is added to the storage axes of `rules`."""
    if level < MAX_LEVEL or DATA in rules.storage_axes:
        return rules
    return dataclasses.replace(rules, storage_axes=(*rules.storage_axes, DATA))


@dataclasses.dataclass(frozen=True)
class ParamSharding:
    """The sharding of a weight and of the arrays that have its shape.

    Attributes:
      parameter: the spec of the weight.
      gradient: the spec of the float32 sum to which the gradient of each microbatch is added.
      moment: the spec of the optimizer's moments, and of the gradient that the optimizer gets.
      num_dims: the weight's number of dims.
      data_dim: the dim that the data axis splits in the arrays that the ZeRO level shards, counted from the end (-1 is
        the last); 0: it splits no dim.
    """

    parameter: PartitionSpec
    gradient: PartitionSpec
    moment: PartitionSpec
    num_dims: int
    data_dim: int = 0

    @classmethod
    def same(cls, spec: PartitionSpec, num_dims: int) -> "ParamSharding":
        """Returns a `ParamSharding` with one spec for parameter, gradient and moment, as at level 0."""
        return cls(spec, spec, spec, num_dims)

    @property
    def is_scattered(self) -> bool:
        """Whether a replica gets one shard of the gradient: at levels 1 and 2, if the data axis divides a dim."""
        return self.moment != self.parameter

    @property
    def scattered_dim(self) -> int:
        """The dim along which a replica gets its shard of the gradient, counted from the end; 0: the full gradient."""
        return self.data_dim if self.is_scattered else 0


def param_sharding(
    shape: Sequence[int],
    names: Names,
    rules: Rules,
    mesh_shape: Mapping[str, int],
    level: int,
    path: str = "array",
) -> ParamSharding:
    """Returns the sharding of a weight and of arrays with its shape.

    Args:
      shape: the shape of the weight, or of an array of the optimizer's state.
      names: a logical axis or None for each dim.
      rules: the table of rules; only its column `parameters` is read.
      mesh_shape: the size of each mesh axis.
      level: the ZeRO level.
      path: the array's name in an error.

    Raises:
      UserError: the rules cannot split the array; `array_problems` returns the reasons.
    """
    by_rules = spec(path, shape, names, rules.parameters, mesh_shape)
    dim = _data_dim(by_rules, shape, names, mesh_shape)
    if dim == 0:
        return ParamSharding.same(by_rules, len(shape))
    parts = axes_of_dims(by_rules, len(shape))
    parts[dim] = (*parts[dim], DATA)
    sharded = spec_of_dims(parts)
    parameter, gradient, moment = (
        sharded if level >= first else by_rules for first in (PARAMETERS_LEVEL, GRADIENTS_LEVEL, MOMENTS_LEVEL)
    )
    return ParamSharding(parameter, gradient, moment, len(shape), dim)


def _data_dim(spec: PartitionSpec, shape: Sequence[int], names: Names, mesh_shape: Mapping[str, int]) -> int:
    """Returns the dim of an array that the data axis splits, counted from the end; 0 for none.

    It is the first dim whose shard according to `spec` is divisible by the size of the data axis. A dim that stacks
    layers is never split, because the layers are computed one after the other.

    Args:
      spec: the array's spec according to the rules, without the split over the data axis.
      shape: the array's global shape.
      names: a logical axis or None for each dim.
      mesh_shape: the size of each mesh axis.
    """
    dims = axes_of_dims(spec, len(shape))
    if mesh_shape[DATA] == 1 or any(DATA in axes for axes in dims):
        return 0
    for dim, (size, name, axes) in enumerate(zip(shape, names, dims, strict=True)):
        if name not in STACKED and size % (num_parts(axes, mesh_shape) * mesh_shape[DATA]) == 0:
            return dim - len(shape)
    return 0


def params_with_axes(init: Callable[[jax.Array], Arrays], *, on_one_device: bool = False) -> tuple[Arrays, NamesTree]:
    """Returns a model's abstract parameters and their logical axes; allocates nothing and uses no device.

    Layers are in the order of the model. JAX caches traces by function, so a model with the same `init` is traced once.

    Args:
      init: a function of a PRNG key that returns the parameters; a leaf may be boxed with its logical axes (`Named`, a
        box of Linen, or a variable of NNX).
      on_one_device: whether the model runs on one device. If so, a leaf without a box has the axes (None, ..., None).
        Otherwise its entry is None instead of a tuple: the axes are missing.

    Raises:
      UserError: one line for each weight whose box has no tuple of names, such as an NNX variable without axes.
    """
    boxed = jax.eval_shape(init, _abstract_key())
    problems = list[Problem]()

    def names(path: KeyPath, leaf: Any) -> Names | None:
        if not is_boxed(leaf):
            return (None,) * leaf.ndim if on_one_device else None
        value, axes = value_and_names(leaf)
        if not is_names(axes):
            shape = tuple(value.shape)
            problems.append(
                Problem(
                    f"{path_text(path)}: shape {shape}",
                    got=f"{axes!r} as logical axes",
                    allowed="a name or None for each dim",
                    nearest=(None,) * len(shape),
                )
            )
        return axes

    axes_tree = jax.tree_util.tree_map_with_path(names, boxed, is_leaf=is_boxed)
    refuse(problems)
    return unbox(boxed), axes_tree


@functools.cache
def _abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def param_shardings(
    abstract: Arrays, axes_tree: NamesTree, rules: Rules, mesh_shape: Mapping[str, int], level: int
) -> ParamShardings:
    """Returns a pytree with the `ParamSharding` of each weight.

    Args:
      abstract: a pytree of arrays or `jax.ShapeDtypeStruct`s, the weights.
      axes_tree: the logical axes of each weight, a tuple with a name or None for each dim.
      rules: the table of rules, with the storage axes of the level (`rules_of_level`).
      mesh_shape: the size of each mesh axis.
      level: the ZeRO level.

    Raises:
      UserError: the first weight that cannot be split; `tree_problems.tree_problems` returns all problems.
    """
    axes = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    leaves = [
        param_sharding(array.shape, axes[path], rules, mesh_shape, level, path)
        for path, array in leaves_with_paths(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def spec(path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Returns the spec of one array, without mesh axes of size 1, so that equal shardings have equal specs.

    Args:
      path: the array's name in an error.
      shape: its shape.
      names: a logical axis or None for each dim.
      column: one column of the rules: `rules.parameters`, `rules.activations` or `rules.gathered`.
      mesh_shape: the size of each mesh axis.

    Raises:
      UserError: the rules cannot split the array; `array_problems` returns the reasons.

    The query kernels (`models/attention/multi_head.py`) of all layers, stacked by `models/transformer/decoder.py`, with
    mesh.tensor=2:

    >>> from meshtrain.sharding.rules import AXES, LayoutOptions, default_rules
    >>> shape, names = (4, 128, 4, 32), ("layers", "embed", "heads", "head_dim")
    >>> column = default_rules(LayoutOptions()).parameters
    >>> tuple(spec("layers/attention/query", shape, names, column, dict.fromkeys(AXES, 1) | {"tensor": 2}))
    (None, None, 'tensor')
    """
    refuse(array_problems(path, shape, names, column, mesh_shape))
    dims = [column[name] if name is not None else () for name in names]
    return spec_of_dims([tuple(axis for axis in axes if mesh_shape[axis] > 1) for axes in dims])


def activation_sharding(
    shape: Sequence[int], names: Names, rules: Rules, mesh: Mesh, path: str = "activation"
) -> NamedSharding:
    """Returns the sharding of an activation or an input according to the activation rules.

    Args:
      shape: the global shape.
      names: a logical axis or None for each dim.
      rules: the table of rules.
      mesh: the mesh of the sharding.
      path: the array's name in an error.

    Raises:
      UserError: the rules cannot split the array; `array_problems` returns the reasons.
    """
    return NamedSharding(mesh, spec(path, shape, names, rules.activations, mesh.shape))


def spec_of_dims(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Returns the spec of an array, given the mesh axes that split each dim: `axes[i]` for dim i, () for no split.

    The spec has no trailing None, so specs of equal shardings are equal.
    """
    parts = [names[0] if len(names) == 1 else names or None for names in axes]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def axes_of_dims(spec: PartitionSpec, num_dims: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes in a spec for each of the `num_dims` dims of an array; () for a dim that is not split."""
    parts = (*spec, *(None,) * (num_dims - len(spec)))
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in parts]


def split_further(
    spec: PartitionSpec, shape: Sequence[int], axes: tuple[str, ...], mesh_shape: Mapping[str, int]
) -> PartitionSpec:
    """Returns a spec in which `axes` also split one dim.

    This is the first dim whose shard size is divisible by the product of the sizes of `axes`. If there is no such dim,
    the spec is returned unchanged.

    Args:
      spec: the spec to extend.
      shape: the array's global shape.
      axes: mesh axes that are not in the spec.
      mesh_shape: the size of each mesh axis.
    """
    dims = axes_of_dims(spec, len(shape))
    for dim, (size, split) in enumerate(zip(shape, dims, strict=True)):
        if size % num_parts((*split, *axes), mesh_shape) == 0:
            return spec_of_dims([*dims[:dim], (*split, *axes), *dims[dim + 1 :]])
    return spec


def axes_in(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns all mesh axes in a spec, in the order of the dims that they split."""
    return tuple(axis for dim in axes_of_dims(spec, len(spec)) for axis in dim)


def num_parts(axes: Sequence[str], mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of shards of a dim that the mesh axes `axes` split: the product of the sizes of these axes."""
    return math.prod(mesh_shape[axis] for axis in axes)


def is_names(leaf: Tree) -> TypeGuard[Names]:
    """Returns whether a node of a pytree is the logical axes of one array, and not a container such as a namedtuple."""
    return type(leaf) is tuple and all(name is None or isinstance(name, str) for name in leaf)


def array_problems(
    path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]
) -> list[Problem]:
    """Returns an error line for each reason why an array cannot be split according to the rules; [] if it can.

    Args:
      path: the array's name in the error lines.
      shape: its shape.
      names: the logical axis of each dim; a dim with None is not split.
      column: logical axis -> mesh axes: one column of the rules.
      mesh_shape: the size of each mesh axis.
    """
    lines = name_problems(path, shape, names, column, mesh_shape)
    if len(names) != len(shape):
        return lines
    uneven = uneven_dims(shape, names, column, mesh_shape)
    return lines + [uneven_line(path, shape, dim, name, column, mesh_shape) for dim, name in uneven]


def name_problems(
    path: str, shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]
) -> list[Problem]:
    """Returns an error line for each problem of an array's logical axes that is independent of the sizes of its dims.

    The problems are: too few or too many logical axes, an unknown name, or a mesh axis that would split two dims.

    Args:
      path: the array's name in the error lines.
      shape: its shape.
      names: the logical axis of each dim; a dim with None is not split.
      column: logical axis -> mesh axes: one column of the rules.
      mesh_shape: the size of each mesh axis.
    """
    where = f"{path}: shape {tuple(shape)}"
    if len(names) != len(shape):
        fitted = (tuple(names) + (None,) * len(shape))[: len(shape)]
        return [
            Problem(
                where,
                got=f"{len(names)} logical axes {tuple(names)} for {len(shape)} dims",
                allowed="one logical axis for each dim",
                nearest=fitted,
            )
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
                    Problem(
                        where,
                        fault=(
                            f"mesh axis '{axis}' (size {mesh_shape[axis]}) would split both dim {taken[axis]} "
                            f"'{names[taken[axis]]}' and dim {dim} '{name}'"
                        ),
                        allowed="each mesh axis splits only one dim of an array",
                        nearest=freed,
                    )
                )
            taken.setdefault(axis, dim)
    return lines


def uneven_dims(
    shape: Sequence[int], names: Names, column: Column, mesh_shape: Mapping[str, int]
) -> list[tuple[int, str]]:
    """Returns (dim, logical axis) for each dim whose size is not divisible by its number of shards.

    Args:
      shape: the array's shape.
      names: the logical axis of each dim; dims with None or an unknown name are skipped.
      column: logical axis -> mesh axes: one column of the rules.
      mesh_shape: the size of each mesh axis.
    """
    return [
        (dim, name)
        for dim, (size, name) in enumerate(zip(shape, names, strict=True))
        if name is not None and name in column and size % num_parts(column[name], mesh_shape)
    ]


def uneven_line(
    path: str,
    shape: Sequence[int],
    dim: int,
    name: str,
    column: Column,
    mesh_shape: Mapping[str, int],
    legal: Mapping[str, int] | None = None,
    options: SizeOptions | None = None,
) -> Problem:
    """Returns the error line for a dim whose size is not divisible by its number of shards.

    Args:
      path: the array's name in the line.
      shape: its shape.
      dim: the index of the dim.
      name: the dim's logical axis.
      column: logical axis -> mesh axes: one column of the rules.
      mesh_shape: the size of each mesh axis.
      legal: mesh axis -> a number; the line suggests a divisor of this number as the size of the axis. None: it
        suggests a divisor of the dim's size.
      options: logical axis -> (key, value) of the option that sets the sizes of dims with this logical axis. If the
        size is a multiple of the option's value, the line names the option as the cause, else the array.
    """
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
        return Problem(
            key,
            got=f"{value}{made} for dim '{name}' of {path}",
            allowed=f"a multiple of {parts}, because it is split over {over}",
            nearest=f"{nearest_multiple(value, parts)}, or {change}",
            depends_on=[f"mesh.{axis}" for axis in axes],
        )
    return Problem(
        path,
        fault=f"shape {tuple(shape)}: dim {dim} has size {size}, but rule '{name}' splits it over {over}",
        allowed=f"multiples of {parts}",
        nearest=f"{nearest_multiple(size, parts)}, or {change}",
        depends_on=[f"mesh.{axis}" for axis in axes],
    )
