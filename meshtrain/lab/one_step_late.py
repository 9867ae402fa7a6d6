"""Gradients that are applied one step late: those of the step before are reduced while this step computes its own.

Nothing in the program waits for the reduction before the update at its end, so it can run beside the forward and
backward pass. The weights that a gradient was computed from have then moved by one update. This is asynchronous SGD
with a bound of one step and without its randomness (Lian et al. 2015; Narayanan et al. 2019).
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.config.fields import Config
from meshtrain.errors import Problem
from meshtrain.models.metrics import Metrics
from meshtrain.models.task import AfterUpdate, Sums
from meshtrain.sharding.reduction import Dims, Reduction, ReductionOptions, summed
from meshtrain.sharding.ring import wire_share
from meshtrain.sharding.trees import Arrays
from meshtrain.step import guard
from meshtrain.step.state import TrainState
from meshtrain.step.step import Reduce, Update


def one_step_late(options: ReductionOptions, dtype: DTypeLike) -> Reduction:
    """Returns the reduction of the gradients of the step before; those of this step are the residual.

    Args:
      options: none of its own.
      dtype: in which gradients are sent.
    """

    def reduce(gradients: Arrays, residual: Arrays, over: str, scattered: Dims) -> tuple[Arrays, Arrays]:
        sums = lambda leaf, dim: summed(leaf.astype(dtype), over, dim).astype(jnp.float32)  # noqa: E731
        return jax.tree.map(sums, residual, scattered), gradients

    def sent_bytes(elements: float, replicas: int, is_scattered: bool) -> float:
        share = wire_share("reduce-scatter" if is_scattered else "all-reduce", replicas)
        return elements * share * jnp.dtype(dtype).itemsize

    return Reduction(reduce, sent_bytes, residual=lambda shapes: shapes, update=late_update)


def check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns one line for each option that does not go with gradients that are applied one step late."""
    lines = []
    if config.local_steps.period:
        lines.append(
            Problem(
                "reduction.name",
                got=(
                    f"one_step_late with local_steps.period = {config.local_steps.period}, whose steps send no gradient"
                ),
                allowed="one of the two",
                nearest="reduction.name=sum",
                depends_on=["local_steps.period"],
            )
        )
    if config.guard.spike_factor:
        lines.append(
            Problem(
                "guard.spike_factor",
                got=(
                    f"{config.guard.spike_factor} with reduction.name = one_step_late, where a skipped gradient would "
                    "come again"
                ),
                allowed=0,
                nearest="guard.spike_factor=0",
                depends_on=["reduction.name"],
            )
        )
    return lines


one_step_late.check = check  # type: ignore[attr-defined]


def late_update(update: Callable[..., Update], reduce: Reduce, after_update: AfterUpdate | None = None) -> Update:
    """Returns the update of a step whose gradients are applied one step late.

    While there is no gradient to apply (in the first step, or after it if its own was not finite) weights and moments
    stay: an update by zeros would still decay weights and correct moments.

    Args:
      update: `WeightUpdate` without its `reduce` and `after_update`.
      reduce: `Replicas.reduce`.
      after_update: see `WeightUpdate`; it gets the metrics of the step whose gradients are applied.
    """

    def late(state: TrainState, sums: Sums, seed: jax.Array) -> tuple[TrainState, Metrics]:
        waiting, _ = reduce(sums.gradients, state.residual)
        # Nothing but the forward and backward pass is left to run beside the reduction, so the compiler chooses these.
        gradients, waiting = jax.lax.optimization_barrier((sums.gradients, waiting))
        # The learning rate is that of the update, of which there is one less than there are steps.
        before = dataclasses.replace(state, step=jnp.maximum(state.step - 1, 0))
        moved = after_update and (lambda params, _: after_update(params, state.late_metrics))
        apply = update(lambda gradients, _: (waiting, gradients), moved)
        new, metrics = apply(before, sums._replace(gradients=gradients), seed)
        norm: Arrays = metrics["grad_norm"]
        has_gradient = jnp.not_equal(norm, 0.0)
        params, opt_state = guard.where_good(has_gradient, (new.params, new.opt_state), (state.params, state.opt_state))
        is_good = new.skipped.total == state.skipped.total
        late_metrics = guard.where_good(is_good, sums.metrics, state.late_metrics) if after_update else ()
        after = dataclasses.replace(new, params=params, opt_state=opt_state, late_metrics=late_metrics)
        return dataclasses.replace(after, step=state.step + 1), metrics

    return late
