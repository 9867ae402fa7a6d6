"""Layers in chunks: how interleaved schedules hold what everybody else sees in layer order.

V: chunks a stage, L: layers. Stored [V, L / V, ...] with the second dim over the stages; shown and kept as [L, ...].
Cutting leaves the order alone, so the two are the same numbers and only their places differ (`stages.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax

from meshtrain.layout.partition import Names

CHUNKS = "chunks"


def chunked(layers: Any, num_chunks: int) -> Any:
    """Returns a tree of [L, ...] as it is stored; as it is where there is one chunk."""
    if num_chunks == 1:
        return layers
    return jax.tree.map(lambda leaf: leaf.reshape(num_chunks, leaf.shape[0] // num_chunks, *leaf.shape[1:]), layers)


def chunked_names(names: Names, num_chunks: int) -> Names:
    """Returns the logical axes of a stored leaf from those of [L, ...]."""
    return names if num_chunks == 1 else (CHUNKS, *names)


def layer_order_shape(shape: Sequence[int], names: Names) -> tuple[int, ...]:
    """Returns the shape in layer order of a leaf that is stored with these logical axes."""
    if names[:1] != (CHUNKS,):
        return tuple(shape)
    return (shape[0] * shape[1], *shape[2:])


def layer_order_names(names: Names) -> Names:
    """Returns the logical axes in layer order of a leaf that is stored with these."""
    return names[1:] if names[:1] == (CHUNKS,) else names
