"""Places a task on a mesh: the sharding of each weight, and the reduction of gradients over the data axis."""

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from meshtrain.config import extensions
from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask, make_task_of
from meshtrain.errors import Problem, UserError
from meshtrain.models.task import Entry, Params, Task, check_task, entries, refuse_weights
from meshtrain.pipeline.program import Program, executable
from meshtrain.pipeline.schedules import chosen
from meshtrain.pipeline.stages import Stack, stack_of
from meshtrain.sharding.gradients import GradientSync, OverData
from meshtrain.sharding.param_sharding import (
    MAX_LEVEL,
    axes_in,
    num_parts,
    param_shardings,
    params_with_axes,
    rules_of_level,
)
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.reduction import SUM
from meshtrain.sharding.rules import DATA, PIPELINE, Rules, default_rules, partitioned_axes
from meshtrain.sharding.trainable import trainable_mask
from meshtrain.sharding.trees import NamesTree, select
from meshtrain.step.precision import in_fp8, reduce_dtype
from meshtrain.step.shardings import abstract_params


@dataclasses.dataclass(frozen=True)
class Placed:
    """A task on a mesh, with the shardings of its weights.

    Attributes:
      mesh: the devices as a grid with named axes, in mesh order.
      rules: the table of rules (logical axis -> mesh axes), with the storage axes of the ZeRO level.
      placement: applies the same rules to arrays inside the step.
      task: the model, its loss and its batch.
      batch: entry name -> shape, dtype and logical axes of the global array.
      params: abstract parameters with global shapes (of complete arrays, not of shards). If there is a pipeline, layers
        are stacked as in `Stack.shape`, with padding layers.
      axes: a pytree with the logical axes of each parameter.
      stack: the arrangement of layers in a pipeline; None without a pipeline.
      program: the pipeline's schedule as tables for the executor; None if the pipeline axis has size 1.
      replicas: sums gradients over microbatches and over data-parallel replicas; `replicas.specs` has the
        PartitionSpec of each weight.
    """

    mesh: Mesh
    rules: Rules
    placement: Placement
    task: Task
    batch: Mapping[str, Entry]
    params: Params
    axes: NamesTree
    stack: Stack | None
    program: Program | None
    replicas: GradientSync


def place(config: Config, mesh: Mesh, make_task: MakeTask | None, rules: Rules | None) -> Placed:
    """Makes the task of a configuration and computes its shardings on a mesh. Allocates no arrays.

    Args:
      config: the configuration.
      mesh: the mesh.
      make_task: a function that returns the task; None: the function that `config.task` names.
      rules: the table of rules: logical axis -> mesh axes; None: the built-in table.

    Raises:
      UserError: an array cannot be sharded as configured, or the task breaks the contract of `Task`.
    """
    rules = rules_of_level(rules or default_rules(config.layout), config.zero.effective_level)
    placement = Placement(rules, mesh, config.zero.keeps_gathered, in_fp8(config.precision))
    task = check_task(make_task_of(config, placement, make_task))
    stack = stack_of(task.stages, mesh.shape[PIPELINE], config.pipeline.num_chunks)
    params, axes = abstract_params(task, stack, mesh.size)
    counted = task.num_parameters or sum(leaf.size for leaf in jax.tree.leaves(params_with_axes(task.init)[0]))
    task = dataclasses.replace(task, num_parameters=counted)
    replicas = _replicas(config, task, params, axes, rules, mesh)
    refuse_weights(params, select(params, replicas.trained)[0])
    program, batch = pipeline_program(config, mesh.shape), entries(task, config.batch_size)
    return Placed(mesh, rules, placement, task, batch, params, axes, stack, program, replicas)


def pipeline_program(config: Config, shape: Mapping[str, int]) -> Program | None:
    """Returns the pipeline's schedule, checked and converted to tables for the executor; None for pipeline size 1.

    Args:
      config: the configuration.
      shape: mesh axis -> size.

    Raises:
      UserError: the schedule does not support these numbers of stages and microbatches, or its table is wrong.
    """
    if shape[PIPELINE] == 1:
        return None
    parts = num_microbatches(config, shape)
    return executable(chosen(config.pipeline, num_stages=shape[PIPELINE], num_microbatches=parts))


def _replicas(config: Config, task: Task, params: Params, axes: NamesTree, rules: Rules, mesh: Mesh) -> GradientSync:
    """Returns the object that sums gradients over microbatches and replicas, with the shardings of parameters.

    ZeRO level 2 and custom reductions need a region in which the data axis is manual: code in this region sees only the
    part of the batch that belongs to its replica.

    Raises:
      UserError: a weight cannot be stored as configured, or the configuration needs a manual data axis and the task or
        the rules do not allow it.
    """
    level = config.zero.effective_level
    others = (
        "with a task without `takes_manual_axes` on a mesh with fsdp or an axis after it, or with weights split "
        "over data"
    )
    trained = trainable_mask(config.optimizer.trainable, params, has_adapters=config.lora.rank > 0)
    specs = param_shardings(params, axes, rules, mesh.shape, level)
    # A user's rule may shard weights over data. Then the data axis has no replicas of these weights, and XLA's
    # partitioner handles the axis.
    splits_weights = level < MAX_LEVEL and any(DATA in axes_in(one.parameter) for one in jax.tree.leaves(specs))
    is_manual = (task.takes_manual_axes or num_parts(partitioned_axes(), mesh.shape) == 1) and not splits_weights
    if level == 2 and not is_manual:
        raise UserError(
            Problem(
                "zero.level",
                got=f"2 {others}",
                allowed="0, 1, 3, or a task with `takes_manual_axes`",
                nearest="zero.level=1",
            )
        )
    crossing = extensions.crossing(config)
    if crossing is OverData.STACKED and mesh.shape[DATA] > 1 and not is_manual:
        raise UserError(
            Problem(
                extensions.KEY,
                got=f"{config.reduction.name} {others}",
                allowed=f"{SUM}, or a task with `takes_manual_axes`",
                nearest=f"{extensions.KEY}={SUM}",
            )
        )
    return GradientSync(mesh, specs, level, is_manual, reduce_dtype(config.precision), trained, crossing)
