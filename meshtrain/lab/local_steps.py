"""Local steps (local SGD, DiLoCo): groups train separately for some steps; an outer optimizer synchronizes them.

DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models") applies Nesterov SGD
to the mean weight change of the groups. With an outer learning rate of 1 and no momentum the groups' weights are
averaged: local SGD (Stich 2019), or federated averaging (McMahan et al. 2017).

A group is a replica of the model that trains on its share of each batch. The data axis splits the groups, and gradients
are not sent between groups. The number of groups is independent of the mesh: a device along data computes one group, or
several groups in sequence, with the same results. The axes fsdp, tensor and pipeline split the work inside a group.

The inner step is `step.WeightUpdate` for each group, with the gradients of the group's share of the batch. Each group
has a separate gradient norm for clipping, guard, loss scale and moments. The outer step moves the anchor, the weights
in `TrainState.params`, towards the mean of the groups' weights. Then all groups restart from the anchor. Evaluations
and exports use the anchor.

The inner and the outer step are separate programs. The inner step sends only scalars between groups.

G: groups, n: groups on one device along data.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assembly.extensions import EXTRA, checked_update, first_extra, restoring
from meshtrain.assembly.placed import Placed
from meshtrain.config.schema import Config, LocalStepsOptions
from meshtrain.errors import Problem, UserError, nearest_multiple
from meshtrain.hardware.links import wire_share
from meshtrain.models.metrics import Metrics, all_logged
from meshtrain.models.task import SEQUENCE_INDEX, Batch, Loss, Params, Sums, batch_axes
from meshtrain.optim.moments import ANCHOR_SEED, round_weights
from meshtrain.optim.states import state_axes
from meshtrain.sharding.param_sharding import Names, is_names
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.reduction import Reduction, in_equal_parts
from meshtrain.sharding.rules import DATA
from meshtrain.sharding.trees import Arrays, Masks, NamesTree, merge, select
from meshtrain.step import guard, loss_scale
from meshtrain.step.accumulate import Gradients
from meshtrain.step.extension import Costs, Estimate, Extension, FieldNames, Periodic
from meshtrain.step.loss_scale import Scaling
from meshtrain.step.precision import cast, in_fp8
from meshtrain.step.shardings import shardings
from meshtrain.step.state import COPY, OptState, TrainState, step_key
from meshtrain.step.step import Reduce, TrainStep, Update, with_sequence_index

FLOAT32_BYTES = 4
# The type of `TrainState` with axes for `jax.vmap` in its fields instead of arrays.
_AXES: Callable[..., TrainState] = TrainState


def outer_optimizer(options: LocalStepsOptions) -> optax.GradientTransformation:
    """Returns the optimizer that moves the anchor (the synchronized weights) towards the mean of the groups' weights.

    It is SGD, with Nesterov momentum if `options.outer_momentum` is above 0.
    """
    momentum = options.outer_momentum or None
    return optax.sgd(
        options.outer_learning_rate, momentum, nesterov=momentum is not None, accumulator_dtype=jnp.float32
    )


def local_steps(config: Config, placed: Placed, reduction: Reduction | None) -> Extension:
    """Returns the extension for local steps: replicas of the model train separately between two outer steps.

    A replica is called a group. Every `local_steps.period` steps, an outer step averages the groups' weights.

    Args:
      config: a configuration with `local_steps.period` above 0.
      placed: the task on its mesh, at ZeRO level 0.
      reduction: the reduction that averages the weight changes of the groups; None: an all-reduce.

    Raises:
      UserError: the data axis has several devices, and the partitioner handles it (it is not a manual axis).
    """
    options, mesh, replicas = config.local_steps, placed.mesh, placed.replicas
    if mesh.shape[DATA] > 1 and not replicas.is_manual:
        raise UserError(
            Problem(
                "local_steps.groups",
                got=(
                    f"{options.groups} on mesh.data = {mesh.shape[DATA]} with a task without "
                    "`takes_manual_axes` on a mesh with fsdp or an axis after it, or with weights split over "
                    "data"
                ),
                allowed="a task with `takes_manual_axes`, or one device along data",
                nearest="mesh.data=1",
                depends_on=["mesh.data"],
            )
        )
    mask, groups = replicas.trained, Groups(placed, options.groups, reduction)
    outer = outer_step(outer_optimizer(options), groups.mean, mask)
    return Extension(
        begin=functools.partial(in_groups, options=options, mask=mask, extra=groups.first_extra),
        names=functools.partial(axes_in_groups, params=placed.params, axes=placed.axes, options=options, mask=mask),
        step=lambda gradients, update, scaling: inner_step(groups.gradients(gradients), update, scaling, mask),
        join=Periodic("outer step", options.period, outer, groups.sent_bytes),
        with_weights=functools.partial(from_weights, mask=mask),
        restore=restoring(in_equal_parts if reduction is None else reduction.reshard, f"{EXTRA}residual/"),
        costs=Costs("local steps", reduction, sends_gradients=False, accumulators=groups.accumulators),
    )


def check(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each reason why local steps cannot run with a configuration and mesh axis sizes."""
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
                allowed=(
                    f"a multiple of {given}, because the weights for evaluation are those after the last step of "
                    "a period"
                ),
                nearest=nearest_multiple(config.num_steps, options.period),
            )
        )
    if config.zero.effective_level and data > 1:
        problems.append(
            Problem(
                "zero.level",
                got=f"{config.zero.effective_level} with {given}; groups along data have separate weights",
                allowed="0; use mesh.fsdp to split weights",
                nearest="zero.level=0",
                depends_on=["mesh.data"],
            )
        )
    if in_fp8(config.precision):
        problems.append(
            Problem(
                "precision.policy",
                got=f"fp8 with {given}, but a tensor's maximum for its scale would be over all groups",
                allowed="float32, bfloat16, float16",
                nearest="precision.policy=bfloat16",
            )
        )
    if config.offload.moments:
        key = "offload.moments"
        problems.append(Problem(key, got=f"True with {given}", allowed=False, nearest=f"{key}=False"))
    if config.optimizer.average:
        why = "but a group would average weights that the outer step replaces"
        got = f"{config.optimizer.average} with {given}, {why}"
        problems.append(Problem("optimizer.average", got=got, allowed=0, nearest="optimizer.average=0"))
    if options.outer_momentum >= 1:
        key, allowed = "local_steps.outer_momentum", "at least 0 and below 1"
        problems.append(Problem(key, got=options.outer_momentum, allowed=allowed, nearest="0.9"))
    return [one.with_parts(depends_on={*one.depends_on, "local_steps.period"}) for one in problems]


def estimate(config: Config, mesh_shape: Mapping[str, int]) -> Estimate:
    """Returns an estimate of the memory and the traffic of local steps on one device.

    A device stores weights, gradient sums and moments for each of its groups (replicas of the model).

    Args:
      config: a configuration with `local_steps.period` above 0.
      mesh_shape: the size of each mesh axis.
    """
    options = config.local_steps
    num_here = options.groups // mesh_shape[DATA]
    sent = 2 * FLOAT32_BYTES / options.period
    return Estimate(num_here, weights=num_here, float32=int(bool(options.outer_momentum)), sent_bytes=sent)


local_steps.check = check  # type: ignore[attr-defined]
local_steps.estimate = estimate  # type: ignore[attr-defined]
local_steps.unread = ("precision.reduce_dtype",)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Groups:
    """Computes the gradients of each group (replica of the model), and means of weight changes over the groups.

    Attributes:
      placed: the task on its mesh.
      num_groups: the number of groups G, a multiple of the size of the data axis.
      reduction: the reduction that sums over the data axis for the mean; None: an all-reduce.
    """

    placed: Placed
    num_groups: int
    reduction: Reduction | None = None

    @property
    def num_here(self) -> int:
        """The number of groups n (replicas of the model) on each device along the data axis."""
        return self.num_groups // self.placed.mesh.shape[DATA]

    def gradients(self, of_group: Gradients) -> Gradients:
        """Returns a function (params, batch, rng, seeds) -> `Sums`, the loss and gradients of each of G groups.

        A group is a replica of the model with separate weights and a share of the batch. Each trained parameter is
        [G, ...]; frozen parameters have no dim G. The batch is [B, ...] for B sequences, and `seeds` [G] has the factor
        of each group's loss in the backward pass. In the result the loss, the weight and each metric are [G], and each
        gradient is [G, ...]. The function opens a `jax.shard_map` region that is manual over data; manual regions of
        other axes nest inside.

        Args:
          of_group: the gradient function of one model, which is called for each group.
        """
        replicas, axes_of_batch = self.placed.replicas, batch_axes(self.placed.batch)
        axes_of_batch = {**axes_of_batch, SEQUENCE_INDEX: ("batch",)}

        def on_device(params: Params, batch: Batch, key_data: jax.Array, seeds: jax.Array) -> tuple[Loss, Params]:
            rng, (trained, frozen) = jax.random.wrap_key_data(key_data), select(params, replicas.trained)

            def one(given: tuple[Params, Batch, jax.Array]) -> tuple[Loss, Params]:
                weights, share, seed = given
                sums = of_group(merge(weights, frozen), share, rng, seed)
                return (sums.loss, sums.weight, sums.metrics), sums.gradients

            shares = {name: self._shares(x, axes_of_batch[name]) for name, x in batch.items()}
            if self.num_here > 1:
                return jax.lax.map(one, (trained, shares, seeds))
            done = one(jax.tree.map(lambda x: x[0], (trained, shares, seeds)))
            return jax.tree.map(lambda x: x[None], done)

        def run(params: Params, batch: Batch, rng: jax.Array, seeds: jax.Array) -> Sums:
            trained, frozen = select(replicas.specs, replicas.trained)
            split, stacked = PartitionSpec(DATA), replicas.with_replicas(trained)
            in_specs = (merge(stacked, frozen), split, PartitionSpec(), split)
            axes = frozenset({DATA}) if self.placed.mesh.shape[DATA] > 1 else frozenset()
            over = on_shards(self.placed.mesh, on_device, in_specs, (split, stacked), axes=axes)
            (loss, weight, metrics), gradients = over(params, batch, jax.random.key_data(rng), seeds)
            return Sums(loss, weight, metrics, gradients)

        return run

    def accumulators(self, sums: Arrays) -> Arrays:
        """Returns the abstract gradient sums of all G groups (replicas of the model), float32 [G, ...], with shardings.

        Args:
          sums: the abstract gradient sums of one model, with shardings.
        """

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.placed.mesh, PartitionSpec(DATA, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((self.num_groups, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(stacked, sums)

    def first_extra(self, trained: Arrays) -> Arrays:
        """Returns the initial residual of `reduction`: zeros, float32 [devices along data, ...]; () if it has none.

        A residual is the part of earlier sums that a compressed reduction has not sent yet.

        Args:
          trained: the trained parameters of one model, with global shapes.
        """
        return () if self.reduction is None else first_extra(self.reduction, self.placed.replicas, trained)

    def mean(self, tree: Arrays, residual: Arrays = ()) -> tuple[Arrays, Arrays]:
        """Returns the mean of arrays over all G groups (replicas of the model), and the residual for the next mean.

        The attribute `reduction` sums over the data axis; if it is None, a float32 all-reduce is used.

        Args:
          tree: the arrays, a pytree with the structure of the trained parameters, float32 [G, ...].
          residual: a pytree of the unsent parts of earlier means, float32 [devices along data, ...]; () without
            residuals.
        """
        replicas, mesh = self.placed.replicas, self.placed.mesh
        whole = replicas.trained_specs
        stacked = replicas.with_replicas(whole)
        of_residual = stacked if jax.tree.leaves(residual) else residual

        def on_device(tree: Arrays, residual: Arrays) -> tuple[Arrays, Arrays]:
            sums, left = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree), residual
            if self.reduction is not None:
                here = jax.tree.map(lambda leaf: leaf[0], residual)
                dims = jax.tree.map(lambda _: 0, sums)
                sums, left = checked_update(self.reduction, replicas, sums, here, dims)
                left = jax.tree.map(lambda leaf: leaf[None], left)
            elif mesh.shape[DATA] > 1:
                sums = jax.lax.psum(sums, DATA)
            return jax.tree.map(lambda leaf: leaf / self.num_groups, sums), left

        axes = frozenset(mesh.axis_names) if self.reduction else None
        return on_shards(mesh, on_device, (stacked, of_residual), (whole, of_residual), axes=axes)(tree, residual)

    def sent_bytes(self, elements: float, replicas: int) -> float:
        """Returns the minimum bytes that a device sends over data to compute the mean of arrays over all groups.

        Args:
          elements: the number of elements of the arrays on a device.
          replicas: the size of the data axis.
        """
        if self.reduction is not None:
            return self.reduction.sent_bytes(elements, replicas, False)
        return wire_share("all-reduce", replicas) * elements * FLOAT32_BYTES

    def _shares(self, x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        """Splits a device's part of the batch into the shares of its groups: [n B / G, ...] -> [n, B / G, ...].

        B: sequences in the global batch, G: groups, n: groups on one device. A share has consecutive examples. It is
        sharded over the mesh axes that split the batch inside a group.

        Args:
          x: one entry of the batch, local along data.
          axes: the logical axis of each dim.
        """
        shares = x.reshape(self.num_here, x.shape[0] // self.num_here, *x.shape[1:])
        return self.placed.placement.activation(shares, (None, *axes)) if self.num_here > 1 else shares


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Local:
    """The weights of all groups (replicas of the model) and the outer optimizer's state, stored in `TrainState.extra`.

    Attributes:
      params: the trained parameters of all G groups, [G, ...], in the dtypes of `TrainState.params`.
      outer_state: the optax state of the outer optimizer, float32.
      residual: the parts of earlier means that a compressed reduction has not sent yet; () without residuals.
    """

    params: Params
    outer_state: OptState
    residual: Arrays = ()


# Below, `mask` is a bool pytree with the structure of the parameters, true for trained parameters; None: all trained.


def in_groups(
    state: TrainState,
    options: LocalStepsOptions,
    mask: Masks = None,
    extra: Callable[[Arrays], Arrays] = lambda trained: (),
) -> TrainState:
    """Returns the initial state of all groups (replicas of the model), which start with the same weights and moments.

    Args:
      state: the initial state of one model.
      options: the options of local steps.
      mask: a bool pytree, true for trained parameters; None: all parameters are trained.
      extra: a function of the trained parameters that returns the initial residual of the reduction, or ().
    """

    def stacked(tree: Arrays) -> Arrays:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (options.groups, *leaf.shape)), tree)

    trained, _ = select(state.params, mask)
    return dataclasses.replace(
        state,
        opt_state=stacked(state.opt_state),
        skipped=stacked(state.skipped),
        loss_scale=stacked(state.loss_scale),
        extra=Local(stacked(trained), outer_optimizer(options).init(cast(trained, jnp.float32)), extra(trained)),
    )


def restarted(state: TrainState, mask: Masks = None) -> TrainState:
    """Returns the state with the trained weights of every group (replica of the model) replaced by `state.params`."""
    trained, _ = select(state.params, mask)
    params = jax.tree.map(lambda anchor, leaf: jnp.broadcast_to(anchor, leaf.shape), trained, state.extra.params)
    return dataclasses.replace(state, extra=dataclasses.replace(state.extra, params=params))


def from_weights(state: TrainState, params: Params, mask: Masks = None) -> TrainState:
    """Returns the state of a run that starts from other weights: `params` become the weights of every group.

    A group is a replica of the model. `params` also become `TrainState.params`. The argument `state` is donated.
    """
    begun = functools.partial(restarted, mask=mask)
    state = dataclasses.replace(state, params=params)
    return jax.jit(begun, donate_argnums=0, out_shardings=shardings(state))(state)


def axes_in_groups(
    of_fields: FieldNames,
    abstract: TrainState,
    params: Params,
    axes: NamesTree,
    options: LocalStepsOptions,
    mask: Masks,
) -> dict[str, list[Names]]:
    """Returns field of `TrainState` -> the logical axes of each of its arrays, in the state of all groups.

    Args:
      of_fields: the same mapping for the state of one model, from `shardings.axes_of_fields`.
      abstract: the abstract state of all groups (replicas of the model).
      params: the abstract parameters of one model.
      axes: a pytree with the structure of the parameters; each leaf is a tuple of logical axes.
      options: the options of local steps.
      mask: a bool pytree, true for trained parameters; None: all parameters are trained.
    """
    (trained, _), (trained_axes, _) = select(params, mask), select(axes, mask)
    of_trained = jax.tree.leaves(trained_axes, is_leaf=is_names)
    of_residual = of_trained if jax.tree.leaves(abstract.extra.residual) else []
    # Counts [G] are replicated, so that every process can read them. The guard's norms [G, n] are not read.
    norms: list[Names] = [(COPY, None) if leaf.ndim > 1 else (None,) for leaf in jax.tree.leaves(abstract.skipped)]
    return {
        **{name: list(names) for name, names in of_fields.items()},
        "opt_state": [(COPY, *names) for names in of_fields["opt_state"]],
        "skipped": norms,
        "loss_scale": [(None,) for _ in jax.tree.leaves(abstract.loss_scale)],
        "extra": [
            *((COPY, *names) for names in of_trained),
            *state_axes(outer_optimizer(options), trained, trained_axes),
            *((COPY, *names) for names in of_residual),
        ],
    }


def inner_step(gradients: Gradients, update: Update, scaling: Scaling | None = None, mask: Masks = None) -> TrainStep:
    """Returns the step in which each of G groups trains on its share of the batch: (state, batch) -> (state, metrics).

    A group is a replica of the model with separate weights, in `TrainState.extra`. The metrics have the names of
    `step.WeightUpdate` and combine all groups. Loss and the task's metrics are over the global batch. grad_norm, the
    norms of layers and learning_rate are means over groups; skipped_steps is a sum; loss_scale is the minimum. The
    metrics that `step/guard.py` computes for the training loop, such as `skipped_in_a_row`, are maxima over groups.

    Args:
      gradients: a function (params [G, ...], batch, rng, seeds [G]) -> sums [G] and gradients [G, ...], from
        `Groups.gradients`.
      update: a `step.WeightUpdate`, applied to each group.
      scaling: the loss scaling for the backward pass; None: no scaling.
      mask: a bool pytree, true for trained parameters; None: all parameters are trained.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        _, frozen = select(state.params, mask)
        params = merge(state.extra.params, frozen)
        seeds = jax.vmap(lambda scale: loss_scale.seed(scaling, scale))(state.loss_scale)
        sums = gradients(params, with_sequence_index(batch), step_key(state), seeds)
        of_params = jax.tree.map(lambda _: 0, state.extra.params)  # None for frozen parameters, which groups share
        in_axes = _AXES(step=None, params=of_params, opt_state=0, rng=None, skipped=0, loss_scale=0)
        of_groups = dataclasses.replace(state, params=params, extra=())
        new, metrics = jax.vmap(update, in_axes=(in_axes, 0, 0), out_axes=(in_axes, 0))(of_groups, sums, seeds)
        trained, _ = select(new.params, mask)
        extra = dataclasses.replace(state.extra, params=trained)
        return dataclasses.replace(new, params=state.params, extra=extra), over_groups(metrics, sums)

    return step


def over_groups(metrics: Mapping[str, Arrays], sums: Sums) -> Metrics:
    """Combines the metrics of G groups (replicas of the model), each [G, ...], into one value for each metric.

    Args:
      metrics: the metrics of `step.WeightUpdate`, each [G, ...].
      sums: the sums of the groups' losses, weights and task metrics, each [G, ...].
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
    joined |= {name: jnp.mean(norm, axis=0) for name, norm in metrics.items() if "_norm_of/" in name}
    if guard.ITS_LAYER in metrics:
        joined[guard.ITS_LAYER] = jnp.max(metrics[guard.ITS_LAYER])
    if "loss_scale" in metrics:
        joined["loss_scale"] = jnp.min(metrics["loss_scale"])
    return joined


def outer_step(
    transformation: optax.GradientTransformation, mean_of_groups: Reduce, mask: Masks = None
) -> Callable[[TrainState], TrainState]:
    """Returns the outer step, a function state -> next state that synchronizes the weights of all G groups.

    A group is a replica of the model. With the anchor a (`state.params`) and the groups' weights w, the outer optimizer
    gets a - mean(w) as the gradient of a. Then all groups restart from the updated anchor. The groups' moments and the
    step number stay unchanged.

    Args:
      transformation: the outer optimizer.
      mean_of_groups: a function (pytree of [G, ...], residual) -> (mean over groups, next residual), such as
        `Groups.mean`.
      mask: a bool pytree, true for trained parameters; None: all parameters are trained.
    """

    def step(state: TrainState) -> TrainState:
        anchor, frozen = select(state.params, mask)
        float32_anchor, weights = cast(anchor, jnp.float32), cast(state.extra.params, jnp.float32)
        each = jax.tree.map(lambda a, w: a - w, float32_anchor, weights)
        gone, residual = mean_of_groups(each, state.extra.residual)
        updates, outer_state = transformation.update(gone, state.extra.outer_state, float32_anchor)
        moved = optax.apply_updates(float32_anchor, updates)
        moved = round_weights(moved, anchor, state.step, ANCHOR_SEED)
        extra = Local(state.extra.params, outer_state, residual)
        joined = dataclasses.replace(state, params=merge(moved, frozen), extra=extra)
        return restarted(joined, mask)

    return step
