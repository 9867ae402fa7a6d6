"""Lists the kernels of a compiled step by the part of the model that they compute: modelled seconds, and bytes moved.

A kernel is an operation of the scheduled program that runs on the computing stream. Its part is the scope that JAX
writes into the program, such as `Layer/mlp_norm`. Loops, transformations and primitives are no part of it.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping

from meshtrain.hardware.accelerators import Accelerator
from meshtrain.plan.hlo.flops import attention_kernel
from meshtrain.plan.hlo.memory_traffic import bytes_moved
from meshtrain.plan.hlo.parse import FUSIONS, Instruction, Program
from meshtrain.plan.hlo.products import is_product
from meshtrain.plan.hlo.shapes import num_bytes
from meshtrain.plan.timing.streams import CALLS, FREE, Assumptions, Streams

PRODUCTS, ATTENTION = "matrix products", "attention kernels"
OUTSIDE = "gradients and optimizer"  # operations outside of the loss and its backward pass
LOSS = "loss, other"  # operations of the loss without a scope
RECOMPUTED = "rematted_computation"  # `jax.checkpoint` adds this scope to the operations that it repeats
# A forward pass inside of a backward pass, which the layers of `models.split` repeat.
FORWARD_IN_BACKWARD = re.compile(r"transpose\(.*/jvp\(")
OP_NAME = re.compile(r'op_name="([^"]*)"')
# Components of a scope that name a transformation or a loop.
WRAPPER = re.compile(r"^(?:\w+\(.*\)|while|body|cond|branch_\d+_fun|checkpoint|eval_jaxpr|closed_call|shard_map)$")
DEPTH = 2  # components of a scope that name the part
VIEWS = ("get-tuple-element", "bitcast")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """All kernels of one part of the model in a step, on one device.

    Attributes:
      part: the scope of the part, or `PRODUCTS`, `ATTENTION`, `OUTSIDE` or `LOSS`.
      count: number of kernels that run.
      seconds: their modelled seconds, without overlapping transfers.
      recomputed_seconds: the seconds of kernels that repeat a part of the forward pass in the backward pass.
      moved_bytes: bytes that they read and write in device memory.
      minimum_bytes: lower bound of these bytes: each array that a chain of kernels reads or returns is moved once, and
        arrays between the kernels of a chain are not moved.
    """

    part: str
    count: float
    seconds: float
    recomputed_seconds: float
    moved_bytes: float
    minimum_bytes: float


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One kernel: its instruction and part, whether it belongs to the backward pass, and its seconds and bytes."""

    line: Instruction
    part: str
    is_backward: bool
    is_recomputed: bool
    seconds: float
    moved_bytes: float

    @property
    def chain_key(self) -> tuple[str, bool, bool]:
        """Kernels with different keys are never in the same chain."""
        return self.part, self.is_backward, self.is_recomputed


def kernels_by_part(program: Program, accelerator: Accelerator, assumptions: Assumptions) -> tuple[Kernels, ...]:
    """Returns the kernels of a step by part of the model, the longest total first.

    Args:
      program: the scheduled program of the step.
      accelerator: the published peaks of a device.
      assumptions: the assumptions of the time model.
    """
    streams = Streams(program, accelerator, {}, assumptions)
    streams.step()
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 5)
    for name in streams.seconds:  # the computations that the simulation has entered, without those of fusions
        body, runs = program.computations[name], program.num_runs[name]
        shapes = {line.name: line.shape for line in body}
        found = list(_kernels(streams, body, shapes))
        for kernel in found:
            again = kernel.seconds if kernel.is_recomputed else 0.0
            for index, value in enumerate((1.0, kernel.seconds, again, kernel.moved_bytes)):
                totals[kernel.part][index] += runs * value
        for part, minimum in _minima(found, body, shapes).items():
            totals[part][4] += runs * minimum
    rows = (Kernels(part, *numbers) for part, numbers in totals.items())
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _kernels(streams: Streams, body: list[Instruction], shapes: Mapping[str, str]) -> Iterator[_Kernel]:
    program = streams.program
    for line in body:
        if line.opcode in (*CALLS, *FREE) or line.opcode.endswith("-done") or line.name in streams.transfers:
            continue
        inner = [line]
        if line.opcode in FUSIONS and (called := line.attribute("calls")):
            inner = program.computations[called]
        match = OP_NAME.search(line.rest)
        scope = match[1] if match else ""
        part = _part(scope)
        if any(attention_kernel(one) for one in inner):
            part = ATTENTION
        elif any(is_product(one) for one in inner):
            part = PRODUCTS
        moved = bytes_moved(line, inner, shapes, program.shares) if inner else 0.0
        seconds = streams.operation(line, shapes)[0]
        is_recomputed = RECOMPUTED in scope or FORWARD_IN_BACKWARD.search(scope) is not None
        yield _Kernel(line, part, "transpose(" in scope, is_recomputed, seconds, moved)


def _part(scope: str) -> str:
    """Returns the part of the model that a scope names.

    >>> _part("jit(step)/transpose(jvp())/while/body/eval_jaxpr/Layer/mlp_norm/mul")
    'Layer/mlp_norm'
    """
    names = [name for name in scope.split("/")[:-1] if not WRAPPER.match(name) and name != RECOMPUTED]
    inside = [re.sub(r"^.*\((\w+)\)+$", r"\1", name) for name in scope.split("/") if re.match(r"^.*jvp\(\w+\)+$", name)]
    if names := [*inside, *names][:DEPTH]:
        return "/".join(name.partition(".")[0] for name in names)
    return LOSS if "jvp(" in scope else OUTSIDE


def _minima(kernels: list[_Kernel], body: list[Instruction], shapes: Mapping[str, str]) -> dict[str, float]:
    """Returns part -> lower bound of the bytes that its kernels move in one run of a computation.

    A chain consists of kernels of the same part and the same pass that are connected by their arrays.

    Args:
      kernels: the kernels of the computation.
      body: the instructions of the computation.
      shapes: name of each instruction -> its shape.
    """
    by_name, maker = {kernel.line.name: kernel for kernel in kernels}, dict[str, str]()
    for line in body:  # in execution order, so operands come first
        viewed = line.operands[0] if line.opcode in VIEWS and line.operands else ""
        maker[line.name] = maker[viewed] if viewed in maker else line.name
    chain = {name: name for name in by_name}

    def chain_of(name: str) -> str:
        while chain[name] != name:
            name = chain[name]
        return name

    users: dict[str, list[str]] = collections.defaultdict(list)
    for line in body:
        for array in dict.fromkeys(line.operands):
            users[array] += [line.name] if line.opcode not in VIEWS else []
            source = maker[array] if array in maker else ""
            are_kernels = line.name in by_name and source in by_name
            if are_kernels and by_name[line.name].chain_key == by_name[source].chain_key:
                chain[chain_of(line.name)] = chain_of(source)
    result: dict[str, float] = collections.defaultdict(float)
    read = set[tuple[str, str]]()
    for kernel in kernels:
        own, saved = chain_of(kernel.line.name), 0.0
        for array in (name for name in dict.fromkeys(kernel.line.operands) if name in shapes):
            size = num_bytes(shapes[array])
            if size > kernel.moved_bytes:
                continue  # the kernel reads only a slice
            is_inside = maker[array] in by_name and chain_of(maker[array]) == own
            is_first = (array, own) not in read
            saved += size if is_inside or not is_first else 0
            if is_inside and is_first and all(name in chain and chain_of(name) == own for name in users[array]):
                saved += size  # the array is not written either
            read.add((array, own))
        result[kernel.part] += kernel.moved_bytes - saved
    return {part: max(0.0, number) for part, number in result.items()}
