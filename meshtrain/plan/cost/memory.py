"""Computes the memory of one device from shardings and the compiler's statistics, and decides whether the step fits."""

import dataclasses
from collections.abc import Sequence

from meshtrain.assembly.assemble import Assembly
from meshtrain.hardware.accelerators import usable_bytes
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.compile import Compiled
from meshtrain.plan.hlo.parse import FUSIONS, Program
from meshtrain.plan.hlo.shapes import num_bytes, parts
from meshtrain.step.device_memory import StateBytes, Statistics, bytes_of_device, training_state_bytes

# A GPU chooses kernels of matrix products at run time; their workspaces and layouts make temporaries larger or smaller.
# A TPU program's memory is final.
TEMPORARY_UNCERTAINTY = {"cuda": 0.10, "tpu": 0.0, "cpu": 0.0}
# Operations that allocate no array: views, bookkeeping, and updates in place.
NO_ARRAYS = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "constant", "call", "conditional",
             "dynamic-update-slice", "opt-barrier", "iota")  # fmt: skip
NUM_BUFFERS_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A large array in the compiled program.

    Attributes:
      name: name of the instruction that creates the array.
      shape: dtype and dims of the array, such as `f32[4,8]`.
      num_bytes: size of the array in bytes.
      source: `file:line` of the Python code that created the instruction; empty if unknown.
    """

    name: str
    shape: str
    num_bytes: float
    source: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a step needs on one device, in bytes; None means unknown.

    Attributes:
      state: bytes of the training state, computed from shardings.
      batch_bytes: bytes of the step's batch, computed from shardings.
      compiler: the compiler's statistics, whose temporaries include the gradients; None if the compiler gave up.
      arguments_expected_bytes: bytes of the arguments that the program reads, computed from shardings.
      activations_bytes: the compiler's temporaries minus gradients.
      device_bytes: the device's memory.
      capacity_bytes: usable memory of the device.
      uncertainty_bytes: the possible error of the compiler's peak, in either direction.
      unread: names of the batch's entries that the program does not read.
      buffers: the largest arrays of the program, largest first.
      fits: whether the step fits; None if the peak is too close to the capacity, or the device is unknown.
    """

    state: StateBytes
    batch_bytes: int
    compiler: Statistics | None
    arguments_expected_bytes: int
    activations_bytes: int | None
    device_bytes: int | None
    capacity_bytes: int | None
    uncertainty_bytes: int
    unread: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    fits: bool | None

    @property
    def margin_bytes(self) -> int | None:
        """Capacity minus peak; negative if the step does not fit, None if either is unknown."""
        if self.compiler is None or self.capacity_bytes is None:
            return None
        return self.capacity_bytes - self.compiler.peak_bytes


def memory(compiled: Compiled, cluster: Cluster, program: Program | None) -> Memory:
    """Returns the memory that a compiled step needs on one device.

    Args:
      compiled: the compiled step.
      cluster: the target cluster.
      program: the parsed HLO text of the step; None if the compiler gave up.
    """
    assembly, stats = compiled.assembly, compiled.statistics
    state, batch = training_state_bytes(assembly.state, assembly.states.sums), bytes_of_device(assembly.batch)
    unread = unread_arguments(assembly, program)
    accelerator = cluster.accelerator
    capacity = usable_bytes(accelerator) if accelerator else None
    uncertainty = int(TEMPORARY_UNCERTAINTY[cluster.platform] * (stats.temporary_bytes if stats else 0))
    return Memory(
        state=state,
        batch_bytes=batch,
        compiler=stats,
        arguments_expected_bytes=bytes_of_device(assembly.state) + batch - sum(size for _, size in unread),
        activations_bytes=max(0, stats.temporary_bytes - state.gradients) if stats else None,
        device_bytes=accelerator.memory_bytes if accelerator else None,
        capacity_bytes=capacity,
        uncertainty_bytes=uncertainty,
        unread=tuple(name for name, _ in unread),
        buffers=largest_buffers(program) if program else (),
        fits=fits(stats.peak_bytes if stats else None, capacity, uncertainty, refused=bool(compiled.refusal)),
    )


def fits(peak_bytes: int | None, capacity_bytes: int | None, uncertainty_bytes: int, *, refused: bool) -> bool | None:
    """Returns whether a step fits its device; None if the peak is too close to the capacity, or if either is unknown.

    Args:
      peak_bytes: the step's peak; None: unknown.
      capacity_bytes: the usable memory; None: unknown.
      uncertainty_bytes: the possible error of the peak, in either direction.
      refused: whether the compiler gave up because of too little memory; the result is then False.
    """
    if refused:
        return False
    if peak_bytes is None or capacity_bytes is None:
        return None
    if peak_bytes + uncertainty_bytes <= capacity_bytes:
        return True
    return False if peak_bytes - uncertainty_bytes > capacity_bytes else None


def unread_arguments(assembly: Assembly, program: Program | None) -> list[tuple[str, int]]:
    """Returns (name, bytes on a device) of each entry of the batch that the compiled program does not read.

    Args:
      assembly: the assembled step.
      program: the parsed HLO text of the step; None if the compiler gave up, and the result is then empty.
    """
    if program is None:
        return []
    named = (line.rest for line, _, _ in program.instructions("parameter") if "op_name=" in line.rest)
    text = " ".join(named).replace("\\'", "'")
    return [(name, bytes_of_device(leaf)) for name, leaf in assembly.batch.items() if f"batch['{name}']" not in text]


def largest_buffers(program: Program) -> tuple[Buffer, ...]:
    """Returns the largest arrays that a program allocates outside of fusions, largest first.

    There are at most `NUM_BUFFERS_SHOWN` arrays. Arrays with the same source line and shape are listed once. Arrays in
    host memory are left out.
    """
    fused = {name for line, _, _ in program.instructions(*FUSIONS) for name in (line.attribute("calls"),)}
    found: dict[tuple[str, str], Buffer] = {}
    for computation, body in program.computations.items():
        if computation in fused or not program.num_runs[computation]:
            continue
        for line in body:
            if line.opcode in NO_ARRAYS or line.opcode.endswith(("-start", "-done")) or "S(5)" in line.shape:
                continue
            for part in parts(line.shape):
                shape, source = part.partition("{")[0], program.source(line)
                found[shape, source] = Buffer(line.name, shape, num_bytes(part), source)
    ranked: Sequence[Buffer] = sorted(found.values(), key=lambda buffer: -buffer.num_bytes)
    return tuple(ranked[:NUM_BUFFERS_SHOWN])
