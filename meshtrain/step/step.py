"""The training step, which updates the weights from one batch, and the evaluation step, which only returns metrics.

A training step computes the loss and its gradients, and clips the gradients by their global norm (Pascanu et al. 2013).
The guard checks that loss and gradients are finite. Then the optimizer updates the weights.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from meshtrain.models.metrics import Metrics, all_logged, divisor
from meshtrain.models.task import SEQUENCE_INDEX, AfterUpdate, Batch, Loss, Params, Sums
from meshtrain.optim.average import update_average
from meshtrain.optim.moments import round_weights
from meshtrain.sharding.trees import Arrays, Masks, merge, select
from meshtrain.step import guard, health, loss_scale
from meshtrain.step.accumulate import Gradients
from meshtrain.step.guard import GuardOptions
from meshtrain.step.loss_scale import Scaling
from meshtrain.step.precision import cast
from meshtrain.step.state import OptState, TrainState, num_updates, step_key

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[Params, Batch], Metrics]
# (state, sums of a batch, seed of the backward pass that made its gradients) -> (state after the step, metrics).
Update = Callable[[TrainState, Sums, jax.Array], tuple[TrainState, Metrics]]
# (gradients of the mean loss, arrays of an extension) -> (gradients reduced over data, next arrays of the extension).
Reduce = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]


def with_sequence_index(batch: Batch) -> Batch:
    """Adds the entry `sequence_index` to a global batch of B examples: the index of each example, int32 [B]."""
    num_sequences = jax.tree.leaves(batch)[0].shape[0]
    return {**batch, SEQUENCE_INDEX: jnp.arange(num_sequences, dtype=jnp.int32)}


def train_step(gradients: Gradients, update: Update, scaling: Scaling | None = None) -> TrainStep:
    """Returns the training step: (state, batch) -> (state, metrics).

    Args:
      gradients: a function (params, batch, rng, seed) -> sums of loss, weight, metrics and gradients over the batch.
        The gradients are of the trained weights, and are multiplied by `seed`.
      update: the second half of the step, for example a `WeightUpdate`.
      scaling: the loss scaling of the backward pass; None: the loss is not scaled.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        seed = loss_scale.seed(scaling, state.loss_scale)
        sums = gradients(state.params, with_sequence_index(batch), step_key(state), seed)
        return update(state, sums, seed)

    return step


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """The second half of a step, an `Update`: the guard's checks, clipping, the optimizer, and the metrics.

    A step that the guard skips changes neither weights nor moments nor averages. It increases the step number, so the
    next step has another batch and other random numbers.

    Attributes:
      transformation: the optimizer. It gets the gradients of the mean loss.
      learning_rate: the learning rate as a function of the number of updates, for the metrics only.
      clip_norm: the largest global norm of the gradients; 0: no clipping.
      guard_options: the options that determine which steps are skipped.
      scaling: the loss scaling of the backward pass; None: the loss is not scaled.
      fetch: a function (optimizer's state, gradient norm) -> optimizer's state in device memory. The norm is an
        argument so that the copy starts only after the backward pass.
      mask: a pytree with the structure of the parameters: true for each trained parameter; None: all are trained.
        Frozen parameters do not change.
      reduce: a function (gradients of the mean loss, `TrainState.extra`) -> (gradients reduced over data, next
        `extra`); None if the gradients in the sums are already reduced.
      after_update: the function `Task.after_update`, which changes weights after the optimizer; None: no change.
      average_decay: the decay of the weight averages (`average.update_average`); 0: no averages.
      layers: which dims of the parameters stack layers, for `health.metrics`; None: no metrics by layer.
      is_own: whether the optimizer, the learning rate or `after_update` is a user's function. If so, the step also
        checks that the updated weights are finite; if they are not, the guard skips the step.
    """

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule
    clip_norm: float
    guard_options: GuardOptions
    scaling: Scaling | None = None
    fetch: Callable[[OptState, jax.Array], OptState] = lambda opt_state, _: opt_state
    mask: Masks = None
    reduce: Reduce | None = None
    after_update: AfterUpdate | None = None
    average_decay: float = 0.0
    layers: health.Layers | None = None
    is_own: bool = False

    def __call__(self, state: TrainState, sums: Sums, seed: jax.Array) -> tuple[TrainState, Metrics]:
        """Returns the state after the step, and the metrics of the step.

        Metrics are scalars: loss (mean over targets), weight (number of targets), grad_norm (over trained weights,
        before clipping), learning_rate (of this step, skipped or not), skipped_steps (since the start of the run), and
        loss_scale (of this step, if the loss is scaled). The guard adds metrics for the training loop. The task adds
        the metrics of `metrics.all_logged`, in which expert loads are arrays. With `layers` there are also the metrics
        of `health.metrics`.

        Args:
          state: the state before the step.
          sums: the sums of loss, weight, metrics and gradients over the batch; the gradients are multiplied by `seed`.
          seed: the factor of the loss in the backward pass, a float32 scalar.
        """
        weight = divisor(sums.weight)
        loss = sums.loss / weight
        mean_gradients = jax.tree.map(lambda total: total / (weight * seed), cast(sums.gradients, jnp.float32))
        trained, frozen = select(state.params, self.mask)
        # A zero for each frozen weight, because the guard reports a gradient by its index among all parameters.
        of_all = merge(mean_gradients, jax.tree.map(lambda _: jnp.float32(0), frozen))
        by_layer = health.squares(self.layers, of_all) if self.layers and self.reduce is None else None
        sums_of_squares = health.totals(by_layer) if by_layer else square_sums(of_all)
        squares = loss_scale.mark_overflows(self.scaling, sums_of_squares, of_all, weight * seed)
        norm, extra = jnp.sqrt(jnp.sum(squares)), state.extra
        if self.reduce is not None:
            mean_gradients, extra = self.reduce(mean_gradients, extra)
            # Compression may lose a NaN. So the norm of the reduced gradients is used only if the norm before the
            # reduction is finite.
            reduced_norm = jnp.sqrt(jnp.sum(square_sums(mean_gradients)))
            norm = jnp.where(jnp.isfinite(norm), reduced_norm, norm)
        before, weights = self.fetch(state.opt_state, norm), cast(trained, jnp.float32)
        clipped = clip(mean_gradients, norm, self.clip_norm)
        moved, opt_state = self._move(clipped, before, weights, frozen, sums.metrics)
        can_move = jnp.bool_(True)
        if self.is_own:
            can_move = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(moved)]))
        good = guard.is_good(self.guard_options, state.skipped, loss, norm) & can_move
        new_scale, is_excused = loss_scale.after(self.scaling, state.loss_scale, loss, norm)
        skipped = guard.after(state.skipped, good, is_excused, norm)
        updated = guard.where_good(good, round_weights(moved, trained, num_updates(state)), trained)
        metrics = all_logged(sums.metrics, weight)
        metrics |= {
            "loss": loss,
            "weight": sums.weight,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(self.learning_rate(num_updates(state)), jnp.float32),
            "skipped_steps": skipped.total,
            guard.IN_A_ROW: skipped.in_a_row,
            guard.FIRST_NOT_FINITE: guard.first_not_finite(loss, squares, can_move),
        }
        if self.layers:
            by_layer = by_layer or health.squares(self.layers, mean_gradients)
            metrics |= health.metrics(self.layers, by_layer, weights, cast(updated, jnp.float32))
            metrics[guard.ITS_LAYER] = health.last_not_finite(by_layer, metrics[guard.FIRST_NOT_FINITE])
        if self.scaling is not None:
            metrics["loss_scale"] = state.loss_scale.scale
        params = merge(updated, frozen)
        opt_state = guard.where_good(good, opt_state, before)
        extra = guard.where_good(good, extra, state.extra)
        return TrainState(state.step + 1, params, opt_state, state.rng, skipped, new_scale, extra), metrics

    def _move(
        self, gradients: Arrays, before: OptState, weights: Arrays, frozen: Arrays, of_task: Metrics
    ) -> tuple[Arrays, OptState]:
        """Returns the trained weights after the optimizer and `after_update`, and the next state of the optimizer.

        Args:
          gradients: the clipped gradients of the trained weights, float32.
          before: the optimizer's state before the step.
          weights: the trained weights before the step, float32.
          frozen: the frozen weights.
          of_task: the metric sums of the task's loss, for `after_update`.
        """
        updates, opt_state = self.transformation.update(gradients, before, weights)
        moved = optax.apply_updates(weights, updates)
        if self.after_update is not None:
            moved, _ = select(self.after_update(merge(moved, frozen), of_task), self.mask)
        return moved, update_average(opt_state, moved, self.average_decay) if self.average_decay else opt_state


def eval_step(loss: Callable[[Params, Batch, jax.Array], Loss]) -> EvalStep:
    """Returns the evaluation step: a function (params, batch) -> metrics, which are sums over the batch.

    The metrics are `loss`, `weight` (number of targets), and the metrics that the task's loss returns.
    """

    def step(params: Params, batch: Batch) -> Metrics:
        value, weight, metrics = loss(params, with_sequence_index(batch), jax.random.key(0))
        return {**metrics, "loss": value, "weight": weight}

    return step


def square_sums(gradients: Arrays) -> jax.Array:
    """Returns the sum of squares of each array, float32 [leaves], in the order of `jax.tree.leaves`.

    Args:
      gradients: a pytree of float32 arrays.
    """
    return jnp.stack([jnp.sum(jnp.square(gradient)) for gradient in jax.tree.leaves(gradients)])


def clip(gradients: Arrays, norm: jax.Array, max_norm: float) -> Arrays:
    """Returns the gradients times min(1, max_norm / norm).

    >>> clip({"a": jnp.float32([3.0, 4.0])}, jnp.float32(5.0), 1.0)["a"]
    Array([0.6, 0.8], dtype=float32)

    Args:
      gradients: a pytree of float32 arrays.
      norm: the global norm of the gradients, a float32 scalar.
      max_norm: the largest global norm; 0: no clipping.
    """
    if max_norm == 0.0:
        return gradients
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda gradient: gradient * scale, gradients)
