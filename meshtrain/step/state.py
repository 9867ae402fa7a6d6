"""What a step takes and gives back: everything that a run must keep to go on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain.models.task import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run.

    Attributes:
      step: int32 scalar, updates done so far.
      params: nested dict of float32 arrays.
      opt_state: the optimizer's state, as optax made it.
      rng: uint32 key data; step n draws from this key with n folded in.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    rng: jax.Array


def init_state(params: Params, transformation: optax.GradientTransformation, rng: jax.Array) -> TrainState:
    """Returns the state before the first step.

    Args:
      params: initial parameters.
      transformation: the optimizer.
      rng: a typed key.
    """
    return TrainState(jnp.zeros((), jnp.int32), params, transformation.init(params), jax.random.key_data(rng))


def step_key(state: TrainState) -> jax.Array:
    """Returns the typed key of the state's step."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
