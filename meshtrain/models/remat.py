"""Which activations of a layer are kept for the backward pass, and which are computed again."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from meshtrain.layout.placement import Placement
from meshtrain.words.numbers import nearest_divisor
from meshtrain.words.options import option

# Names that mark activations for policies: a layer's input, and what attention makes before its output projection.
RESIDUAL, HEADS = "residual", "heads"

# cuDNN's attention: its results are the heads, and the sums of exponentials that its backward pass starts from.
_FUSED_ATTENTION = "dot_product_attention_fwd"


@dataclasses.dataclass(frozen=True)
class RematOptions:
    """What the backward pass recomputes."""

    policy: str = option(
        "none",
        "what a layer computes again: none, full (all but its input), save_attention (all but input and attention), "
        "dots (all but matmuls), offload (as full, the input waits in the host's memory)",
        choices=("none", "full", "save_attention", "dots", "offload"),
    )
    every: int = option(1, "one layer of so many computes again, the others keep everything; 1: each layer", minimum=1)


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
    if name == "save_attention":
        return _is_attention
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


def _is_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name.startswith(_FUSED_ATTENTION) or (primitive.name == "name" and params["name"] == HEADS)


def _only(chosen: Callable[..., bool]) -> Callable[..., bool]:
    return lambda primitive, *_, **params: chosen(primitive, params)


def _all_but(chosen: Callable[..., bool]) -> Callable[..., bool]:
    return lambda primitive, *_, **params: not chosen(primitive, params)


def check(options: RematOptions, num_layers: int, num_stages: int) -> list[str]:
    """Returns one line for each way in which the choice of layers does not fit the model or the mesh.

    Args:
      options: each within its own bounds.
      num_layers: in the whole model.
      num_stages: of the pipeline, 1 for none.
    """
    if options.every == 1:
        return []
    if num_stages > 1:
        return [
            f"remat.every: got {options.every} with mesh.pipeline = {num_stages}; allowed: 1, since the backward pass "
            "of a stage computes all of its layers again; nearest: remat.every=1"
        ]
    if num_layers % options.every:
        near = nearest_divisor(num_layers, options.every)
        return [
            f"remat.every: got {options.every}; allowed: a divisor of model.num_layers = {num_layers}; nearest: {near}"
        ]
    return []
