"""Residuals of gradients on another number of replicas, as `Reduction.reshard` has them.

A checkpoint has the residual of each replica. On a mesh with as many replicas they go on bitwise.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
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


def shared_out(state: TrainState, like: TrainState, reshard: Callable[[Any, int], Any]) -> TrainState:
    """Returns a state from `as_saved` with the residuals of as many replicas as `like` has.

    Args:
      state: as it was read.
      like: abstract, each leaf with its sharding.
      reshard: see `Reduction`.
    """
    leaves = jax.tree.leaves(like.residual)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like.residual)
    share = jax.jit(reshard, static_argnums=1, out_shardings=shardings)
    return dataclasses.replace(state, residual=share(state.residual, leaves[0].shape[0]))
