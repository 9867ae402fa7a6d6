"""The axes of the mesh: one record each, in mesh order. What an axis is for stands here and nowhere else.

Slowest network first: a mesh is filled row by row, so the last axes are neighbours on the fast links inside a host.
tensor communicates within every layer, fsdp once a layer, pipeline once a microbatch, data once a step.

A fifth axis is one more record here, the rules that name it (`rules.py`), and its traffic (`plan/minimum.py`).
"""

import dataclasses

DATA = "data"
PIPELINE = "pipeline"


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
      name: as in `mesh.NAME`.
      text: what its size counts, in one line.
      splits_batch: its devices work on different sequences.
      stores_weights: it splits weights for storage only; they are gathered over it before they compute.
      splits_model: its devices compute different parts of the model with different weights.
      is_manual: collectives over it are written by hand (`jax.shard_map`), at least while gradients are computed; the
        partitioner inserts those of the other axes.
    """

    name: str
    text: str
    splits_batch: bool = False
    stores_weights: bool = False
    splits_model: bool = False
    is_manual: bool = False


TABLE = (
    Axis(DATA, "copies of the weights, each on its share of the batch", splits_batch=True, is_manual=True),
    Axis(PIPELINE, "groups of consecutive layers, one after the other", splits_model=True, is_manual=True),
    Axis(
        "fsdp",
        "shares of the batch that keep the weights in pieces, gathered when used",
        splits_batch=True,
        stores_weights=True,
    ),
    Axis("tensor", "parts of every weight's heads, mlp and vocabulary dims", splits_model=True),
)
AXES = tuple(axis.name for axis in TABLE)


def batch_axes() -> tuple[str, ...]:
    """Returns the axes that split the batch, in mesh order."""
    return tuple(axis.name for axis in TABLE if axis.splits_batch)


def storage_axes() -> tuple[str, ...]:
    """Returns the axes that split weights for storage only. At ZeRO level 3 data is one more (`zero.storage_axes`)."""
    return tuple(axis.name for axis in TABLE if axis.stores_weights)


def model_axes() -> tuple[str, ...]:
    """Returns the axes whose devices compute different parts of the model."""
    return tuple(axis.name for axis in TABLE if axis.splits_model)


def partitioned_axes() -> tuple[str, ...]:
    """Returns the axes whose collectives the partitioner always inserts: those that are never manual."""
    return tuple(axis.name for axis in TABLE if not axis.is_manual)
