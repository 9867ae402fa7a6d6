"""Balance of experts without an auxiliary loss (Wang et al. 2024; DeepSeek-V3, section 2.1.2).

The bias of an expert is added to its score where experts are chosen. After each step it falls by a fixed rate if more
tokens than the mean chose the expert, and rises by the rate if fewer did.

E: experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain.layout.partition import is_counted
from meshtrain.optim.masks import map_axes


def with_balance(
    transformation: optax.GradientTransformation, rate: float, logical_axes: Any
) -> optax.GradientTransformation:
    """Returns an optimizer that moves the biases of routers by `balancing`, and all other weights as before.

    It is the same optimizer, with the same state, where no weight is such a bias.

    Args:
      transformation: of the other weights. It gets a `MaskedNode` in place of each bias.
      rate: see `balancing`.
      logical_axes: a tree like the parameters, with a tuple of logical axes for each weight.
    """
    labels = map_axes(lambda axes: "counted" if is_counted(axes) else "others", logical_axes)
    if "counted" not in jax.tree.leaves(labels):
        return transformation
    return optax.partition({"counted": balancing(rate), "others": transformation}, labels)


def others(logical_axes: Any) -> Any:
    """Returns the logical axes with a `MaskedNode` for each bias, as `with_balance` has the trees of the others."""
    return map_axes(lambda axes: optax.MaskedNode() if is_counted(axes) else axes, logical_axes)


def balancing(rate: float) -> optax.GradientTransformation:
    """Returns the optimizer of biases, without a state: counts -> -rate x sign(count - mean count).

    Counts are compared as integers, so that the result has the same bits however they were added up.

    >>> print(balancing(0.5).update(jnp.float32([4, 1, 2, 2]), optax.EmptyState())[0])
    [-0.5  0.5  0.5  0.5]

    Args:
      rate: by which a bias moves in a step.
    """

    def update(counts: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda count: rate * direction(count), counts)

    return optax.stateless(update)


def direction(counts: jax.Array) -> jax.Array:
    """Returns which way each bias moves: -1 above the mean of the last dim, 1 below, 0 at it; float32.

    Args:
      counts: float32 [..., E], whole numbers below 2^24. Their sum over E has to be below 2^31.
    """
    whole = counts.astype(jnp.int32)
    total = jnp.sum(whole, axis=-1, keepdims=True)
    floor, rest = total // counts.shape[-1], total % counts.shape[-1]
    is_above = whole > floor
    is_below = (whole < floor) | ((whole == floor) & (rest > 0))
    return is_below.astype(jnp.float32) - is_above.astype(jnp.float32)
