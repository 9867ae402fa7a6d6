"""The sharding of each stored array at every ZeRO level, from shape, logical axes, rules, mesh and level.

The rules split a weight over the mesh axes of its logical axes. The data axis replicates weights at level 0. At higher
levels it splits one more dim: of moments from level 1 on, of gradient sums from level 2 on, of parameters at level 3
(`zero.py`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshtrain.layout.axes import DATA
from meshtrain.layout.partition import STACKED, Names, axes_of_dims, is_names, num_parts, spec, spec_of_dims
from meshtrain.layout.rules import Rules
from meshtrain.layout.trees import leaves_with_paths

# The level from which on the data axis splits an array.
MOMENTS_LEVEL, GRADIENTS_LEVEL, PARAMETERS_LEVEL = 1, 2, 3


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
      UserError: see `partition.problems`.
    """
    by_rules = spec(path, shape, names, rules.parameters, mesh_shape)
    dim = _data_dim(by_rules, shape, names, mesh_shape)
    if dim == 0:
        return Stored(by_rules, by_rules, by_rules, len(shape))
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


def stored_tree(abstract: Any, axes_tree: Any, rules: Rules, mesh_shape: Mapping[str, int], level: int) -> Any:
    """Returns `Stored` for each weight of a tree.

    Args:
      abstract: arrays or `jax.ShapeDtypeStruct`s.
      axes_tree: the same structure; each leaf is a tuple with a logical axis or None for each dim.
      rules: the table.
      mesh_shape: the size of each mesh axis.
      level: of ZeRO.

    Raises:
      UserError: the first weight that cannot be split; `fit.problems` returns the problems of all weights.
    """
    axes = dict(leaves_with_paths(axes_tree, is_leaf=is_names))
    leaves = [
        stored(leaf.shape, axes[path], rules, mesh_shape, level, path) for path, leaf in leaves_with_paths(abstract)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)
