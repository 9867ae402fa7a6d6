"""ZeRO over the data axis (Rajbhandari et al. 2020): which arrays are replicated over it, and which are sharded.

    level   parameters   moments      sums of gradients   what crosses the network in a step of M microbatches
    0       replicated   replicated   replicated          gradients all-reduced once
    1       replicated   sharded      replicated          gradients reduce-scattered, new weights all-gathered, once
    2       replicated   sharded      sharded             gradients reduce-scattered M times, new weights gathered once
    3       sharded      sharded      sharded             weights gathered 2 M times, gradients reduce-scattered M times

`stored.py` says which dim is split. Parameters are float32 and serve as master weights. The `fsdp` axis is level 3 by
construction: its rules split every weight. Level 3 over `data` is the same with one axis fewer; `fsdp` inside a host
with level 0 over `data` across hosts is hybrid sharding.
"""

import dataclasses

from meshtrain.layout.axes import DATA
from meshtrain.layout.rules import Rules
from meshtrain.words.options import option

STRATEGIES = {"no_shard": 0, "hybrid_shard": 0, "shard_grad_op": 3, "full_shard": 3}
MAX_LEVEL = 3


@dataclasses.dataclass(frozen=True)
class ZeroOptions:
    """What is sharded over the data axis."""

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
