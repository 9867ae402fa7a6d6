"""The axes of the mesh: one record each, in mesh order, with the roles of each axis.

The axis with the slowest network comes first: a mesh is filled in row-major order, so the last axes connect neighbours
on the fast links inside a host. tensor communicates within every layer, and so do context and expert, with fewer
bytes; fsdp communicates once a layer, pipeline once a microbatch, data once a step.

To add an axis, add a record here, rules that name it (`rules.py`), and its traffic (`plan/cost/lower_bound.py`,
`models/cost.py`).
"""

import dataclasses

DATA = "data"
PIPELINE = "pipeline"
CONTEXT = "context"
EXPERT = "expert"
TENSOR = "tensor"


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Attributes:
      name: as in `mesh.NAME`.
      text: the help of the option `mesh.NAME`: what its size counts, in one line.
      splits_batch: it shards the batch: its devices compute different sequences.
      splits_sequence: it shards each sequence: its devices compute different tokens of the same sequences.
      stores_weights: it shards weights for storage only: they are gathered over it before they are used.
      splits_experts: it shards experts, which are not gathered: tokens go to the devices of theirs.
      splits_model: its devices compute different parts of the model, with different weights.
      is_manual: collectives over it are written by hand (`jax.shard_map`), at least while gradients are computed; the
        partitioner inserts those of the other axes.
    """

    name: str
    text: str
    splits_batch: bool = False
    splits_sequence: bool = False
    stores_weights: bool = False
    splits_experts: bool = False
    splits_model: bool = False
    is_manual: bool = False


TABLE = (
    Axis(DATA, "replicas of the weights, each with its own shard of the batch", splits_batch=True, is_manual=True),
    Axis(PIPELINE, "groups of consecutive layers, one after the other", splits_model=True, is_manual=True),
    Axis(
        "fsdp",
        "shards of the batch; weights are sharded too, and gathered before use",
        splits_batch=True,
        stores_weights=True,
    ),
    Axis(
        EXPERT,
        "shards of the batch; experts are split, other weights are sharded too, and gathered before use",
        splits_batch=True,
        stores_weights=True,
        splits_experts=True,
    ),
    Axis(
        CONTEXT,
        "shards of each sequence; weights are sharded too, and gathered before use",
        splits_sequence=True,
        stores_weights=True,
    ),
    Axis(TENSOR, "shards of the heads, mlp and vocabulary dims of weights", splits_model=True),
)
AXES = tuple(axis.name for axis in TABLE)


def batch_axes() -> tuple[str, ...]:
    """Returns the axes that split the batch, in mesh order."""
    return tuple(axis.name for axis in TABLE if axis.splits_batch)


def sequence_axes() -> tuple[str, ...]:
    """Returns the axes that split each sequence, in mesh order."""
    return tuple(axis.name for axis in TABLE if axis.splits_sequence)


def storage_axes() -> tuple[str, ...]:
    """Returns the axes that split weights for storage only. At ZeRO level 3, `stored.rules_of_level` adds data."""
    return tuple(axis.name for axis in TABLE if axis.stores_weights)


def expert_axes() -> tuple[str, ...]:
    """Returns the axes that split experts, in mesh order."""
    return tuple(axis.name for axis in TABLE if axis.splits_experts)


def model_axes() -> tuple[str, ...]:
    """Returns the axes whose devices compute different parts of the model."""
    return tuple(axis.name for axis in TABLE if axis.splits_model)


def partitioned_axes() -> tuple[str, ...]:
    """Returns the axes that are never manual: the partitioner inserts their collectives."""
    return tuple(axis.name for axis in TABLE if not axis.is_manual)
