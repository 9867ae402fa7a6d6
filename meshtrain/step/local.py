"""Steps of groups that train apart: the inner step of every group, and the outer step that joins them.

The inner step is `step.weight_update` for each group, on the gradients of its own share of the batch: clipping, guard,
loss scale and moments are those of the group. The outer step moves the anchor, `TrainState.params`, towards the mean of
the groups' weights, and all groups start again from it. Evaluations and exports use the anchor.

The two are programs of their own: the inner one sends nothing but scalars between groups.

G: groups.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain.layout.groups import GROUPS
from meshtrain.layout.stored import Names, is_names
from meshtrain.layout.trees import merged, select
from meshtrain.models.metrics import Metrics, all_logged
from meshtrain.models.task import Batch, Sums
from meshtrain.optim.outer import Outer
from meshtrain.optim.states import state_axes
from meshtrain.step import guard, loss_scale
from meshtrain.step.accumulate import Gradients
from meshtrain.step.loss_scale import Scaling
from meshtrain.step.precision import cast
from meshtrain.step.state import TrainState, step_key
from meshtrain.step.step import TrainStep, Update, with_sequence_index

OuterStep = Callable[[TrainState], TrainState]
_AXES: Any = TrainState  # of arrays' axes in place of arrays, for `jax.vmap`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Local:
    """The part of a state that only groups have.

    Attributes:
      params: each group's trained parameters, [G, ...], in the dtype of the anchor.
      outer_state: the optax state of the outer optimizer, float32.
    """

    params: Any
    outer_state: Any


def in_groups(state: TrainState, outer: Outer, mask: Any = None) -> TrainState:
    """Returns the state of groups that have not trained yet, from that of one model.

    Args:
      state: before the first step.
      outer: how groups are joined.
      mask: a tree of bool like the parameters, true for each that is trained; None: all of them.
    """
    stacked = lambda tree: _stacked(tree, outer.num_groups)  # noqa: E731
    trained, _ = select(state.params, mask)
    return dataclasses.replace(
        state,
        opt_state=stacked(state.opt_state),
        skipped=stacked(state.skipped),
        loss_scale=stacked(state.loss_scale),
        local=Local(stacked(trained), outer.transformation.init(cast(trained, jnp.float32))),
    )


def _stacked(tree: Any, num_groups: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_groups, *leaf.shape)), tree)


def restarted(state: TrainState, mask: Any = None) -> TrainState:
    """Returns the state with the anchor's weights in every group."""
    trained, _ = select(state.params, mask)
    params = jax.tree.map(lambda anchor, leaf: jnp.broadcast_to(anchor, leaf.shape), trained, state.local.params)
    return dataclasses.replace(state, local=dataclasses.replace(state.local, params=params))


def axes_in_groups(
    of_fields: Mapping[str, Sequence[Names]], abstract: TrainState, outer: Outer, params: Any, axes: Any, mask: Any
) -> dict[str, list[Names]]:
    """Returns the logical axes of the arrays of each field of a state of groups; see `state.axes_of_fields`.

    Args:
      of_fields: those of the state of one model.
      abstract: the state of groups.
      outer: how groups are joined.
      params: abstract parameters.
      axes: like the parameters, with a tuple of logical axes for each.
      mask: a tree of bool like the parameters, true for each that is trained; None: all of them.
    """
    (trained, _), (trained_axes, _) = select(params, mask), select(axes, mask)
    of_trained = jax.tree.leaves(trained_axes, is_leaf=is_names)
    # Counts [G] are on every device, where a process can read them. The guard's norms [G, n] are not read.
    norms: list[Names] = [(GROUPS, None) if leaf.ndim > 1 else (None,) for leaf in jax.tree.leaves(abstract.skipped)]
    return {
        **{name: list(names) for name, names in of_fields.items()},
        "opt_state": [(GROUPS, *names) for names in of_fields["opt_state"]],
        "skipped": norms,
        "loss_scale": [(None,) for _ in jax.tree.leaves(abstract.loss_scale)],
        "local": [
            *((GROUPS, *names) for names in of_trained),
            *state_axes(outer.transformation, trained, trained_axes),
        ],
    }


def inner_step(gradients: Gradients, update: Update, scaling: Scaling | None = None, mask: Any = None) -> TrainStep:
    """Returns the step of all groups: (state, batch) -> (state, metrics). Group g trains on share g of the batch.

    Args:
      gradients: (params [G, ...], batch, rng, seeds [G]) -> sums [G] and gradients [G, ...]; see `layout.groups`.
      update: from `step.weight_update`, applied to each group.
      scaling: how the loss is scaled for the backward pass; None: not at all.
      mask: a tree of bool like the parameters, true for each that is trained; None: all of them.

    Metrics are those of `step.weight_update` over all groups: loss and the task's own over the whole batch; the means
    of grad_norm and learning_rate; skipped_steps added up; the least loss_scale; and the worst group's for the guard.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _, frozen = select(state.params, mask)
        params = merged(state.local.params, frozen)
        seeds = jax.vmap(lambda scale: loss_scale.seed(scaling, scale))(state.loss_scale)
        sums = gradients(params, with_sequence_index(batch), step_key(state), seeds)
        of_params = (
            jax.tree.map(lambda _: 0, params) if mask is None else jax.tree.map(lambda on: 0 if on else None, mask)
        )
        in_axes: Any = _AXES(step=None, params=of_params, opt_state=0, rng=None, skipped=0, loss_scale=0)
        of_groups = dataclasses.replace(state, params=params, residual=(), local=())
        new, metrics = jax.vmap(update, in_axes=(in_axes, 0, 0), out_axes=(in_axes, 0))(of_groups, sums, seeds)
        trained, _ = select(new.params, mask)
        local = dataclasses.replace(state.local, params=trained)
        joined = dataclasses.replace(new, params=state.params, residual=state.residual, local=local)
        return joined, over_groups(metrics, sums)

    return step


def over_groups(metrics: Mapping[str, Any], sums: Sums) -> Metrics:
    """Returns the metrics of a step, scalars, from those of each group, [G].

    Args:
      metrics: of `step.weight_update`, each [G].
      sums: of the groups, each [G].
    """
    total = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums._replace(gradients=None))
    joined = all_logged({**total.metrics, "loss": total.loss}, total.weight)
    joined |= {
        "weight": total.weight,
        "grad_norm": jnp.mean(metrics["grad_norm"]),
        "learning_rate": jnp.mean(metrics["learning_rate"]),
        "skipped_steps": jnp.sum(metrics["skipped_steps"]),
        guard.IN_A_ROW: jnp.max(metrics[guard.IN_A_ROW]),
        guard.FIRST_NOT_FINITE: jnp.max(metrics[guard.FIRST_NOT_FINITE]),
    }
    if "loss_scale" in metrics:
        joined["loss_scale"] = jnp.min(metrics["loss_scale"])
    return joined


def outer_step(
    transformation: optax.GradientTransformation,
    mean_of_groups: Callable[[Any, Any], tuple[Any, Any]],
    mask: Any = None,
) -> OuterStep:
    """Returns the step that joins the groups: state -> state. It changes neither moments nor the step number.

    With anchor a and the weights w of the groups, the outer optimizer gets a - mean(w) as the gradient of a.

    Args:
      transformation: the outer optimizer.
      mean_of_groups: (a tree of [G, ...], residual) -> (its mean over groups, the next residual); see `Groups.mean`.
      mask: a tree of bool like the parameters, true for each that is trained; None: all of them.
    """

    def step(state: TrainState) -> TrainState:
        anchor, frozen = select(state.params, mask)
        float32_anchor, weights = cast(anchor, jnp.float32), cast(state.local.params, jnp.float32)
        each = jax.tree.map(lambda a, w: a - w, float32_anchor, weights)
        gone, residual = mean_of_groups(each, state.residual)
        updates, outer_state = transformation.update(gone, state.local.outer_state, float32_anchor)
        moved = optax.apply_updates(float32_anchor, updates)
        moved = jax.tree.map(lambda new, old: new.astype(old.dtype), moved, anchor)
        local = Local(state.local.params, outer_state)
        joined = dataclasses.replace(state, params=merged(moved, frozen), residual=residual, local=local)
        return restarted(joined, mask)

    return step
