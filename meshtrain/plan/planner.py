"""Plans one training step: compiles it for a cluster, and collects its memory, traffic, FLOPs and modelled time."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from meshtrain.config.schema import Config
from meshtrain.hardware.accelerators import peak_flops_per_second
from meshtrain.options import Values
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.compile import Compiled, compile_step, other_programs_of, program_of
from meshtrain.plan.cost.lower_bound import (
    executor_bytes,
    idle_bytes,
    layer_gradient_bytes,
    model_flops,
    trained_elements,
    wire_bytes_minimum,
)
from meshtrain.plan.cost.memory import Memory, memory
from meshtrain.plan.hlo.collectives import (
    LayerGradients,
    Traffic,
    collectives,
    layer_gradients,
    sent_along,
    traffic,
)
from meshtrain.plan.hlo.flops import Work, matmul_flops
from meshtrain.plan.timing.kernels import Kernels, kernels_by_part
from meshtrain.plan.timing.streams import Assumptions, Timing, timing
from meshtrain.sharding.mesh import mesh_shape, over_slices
from meshtrain.sharding.rules import DATA
from meshtrain.step.precision import product_name


@dataclasses.dataclass(frozen=True)
class OtherProgram:
    """The costs of a program that runs once every few steps, such as the synchronization of local-SGD replicas.

    Attributes:
      name: the name of the program.
      every: number of steps between two runs.
      traffic: the collectives of one run, one row for each combination of mesh axes and kind of collective.
      minimum_bytes: lower bound of the bytes that a device sends over the data axis in one run.
      timing: modelled seconds of one run; None for CPUs.
    """

    name: str
    every: int
    traffic: tuple[Traffic, ...]
    minimum_bytes: float
    timing: Timing | None


@dataclasses.dataclass(frozen=True)
class Faster:
    """A change of the configuration that makes a step faster and fits in memory; it was compiled.

    Attributes:
      change: dotted key -> new value.
      step_seconds: modelled seconds of the changed step.
      peak_bytes: peak memory of the changed step on one device.
    """

    change: Values
    step_seconds: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The costs of one training step; all numbers are for one device.

    Attributes:
      cluster: the target cluster.
      compiled: the compiled step.
      memory: the memory that the step needs, and whether it fits.
      traffic: the collectives of the step, one row for each combination of mesh axes and kind of collective.
      others: the programs that run once every few steps; empty in plain training.
      minimum: mesh axis, or axes joined by `+` -> lower bound of the bytes that a device sends along them.
      idle_bytes: mesh axis, or axes joined by `+` -> bytes that a device sends in a pipeline's idle clock ticks;
        contains only axes along which layers send in each tick.
      executor_bytes: bytes that a device sends over the pipeline axis according to the executor's formula; None without
        a pipeline, or if the task does not state its width.
      layer_gradients: the traffic of the gradients of stacked layers over data; None if they are not reduced once a
        step (one replica, ZeRO levels 2 and 3, compression), or there is no program.
      work: FLOPs of the compiled program; None if there is no program.
      model_flops: FLOPs of the model, (with causal attention, with full attention); None if the task does not state
        them.
      timing: modelled seconds of the step; None for CPUs and if there is no program.
      assumptions: the assumptions of the time model.
      kernels: the kernels of the step by part of the model, longest first; empty without a timing.
      faster: a faster configuration, see `search.faster`; None if none is known.
    """

    cluster: Cluster
    compiled: Compiled
    memory: Memory
    traffic: tuple[Traffic, ...]
    others: tuple[OtherProgram, ...]
    minimum: Mapping[str, float]
    idle_bytes: Mapping[str, float]
    executor_bytes: float | None
    layer_gradients: LayerGradients | None
    work: Work | None
    model_flops: tuple[float, float] | None
    timing: Timing | None
    assumptions: Assumptions
    kernels: tuple[Kernels, ...] = ()
    faster: Faster | None = None

    @property
    def recomputed_seconds(self) -> float:
        """Modelled seconds of kernels that repeat a part of the forward pass in the backward pass; 0 if unknown."""
        return sum(row.recomputed_seconds for row in self.kernels) * (self.timing.factor if self.timing else 1.0)

    @property
    def mfu(self) -> tuple[float, float, float] | None:
        """Modelled model FLOPs utilization (low, middle, high), with the FLOPs of full attention as in PaLM.

        The peak is for the dtype of most matrix products, as in the training log. None if the time, the model's FLOPs
        or the peak is unknown.
        """
        accelerator = self.cluster.accelerator
        if self.timing is None or self.model_flops is None or accelerator is None:
            return None
        dtype = product_name(self.compiled.assembly.config.precision)
        peak = peak_flops_per_second(accelerator.device_kinds[0], dtype)
        if peak is None:
            return None
        share, timing = self.model_flops[1] / peak, self.timing
        return share / timing.high_seconds, share / timing.step_seconds, share / timing.low_seconds

    @property
    def recomputed_share(self) -> float | None:
        """(compiled FLOPs - model FLOPs) / compiled FLOPs, both with full attention; None if either is unknown.

        The difference is recomputation, or work in a pipeline's idle clock ticks.
        """
        if self.work is None or self.model_flops is None or not self.work.full:
            return None
        return 1 - self.model_flops[1] / self.work.full

    @property
    def added_share(self) -> float | None:
        """FLOPs that the compiler added to the traced FLOPs, as a share of the traced FLOPs; None without a program."""
        if self.work is None or not self.compiled.traced_flops:
            return None
        return self.work.full / self.compiled.traced_flops - 1


def shape_on(config: Config, cluster: Cluster) -> dict[str, int]:
    """Returns mesh axis -> size for the configured mesh; a size of -1 is replaced by the number of remaining devices.

    Raises:
      UserError: the mesh does not fit the cluster.
    """
    slice_size = cluster.devices_each if cluster.num_slices > 1 else 0
    return mesh_shape(config.mesh, len(cluster.devices), simulated=False, slice_size=slice_size)


def plan(
    config: Config,
    shape: Mapping[str, int],
    cluster: Cluster,
    assumptions: Assumptions,
    measured_seconds: float | None = None,
    compiled_by: Callable[[Config, Mapping[str, int], Cluster], Compiled] | None = None,
) -> Plan:
    """Compiles a step for a cluster and returns its plan.

    Args:
      config: the resolved configuration.
      shape: mesh axis -> size.
      cluster: the target cluster; it has at least as many devices as the mesh.
      assumptions: the assumptions of the time model.
      measured_seconds: measured step time of the same run, which calibrates the time model; None if not measured.
      compiled_by: function that compiles the step; None: `compile_step`.

    Raises:
      UserError: `assemble` rejects the configuration.
    """
    compiled = (compiled_by or compile_step)(config, shape, cluster)
    assembly = compiled.assembly
    program = program_of(compiled)
    sent = collectives(program, dict(assembly.mesh.shape), over_slices(assembly.mesh)) if program else []
    rows = tuple(traffic(sent))
    modelled = None
    kernels: tuple[Kernels, ...] = ()
    if program and cluster.accelerator:
        kernels = kernels_by_part(program, cluster.accelerator, assumptions)
        modelled = timing(assembly.mesh, cluster, program, assumptions, measured_seconds)
    by_chunk = assembly.placed.program is not None and assembly.placed.program.reduces_chunks
    least, least_count = wire_bytes_minimum(assembly), 1 if by_chunk else 2
    return Plan(
        cluster=cluster,
        compiled=compiled,
        memory=memory(compiled, cluster, program),
        traffic=rows,
        others=tuple(_others(compiled, cluster, assumptions)),
        minimum=least,
        idle_bytes=idle_bytes(assembly, {axis: sent_along(rows, axis) for axis in least}),
        executor_bytes=executor_bytes(assembly),
        layer_gradients=layer_gradients(sent, DATA, layer_gradient_bytes(assembly), least_count) if program else None,
        work=matmul_flops(program) if program else None,
        model_flops=model_flops(assembly),
        timing=modelled,
        assumptions=assumptions,
        kernels=kernels,
    )


def _others(compiled: Compiled, cluster: Cluster, assumptions: Assumptions) -> Iterator[OtherProgram]:
    mesh = compiled.assembly.mesh
    join, elements = compiled.assembly.extension.join, trained_elements(compiled.assembly)
    for name, every, program in other_programs_of(compiled):
        yield OtherProgram(
            name=name,
            every=every,
            traffic=tuple(traffic(collectives(program, dict(mesh.shape), over_slices(mesh)))),
            minimum_bytes=join.sent_bytes(elements, mesh.shape[DATA]) if join else 0.0,
            timing=timing(mesh, cluster, program, assumptions) if cluster.accelerator else None,
        )
