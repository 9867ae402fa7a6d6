"""Gradients among which some are counts of the tokens that chose each expert; see `layout.partition.is_counted`.

Counts are added up as gradients are. They are no derivative of the loss, so they are neither divided by the number of
targets and the loss scale nor clipped, and have no part in the norm. The optimizer gets them as whole numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def except_counts(function: Callable[[Any], Any], gradients: Any, counted: Any) -> Any:
    """Returns a function's result for a tree of gradients, with each count as it was.

    Args:
      function: gradients -> a tree like them.
      gradients: a tree of arrays.
      counted: a tree of bool like the gradients, true for each count; None: none is.
    """
    changed = function(gradients)
    if counted is None:
        return changed
    return jax.tree.map(lambda is_count, new, old: old if is_count else new, counted, changed, gradients)


def without_counts(gradients: Any, counted: Any) -> Any:
    """Returns the gradients with a zero in place of each count; for the arguments see `except_counts`."""
    if counted is None:
        return gradients
    return jax.tree.map(lambda is_count, leaf: jnp.float32(0) if is_count else leaf, counted, gradients)
