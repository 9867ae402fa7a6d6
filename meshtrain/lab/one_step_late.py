"""Gradients that are applied one step late: those of the step before are reduced while this step computes its own.

Nothing in the program waits for the reduction before the update at its end, so it can run beside the forward and
backward pass. The weights that a gradient was computed from have then moved by one update. This is asynchronous SGD
with a bound of one step and without its randomness (Lian et al. 2015; Narayanan et al. 2019).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.assembly.extensions import EXTRA, reduced_over_data, reducing, restoring
from meshtrain.assembly.placed import Placed
from meshtrain.config.schema import Config
from meshtrain.errors import Problem
from meshtrain.models.metrics import Metrics
from meshtrain.models.task import AfterUpdate, Sums
from meshtrain.sharding.param_sharding import Names
from meshtrain.sharding.reduction import Dims, Reduction, ReductionOptions, sum_over
from meshtrain.sharding.ring import wire_share
from meshtrain.sharding.trees import Arrays
from meshtrain.step import guard
from meshtrain.step.extension import Extension, FieldNames
from meshtrain.step.shardings import abstract_metrics
from meshtrain.step.state import TrainState
from meshtrain.step.step import Reduce, Update


def one_step_late(options: ReductionOptions, dtype: DTypeLike) -> Reduction:
    """Returns the reduction of the gradients of the step before; those of this step are the residual.

    Args:
      options: none of its own.
      dtype: in which gradients are sent.
    """

    def reduce(gradients: Arrays, residual: Arrays, over: str, scattered: Dims) -> tuple[Arrays, Arrays]:
        sums = lambda leaf, dim: sum_over(leaf.astype(dtype), over, dim).astype(jnp.float32)  # noqa: E731
        return jax.tree.map(sums, residual, scattered), gradients

    def sent_bytes(elements: float, replicas: int, is_scattered: bool) -> float:
        share = wire_share("reduce-scatter" if is_scattered else "all-reduce", replicas)
        return elements * share * jnp.dtype(dtype).itemsize

    return Reduction(reduce, sent_bytes, init=lambda shapes: shapes, extension=late)


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


def late(reduction: Reduction, placed: Placed) -> Extension:
    """Returns the extension of a step whose gradients are applied one step late.

    `TrainState.extra` is (the gradients of the step before, the sums of metrics that `Task.after_update` gets with
    them; () without one).
    """
    plain, reduce = reducing(reduction, placed), reduced_over_data(reduction, placed.replicas)
    task = placed.task
    metrics = abstract_metrics(task, placed.batch) if task.after_update is not None else ()

    def begin(state: TrainState) -> TrainState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), metrics)
        return dataclasses.replace(state, extra=(plain.begin(state).extra, zeros))

    def names(fields: FieldNames, state: TrainState) -> FieldNames:
        of_metrics: list[Names] = [(None,) * leaf.ndim for leaf in jax.tree.leaves(metrics)]
        return {**fields, "extra": [*plain.names(fields, state)["extra"], *of_metrics]}

    return dataclasses.replace(
        plain,
        begin=begin,
        names=names,
        update=functools.partial(late_update, reduce),
        restore=restoring(reduction.reshard, f"{EXTRA}0/"),
        costs=dataclasses.replace(plain.costs, hides_transfers=True),
    )


def late_update(reduce: Reduce, update: Callable[..., Update], after_update: AfterUpdate | None = None) -> Update:
    """Returns the update of a step whose gradients are applied one step late.

    While there is no gradient to apply (in the first step, or after it if its own was not finite) weights and moments
    stay: an update by zeros would still decay weights and correct moments.

    Args:
      reduce: from `reduced_over_data`.
      update: `WeightUpdate` without its `reduce` and `after_update`.
      after_update: see `WeightUpdate`; it gets the metrics of the step whose gradients are applied.
    """

    def late(state: TrainState, sums: Sums, seed: jax.Array) -> tuple[TrainState, Metrics]:
        before, metrics_before = state.extra
        waiting, _ = reduce(sums.gradients, before)
        # Nothing but the forward and backward pass is left to run beside the reduction, so the compiler chooses these.
        gradients, waiting = jax.lax.optimization_barrier((sums.gradients, waiting))
        moved = after_update and (lambda params, _: after_update(params, metrics_before))
        apply = update(lambda gradients, _: (waiting, gradients), moved)
        # The learning rate is that of the update, of which there is one less than there are steps.
        last = dataclasses.replace(state, step=jnp.maximum(state.step - 1, 0), extra=before)
        new, metrics = apply(last, sums._replace(gradients=gradients), seed)
        norm: Arrays = metrics["grad_norm"]
        has_gradient = jnp.not_equal(norm, 0.0)
        params, opt_state = guard.where_good(has_gradient, (new.params, new.opt_state), (state.params, state.opt_state))
        is_good = new.skipped.total == state.skipped.total
        kept = guard.where_good(is_good, sums.metrics, metrics_before) if after_update else ()
        after = dataclasses.replace(new, params=params, opt_state=opt_state, extra=(new.extra, kept))
        return dataclasses.replace(after, step=state.step + 1), metrics

    return late
