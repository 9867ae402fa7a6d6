"""Layers in chunks: the storage of interleaved schedules, and the layer order of checkpoints and initial values.

V: chunks a stage, L: layers. A leaf is [V, L / V, ...] in memory, with the second dim sharded over the stages
(`stages.py`), and [L, ...] in checkpoints. One is a reshape of the other. Dims may stand before these, such as that of
the replicas.
"""

from collections.abc import Sequence
from typing import Any

import jax

from meshtrain.layout.stored import Names

CHUNKS = "chunks"


def chunked(layers: Any, num_chunks: int) -> Any:
    """Returns a tree of [L, ...] as [V, L / V, ...]; the same tree where V is 1."""
    if num_chunks == 1:
        return layers
    return jax.tree.map(lambda leaf: leaf.reshape(num_chunks, leaf.shape[0] // num_chunks, *leaf.shape[1:]), layers)


def chunked_names(names: Names, num_chunks: int) -> Names:
    """Returns the logical axes of a leaf [V, L / V, ...], given those of [L, ...]; the same where V is 1."""
    return names if num_chunks == 1 else (CHUNKS, *names)


def layer_order_shape(shape: Sequence[int], names: Names) -> tuple[int, ...]:
    """Returns the shape [L, ...] of a leaf, given its shape and logical axes in memory."""
    if CHUNKS not in names:
        return tuple(shape)
    at = names.index(CHUNKS)
    return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])


def layer_order_names(names: Names) -> Names:
    """Returns the logical axes of a leaf [L, ...], given those in memory."""
    return tuple(name for name in names if name != CHUNKS)
