"""Which activations of a layer are kept for the backward pass, and which are computed again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from meshtrain.layout.placement import Placement
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


def checkpoint_policy(name: str, placement: Placement) -> Callable[..., Any] | None:
    """Returns the `jax.checkpoint` policy of a layer, None where everything may be kept.

    Weights that were gathered from their shards are kept only where the placement says so: a policy that keeps them
    would hold whole weights of all layers, which is what sharding them was to avoid.

    Args:
      name: one of the choices of `RematOptions.policy`; `full` keeps nothing but a layer's input.
      placement: tells gathered weights from activations.
    """
    if not placement.gathers_weights:
        return None if name == "none" else _activations(name)
    if name == "none":
        return None if placement.keeps_gathered else _all_but(placement.is_gather)
    if not placement.keeps_gathered:
        return _activations(name)
    keeps, gathers = _activations(name), _only(placement.is_gather)
    return lambda primitive, *shapes, **params: (
        gathers(primitive, *shapes, **params) or keeps(primitive, *shapes, **params)
    )


def _activations(name: str) -> Callable[..., Any]:
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


def _only(chosen: Callable[..., bool]) -> Callable[..., bool]:
    return lambda primitive, *_, **params: chosen(primitive, params)


def _all_but(chosen: Callable[..., bool]) -> Callable[..., bool]:
    return lambda primitive, *_, **params: not chosen(primitive, params)
