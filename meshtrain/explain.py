"""Prints the placement of a configuration: the mesh, a line for each array, the layers of each pipeline stage.

python -m meshtrain explain --config=configs/3d.py [--config.mesh.tensor=4 ...]
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.assembly.facts import array_rows, num_trained
from meshtrain.cli.output_files import PICTURES, write_picture
from meshtrain.cli.tables import format_bytes
from meshtrain.config import unused_options
from meshtrain.config.build import groups
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.errors import refuse, run
from meshtrain.files import target_problems
from meshtrain.launch import distributed
from meshtrain.launch.early_errors import tell_before_meeting
from meshtrain.models.task import token_batch
from meshtrain.observe.mesh_picture import mesh_figure, mesh_text
from meshtrain.options import function_field, user_options
from meshtrain.pipeline.schedules import layers_in_chunk
from meshtrain.pipeline.stages import layers_of_stage
from meshtrain.run.dataset import open_data, with_steps
from meshtrain.sharding.mesh import advice, describe, mesh_shape, num_needed
from meshtrain.sharding.placement_text import table
from meshtrain.sharding.rules import DATA
from meshtrain.step.device_memory import StateBytes, training_state_bytes


def text(assembly: Assembly) -> str:
    """Returns the report that `explain` prints: parameters, mesh, batch, arrays, bytes per device, stages."""
    config, task = assembly.config, assembly.task
    shape = dict(assembly.mesh.shape)
    parts = [
        f"parameters   {task.num_parameters:,} without padding",
        *([f"active       {task.num_active_parameters:,} for each token"] if task.num_active_parameters else []),
        *trainable_text(assembly),
        f"mesh         {describe(assembly.mesh)}",
        *(f"warning      {what}; {change}" for what, change in advice(assembly.mesh)),
        *reduction_text(assembly),
        f"batch        {batch_text(assembly)}",
        *kernels_text(assembly),
        *user_options_text(config),
        "",
        mesh_text(shape),
        "",
        table(array_rows(assembly)),
        state_text(training_state_bytes(assembly.state, assembly.states.sums), assembly.extension.costs.label),
        *stages_text(assembly),
    ]
    if idle := unused_options.text(config, shape):
        parts += ["", idle]
    return "\n".join(parts)


def reduction_text(assembly: Assembly) -> list[str]:
    """Returns one line with the name and the sent bytes of a custom or compressed gradient reduction.

    Returns [] if gradients are summed by JAX, without compression.
    """
    replicas, shape = assembly.placed.replicas, assembly.mesh.shape
    reduction = assembly.extension.costs.reduction
    if reduction is None:
        return []
    sent = reduction.sent_bytes(1, shape[DATA], replicas.level > 0)
    return [f"reduction    {reduction.name}, {sent:.3g} bytes per parameter sent over data={shape[DATA]}"]


def batch_text(assembly: Assembly) -> str:
    """Returns the size of a global batch as text, such as `8 sequences of 1024 tokens`.

    For batches that are not text, the result states the number of examples, and the shape and dtype of each entry.
    """
    config = assembly.config
    if set(assembly.batch) == set(token_batch(1, 1)):
        return f"{config.batch_size} sequences of {config.sequence_length} tokens"
    if assembly.task.batch_text:
        return assembly.task.batch_text
    held = (f"{name} {list(leaf.shape[1:])} {leaf.dtype.name}" for name, leaf in assembly.batch.items())
    return f"{config.batch_size} examples of {', '.join(held)}; {assembly.task.num_units:,} {assembly.task.unit}"


def kernels_text(assembly: Assembly) -> list[str]:
    """Returns lines about kernels and communication, for a task with a cost model; [] for other tasks.

    A line states the kernel that computes a part of the model, and why this kernel is used. A further line describes
    the part's communication between devices, if any, such as in context-parallel attention.
    """
    lines = list[str]()
    for kernel in assembly.cost.kernels:
        lines += [f"{kernel.part:<13}{kernel.by}: {kernel.why}"] if kernel.by else []
        lines += [f"exchange     {kernel.exchange}"] if kernel.exchange else []
        lines += [f"warning      {kernel.fallback_line}"] if kernel.fallback else []
    return lines


def trainable_text(assembly: Assembly) -> list[str]:
    """Returns one line with the number of trained weights if `optimizer.trainable` freezes some; else an empty list."""
    trained, frozen = num_trained(assembly)
    return (
        [f"trained      {trained:,} of {trained + frozen:,} stored parameters, the others are frozen"] if frozen else []
    )


def user_options_text(config: Config) -> list[str]:
    """Returns a line for each option that names a user's function, with the values of the function's options."""
    lines = []
    for group, options in groups(config).items():
        field = function_field(options)
        if field and ":" in getattr(options, field):
            values = "".join(f", {name}={json.dumps(value)}" for name, value in user_options(options).items())
            lines.append(f"custom       {group}.{field}={getattr(options, field)}{values}")
    return lines


def state_text(bytes_held: StateBytes, label: str) -> str:
    """Returns one line with the bytes of the training state on one device.

    Args:
      bytes_held: the bytes of each part of the state.
      label: the name that the line uses for the arrays of an extension.
    """
    names = {"parameters": "parameters", "gradients": "gradients", "moments": "moments"}
    names |= {"extra": label} if bytes_held.extra else {}
    sizes = ", ".join(f"{name} {format_bytes(getattr(bytes_held, field))}" for field, name in names.items())
    beside = f"; {format_bytes(bytes_held.on_host)} of moments in host memory" if bytes_held.on_host else ""
    return f"per device   {sizes}{beside}"


def stages_text(assembly: Assembly) -> list[str]:
    """Returns lines about the pipeline: its schedule, each stage, and the saved activations; [] without a pipeline."""
    program, stages = assembly.placed.program, assembly.task.stages
    if program is None or stages is None:
        return []
    schedule = program.schedule
    lines = [f"schedule     {schedule.text}"]
    share = f"1/{schedule.num_stages} of the vocabulary (embedding and head)"
    layers = layers_in_chunk(stages.num_layers, schedule.num_stages, schedule.num_chunks)
    for stage in range(schedule.num_stages):
        held = layers_of_stage(stage, schedule.num_stages, stages.num_layers, schedule.num_chunks)
        parts = (f"{part.start} to {part.stop - 1}" if len(part) > 1 else f"{part.start}" for part in held if part)
        num_empty = layers * schedule.num_chunks - sum(map(len, held))
        empty = f" and {num_empty} padding layer{'s' if num_empty > 1 else ''}" if num_empty else ""
        lines.append(f"stage {stage:<6} layers {', '.join(parts)}{empty}; {share}")
    policy = assembly.config.remat.policy
    most = f"at most {program.num_kept_slots} microbatches x chunks on a stage"
    each = "1 layer" if layers == 1 else f"{layers} layers"
    lines.append(f"saved        for backward passes: residuals of {most}, {each} each (remat.policy={policy})")
    return lines


def main(argv: Sequence[str]) -> int:
    """Prints the placement of a configuration, computed only from shapes; returns the exit code.

    Raises:
      UserError: a wrong flag or configuration, or a file that cannot be written.
    """
    tell_before_meeting(os.environ)
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain explain",
        description="Prints how each array of a configuration is sharded.",
        add_help=False,
    )
    extra.add_argument("--draw", metavar="FILE", default="", help="also draw the mesh (.png, .svg or .pdf)")
    config, arguments = parse(argv, extra, reads_data=False)
    if arguments.draw:
        refuse(target_problems("--draw", arguments.draw, "mesh.png", PICTURES))
    devices, notes = distributed.start(num_needed(config.mesh), is_open=-1 in dataclasses.astuple(config.mesh))
    shape = mesh_shape(config.mesh, len(devices), simulated=devices[0].platform == "cpu")
    print(text(assembly := assemble(config, shape, devices)))
    if config.num_epochs:
        notes = [*notes, with_steps(config, open_data(config, assembly.task))[1]]
    for note in notes:
        print(f"note         {note}")
    if arguments.draw:
        write_picture("--draw", arguments.draw, mesh_figure(shape))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
