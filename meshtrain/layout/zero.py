"""ZeRO over the data axis (Rajbhandari et al. 2020): which arrays are replicated over it, and which are sharded.

    level   parameters   moments      sums of gradients   what crosses the network in a step of M microbatches
    0       replicated   replicated   replicated          gradients all-reduced once
    1       replicated   sharded      replicated          gradients reduce-scattered, new weights all-gathered, once
    2       replicated   sharded      sharded             gradients reduce-scattered M times, new weights gathered once
    3       sharded      sharded      sharded             weights gathered 2 M times, gradients reduce-scattered M times

`stored.py` chooses the dim that is split. Parameters are the master weights, float32 unless `precision.param_dtype`
says otherwise. The `fsdp` axis does what level 3 does, over an axis of its own: its rules split every weight. `fsdp`
inside a host with level 0 over `data` across hosts is hybrid sharding.
"""

import dataclasses

from meshtrain.layout.axes import DATA
from meshtrain.layout.rules import Rules
from meshtrain.words.options import AllBut, option

STRATEGIES = {"no_shard": 0, "hybrid_shard": 0, "shard_grad_op": 3, "full_shard": 3}
MAX_LEVEL = 3
_OVER_DATA = {f"mesh.{DATA}": AllBut(1)}


@dataclasses.dataclass(frozen=True)
class ZeroOptions:
    """What is sharded over the data axis."""

    level: int = option(
        0, "shards over data: 0 nothing, 1 moments, 2 also gradient sums, 3 also parameters", minimum=0,
        only_for=_OVER_DATA,
    )  # fmt: skip
    strategy: str = option(
        "", "the level by its name in PyTorch's FSDP; empty: zero.level", choices=("", *STRATEGIES), only_for=_OVER_DATA
    )

    @property
    def effective_level(self) -> int:
        """The level of `strategy`, or `level` where that is empty."""
        return STRATEGIES[self.strategy] if self.strategy else self.level

    @property
    def keeps_gathered(self) -> bool:
        """Whether the backward pass reuses the weights gathered in the forward pass instead of gathering them again."""
        return self.strategy == "shard_grad_op"


def problems(options: ZeroOptions, num_replicas: int, fsdp: int) -> list[str]:
    """Returns one line for each value that is not allowed, or not with the others.

    Args:
      options: each within its own bounds.
      num_replicas: the size of the data axis, or -1 where it is not known yet.
      fsdp: the size of the fsdp axis, likewise.
    """
    lines = []
    if options.level > MAX_LEVEL:
        lines.append(f"zero.level: got {options.level}; allowed: 0 to {MAX_LEVEL}; nearest: {MAX_LEVEL}")
    if options.strategy and options.level not in (0, options.effective_level):
        lines.append(
            f"zero.level: got {options.level} with zero.strategy = {options.strategy}, which is level "
            f"{options.effective_level}; allowed: one of the two; nearest: zero.level=0 (left to the strategy)"
        )
    if options.strategy == "hybrid_shard" and 1 in (num_replicas, fsdp):
        lines.append(
            f"zero.strategy: got hybrid_shard with mesh.data = {num_replicas} and mesh.fsdp = {fsdp}; allowed: both "
            "above 1 (weights split over fsdp, copied over data); nearest: zero.strategy=full_shard"
        )
    return lines


def rules_of_level(rules: Rules, level: int) -> Rules:
    """Returns the rules with the storage axes of a level: at level 3 data is one, as fsdp is at every level."""
    if level < MAX_LEVEL or DATA in rules.storage_axes:
        return rules
    return dataclasses.replace(rules, storage_axes=(*rules.storage_axes, DATA))
