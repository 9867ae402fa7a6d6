"""Clipping by the global norm of the gradients (Pascanu et al. 2013)."""

from typing import Any

import jax
import jax.numpy as jnp


def square_sums(gradients: Any) -> jax.Array:
    """Returns the sum of squares of each array, float32 [leaves], in the order of `jax.tree.leaves`.

    Args:
      gradients: a tree of float32 arrays.
    """
    return jnp.stack([jnp.sum(jnp.square(gradient)) for gradient in jax.tree.leaves(gradients)])


def clip(gradients: Any, norm: jax.Array, max_norm: float) -> Any:
    """Returns the gradients times min(1, max_norm / norm).

    >>> clip({"a": jnp.float32([3.0, 4.0])}, jnp.float32(5.0), 1.0)["a"]
    Array([0.6, 0.8], dtype=float32)

    Args:
      gradients: a tree of float32 arrays.
      norm: their global norm, a float32 scalar.
      max_norm: the largest norm; 0 means no clipping.
    """
    if max_norm == 0.0:
        return gradients
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda gradient: gradient * scale, gradients)
