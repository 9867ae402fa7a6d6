"""A step whose loss or gradients are no numbers leaves no trace in weights and moments; it is counted, and named.

Everything here is part of the one jitted step: no value travels to the host, and every process and mesh comes to the
same decision, since all of them judge the same global sums.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.layout.trees import leaves_with_paths
from meshtrain.words.options import option

NUM_NORMS = 64  # gradient norms that the median of the spike rule is taken over

# Names among a step's metrics that steer the loop and are not worth a log line.
IN_A_ROW, FIRST_NOT_FINITE = "skipped_in_a_row", "first_not_finite"


@dataclasses.dataclass(frozen=True)
class GuardOptions:
    """When a step is left out, and when leaving out no longer helps."""

    max_skipped_in_a_row: int = option(
        5,
        "steps in a row that may be skipped because loss or gradients are no numbers; one more ends the run",
        minimum=0,
    )
    spike_factor: float = option(
        0.0,
        f"skips a step too whose gradient norm is above so many medians of the last {NUM_NORMS}; 0: never",
        minimum=0.0,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Skipped:
    """What the guard remembers.

    Attributes:
      total: int32 scalar, steps skipped since the run began.
      in_a_row: int32 scalar, those since the last good step that a smaller loss scale could not have saved.
      norms: float32 [NUM_NORMS], the last finite gradient norms, oldest first; 0 where there were none yet.
    """

    total: jax.Array
    in_a_row: jax.Array
    norms: jax.Array


def none_skipped() -> Skipped:
    """Returns the memory of a run that has not begun."""
    return Skipped(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros(NUM_NORMS, jnp.float32))


def is_good(options: GuardOptions, skipped: Skipped, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns whether a step may change the weights, a bool scalar.

    The spike rule waits until it has seen NUM_NORMS norms. It compares with every finite norm, of skipped steps too:
    gradients that stay larger are the new median after a while, or end the run before.

    Args:
      options: the rules.
      skipped: what happened before.
      loss: float32 scalar.
      norm: float32 scalar, the norm over all gradients before clipping, unscaled.
    """
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if options.spike_factor == 0.0:
        return good
    has_seen_enough = jnp.min(skipped.norms) > 0
    return good & ~(has_seen_enough & (norm > options.spike_factor * jnp.median(skipped.norms)))


def after(skipped: Skipped, good: jax.Array, excused: jax.Array, norm: jax.Array) -> Skipped:
    """Returns the memory after a step.

    Args:
      skipped: the memory before it.
      good: bool scalar, from `is_good`.
      excused: bool scalar, true where the loss scale may be to blame and has become smaller.
      norm: float32 scalar.
    """
    in_a_row = jnp.where(good, 0, skipped.in_a_row + jnp.where(excused, 0, 1))
    later = jnp.concatenate([skipped.norms[1:], norm[None]])
    return Skipped(skipped.total + jnp.where(good, 0, 1), in_a_row, jnp.where(jnp.isfinite(norm), later, skipped.norms))


def chosen(good: jax.Array, new: Any, old: Any) -> Any:
    """Returns the new tree after a good step and the old one, bit for bit, after another."""
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)


def first_not_finite(loss: jax.Array, square_sums: jax.Array) -> jax.Array:
    """Returns which value of a step is no number, an int32 scalar; -1 where all are.

    Args:
      loss: float32 scalar, number 0.
      square_sums: float32 [leaves], the sum of squares of each gradient; leaf n is number n + 1.
    """
    wrong = ~jnp.isfinite(jnp.concatenate([loss[None], square_sums]))
    return jnp.where(jnp.any(wrong), jnp.argmax(wrong), -1).astype(jnp.int32)


def name_of_first(params: Any, number: int) -> str:
    """Returns the name of the first array that is not finite, found out once training has stopped.

    A weight comes first, if one was read from elsewhere and is no number itself; then the loss, which only a forward
    pass through finite weights can have spoiled; then the gradients.

    Args:
      params: the parameters, on any mesh; every process calls this together.
      number: what `first_not_finite` said.
    """
    paths = [path for path, _ in leaves_with_paths(params)]
    are_finite = jax.jit(lambda leaves: [jnp.all(jnp.isfinite(leaf)) for leaf in leaves])(jax.tree.leaves(params))
    for path, is_finite in zip(paths, jax.device_get(are_finite), strict=True):
        if not np.all(is_finite):
            return f"params/{path}"
    if number < 0:
        return "none, the gradient norm jumped (guard.spike_factor)"
    return "loss" if number == 0 else f"gradients/{paths[number - 1]}"
