"""Residuals of compressed gradients on another number of replicas: what the optimizer has not got yet stays the same.

A checkpoint has the residual of each replica. On a mesh with as many replicas they go on bitwise. On any other mesh
only their sum has a meaning, and each of the n replicas gets 1 / n of it: equal parts are packed with smaller scales
than the whole in one place.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.layout.axes import DATA
from meshtrain.step.state import TrainState


def as_saved(state: TrainState, num_saved: int) -> TrainState:
    """Returns the abstract state with the residuals of `num_saved` replicas, for reading a checkpoint of that many.

    Args:
      state: abstract, each leaf with its sharding; it has residuals.
      num_saved: replicas of the run that saved. Data splits the first dim if it divides it.
    """

    def saved(leaf: Any) -> jax.ShapeDtypeStruct:
        mesh = leaf.sharding.mesh
        replicas = DATA if num_saved % mesh.shape[DATA] == 0 else None
        sharding = NamedSharding(mesh, PartitionSpec(replicas, *leaf.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((num_saved, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return dataclasses.replace(state, residual=jax.tree.map(saved, state.residual))


def shared_out(state: TrainState, like: TrainState) -> TrainState:
    """Returns a state from `as_saved` with the residuals of as many replicas as `like` has.

    Args:
      state: as it was read.
      like: abstract, each leaf with its sharding.
    """

    def share(residuals: Any) -> Any:
        equal = lambda leaf, to: jnp.broadcast_to(jnp.sum(leaf, axis=0) / to.shape[0], to.shape)  # noqa: E731
        return jax.tree.map(equal, residuals, like.residual)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, like.residual)
    return dataclasses.replace(state, residual=jax.jit(share, out_shardings=shardings)(state.residual))
