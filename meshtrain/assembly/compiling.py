"""Chooses compiler options for a step, and compiles the programs of a run."""

import dataclasses
import hashlib

import jax
from jax.sharding import Mesh

from meshtrain.assembly.placed import Placed
from meshtrain.config.schema import Config
from meshtrain.hardware.accelerators import find as find_accelerator
from meshtrain.hardware.compiler_options import CompilerOption, options_of
from meshtrain.hardware.links import wire_share
from meshtrain.launch import peers
from meshtrain.models.remat import gathers_early
from meshtrain.pipeline.program import worth_reducing_early
from meshtrain.sharding.param_sharding import axes_in
from meshtrain.sharding.rules import DATA, EXPERT
from meshtrain.step.extension import Extension
from meshtrain.step.shardings import layer_bytes

REFERENCE = "NVIDIA H100 80GB HBM3"  # its rates are used for devices without known rates


@dataclasses.dataclass(frozen=True)
class Compiling:
    """The compiler options of a step, and the facts from which they were chosen.

    Attributes:
      options: the options with which XLA compiles the step for these devices.
      layer_bytes: bytes of gradients that a device reduces across data-parallel replicas in one iteration of the
        backward loop over layers; 0: the loop reduces no gradients.
      gathers_early: whether XLA may gather the next layer's weights while it computes the current layer.
    """

    options: tuple[CompilerOption, ...]
    layer_bytes: int
    gathers_early: bool


def compiling(config: Config, placed: Placed, extension: Extension) -> Compiling:
    """Returns the compiler options of a step, for the kind of device of the mesh."""
    program, placement = placed.program, placed.placement
    size = 0 if program else layer_bytes(placed.params, placed.axes, placed.replicas, config.remat.every)
    early = gathers_early(config.remat, placement, splits_sequence=config.layout.sequence_parallel)
    whole = jax.tree.map(lambda leaf, axes: placement.weight_spec(leaf.shape, axes), placed.params, placed.axes)
    # Whether a weight stays sharded over the expert axis during the computation.
    splits_experts = any(EXPERT in axes_in(spec) for spec in jax.tree.leaves(whole))
    options = options_of(
        device_kind(placed.mesh),
        size,
        is_late=extension.costs.hides_transfers,
        by_chunk=program is not None and (program.reduces_chunks or splits_experts),
        gathers_early=early,
        splits_experts=program is None and splits_experts,
        is_deterministic=config.precision.deterministic,
    )
    return Compiling(options, size, early)


def reduced_early(config: Config, placed: Placed) -> Placed:
    """Returns `placed` with `program.reduces_chunks` set to the faster choice; unchanged without a pipeline.

    If it is true, a pipeline reduces the gradients of each chunk of layers as soon as they are complete, else all
    gradients after the last clock tick. The choice is an estimate from the configuration, the mesh and the kind of
    device, so `plan` and a run choose the same program. It assumes matrix products at the speed of large products, the
    idle clock ticks of the schedule, and replicas on different hosts. A device without known rates, such
    as a CPU, is estimated as an H100.
    """
    program, task, mesh = placed.program, placed.task, placed.mesh
    if program is None:
        return placed
    accelerator = find_accelerator(device_kind(mesh)) or find_accelerator(REFERENCE)
    assert accelerator is not None
    peak = accelerator.product_share * accelerator.bfloat16_flops_per_second
    computing_seconds = task.flops_per_token * task.num_units / mesh.size / peak / program.cells.active.mean()
    layers = task.stages.num_layers if task.stages else 0
    kind_of_sum = "reduce-scatter" if config.zero.effective_level else "all-reduce"
    of_layer = layer_bytes(placed.params, placed.axes, placed.replicas, 1)
    rate = accelerator.network_bytes_per_second or accelerator.link_bytes_per_second
    sending_seconds = wire_share(kind_of_sum, mesh.shape[DATA]) * layers * of_layer / rate
    pays = worth_reducing_early(program, sending_seconds, float(computing_seconds))
    return dataclasses.replace(placed, program=dataclasses.replace(program, reduces_chunks=pays))


def device_kind(mesh: Mesh) -> str:
    """Returns the `jax.Device.device_kind` of a mesh; all its devices are of the same kind."""
    kind: str = mesh.devices.flat[0].device_kind
    return kind


def compile_program(name: str, traced: jax.stages.Traced) -> jax.stages.Compiled:
    """Compiles a traced program, after a check that all processes traced the same program.

    This function may be called in a thread.

    Args:
      name: the name of the program for the check and its error; different programs need different names.
      traced: the program.

    Raises:
      UserError: other processes traced a different program.
    """
    lowered = traced.lower()
    if peers.count() > 1:
        program = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        peers.refuse_differences(f"the program of the {name}", {"hash": program})
    return lowered.compile()
