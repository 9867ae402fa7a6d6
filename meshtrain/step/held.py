"""Bytes of training state on one device, from shapes and shardings alone: at every ZeRO level, with and without fsdp.

The planner, `explain` and README's table of memory all read this account. Activations are not in it.
"""

import dataclasses
import math
from typing import Any

import jax

from meshtrain.layout.offload import is_on_host
from meshtrain.layout.replicas import Replicas
from meshtrain.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of one device.

    Attributes:
      parameters: in the dtype in which they are stored.
      gradients: the float32 sums to which each microbatch's gradients are added.
      moments: the optimizer's state in device memory.
      on_host: the optimizer's state in the memory of the host, where `offload.moments` puts it.
    """

    parameters: int
    gradients: int
    moments: int
    on_host: int

    @property
    def total(self) -> int:
        """Bytes in device memory."""
        return self.parameters + self.gradients + self.moments


def held(state: TrainState, replicas: Replicas) -> Held:
    """Returns what one device holds of a training state.

    Args:
      state: abstract; each leaf has its sharding.
      replicas: how gradients are reduced over the data axis, which decides the shape of their sums.
    """
    moments = jax.tree.leaves(state.opt_state)
    return Held(
        parameters=bytes_of_device(state.params),
        gradients=bytes_of_device(replicas.accumulators(state.params)),
        moments=bytes_of_device([leaf for leaf in moments if not is_on_host(leaf.sharding)]),
        on_host=bytes_of_device([leaf for leaf in moments if is_on_host(leaf.sharding)]),
    )


def bytes_of_device(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of abstract arrays with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
