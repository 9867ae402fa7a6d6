"""Trees of arrays: the path and the bytes of each leaf."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax


def path_text(key_path: Sequence[Any]) -> str:
    """Returns the path of a leaf as text, such as `layers/mlp/up/kernel`.

    Args:
      key_path: keys as `jax.tree_util.tree_flatten_with_path` gives them, of dicts, sequences and dataclasses.
    """
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator="/")


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Returns (path, leaf) for each leaf of a tree, in the order of `jax.tree.leaves`."""
    return [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def num_bytes(array: Any) -> int:
    """Returns the bytes of all of an array, or of anything with `.shape` and `.dtype` (of a PRNG key: of its data)."""
    return int(math.prod(array.shape) * array.dtype.itemsize)
