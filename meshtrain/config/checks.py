"""Checks of options against each other, the data and the mesh. Each returns lines: got, allowed, nearest fix.

Sizes of the mesh come as {axis: size}. An axis of unknown size is passed as 1, which can only weaken a check.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from meshtrain.config.data_sources import names as source_names
from meshtrain.config.fields import Config
from meshtrain.data.sources import DOCUMENTS, TOKENS, DataOptions
from meshtrain.data.tokenizer import NUM_BYTES
from meshtrain.errors import UserError, nearest_multiple
from meshtrain.models import problems, remat
from meshtrain.models.task import Task, entries
from meshtrain.optim import moments, trainable
from meshtrain.options import Options
from meshtrain.sharding.rules import CONTEXT, DATA, Rules, expert_axes
from meshtrain.sharding.stored import MAX_LEVEL, num_parts, tree_problems
from meshtrain.sharding.trees import Arrays, NamesTree, select
from meshtrain.step.precision import compute_name, in_fp8


def decoder(config: Config, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each way in which a decoder's options contradict each other, the data or the mesh.

    Args:
      config: with `DecoderOptions` as its model, each field within its own bounds.
      mesh_shape: the size of each mesh axis.
    """
    num_chunks = config.pipeline.num_chunks if mesh_shape["pipeline"] > 1 else 1
    computes_in = compute_name(config.precision), in_fp8(config.precision)
    return [
        *sources(config, TOKENS, "packed tokens"),
        *problems.of_decoder(config.model, config.sequence_length, *computes_in, mesh_shape),
        *vocabulary(config.model, config.data),
        *remat.check(config.remat, config.model.num_layers, mesh_shape["pipeline"], num_chunks=num_chunks),
    ]


def sources(config: Config, allowed: Sequence[str], what: str) -> list[str]:
    """Returns one line if a built-in source gives other examples than a built-in task takes.

    Args:
      config: the configuration.
      allowed: the built-in sources that fit the task.
      what: the examples that the task takes.
    """
    source = config.data.source
    if source in allowed or source not in source_names():
        return []
    return [
        f"data.source: got {source} with task={config.task}, which takes {what}; allowed: {', '.join(allowed)}, or "
        f"package.module:function; nearest: data.source={allowed[0]}"
    ]


def vocabulary(options: Options, data: DataOptions) -> list[str]:
    """Returns one line if the byte tokenizer has more tokens than the model. Others are checked when the data open."""
    if data.source not in DOCUMENTS["source"] or data.tokenizer != "bytes" or options.vocab_size > NUM_BYTES:
        return []
    return [
        f"model.vocab_size: got {options.vocab_size}; allowed with data.tokenizer = bytes: at least {NUM_BYTES + 1}, "
        f"the bytes and the end of a document; nearest: {NUM_BYTES + 1}"
    ]


def batch(
    batch_size: int, rules: Rules, mesh_shape: Mapping[str, int], num_microbatches: int, num_groups: int = 0
) -> list[str]:
    """Returns one line where the global batch does not divide by its shards (data x fsdp) x microbatches.

    Args:
      batch_size: sequences.
      rules: the axes that split an activation's `batch` dim count.
      mesh_shape: the size of each mesh axis.
      num_microbatches: parts that are computed one after the other.
      num_groups: that train apart, which then divide the batch in place of the data axis; 0: none.
    """
    # An axis that is there for experts alone is left out where it has size 1.
    axes = [axis for axis in rules.activations["batch"] if axis not in expert_axes() or mesh_shape[axis] > 1]
    sizes = {f"mesh.{axis}": mesh_shape[axis] for axis in axes}
    if num_groups:
        sizes = {"local_steps.groups": num_groups} | {name: n for name, n in sizes.items() if name != f"mesh.{DATA}"}
    divisor = math.prod(sizes.values()) * num_microbatches
    if batch_size % divisor == 0:
        return []
    factors = " x ".join([*(f"{name} {size}" for name, size in sizes.items()), f"{num_microbatches} microbatches"])
    return [
        f"batch_size: got {batch_size}; allowed: a multiple of {divisor} = {factors}; "
        f"nearest: {nearest_multiple(batch_size, divisor)}"
    ]


def sequence(
    sequence_length: int, rules: Rules, mesh_shape: Mapping[str, int], name: str = "sequence_length"
) -> list[str]:
    """Returns one line where a rule splits the sequence of an activation into unequal shards.

    Args:
      sequence_length: in tokens.
      rules: the axes that split `sequence`, and between layers `residual_sequence`, count.
      mesh_shape: the size of each mesh axis.
      name: the option that holds the length.
    """
    for rule in ("residual_sequence", "sequence"):  # what fits the first fits the second
        axes = rules.activations[rule] if rule in rules.activations else ()
        parts = num_parts(axes, mesh_shape)
        if sequence_length % parts:
            over = " x ".join(f"mesh.{axis} = {mesh_shape[axis]}" for axis in axes if mesh_shape[axis] > 1)
            return [
                f"{name}: got {sequence_length}; allowed: a multiple of {parts}, as rule '{rule}' splits it "
                f"over {over}; nearest: {nearest_multiple(sequence_length, parts)}"
            ]
    return []


def parts_of_sequences(config: Config, task: Task, rules: Rules, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line if `context`, larger than 1, should split sequences, and the task's batch has none."""
    split = {name for name, axes in rules.activations.items() if CONTEXT in axes}
    if any(split & set(entry.axes) for entry in entries(task, config.batch_size).values()):
        return []
    return [
        f"mesh.{CONTEXT}: got {mesh_shape[CONTEXT]}, and no entry of this task's batch has a dim 'sequence'; allowed: "
        f"1; nearest: mesh.{CONTEXT}=1"
    ]


def weights(config: Config, mesh_shape: Mapping[str, int], params: Arrays, axes: NamesTree, rules: Rules) -> list[str]:
    """Returns one line for each reason why a task's weights cannot be stored on a mesh of these sizes.

    The dim `layers` is left out: the pipeline's check, which knows the number of chunks, covers it.

    Args:
      config: the configuration. The lines name the options in `config.model` that set the size of a dim.
      mesh_shape: the size of each mesh axis.
      params: abstract parameters in layer order.
      axes: their logical axes.
      rules: the table, with the storage axes of the ZeRO level.
    """
    mask, problems, chosen = None, list[str](), config.optimizer
    if not trainable.check(chosen.trainable):  # which `optimizers.check` reports
        try:
            mask = trainable.trained_mask(chosen.trainable, params, has_adapters=config.lora.rank > 0)
        except UserError as error:
            problems = list(error.problems)
    if chosen.moments == moments.EIGHT_BITS and not moments.check_block(chosen.moment_block, ""):
        (of_trained, _), (axes_of_trained, _) = select(params, mask), select(axes, mask)
        problems += moments.problems(chosen.moment_block, of_trained, axes_of_trained, rules.parameters, mesh_shape)
    sizes = {
        field.metadata["dim"]: (f"model.{field.name}", getattr(config.model, field.name))
        for field in dataclasses.fields(config.model)
        if field.metadata and field.metadata["dim"]
    }
    level = min(config.zero.effective_level, MAX_LEVEL)
    return problems + tree_problems(
        params, axes, rules, mesh_shape, level, options=sizes, trained=mask, elsewhere=("layers",)
    )
