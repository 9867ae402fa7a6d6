"""Clipping by the norm over all gradients (Pascanu et al. 2013)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(gradients: Any, max_norm: float) -> tuple[Any, jax.Array]:
    """Scales all gradients by min(1, max_norm / norm).

    Args:
      gradients: a tree of float32 arrays.
      max_norm: 0 leaves them alone.

    Returns:
      The clipped gradients, and their norm before, a float32 scalar.
    """
    norm = optax.tree.norm(gradients)
    if max_norm == 0.0:
        return gradients, norm
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda gradient: gradient * scale, gradients), norm
