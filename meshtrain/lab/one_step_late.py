"""Delayed gradients: a step reduces and applies the previous step's gradients while it computes new gradients.

Only the update at the end of the step uses the reduced gradients, so the reduction can overlap with the forward and
backward pass. The weights have changed by one update since the applied gradients were computed. This is asynchronous
SGD with a staleness of exactly one step, and deterministic (Lian et al. 2015; Narayanan et al. 2019).
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
from meshtrain.hardware.links import wire_share
from meshtrain.models.metrics import Metrics
from meshtrain.models.task import AfterUpdate, Sums
from meshtrain.sharding.param_sharding import Names
from meshtrain.sharding.reduction import Dims, Reduction, ReductionOptions, sum_over
from meshtrain.sharding.trees import Arrays
from meshtrain.step import guard
from meshtrain.step.extension import Extension, FieldNames
from meshtrain.step.shardings import abstract_metrics
from meshtrain.step.state import TrainState
from meshtrain.step.step import Reduce, Update


def one_step_late(options: ReductionOptions, dtype: DTypeLike) -> Reduction:
    """Returns a reduction that sums the previous step's gradients, and saves this step's gradients as its state.

    Args:
      options: not used; the reduction has no custom options.
      dtype: the dtype in which gradients are sent.
    """

    def reduce(gradients: Arrays, residual: Arrays, over: str, scattered: Dims) -> tuple[Arrays, Arrays]:
        sums = lambda leaf, dim: sum_over(leaf.astype(dtype), over, dim).astype(jnp.float32)  # noqa: E731
        return jax.tree.map(sums, residual, scattered), gradients

    def sent_bytes(elements: float, replicas: int, is_scattered: bool) -> float:
        share = wire_share("reduce-scatter" if is_scattered else "all-reduce", replicas)
        return elements * share * jnp.dtype(dtype).itemsize

    return Reduction(reduce, sent_bytes, init=lambda shapes: shapes, extension=late)


def check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each option that is incompatible with delayed gradients."""
    lines = []
    if config.local_steps.period:
        lines.append(
            Problem(
                "reduction.name",
                got=(
                    f"one_step_late with local_steps.period = {config.local_steps.period}, whose steps do not "
                    "send gradients"
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
                    f"{config.guard.spike_factor} with reduction.name = one_step_late, which would apply a "
                    "skipped gradient in the next step"
                ),
                allowed=0,
                nearest="guard.spike_factor=0",
                depends_on=["reduction.name"],
            )
        )
    return lines


one_step_late.check = check  # type: ignore[attr-defined]


def late(reduction: Reduction, placed: Placed) -> Extension:
    """Returns the extension for a step that applies gradients one step late.

    `TrainState.extra` is a pair: the previous step's gradients, and the previous step's metric sums for
    `Task.after_update`. The metric sums are () if the task has no `after_update`.

    Args:
      reduction: the result of `one_step_late`.
      placed: the task on its mesh.
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
    """Returns the update for a step that applies gradients one step late.

    Weights and moments stay unchanged while there is no gradient to apply: in the first step, and after the first step
    if its gradient was not finite. An update with zero gradients would still decay weights and change moments.

    Args:
      reduce: a function (gradients, state of the reduction) -> (reduced gradients, next state), from
        `reduced_over_data`.
      update: `WeightUpdate` with all arguments except `reduce` and `after_update`.
      after_update: the function that changes weights after the optimizer; None: no change. It gets the metrics of the
        previous step, whose gradients are applied.
    """

    def late(state: TrainState, sums: Sums, seed: jax.Array) -> tuple[TrainState, Metrics]:
        before, metrics_before = state.extra
        waiting, _ = reduce(sums.gradients, before)
        # The update waits for both values, so the compiler overlaps the reduction with the forward and backward pass.
        gradients, waiting = jax.lax.optimization_barrier((sums.gradients, waiting))
        moved = after_update and (lambda params, _: after_update(params, metrics_before))
        apply = update(lambda gradients, _: (waiting, gradients), moved)
        # The learning rate depends on the number of updates, which is one less than the number of steps.
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
