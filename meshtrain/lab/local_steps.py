"""Groups that train apart: each on its share of the batch, and every few steps an outer optimizer joins them.

DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models") is Nesterov SGD on
the mean distance that the groups have gone. With an outer learning rate of 1 and no momentum the groups' weights are
averaged: local SGD (Stich 2019), or federated averaging (McMahan et al. 2017).

The data axis splits the groups, and gradients stay inside a group. The number of groups is a choice of the algorithm,
not of the mesh: a device along data computes one group, or several one after the other, with the same results. fsdp,
tensor and pipeline split the work inside a group.

The inner step is `step.WeightUpdate` for each group, on the gradients of its own share of the batch: clipping, guard,
loss scale and moments are those of the group. The outer step moves the anchor, `TrainState.params`, towards the mean of
the groups' weights, and all groups start again from it. Evaluations and exports use the anchor.

The two are programs of their own: the inner one sends nothing but scalars between groups.

G: groups, n: groups on one device along data.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.config.fields import Config, LocalStepsOptions
from meshtrain.errors import Problem, UserError, nearest_multiple
from meshtrain.models.metrics import Metrics, all_logged
from meshtrain.models.task import Batch, Params, Sums
from meshtrain.optim.moments import ANCHOR_SEED, round_weights
from meshtrain.optim.states import state_axes
from meshtrain.sharding.gradients import Compute, Replicas
from meshtrain.sharding.placement import Placement, on_shards
from meshtrain.sharding.rules import DATA
from meshtrain.sharding.stored import Names, is_names
from meshtrain.sharding.trees import Arrays, Masks, NamesTree, merged, select
from meshtrain.step import guard, loss_scale
from meshtrain.step.accumulate import Gradients
from meshtrain.step.loss_scale import Scaling
from meshtrain.step.precision import cast, in_fp8
from meshtrain.step.state import GROUPS, OptState, TrainState, step_key
from meshtrain.step.step import Apart, Reduce, TrainStep, Update, with_sequence_index

_AXES: Callable[..., TrainState] = TrainState  # of arrays' axes in place of arrays, for `jax.vmap`


def outer_optimizer(options: LocalStepsOptions) -> optax.GradientTransformation:
    """Returns the optimizer of the anchor, from which all groups start again."""
    momentum = options.outer_momentum or None
    return optax.sgd(
        options.outer_learning_rate, momentum, nesterov=momentum is not None, accumulator_dtype=jnp.float32
    )


def apart(
    config: Config,
    replicas: Replicas,
    placement: Placement,
    axes_of_batch: Mapping[str, Sequence[str | None]],
) -> Apart:
    """Returns the functions of groups that train apart.

    Args:
      config: with a period.
      replicas: of level 0.
      placement: the sharding of a group's share of the batch.
      axes_of_batch: the logical axes of each entry of the batch.

    Raises:
      UserError: data is split over several devices and left to the partitioner.
    """
    num_groups, mask = config.local_steps.groups, replicas.trained
    if replicas.mesh.shape[DATA] > 1 and not replicas.is_manual:
        raise UserError(
            Problem(
                "local_steps.groups",
                got=(
                    f"{num_groups} on mesh.data = {replicas.mesh.shape[DATA]} with fsdp or an axis after it and a task "
                    "without `takes_manual_axes`, or with weights split over data"
                ),
                allowed="a task with it, or one device along data",
                nearest="mesh.data=1",
                depends_on=["mesh.data"],
            )
        )
    fields = {field.name: getattr(replicas, field.name) for field in dataclasses.fields(replicas)}
    groups = Groups(**fields, num_groups=num_groups, placement=placement, axes_of_batch=axes_of_batch)
    return Apart(
        replicas=groups,
        begun=functools.partial(in_groups, options=config.local_steps, mask=mask),
        restarted=functools.partial(restarted, mask=mask),
        axes_of_fields=functools.partial(axes_in_groups, options=config.local_steps, mask=mask),
        step=functools.partial(inner_step, mask=mask),
        join=outer_step(outer_optimizer(config.local_steps), groups.mean, mask),
    )


def check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns one line for each reason why groups cannot train apart on a mesh of these sizes."""
    options, data, problems = config.local_steps, mesh_shape[DATA], list[Problem]()
    num_groups, given = options.groups, f"local_steps.period = {options.period}"
    if num_groups == 0 or num_groups % data:
        fix = nearest_multiple(num_groups, data) if num_groups else max(data, 2)
        problems.append(
            Problem(
                "local_steps.groups",
                got=f"{num_groups} with {given}",
                allowed=f"a multiple of mesh.data = {data} (fsdp, tensor and pipeline split a group)",
                nearest=fix,
                depends_on=["mesh.data"],
            )
        )
    if config.num_steps % options.period:
        problems.append(
            Problem(
                "num_steps",
                got=config.num_steps,
                allowed=f"a multiple of {given}, as weights that are evaluated come from its last step",
                nearest=nearest_multiple(config.num_steps, options.period),
            )
        )
    if config.zero.effective_level and data > 1:
        problems.append(
            Problem(
                "zero.level",
                got=f"{config.zero.effective_level} with {given}, where each group along data has weights of its own",
                allowed="0, and fsdp to split them",
                nearest="zero.level=0",
                depends_on=["mesh.data"],
            )
        )
    if in_fp8(config.precision):
        problems.append(
            Problem(
                "precision.policy",
                got=f"fp8 with {given}, where a tensor's maximum would be that of all groups",
                allowed="float32, bfloat16, float16",
                nearest="precision.policy=bfloat16",
            )
        )
    if config.offload.moments:
        key = "offload.moments"
        problems.append(Problem(key, got=f"True with {given}", allowed=False, nearest=f"{key}=False"))
    if config.optimizer.average:
        why = "where each group would average weights that its outer step replaces"
        got = f"{config.optimizer.average} with {given}, {why}"
        problems.append(Problem("optimizer.average", got=got, allowed=0, nearest="optimizer.average=0"))
    if options.outer_momentum >= 1:
        key, allowed = "local_steps.outer_momentum", "at least 0 and below 1"
        problems.append(Problem(key, got=options.outer_momentum, allowed=allowed, nearest="0.9"))
    return [one.with_parts(depends_on={*one.depends_on, "local_steps.period"}) for one in problems]


apart.check = check  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Groups(Replicas):
    """How gradients are added up over the microbatches of each group. They are not reduced over data.

    Attributes:
      num_groups: G, a multiple of the data axis.
      placement: the sharding of a group's share of the batch.
      axes_of_batch: the logical axes of each entry of the batch.
    """

    num_groups: int = 1
    placement: Placement = dataclasses.field(default_factory=Placement.nowhere)
    axes_of_batch: Mapping[str, Sequence[str | None]] = dataclasses.field(default_factory=dict)

    @property
    def num_here(self) -> int:
        """The number of groups that one device along data computes, n."""
        return self.num_groups // self.mesh.shape[DATA]

    @property
    def reduces_in_loops(self) -> bool:
        """Whether gradients are reduced over data inside the backward loop; never, because groups do not share them."""
        return False

    def data_parallel(self, compute: Compute, manual: frozenset[str] = frozenset()) -> Compute:
        """Returns `compute` run for each group, on its weights and its share of the batch.

        The result takes trained parameters [G, ...], frozen ones without that dim, the batch [B, ...], arrays that are
        the same for all groups, and last a seed [G]. It returns sums [G] and gradients [G, ...].

        Args:
          compute: (parameters, batch, further arrays, seed) -> (sums, gradients) of one group; see `Replicas`.
          manual: axes that are manual besides data.
        """

        def on_device(params: Params, batch: Batch, *others: jax.Array) -> tuple[Arrays, Arrays]:
            *shared, seeds = others
            trained, frozen = select(params, self.trained)

            def one(of_group: tuple[Params, Batch, jax.Array]) -> tuple[Arrays, Arrays]:
                weights, share, seed = of_group
                return compute(merged(weights, frozen), share, *shared, seed)

            shares = {name: self._shares(x, self.axes_of_batch[name]) for name, x in batch.items()}
            if self.num_here > 1:
                return jax.lax.map(one, (trained, shares, seeds))
            done = one(jax.tree.map(lambda x: x[0], (trained, shares, seeds)))
            return jax.tree.map(lambda x: x[None], done)

        axes = self.axes | manual
        if not axes:
            return on_device
        trained, frozen = select(self.specs, self.trained)
        split, stacked = PartitionSpec(DATA), self._with_replicas(trained)

        def run(params: Params, batch: Batch, *others: jax.Array) -> tuple[Arrays, Arrays]:
            replicated = (PartitionSpec() for _ in others[1:])
            in_specs = (merged(stacked, frozen), split, *replicated, split)
            return on_shards(self.mesh, on_device, in_specs, (split, stacked), axes=axes)(params, batch, *others)

        return run

    def accumulators(self, params: Arrays) -> Arrays:
        """Returns the abstract float32 gradients [G, ...] of trained parameters, each with its sharding.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s, global shapes without the dim of groups; trained or not.
        """

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, PartitionSpec(DATA, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((self.num_groups, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(stacked, super().accumulators(params))

    def mean(self, tree: Arrays, residual: Arrays = ()) -> tuple[Arrays, Arrays]:
        """Returns the mean over groups of arrays like the trained parameters, and the residual of the next mean.

        Without a `reduction` it is one float32 all-reduce over data.

        Args:
          tree: float32 [G, ...].
          residual: a tree of float32 [devices along data, ...], what reduced means have not sent yet; or ().
        """
        whole = self.trained_specs
        stacked = self._with_replicas(whole)
        of_residual = stacked if jax.tree.leaves(residual) else residual

        def on_device(tree: Arrays, residual: Arrays) -> tuple[Arrays, Arrays]:
            sums, left = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree), residual
            if self.reduction is not None:
                here = jax.tree.map(lambda leaf: leaf[0], residual)
                sums, left = self.reduced_here(sums, here, jax.tree.map(lambda _: 0, sums))
                left = jax.tree.map(lambda leaf: leaf[None], left)
            elif self.mesh.shape[DATA] > 1:
                sums = jax.lax.psum(sums, DATA)
            return jax.tree.map(lambda leaf: leaf / self.num_groups, sums), left

        axes = frozenset(self.mesh.axis_names) if self.reduction else None
        run = on_shards(self.mesh, on_device, (stacked, of_residual), (whole, of_residual), axes=axes)
        return run(tree, residual)

    def _shares(self, x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        """Returns one device's part of the batch, [n B / G, ...], as shares [n, B / G, ...] of consecutive examples.

        Each share is split over the axes that split a batch inside a group, by the logical axes of its dims. A pipeline
        has a dim of microbatches after the first.
        """
        axes = (axes[0], *[None] * (x.ndim - len(axes)), *axes[1:])
        shares = x.reshape(self.num_here, x.shape[0] // self.num_here, *x.shape[1:])
        return self.placement.activation(shares, (None, *axes)) if self.num_here > 1 else shares


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Local:
    """The part of a state that only groups have.

    Attributes:
      params: each group's trained parameters, [G, ...], in the dtype of the anchor.
      outer_state: the optax state of the outer optimizer, float32.
    """

    params: Params
    outer_state: OptState


# Below, `mask` is a tree of bool like the parameters, true for each that is trained; None: all of them.


def in_groups(state: TrainState, options: LocalStepsOptions, mask: Masks = None) -> TrainState:
    """Returns the state of groups that have not trained yet, from that of one model before its first step."""

    def stacked(tree: Arrays) -> Arrays:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (options.groups, *leaf.shape)), tree)

    trained, _ = select(state.params, mask)
    return dataclasses.replace(
        state,
        opt_state=stacked(state.opt_state),
        skipped=stacked(state.skipped),
        loss_scale=stacked(state.loss_scale),
        local=Local(stacked(trained), outer_optimizer(options).init(cast(trained, jnp.float32))),
    )


def restarted(state: TrainState, mask: Masks = None) -> TrainState:
    """Returns the state with the anchor's weights in every group."""
    trained, _ = select(state.params, mask)
    params = jax.tree.map(lambda anchor, leaf: jnp.broadcast_to(anchor, leaf.shape), trained, state.local.params)
    return dataclasses.replace(state, local=dataclasses.replace(state.local, params=params))


def axes_in_groups(
    of_fields: Mapping[str, Sequence[Names]],
    abstract: TrainState,
    params: Params,
    axes: NamesTree,
    options: LocalStepsOptions,
    mask: Masks,
) -> dict[str, list[Names]]:
    """Returns the logical axes of the arrays of each field of a state of groups; see `shardings.axes_of_fields`.

    Args:
      of_fields: those of the state of one model.
      abstract: the state of groups.
      params: abstract parameters.
      axes: like the parameters, with a tuple of logical axes for each.
      options: of groups.
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
            *state_axes(outer_optimizer(options), trained, trained_axes),
        ],
    }


def inner_step(gradients: Gradients, update: Update, scaling: Scaling | None = None, mask: Masks = None) -> TrainStep:
    """Returns the step of all groups: (state, batch) -> (state, metrics). Group g trains on share g of the batch.

    Args:
      gradients: (params [G, ...], batch, rng, seeds [G]) -> sums [G] and gradients [G, ...]; see `Groups`.
      update: a `step.WeightUpdate`, applied to each group.
      scaling: how the loss is scaled for the backward pass; None: not at all.

    Metrics are those of `step.WeightUpdate` over all groups: loss and the task's own over the whole batch; the means
    of grad_norm and learning_rate; skipped_steps added up; the least loss_scale; and the worst group's for the guard.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _, frozen = select(state.params, mask)
        params = merged(state.local.params, frozen)
        seeds = jax.vmap(lambda scale: loss_scale.seed(scaling, scale))(state.loss_scale)
        sums = gradients(params, with_sequence_index(batch), step_key(state), seeds)
        of_params = jax.tree.map(lambda _: 0, state.local.params)  # None for frozen ones, which groups share
        in_axes = _AXES(step=None, params=of_params, opt_state=0, rng=None, skipped=0, loss_scale=0)
        of_groups = dataclasses.replace(state, params=params, residual=(), local=())
        new, metrics = jax.vmap(update, in_axes=(in_axes, 0, 0), out_axes=(in_axes, 0))(of_groups, sums, seeds)
        trained, _ = select(new.params, mask)
        local = dataclasses.replace(state.local, params=trained)
        joined = dataclasses.replace(new, params=state.params, residual=state.residual, local=local)
        return joined, over_groups(metrics, sums)

    return step


def over_groups(metrics: Mapping[str, Arrays], sums: Sums) -> Metrics:
    """Returns the metrics of a step, scalars, from those of `step.WeightUpdate` and the sums of each group, [G]."""
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
    joined |= {name: jnp.mean(norm, axis=0) for name, norm in metrics.items() if "_norm_of/" in name}
    if guard.ITS_LAYER in metrics:
        joined[guard.ITS_LAYER] = jnp.max(metrics[guard.ITS_LAYER])
    if "loss_scale" in metrics:
        joined["loss_scale"] = jnp.min(metrics["loss_scale"])
    return joined


def outer_step(
    transformation: optax.GradientTransformation, mean_of_groups: Reduce, mask: Masks = None
) -> Callable[[TrainState], TrainState]:
    """Returns the step that joins the groups: state -> state. It changes neither moments nor the step number.

    With anchor a and the weights w of the groups, the outer optimizer gets a - mean(w) as the gradient of a.

    Args:
      transformation: the outer optimizer.
      mean_of_groups: (a tree of [G, ...], residual) -> (its mean over groups, the next residual); see `Groups.mean`.
    """

    def step(state: TrainState) -> TrainState:
        anchor, frozen = select(state.params, mask)
        float32_anchor, weights = cast(anchor, jnp.float32), cast(state.local.params, jnp.float32)
        each = jax.tree.map(lambda a, w: a - w, float32_anchor, weights)
        gone, residual = mean_of_groups(each, state.residual)
        updates, outer_state = transformation.update(gone, state.local.outer_state, float32_anchor)
        moved = optax.apply_updates(float32_anchor, updates)
        moved = round_weights(moved, anchor, state.step, ANCHOR_SEED)
        local = Local(state.local.params, outer_state)
        joined = dataclasses.replace(state, params=merged(moved, frozen), residual=residual, local=local)
        return restarted(joined, mask)

    return step
