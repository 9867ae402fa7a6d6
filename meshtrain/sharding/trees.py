"""Pytrees of arrays: the path and the bytes of each leaf, and splitting a pytree by a mask."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

# Pytrees by the type of their leaves; a pytree consists of nested dicts, sequences and registered dataclasses.
Arrays: TypeAlias = Any  # `jax.Array`, or `jax.ShapeDtypeStruct` if nothing is allocated
NamesTree: TypeAlias = Any  # a tuple of logical axis names, one for each dim
Specs: TypeAlias = Any  # `jax.sharding.PartitionSpec`
Shardings: TypeAlias = Any  # `jax.sharding.NamedSharding`
Masks: TypeAlias = Any  # bool; None is true everywhere
Tree: TypeAlias = Any  # leaves of any kind
Leaf: TypeAlias = Any  # a leaf of any kind
KeyEntry: TypeAlias = Any  # an entry of a leaf's path: `jax.tree_util.DictKey`, `SequenceKey` or `GetAttrKey`
ArrayFunction: TypeAlias = Callable[..., Arrays]  # a function of pytrees of arrays, as positional arguments


class Shaped(Protocol):
    """Anything with a shape and a dtype: an array, a `jax.ShapeDtypeStruct`, or an array's metadata in a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array's elements."""


def path_text(key_path: Sequence[KeyEntry]) -> str:
    """Returns the path of a leaf as text, such as `layers/mlp/up/kernel`.

    Args:
      key_path: keys from `jax.tree_util.tree_flatten_with_path`, of dicts, sequences and dataclasses.
    """
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator="/")


def leaves_with_paths(tree: Tree, is_leaf: Callable[[Tree], bool] | None = None) -> list[tuple[str, Leaf]]:
    """Returns (path, leaf) for each leaf of a pytree, in the order of `jax.tree.leaves`.

    Args:
      tree: any pytree; paths are text such as `layers/mlp/up/kernel`.
      is_leaf: a function that returns whether a node counts as a leaf, although it has children; None: no such node.
    """
    return [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def num_bytes(array: Shaped) -> int:
    """Returns the bytes of an array, from its shape and dtype; for typed PRNG keys, the bytes of the key data."""
    return int(math.prod(array.shape) * array.dtype.itemsize)


def shard_bytes(array: Leaf) -> int:
    """Returns the bytes of one device's shard of an array; the array may be abstract but must have a sharding."""
    return int(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize)


def select(tree: Tree, mask: Masks) -> tuple[Tree, Tree]:
    """Splits a pytree by a mask: (leaves where the mask is true, other leaves), with None for missing leaves.

    `jax.tree` functions skip None, so each result acts as a pytree of fewer leaves.

    >>> select({"up": 1.0, "down": 2.0}, {"up": True, "down": False})
    ({'down': None, 'up': 1.0}, {'down': 2.0, 'up': None})

    Args:
      tree: any pytree; a leaf of the mask may correspond to a complete subtree of it.
      mask: a pytree of bool; None is true everywhere.
    """
    if mask is None:
        return tree, None
    chosen = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree)
    return chosen, jax.tree.map(lambda keep, leaf: None if keep else leaf, mask, tree)


def mark_leaves(mask: Masks, tree: Tree) -> Masks:
    """Returns a pytree of bool with the structure of `tree`, whose subtrees may correspond to a leaf of the mask."""
    return jax.tree.map(lambda mark, part: jax.tree.map(lambda _: mark, part), mask, tree)


def merge(chosen: Tree, others: Tree) -> Tree:
    """Merges the two pytrees that `select` returned: each leaf comes from the pytree in which it is not None."""
    if others is None:
        return chosen
    return jax.tree.map(lambda x, y: y if x is None else x, chosen, others, is_leaf=lambda leaf: leaf is None)
