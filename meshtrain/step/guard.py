"""Skips a step whose loss or gradients are not finite: weights and moments do not change, and the step is counted.

The guard is part of the jitted step and transfers nothing to the host. Every process makes the same decision, because
it depends only on global sums.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.options import option
from meshtrain.sharding.trees import Arrays, leaves_with_paths

NUM_NORMS = 64  # number of gradient norms in the median of the spike rule

_UPDATE = -2  # result of `first_not_finite` if only the updated weights are not finite
# Metrics of a step that the loop reads but does not log.
IN_A_ROW, FIRST_NOT_FINITE, ITS_LAYER = "skipped_in_a_row", "first_not_finite", "first_not_finite_layer"


@dataclasses.dataclass(frozen=True)
class GuardOptions:
    """When a step is skipped, and how many steps in a row may be skipped."""

    max_skipped_in_a_row: int = option(
        5,
        "consecutive steps that may be skipped (loss or gradients not finite); one more ends the run",
        minimum=0,
    )
    spike_factor: float = option(
        0.0,
        f"skip a step whose gradient norm exceeds this factor times the median of {NUM_NORMS} norms; 0: never",
        minimum=0.0,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """The guard's part of the training state.

    Attributes:
      total: int32 scalar, number of steps skipped since the start of the run.
      in_a_row: int32 scalar, number of steps skipped since the last good step; excludes overflows that a smaller loss
        scale may avoid.
      norms: float32 [NUM_NORMS], the last finite gradient norms, oldest first; unfilled entries are 0.
    """

    total: jax.Array
    in_a_row: jax.Array
    norms: jax.Array


def none_skipped() -> GuardState:
    """Returns the guard's state before the first step: no skipped steps and no gradient norms."""
    return GuardState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros(NUM_NORMS, jnp.float32))


def is_good(options: GuardOptions, skipped: GuardState, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns whether a step may change the weights, a bool scalar.

    The loss and the gradient norm must be finite. If `spike_factor` is above 0, and there are NUM_NORMS earlier finite
    norms, the norm must also be at most `spike_factor` times the median of the last NUM_NORMS finite norms. The median
    includes the norms of skipped steps. So if gradients stay large, either the median rises or `max_skipped_in_a_row`
    ends the run.

    Args:
      options: the options of the guard.
      skipped: the guard's state before the step.
      loss: float32 scalar, the mean loss of the step.
      norm: float32 scalar, the global norm of the gradients before clipping, without the loss scale.
    """
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if options.spike_factor == 0.0:
        return good
    is_full = jnp.min(skipped.norms) > 0
    return good & ~(is_full & (norm > options.spike_factor * jnp.median(skipped.norms)))


def after(skipped: GuardState, good: jax.Array, excused: jax.Array, norm: jax.Array) -> GuardState:
    """Returns the guard's state after a step.

    Args:
      skipped: the guard's state before the step.
      good: bool scalar, from `is_good`.
      excused: bool scalar from `loss_scale.after`, whether the loss scale may have caused the overflow and can still
        shrink. `total` counts an excused step, `in_a_row` does not.
      norm: float32 scalar, the step's global norm of the gradients.
    """
    in_a_row = jnp.where(good, 0, skipped.in_a_row + jnp.where(excused, 0, 1))
    later = jnp.concatenate([skipped.norms[1:], norm[None]])
    return GuardState(
        skipped.total + jnp.where(good, 0, 1), in_a_row, jnp.where(jnp.isfinite(norm), later, skipped.norms)
    )


def where_good(good: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    """Returns the arrays of `new` if `good` is true, else the arrays of `old`, bitwise equal."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def first_not_finite(loss: jax.Array, square_sums: jax.Array, can_move: jax.Array) -> jax.Array:
    """Returns the index of the first non-finite value of a step, an int32 scalar; -1 if all are finite.

    Args:
      loss: float32 scalar; its index is 0.
      square_sums: float32 [leaves], the sum of squares of each parameter's gradient; leaf n has the index n + 1.
      can_move: bool scalar, false if the updated weights are not finite. If it is false, and the loss and the gradients
        are finite, the result is `_UPDATE` (-2).
    """
    wrong = ~jnp.isfinite(jnp.concatenate([loss[None], square_sums]))
    otherwise = jnp.where(can_move, -1, _UPDATE)
    return jnp.where(jnp.any(wrong), jnp.argmax(wrong), otherwise).astype(jnp.int32)


def skip_reason(paths: Sequence[str], number: int, layer: int) -> str:
    """Returns as text why the guard skipped a step: a non-finite loss, gradient or update, or a jump of the norm.

    Args:
      paths: the path of each parameter.
      number: the result of `first_not_finite`. 0: the loss is not finite. n + 1: the gradient of parameter n is not
        finite. -2: the updated weights are not finite. -1: all of these are finite, so the gradient norm jumped.
      layer: the layer of the gradient, from `health.last_not_finite`; -1: unknown, or no layer.
    """
    if number == _UPDATE:
        return "the learning rate, an update of the optimizer, or the result of Task.after_update"
    if number < 0:
        return "none, the gradient norm jumped (guard.spike_factor)"
    of_layer = f", layer {layer}" if layer >= 0 else ""
    return "loss" if number == 0 else f"gradients/{paths[number - 1]}{of_layer}"


def name_of_first(params: Arrays, number: int, layer: int = -1) -> str:
    """Returns the path of the first non-finite weight, or the text of `skip_reason` if all weights are finite.

    Call it after training has stopped. A non-finite weight was non-finite when the run started, because the guard skips
    updates that are not finite.

    Args:
      params: the parameters, on any mesh; all processes have to call this function together.
      number: the result of `first_not_finite`.
      layer: the layer of the gradient, from `health.last_not_finite`; -1: unknown, or no layer.
    """
    paths = [path for path, _ in leaves_with_paths(params)]
    are_finite = jax.jit(lambda leaves: [jnp.all(jnp.isfinite(leaf)) for leaf in leaves])(jax.tree.leaves(params))
    for path, is_finite in zip(paths, jax.device_get(are_finite), strict=True):
        if not np.all(is_finite):
            return f"params/{path}"
    return skip_reason(paths, number, layer)
