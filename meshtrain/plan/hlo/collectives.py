"""Lists the collectives of a compiled program: bytes, mesh axes, and overlap with matrix products. Uses no JAX.

Wire bytes are the bytes that one device sends in a ring of n: (n - 1) / n of the full array for a gather, a scatter or
an all-to-all, twice this for an all-reduce (Patarasuk and Yuan 2009), the full array for a permute.

A collective is counted once, in any notation. A start operation and its done operation are one collective, and so are
the pieces of a TPU chain, which splits a gather over several fusions. A TPU's all-reduce counts as a reduce-scatter if
each device keeps only a slice. Traffic between TPU slices is a separate collective, see `between_slices`.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from meshtrain.hardware.links import wire_share
from meshtrain.plan.hlo.between_slices import BETWEEN, PERMUTE, Sent, is_send, sent_collective
from meshtrain.plan.hlo.flops import attention_kernel
from meshtrain.plan.hlo.parse import Instruction, Program
from meshtrain.plan.hlo.products import first_group, is_product
from meshtrain.plan.hlo.replica_groups import axes_of, replica_groups
from meshtrain.plan.hlo.shapes import num_bytes, parts
from meshtrain.sharding.rules import CONTEXT, EXPERT, TENSOR

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "collective-broadcast")
CHAIN = re.compile(r'chain_id="(\d+)"')
CHANNEL = re.compile(r"channel_id=(\d+)")
SCATTER = re.compile(r"^all-reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      name: the name of its instruction.
      kind: one of `KINDS`, followed by `BETWEEN` if it connects slices.
      axes: the mesh axes along which it runs, joined by `+`, or `irregular`.
      group_size: number of devices in one group; number of slices if it connects slices.
      count: number of runs in a step.
      logical_bytes: bytes of the full array, per run.
      wire_bytes: bytes that one device sends, per run.
      is_asynchronous: whether other work may run between its start and its end.
      is_overlapped: whether matrix products run between its start and its end.
      source: `file:line` of the Python code that created it; empty if unknown.
    """

    name: str
    kind: str
    axes: str
    group_size: int
    count: int
    logical_bytes: float
    wire_bytes: float
    is_asynchronous: bool
    is_overlapped: bool
    source: str


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The sum of all collectives of one kind along the same axes, in one step on one device.

    Attributes:
      axis: the mesh axes, joined by `+`, or `irregular`.
      kind: one of `KINDS`, followed by `BETWEEN` if the collectives connect slices.
      count: number of runs in a step.
      logical_bytes: bytes of the full arrays.
      wire_bytes: bytes that one device sends.
      asynchronous_fraction: share of the wire bytes that asynchronous collectives send.
      overlapped_fraction: share of the wire bytes sent by collectives that overlap matrix products.
      sources: up to three `file:line` of the Python code, most wire bytes first.
    """

    axis: str
    kind: str
    count: int
    logical_bytes: float
    wire_bytes: float
    asynchronous_fraction: float
    overlapped_fraction: float
    sources: tuple[str, ...]


def collectives(
    program: Program, mesh_shape: Mapping[str, int], over: Mapping[str, int] | None = None
) -> list[Collective]:
    """Returns the collectives of a program that involve more than one device.

    Args:
      program: the parsed program, scheduled by the compiler.
      mesh_shape: mesh axis -> size, in mesh order; device i of the program is position i of the flattened mesh.
      over: mesh axis -> number of TPU slices along it, see `mesh.over_slices`; None: there is one slice.

    Raises:
      ValueError: replica groups have an unknown syntax.
    """
    products, slices = _with_products(program), over or dict.fromkeys(mesh_shape, 1)
    called_by_start = _asynchronous_bodies(program, products)
    result: list[Collective] = []
    chains: dict[tuple[str, str], int] = {}
    for name, body in program.computations.items():
        if not program.num_runs[name]:
            continue
        for at, line in enumerate(body):
            if is_send(line):
                found = sent_collective(line, body, slices)
            elif line.opcode.removesuffix("-start") in KINDS:
                found = _inside(line, body, mesh_shape, slices)
            else:
                continue
            one = _collective(program, found, name, body, at, products)
            if one.group_size == 1 or not one.axes:
                continue
            if chain := CHAIN.search(line.rest):
                key = chain[1], first_group(CHANNEL, line)
                one = dataclasses.replace(one, is_asynchronous=True, is_overlapped=name in products)
                if key in chains:
                    if one.is_overlapped:
                        result[chains[key]] = dataclasses.replace(result[chains[key]], is_overlapped=True)
                    continue
                chains[key] = len(result)
            elif name in called_by_start:
                one = dataclasses.replace(one, is_asynchronous=True, is_overlapped=called_by_start[name])
            result.append(one)
    return result


def _inside(
    line: Instruction, body: Sequence[Instruction], mesh_shape: Mapping[str, int], over: Mapping[str, int]
) -> Sent:
    """Reads an instruction such as `all-gather`; returns the collective's kind, mesh axes, group size and bytes.

    Transfers between slices by `send` are read by `sent_collective` instead. If the collective runs within each slice,
    the text of the instruction lists only the devices of the first slice. Its axes are then found in the mesh of one
    slice, otherwise in the complete mesh.

    Args:
      line: the instruction, whose opcode is one of `KINDS`, or one of `KINDS` followed by `-start`.
      body: the instructions of the computation that contains the instruction.
      mesh_shape: mesh axis -> size, in mesh order.
      over: mesh axis -> number of TPU slices along it.
    """
    kind = line.opcode.removesuffix("-start")
    of_slice = {axis: size // over[axis] for axis, size in mesh_shape.items()}
    groups = replica_groups(line.attributes, math.prod(of_slice.values()))
    leaves = bool(groups.max() >= math.prod(of_slice.values()))
    axes = axes_of(groups, mesh_shape if leaves else of_slice, are_pairs=kind == PERMUTE)
    whole_bytes = _full_bytes(line, kind, {other.name: other.shape for other in body})
    return Sent(kind + BETWEEN if leaves else kind, axes, groups.shape[1], whole_bytes)


def _collective(
    program: Program,
    found: Sent,
    computation: str,
    body: Sequence[Instruction],
    at: int,
    products: set[str],
) -> Collective:
    line, kind = body[at], found.kind
    if kind == "all-reduce" and SCATTER.search(computation):
        kind = "reduce-scatter"
    return Collective(
        name=line.name,
        kind=kind,
        axes=found.axes,
        group_size=found.group_size,
        count=program.num_runs[computation],
        logical_bytes=found.whole_bytes,
        wire_bytes=found.whole_bytes * wire_share(kind.removesuffix(BETWEEN), found.group_size),
        is_asynchronous=line.is_asynchronous,
        is_overlapped=line.is_asynchronous and _overlaps(body, at, products),
        source=program.source(line),
    )


def _full_bytes(line: Instruction, kind: str, shapes: Mapping[str, str]) -> float:
    """Returns the bytes of a collective's full arrays: the results of a gather, or the operands of other collectives.

    Args:
      line: the instruction.
      kind: one of `KINDS`.
      shapes: name of each operand -> its shape.
    """
    if kind == "all-gather":
        shape = parts(line.shape)[1] if line.opcode.endswith("-start") else line.shape
        return num_bytes(shape)
    return sum(map(num_bytes, line.operand_shapes(shapes)))


def _overlaps(body: Sequence[Instruction], start: int, products: set[str]) -> bool:
    """Returns whether matrix products run between an asynchronous start and its done operation.

    If `body` does not contain the done operation, all instructions after the start are searched.

    Args:
      body: the instructions of the computation, in order.
      start: index of the start operation in `body`.
      products: names of the computations that contain matrix products.
    """
    for line in body[start + 1 :]:
        if line.opcode.endswith("-done") and body[start].name in line.operands:
            return False
        if _multiplies(line, products):
            return True
    return False


def _asynchronous_bodies(program: Program, products: set[str]) -> dict[str, bool]:
    """Returns name of each computation started by an `async-start` -> whether matrix products run until it is done.

    Args:
      program: the parsed program.
      products: names of the computations that contain matrix products.
    """
    return {
        called: _overlaps(body, at, products)
        for body in program.computations.values()
        for at, line in enumerate(body)
        if line.opcode == "async-start" and line.is_asynchronous
        for called in line.called
    }


def _with_products(program: Program) -> set[str]:
    """Returns the names of computations that contain matrix products, directly or in computations that they call."""
    result: set[str] = set()
    # The program's text lists a computation before its callers.
    for name, body in program.computations.items():
        if any(_multiplies(line, result) for line in body):
            result.add(name)
    return result


def _multiplies(line: Instruction, products: set[str]) -> bool:
    multiplies = is_product(line) or attention_kernel(line) is not None
    return multiplies or any(called in products for called in line.called)


@dataclasses.dataclass(frozen=True)
class LayerGradients:
    """The reduction of the gradients of stacked layers over the data axis, in one step on one device.

    Attributes:
      wire_bytes: bytes that the device sends.
      overlapped_fraction: share of these bytes that is sent while matrix products run.
    """

    wire_bytes: float
    overlapped_fraction: float


def layer_gradients(
    found: Iterable[Collective], axis: str, wire_bytes: float, least_count: int = 2
) -> LayerGradients | None:
    """Returns the gradient traffic of stacked layers, with its overlapped share; None if `wire_bytes` is 0.

    XLA merges collectives and drops the names of their operands. So gradients of layers are identified as the
    all-reduces and reduce-scatters along the data axis that run several times a step. The loop over layers contains no
    other such collectives.

    Args:
      found: all collectives of a program.
      axis: the name of the data axis.
      wire_bytes: bytes that a device sends for the gradients of all stacked layers, computed from their shapes.
      least_count: minimum number of runs in a step by which a collective of layers is recognized; 1 if gradients are
        reduced by pipeline chunk.
    """
    if not wire_bytes:
        return None
    kinds = ("all-reduce", "reduce-scatter")
    along = [one for one in found if one.axes == axis and one.kind.startswith(kinds) and one.count >= least_count]
    hidden = sum(one.count * one.wire_bytes for one in along if one.is_overlapped)
    return LayerGradients(wire_bytes, min(1.0, hidden / wire_bytes))


def along(rows: Iterable[Traffic], axes: str) -> list[Traffic]:
    """Returns the rows of traffic that belong to an axis, or to several axes joined by `+`.

    A row belongs to `axes` if its collectives run along exactly these axes. Another row belongs to `axes` if its
    collectives move weights or gradients along some of these axes. All three rules must then hold:

    1. Each axis of the row is in `axes` or is `tensor`. A collective along `tensor` and another axis moves weights or
       gradients, so it belongs to the other axis.
    2. The row is not along only `context`, only `expert` or only `tensor`. Such collectives exchange activations.
    3. If `expert` is in `axes`, the row is also along `expert`. Collectives without this axis move weights of experts.

    Args:
      rows: the traffic along all axes.
      axes: a mesh axis, or axes joined by `+`.
    """
    joined = set(axes.split("+"))

    def is_part(row: Traffic) -> bool:
        along = set(row.axis.split("+"))
        is_of_experts = EXPERT in joined and EXPERT not in along
        return along <= {*joined, TENSOR} and row.axis not in (CONTEXT, EXPERT, TENSOR) and not is_of_experts

    return [row for row in rows if row.axis == axes or is_part(row)]


def sent_along(rows: Iterable[Traffic], axes: str) -> float:
    """Returns the bytes that a device sends along an axis, or axes joined by `+`: the sum over the rows of `along`."""
    return sum(row.wire_bytes for row in along(rows, axes))


def traffic(found: Iterable[Collective]) -> list[Traffic]:
    """Returns a row for each combination of axes and kind, with the sums of its collectives' counts and bytes.

    The rows are sorted by wire bytes, largest first.

    Args:
      found: the collectives of a program.
    """
    groups: dict[tuple[str, str], list[Collective]] = {}
    for one in found:
        groups.setdefault((one.axes, one.kind), []).append(one)
    rows = [_sum(axis, kind, members) for (axis, kind), members in groups.items()]
    return sorted(rows, key=lambda row: -row.wire_bytes)


def _sum(axis: str, kind: str, members: Sequence[Collective]) -> Traffic:
    wire = sum(one.count * one.wire_bytes for one in members)
    by_source = collections.defaultdict[str, float](float)
    for one in members:
        by_source[one.source] += one.count * one.wire_bytes

    def share(chosen: Iterable[Collective]) -> float:
        return sum(one.count * one.wire_bytes for one in chosen) / wire if wire else 0.0

    return Traffic(
        axis=axis,
        kind=kind,
        count=sum(one.count for one in members),
        logical_bytes=sum(one.count * one.logical_bytes for one in members),
        wire_bytes=wire,
        asynchronous_fraction=share(one for one in members if one.is_asynchronous),
        overlapped_fraction=share(one for one in members if one.is_overlapped),
        sources=tuple(source for source in sorted(by_source, key=lambda name: -by_source[name]) if source)[:3],
    )
