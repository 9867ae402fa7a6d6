"""Checks a configuration against a mesh: the batch, sequences, pipeline stages, and the storage of weights.

The functions take the sizes of the mesh as {axis: size}. If the size of an axis is not known yet, callers pass 1, which
can hide a problem but never reports a wrong one.
"""

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.config import extensions, tasks
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.errors import Problem, UserError, nearest_multiple
from meshtrain.models.lora import LoraOptions
from meshtrain.models.task import Task, entries, stack_problems
from meshtrain.optim import moments, optimizers
from meshtrain.options import dims
from meshtrain.pipeline import check as pipeline_check
from meshtrain.pipeline.stages import Stack, stack_of
from meshtrain.sharding import trainable
from meshtrain.sharding.param_sharding import MAX_LEVEL, level_problems, num_parts, rules_of_level
from meshtrain.sharding.rules import CONTEXT, DATA, PIPELINE, Rules, default_rules, expert_axes
from meshtrain.sharding.tree_problems import tree_problems
from meshtrain.sharding.trees import Arrays, NamesTree, select
from meshtrain.user_functions import user_check


def check(
    config: Config, mesh_shape: Mapping[str, int], make_task: MakeTask | None = None, rules: Rules | None = None
) -> list[Problem]:
    """Returns a problem for each reason why a resolved configuration does not fit a mesh of these sizes.

    Args:
      config: a resolved configuration.
      mesh_shape: the size of each mesh axis.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: logical axis -> mesh axes for the task's weights; None: the built-in table.
    """
    return on_mesh(config, mesh_shape, make_task or tasks.find(config.task), rules)


def check_filled(
    config: Config, mesh_shape: Mapping[str, int], make_task: MakeTask | None = None, rules: Rules | None = None
) -> list[Problem]:
    """Returns the problems of `check` if an axis of `config.mesh` has size -1, else [].

    Without an axis of size -1, `resolve` has checked the configuration already. The arguments are explained in `check`;
    `mesh_shape` contains the size that replaces -1.
    """
    is_open = -1 in dataclasses.astuple(config.mesh)
    return check(config, mesh_shape, make_task, rules) if is_open else []


def on_mesh(
    config: Config,
    mesh_shape: Mapping[str, int],
    function: MakeTask | None,
    rules: Rules | None,
    *,
    is_open: bool = False,
) -> list[Problem]:
    """Returns the problems of `check`; if `function` is None, only problems that do not depend on the task.

    Args:
      config: a configuration whose fields are within their bounds.
      mesh_shape: the size of each mesh axis; 1 for an axis of size -1.
      function: the task function.
      rules: logical axis -> mesh axes for the task's weights; None: the built-in table.
      is_open: whether an axis has size -1. If so, and there is no other problem, the placement of the weights is not
        checked. `check_filled` checks the placement later, with the final size of the axis.
    """
    rules = rules_of_level(rules or default_rules(config.layout), config.zero.effective_level)
    num_groups = config.local_steps.groups if config.local_steps.period else 0
    num_parts = num_microbatches(config, mesh_shape)
    problems = batch_problems(config.batch_size, rules, mesh_shape, num_parts, num_groups)
    problems += sequence_problems(config.sequence_length, rules, mesh_shape)
    problems += level_problems(config.zero, config.mesh.data, config.mesh.fsdp)
    problems += extensions.problems(config, mesh_shape)
    if function is None:
        return problems
    own = user_check("task", tasks.name_of(function), function, (config, mesh_shape))
    problems += own + tasks.watch_problems(config, function)
    on_one_device = math.prod(mesh_shape.values()) == 1
    if on_one_device and not config.optimizer.trainable and not config.lora.rank and not rules.own:
        return problems
    try:
        if unfit := tasks.lora_problems(config, function):
            problems += unfit
            config = dataclasses.replace(config, lora=LoraOptions())
        if is_open and not problems:
            return problems
        task, params, axes = tasks.abstract_weights(config, function, on_one_device=on_one_device)
        if mesh_shape[CONTEXT] > 1:
            problems += _parts_of_sequences(config, task, rules, mesh_shape)
        if mesh_shape[PIPELINE] > 1:
            has_option = hasattr(getattr(function, "options", None), "num_layers")
            problems += _in_stages(config, mesh_shape, task, has_option=has_option)
    except Exception:
        if own:
            return problems  # contradictory options, reported above, may make tracing the weights fail
        raise
    if stack := stack_of(task.stages, mesh_shape[PIPELINE], config.pipeline.num_chunks):
        if unstacked := stack_problems(stack.num_layers, params, axes):
            return problems + unstacked
        problems += optimizers.storage_problems(config.optimizer, stack.num_layers, stack.shape)
        problems += _rounding_problems(config, stack)
        params = {**params, "layers": stack.places(params["layers"])}
    return problems + weight_problems(config, mesh_shape, params, axes, rules)


def _in_stages(config: Config, mesh_shape: Mapping[str, int], task: Task, *, has_option: bool) -> list[Problem]:
    """Returns a problem for each reason why the mesh's pipeline stages cannot run the task.

    If `has_option`, the problems name the option `model.num_layers`; otherwise the attribute `Task.stages.num_layers`,
    for a task without this option.
    """
    size = mesh_shape["pipeline"]
    if task.stages is None:
        return [
            Problem(
                "mesh.pipeline",
                got=f"{size}, but this task has no pipeline stages",
                allowed=1,
                nearest="mesh.pipeline=1",
                depends_on=["task"],
            )
        ]
    return pipeline_check.check(
        config.pipeline,
        num_stages=size,
        num_layers=task.stages.num_layers,
        num_microbatches=num_microbatches(config, mesh_shape),
        key="model.num_layers" if has_option else "Task.stages.num_layers",
    )


def _rounding_problems(config: Config, stack: Stack) -> list[Problem]:
    """Returns a problem for each option that asks for random rounding, if `stack` spreads layers unevenly over stages.

    The random bits depend on a value's index in its array. With an uneven spread, which pads the array, this index
    differs from the index on a single device.
    """
    if stack.places_of_layers is None:
        return []
    spread = f"with {stack.num_layers} layers spread over {stack.num_stages} stages x {stack.num_chunks} chunks, whose "
    spread += "random rounding would differ from the rounding on one device"
    values = {
        "optimizer.moments": (config.optimizer.moments, "float32"),
        "precision.param_dtype": (config.precision.param_dtype.replace("auto", "float32"), "float32"),
    }
    return [
        Problem(
            key,
            got=f"{value} {spread}",
            allowed=f"{fix}, or stages that divide the layers",
            nearest=f"{key}={fix}",
            depends_on=["mesh.pipeline", "pipeline.num_chunks", "model.num_layers"],
        )
        for key, (value, fix) in values.items()
        if value != fix
    ]


def _parts_of_sequences(config: Config, task: Task, rules: Rules, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns one problem if no entry of the task's batch has a dim that the context axis splits, else []."""
    split = {name for name, axes in rules.activations.items() if CONTEXT in axes}
    if any(split & set(entry.axes) for entry in entries(task, config.batch_size).values()):
        return []
    return [
        Problem(
            f"mesh.{CONTEXT}",
            got=f"{mesh_shape[CONTEXT]}, but no entry of this task's batch has a dim 'sequence'",
            allowed=1,
            nearest=f"mesh.{CONTEXT}=1",
            depends_on=["task"],
        )
    ]


def batch_problems(
    batch_size: int, rules: Rules, mesh_shape: Mapping[str, int], num_microbatches: int, num_groups: int = 0
) -> list[Problem]:
    """Returns a list with one problem if the devices and microbatches cannot split the global batch evenly, else [].

    The batch size must be a multiple of the number of batch shards, multiplied by the number of microbatches. The
    number of shards is the product of the sizes of all mesh axes that split the batch by `rules`; by default these axes
    are data, fsdp and expert. With separately trained groups, `num_groups` replaces the size of the data axis.

    Args:
      batch_size: the global batch size in sequences.
      rules: the sharding rules, which state the mesh axes that split the `batch` dim of activations.
      mesh_shape: the size of each mesh axis.
      num_microbatches: the number of microbatches of a step, from the function `num_microbatches`.
      num_groups: the number of separately trained groups (`local_steps.groups`); 0: no groups.
    """
    sizes = batch_shards(rules, mesh_shape)
    if num_groups:
        sizes = {"local_steps.groups": num_groups} | {name: n for name, n in sizes.items() if name != f"mesh.{DATA}"}
    divisor = math.prod(sizes.values()) * num_microbatches
    if batch_size % divisor == 0:
        return []
    factors = " x ".join([*(f"{name} {size}" for name, size in sizes.items()), f"{num_microbatches} microbatches"])
    return [
        Problem(
            "batch_size",
            got=batch_size,
            allowed=f"a multiple of {divisor} = {factors}",
            nearest=nearest_multiple(batch_size, divisor),
            depends_on=[*sizes, "accumulation_steps", "pipeline.num_microbatches"],
        )
    ]


def batch_shards(rules: Rules, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Returns dotted key, such as `mesh.data` -> size, for each mesh axis that splits the sequences of a batch."""
    # An axis that is used only for experts is left out if it has size 1.
    axes = [axis for axis in rules.activations["batch"] if axis not in expert_axes() or mesh_shape[axis] > 1]
    return {f"mesh.{axis}": mesh_shape[axis] for axis in axes}


def sequence_problems(
    sequence_length: int, rules: Rules, mesh_shape: Mapping[str, int], name: str = "sequence_length"
) -> list[Problem]:
    """Returns a list with one problem if a rule splits the sequence dim of an activation into unequal shards, else [].

    Args:
      sequence_length: the sequence length in tokens.
      rules: the sharding rules, which state the mesh axes that split `sequence` and, between layers,
        `residual_sequence`.
      mesh_shape: the size of each mesh axis.
      name: the option that sets the length, for the problem.
    """
    for rule in ("residual_sequence", "sequence"):  # a length that fits residual_sequence fits sequence
        axes = rules.activations[rule] if rule in rules.activations else ()
        parts = num_parts(axes, mesh_shape)
        if sequence_length % parts:
            over = " x ".join(f"mesh.{axis} = {mesh_shape[axis]}" for axis in axes if mesh_shape[axis] > 1)
            return [
                Problem(
                    name,
                    got=sequence_length,
                    allowed=f"a multiple of {parts}, because rule '{rule}' splits it over {over}",
                    nearest=nearest_multiple(sequence_length, parts),
                    depends_on=[f"mesh.{axis}" for axis in axes],
                )
            ]
    return []


def weight_problems(
    config: Config, mesh_shape: Mapping[str, int], params: Arrays, axes: NamesTree, rules: Rules
) -> list[Problem]:
    """Returns a problem for each reason why a task's weights cannot be stored on a mesh of these sizes.

    The dim `layers` is not checked: outside of pipeline stages, each task decides how it stacks layers.

    Args:
      config: the configuration. The problems name the options in `config.model` that set the size of a dim.
      mesh_shape: the size of each mesh axis.
      params: abstract parameters. Stacked layers are in layer order and include the padding layers of a pipeline.
      axes: the logical axes of the parameters.
      rules: the sharding rules for the ZeRO level of the configuration, from `rules_of_level`.
    """
    mask, problems, chosen = None, list[Problem](), config.optimizer
    if not trainable.check(chosen.trainable):  # `optimizers.check` reports an invalid pattern
        try:
            mask = trainable.trainable_mask(chosen.trainable, params, has_adapters=config.lora.rank > 0)
        except UserError as error:
            problems = list(error.problems)
    if chosen.moments == moments.EIGHT_BITS and not moments.check_block(chosen.moment_block):
        (of_trained, _), (axes_of_trained, _) = select(params, mask), select(axes, mask)
        problems += moments.problems(chosen.moment_block, of_trained, axes_of_trained, rules.parameters, mesh_shape)
    level = min(config.zero.effective_level, MAX_LEVEL)
    return problems + tree_problems(
        params, axes, rules, mesh_shape, level, options=dims(config.model, "model"), trained=mask, elsewhere=("layers",)
    )


def num_microbatches(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of microbatches of a step.

    It is the number of accumulation steps, multiplied by the pipeline's number of microbatches if there is a pipeline.
    """
    in_pipeline = config.pipeline.num_microbatches if mesh_shape["pipeline"] > 1 else 1
    return config.accumulation_steps * in_pipeline


def units_on_device(config: Config, task: Task, rules: Rules, mesh_shape: Mapping[str, int]) -> float:
    """Returns the number of units (tokens or images) that each device processes in a step.

    The units of the global batch are divided by the sizes of the mesh axes that split the batch dim and, if the batch
    has a sequence dim, the sequence dim.
    """
    has_sequence = any("sequence" in entry.axes for entry in entries(task, config.batch_size).values())
    split = (*rules.activations["batch"], *(rules.activations["sequence"] if has_sequence else ()))
    return task.num_units / num_parts(split, mesh_shape)
