"""ZeRO over the data axis (Rajbhandari et al. 2020): which arrays the replicas share out among themselves.

    level   parameters   moments   gradients, added up   what crosses the network in a step of M microbatches
    0       whole        whole     whole                 gradients, once
    1       whole        split     whole                 gradients scattered once, new weights gathered once
    2       whole        split     split                 gradients scattered M times, new weights gathered once
    3       split        split     split                 weights gathered 2 M times, gradients scattered M times

Parameters are float32 and their own masters. The `fsdp` axis is level 3 by construction: its rules split every weight.
Level 3 over `data` is the same with one axis fewer; `fsdp` inside a host with level 0 over `data` across hosts is
hybrid sharding.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from meshtrain.layout.partition import axes_of_dims, num_parts, spec_of_dims
from meshtrain.layout.rules import Rules
from meshtrain.words.options import option

DATA = "data"
STRATEGIES = {"no_shard": 0, "hybrid_shard": 0, "shard_grad_op": 3, "full_shard": 3}
STACKED = ("layers", "chunks")
MAX_LEVEL = 3
# From which level on a part of the training state is split.
SPLIT_FROM = {"opt_state": 1, "params": MAX_LEVEL}


@dataclasses.dataclass(frozen=True)
class ZeroOptions:
    """What the replicas of the data axis share out."""

    level: int = option(0, "0 nothing, 1 moments, 2 also added-up gradients, 3 also parameters", minimum=0)
    strategy: str = option("", "instead of a level, in other words (empty: the level)", choices=("", *STRATEGIES))

    @property
    def effective_level(self) -> int:
        """The level, whichever way it was said."""
        return STRATEGIES[self.strategy] if self.strategy else self.level

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights gathered for the forward pass are kept for the backward pass rather than gathered again."""
        return self.strategy == "shard_grad_op"


def problems(options: ZeroOptions, num_replicas: int, fsdp: int) -> list[str]:
    """Returns one line for each thing that cannot be combined.

    Args:
      options: each within its own bounds.
      num_replicas: the size of the data axis; -1 where it is what is left.
      fsdp: the size of that axis, likewise.
    """
    found = []
    if options.level > MAX_LEVEL:
        found.append(f"zero.level: got {options.level}; allowed: 0 to {MAX_LEVEL}; nearest: {MAX_LEVEL}")
    if options.strategy and options.level not in (0, options.effective_level):
        found.append(
            f"zero.level: got {options.level} with zero.strategy = {options.strategy}, which is level "
            f"{options.effective_level}; allowed: one of the two; nearest: zero.level=0 (left to the strategy)"
        )
    if options.strategy == "hybrid_shard" and 1 in (num_replicas, fsdp):
        found.append(
            f"zero.strategy: got hybrid_shard with mesh.data = {num_replicas} and mesh.fsdp = {fsdp}; allowed: both "
            "above 1 (weights split over fsdp, copied over data); nearest: zero.strategy=full_shard"
        )
    return found


def rules_of_level(rules: Rules, level: int) -> Rules:
    """Returns the rules with the storage axes in force: at level 3 data stores weights, as fsdp does at every level."""
    if level < MAX_LEVEL or DATA in rules.storage_axes:
        return rules
    return dataclasses.replace(rules, storage_axes=(*rules.storage_axes, DATA))


def dim_over_data(
    spec: PartitionSpec, shape: Sequence[int], names: Sequence[str | None], mesh_shape: Mapping[str, int]
) -> int:
    """Returns which dim of an array the data axis splits, counted from the end (-1 is the last); 0 for none.

    The first that what one device has of it divides by the axis; never that of the layers, which are taken one by one.
    An array without such a dim stays whole on each replica, as explain shows.

    Args:
      spec: where the array lives already.
      shape: its shape.
      names: a logical axis or None for each dim.
      mesh_shape: the size of each mesh axis.
    """
    for dim, (size, name, axes) in enumerate(zip(shape, names, axes_of_dims(spec, len(shape)), strict=True)):
        if (
            name not in STACKED
            and mesh_shape[DATA] > 1
            and size % (num_parts(axes, mesh_shape) * mesh_shape[DATA]) == 0
        ):
            return dim - len(shape)
    return 0


def over_data(spec: PartitionSpec, ndim: int, dim: int) -> PartitionSpec:
    """Returns the spec with the data axis innermost on one dim (see `dim_over_data`; 0: as it was)."""
    if dim == 0:
        return spec
    parts = axes_of_dims(spec, ndim)
    parts[dim] = (*parts[dim], DATA)
    return spec_of_dims(parts)
