"""The training state: all arrays that a step reads and writes and that a checkpoint saves."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshtrain.models.task import Params
from meshtrain.sharding.trees import Arrays, Masks, select
from meshtrain.step.guard import GuardState, none_skipped
from meshtrain.step.loss_scale import LossScale, Scaling, first_scale
from meshtrain.step.precision import cast

OptState: TypeAlias = Any  # optax's named tuples, whose leaves are arrays

# Fields of `TrainState` whose arrays are small and replicated on every device.
REPLICATED_FIELDS = ("step", "rng", "skipped", "loss_scale")
COPY = "copy"  # logical axis of a first dim that has an entry per data-parallel replica


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run.

    Attributes:
      step: int32 scalar, the number of steps done, including skipped steps.
      params: nested dict of arrays, trained and frozen; float32 unless `precision.param_dtype` or
        `precision.frozen_dtype` selects another dtype.
      opt_state: the optax state of the trained parameters, initialized from them in float32.
      rng: uint32 data of a PRNG key; the key of a step is this key with the number of earlier steps folded in.
      skipped: the guard's counts of skipped steps and the last gradient norms.
      loss_scale: the scale of the loss in the backward pass, and the counts of steps that determine its changes.
      extra: the arrays of an extension (`extension.py`), any pytree; () without an extension.
    """

    step: jax.Array
    params: Params
    opt_state: OptState
    rng: jax.Array
    skipped: GuardState
    loss_scale: LossScale
    extra: Arrays = ()


def init_state(
    params: Params,
    transformation: optax.GradientTransformation,
    rng: jax.Array,
    scaling: Scaling | None = None,
    mask: Masks = None,
    extra: Arrays = (),
) -> TrainState:
    """Returns the state before the first step.

    Args:
      params: the initial parameters.
      transformation: the optimizer.
      rng: a typed PRNG key, from which the keys of all steps are derived.
      scaling: the loss scaling; None: the loss is not scaled.
      mask: a pytree with the structure of the parameters: true for each trained parameter; None: all are trained.
      extra: the arrays of an extension.
    """
    trained, _ = select(params, mask)
    step, opt_state = jnp.zeros((), jnp.int32), transformation.init(cast(trained, jnp.float32))
    scale, key_data = first_scale(scaling), jax.random.key_data(rng)
    return TrainState(step, params, opt_state, key_data, none_skipped(), scale, extra)


def step_key(state: TrainState) -> jax.Array:
    """Returns the typed PRNG key of the step that follows this state."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)


def num_updates(state: TrainState) -> jax.Array:
    """Returns the number of steps that were not skipped, an int32 scalar: the argument of the learning rate."""
    return state.step - state.skipped.total
