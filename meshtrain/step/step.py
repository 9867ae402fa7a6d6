"""One step: sums and gradients of the batch, clipping, the optimizer, the new state."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from meshtrain.models.task import SEQUENCE_INDEX, Batch, Loss, Metrics, Params
from meshtrain.step.accumulate import Gradients
from meshtrain.step.clip import clip_by_global_norm
from meshtrain.step.state import TrainState, step_key

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[Params, Batch], Metrics]


def with_sequence_index(batch: Batch) -> Batch:
    """Adds the index of each sequence in the global batch, int32 [B]."""
    num_sequences = jax.tree.leaves(batch)[0].shape[0]
    return {**batch, SEQUENCE_INDEX: jnp.arange(num_sequences, dtype=jnp.int32)}


def train_step(
    gradients: Gradients,
    transformation: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    clip_norm: float,
) -> TrainStep:
    """Returns the step that trains: (state, batch) -> (state, metrics).

    Args:
      gradients: (params, batch, rng) -> sums over the batch.
      transformation: the optimizer, fed with the gradient of the mean loss.
      learning_rate: update count -> learning rate, for the log only; the optimizer has its own.
      clip_norm: the largest gradient norm that passes, 0 for no clipping.

    Metrics are float32 scalars: loss (mean over targets), weight (number of targets), grad_norm (before clipping),
    learning_rate, and the task's own.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sums = gradients(state.params, with_sequence_index(batch), step_key(state))
        weight = jnp.maximum(sums.weight, 1.0)
        mean_gradients = jax.tree.map(lambda gradient: gradient / weight, sums.gradients)
        clipped, grad_norm = clip_by_global_norm(mean_gradients, clip_norm)
        updates, opt_state = transformation.update(clipped, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {name: value / weight for name, value in sums.metrics.items()}
        metrics |= {
            "loss": sums.loss / weight,
            "weight": sums.weight,
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(learning_rate(state.step), jnp.float32),
        }
        return TrainState(state.step + 1, params, opt_state, state.rng), metrics

    return step


def eval_step(loss: Callable[[Params, Batch, jax.Array], Loss]) -> EvalStep:
    """Returns the step that evaluates: (params, batch) -> sums `loss`, `weight` and the task's own, to be added up."""

    def step(params: Params, batch: Batch) -> Metrics:
        value, weight, metrics = loss(params, with_sequence_index(batch), jax.random.key(0))
        return {**metrics, "loss": value, "weight": weight}

    return step
