"""Gradients that are applied one step late: those of the step before are reduced while this step computes its own.

Nothing in the program waits for the reduction before the update at its end, so it can run beside the forward and
backward pass (`step.late_update`). The weights that a gradient was computed from have then moved by one update. This is
asynchronous SGD with a bound of one step and without its randomness (Lian et al. 2015; Narayanan et al. 2019).
"""

import dataclasses
from typing import Any

import jax

from meshtrain.layout.axes import DATA
from meshtrain.layout.replicas import Replicas
from meshtrain.words.errors import UserError


@dataclasses.dataclass(frozen=True)
class Late(Replicas):
    """How gradients are added up over microbatches, kept for one step, and then reduced over the replicas of data."""

    @property
    def reduces_in_loops(self) -> bool:
        """Whether gradients are reduced inside the backward loop; never, because the next step reduces them."""
        return False

    def _reduced(self, gradients: Any) -> Any:
        """Returns the gradients of each replica, [replicas, ...], as they are: `reduce` gets them."""
        return gradients

    def reduce(self, gradients: Any, residual: Any) -> tuple[Any, Any]:
        """Returns the gradients of the step before, reduced over data, and those of this step for the next.

        Args:
          gradients: float32, from `data_parallel`: [replicas, ...], or without that dim where data has size 1.
          residual: those of the step before, a tree of float32 [replicas, ...]; zeros before the first step.
        """
        if self.axes:
            return super()._reduced(residual), gradients
        of_one = jax.tree.map(lambda leaf: leaf[0], residual)
        return of_one, jax.tree.map(lambda leaf: leaf[None], gradients)


def late(replicas: Replicas) -> Late:
    """Returns replicas whose gradients are applied one step late.

    Args:
      replicas: of level 0 or 1.

    Raises:
      UserError: data is split over several devices and left to the partitioner, which reduces gradients at once.
    """
    if replicas.mesh.shape[DATA] > 1 and not replicas.is_manual:
        raise UserError(
            "local_steps.delay: got 1 with fsdp or an axis after it and a task without `takes_manual_axes`, or with "
            "weights split over data; allowed: 0, or a task with it; nearest: local_steps.delay=0"
        )
    return Late(**{field.name: getattr(replicas, field.name) for field in dataclasses.fields(replicas)})
