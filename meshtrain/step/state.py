"""What a step takes and gives back: everything that a run must keep to go on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain.models.task import Params
from meshtrain.step.guard import Skipped, none_skipped
from meshtrain.step.loss_scale import LossScale, Scaling, first_scale
from meshtrain.step.precision import cast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run.

    Attributes:
      step: int32 scalar, steps done so far, skipped ones among them.
      params: nested dict of arrays, float32 unless `precision.param_dtype` says otherwise.
      opt_state: the optimizer's state, as optax made it for float32 parameters.
      rng: uint32 key data; step n draws from this key with n folded in.
      skipped: which steps changed nothing, and what the guard knows of those before.
      loss_scale: by how much the loss is multiplied for the backward pass, and since when.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    rng: jax.Array
    skipped: Skipped
    loss_scale: LossScale


def init_state(
    params: Params, transformation: optax.GradientTransformation, rng: jax.Array, scaling: Scaling | None = None
) -> TrainState:
    """Returns the state before the first step.

    Args:
      params: initial parameters.
      transformation: the optimizer.
      rng: a typed key.
      scaling: how the loss is scaled, if it is.
    """
    step, opt_state = jnp.zeros((), jnp.int32), transformation.init(cast(params, jnp.float32))
    return TrainState(step, params, opt_state, jax.random.key_data(rng), none_skipped(), first_scale(scaling))


def step_key(state: TrainState) -> jax.Array:
    """Returns the typed key of the state's step."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)


def num_updates(state: TrainState) -> jax.Array:
    """Returns how often the weights have changed, an int32 scalar: the count that learning rates are a function of."""
    return state.step - state.skipped.total
