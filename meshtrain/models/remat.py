"""Which activations of a layer are kept for the backward pass, and which are computed again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from meshtrain.options import option

# The name under which `attention.py` marks the residual stream for `offload`.
RESIDUAL = "residual"


@dataclasses.dataclass(frozen=True)
class RematOptions:
    """What the backward pass recomputes."""

    policy: str = option(
        "none",
        "what a layer computes again: none, full (all but its input), dots (all but matmuls), offload (input on host)",
        choices=("none", "full", "dots", "offload"),
    )


def checkpoint_policy(name: str) -> Callable[..., Any] | None:
    """Returns the `jax.checkpoint` policy of a name; `full` keeps nothing but a layer's input.

    Args:
      name: `full`, `dots` or `offload`; `none` has no policy, since nothing is wrapped.
    """
    policies = jax.checkpoint_policies
    if name == "dots":
        return policies.dots_with_no_batch_dims_saveable
    if name == "offload":
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[RESIDUAL],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.nothing_saveable
