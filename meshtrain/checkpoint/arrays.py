"""The arrays of a state by the path of their leaf, and the comparison of two such sets."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from meshtrain.errors import UserError, nearest
from meshtrain.sharding.trees import Leaf, Shaped, Tree, leaves_with_paths

_MAX_MISMATCHES = 5


def leaves_by_path(tree: Tree) -> dict[str, Leaf]:
    """Returns path -> leaf in the order of `jax.tree.leaves`, whatever containers hold the leaves."""
    leaves = leaves_with_paths(tree)
    by_path = dict(leaves)
    assert len(by_path) == len(leaves), "two leaves share a path: a key holds a '/'"
    return by_path


def nested(leaves: Mapping[str, Leaf]) -> dict[str, Tree]:
    """Returns nested dicts of names from path -> leaf: the structure in which Orbax stores them."""
    root: dict[str, Tree] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return root


def mismatches(stored: Mapping[str, Shaped], wanted: Mapping[str, Shaped], rounded: Collection[str] = ()) -> list[str]:
    """Returns one line for each array that is missing, left over, or of another shape or dtype.

    A dtype counts because a reader would otherwise convert silently, and a resumed run would not be the same run.

    Args:
      stored: path -> the array of the checkpoint, anything with `.shape` and `.dtype`.
      wanted: path -> the array that the run needs, likewise.
      rounded: paths of arrays that the run asks for in another dtype.
    """
    lines = []
    for path, leaf in wanted.items():
        if path not in stored:
            lines.append(f"{path}: not in the checkpoint{nearest(path, stored.keys() - wanted.keys())}")
            continue
        got, allowed = _signature(stored[path]), _signature(leaf)
        if got != allowed and not (path in rounded and tuple(stored[path].shape) == tuple(leaf.shape)):
            lines.append(f"{path}: got {got}; allowed: {allowed}")
    return lines + [f"{path}: in the checkpoint, not in this run" for path in stored if path not in wanted]


def refuse_mismatches(
    directory: Path, stored: Mapping[str, Shaped], wanted: Mapping[str, Shaped], rounded: Collection[str] = ()
) -> None:
    """Compares the arrays of a checkpoint with those that the run needs, both as in `mismatches`.

    Raises:
      UserError: they differ; it names the first five arrays that do, and the number of the others.
    """
    problems = mismatches(stored, wanted, rounded)
    if problems:
        more = len(problems) - _MAX_MISMATCHES
        raise UserError(
            *(f"checkpoint {directory}: {line}" for line in problems[:_MAX_MISMATCHES]),
            *([f"checkpoint {directory}: {more} more arrays differ"] if more > 0 else []),
            "nearest: the model and optimizer options the checkpoint was written with, or another workdir",
        )


def _signature(leaf: Shaped) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
