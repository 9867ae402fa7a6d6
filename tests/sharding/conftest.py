"""Meshes and arrays of which tests say what is not one, and the shape."""

import jax
import jax.numpy as jnp

from meshtrain.sharding.rules import AXES


def shape_of(**axes: int) -> dict[str, int]:
    """Returns the size of each axis of a mesh, 1 where nothing is said."""
    return dict.fromkeys(AXES, 1) | axes


def array(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns an abstract array in float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
