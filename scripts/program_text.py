"""Reads what a compiler made of a program: matrix products, copies and transfers in scheduled HLO, with trip counts.

The compilers' own cost analysis counts the body of a loop once; here it counts as often as it runs.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

HEADER = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
# A tuple's shape holds spaces, so it ends where ` opcode(` follows.
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations|called_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
OPERAND = re.compile(r"%([\w.\-]+)")
DIMS = re.compile(r"^\w+\[([\d,]*)\]")
MATMUL_LIBRARIES = ("gemm", "matmul")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      shape: as written, with its layout; a tuple's in parentheses.
      opcode: such as `dot`.
      rest: operands and attributes, as written after the opening parenthesis.
    """

    name: str
    shape: str
    opcode: str
    rest: str


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, and how often each runs in one step: through calls, fusions, and loops of known length."""

    computations: Mapping[str, list[Instruction]]
    num_runs: Mapping[str, int]

    def instructions(self, opcode: str) -> Iterator[tuple[Instruction, str, int]]:
        """Yields (instruction, its computation, how often it runs)."""
        for name, body in self.computations.items():
            yield from ((line, name, self.num_runs[name]) for line in body if line.opcode == opcode)


def read(text: str) -> Program:
    """Returns the program that `compiled.as_text()` wrote.

    Raises:
      ValueError: no entry computation, or a loop of unknown length, whose work could not be counted.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = header["name"]
            computations[current] = []
            entry = current if header["entry"] else entry
        elif found := INSTRUCTION.match(line):
            computations[current].append(Instruction(**found.groupdict()))
    if not entry:
        raise ValueError("no ENTRY computation: not the text of a compiled program")
    num_runs: collections.Counter[str] = collections.Counter({entry: 1})
    # A computation is written before those that call it.
    for name in reversed(computations):
        for line in computations[name]:
            times = num_runs[name] * (_trip_count(line) if line.opcode == "while" else 1)
            for group in CALLED.findall(line.rest):
                num_runs.update({called.strip(" %"): times for called in group.split(",")})
    return Program(computations, num_runs)


def _trip_count(line: Instruction) -> int:
    found = TRIP_COUNT.search(line.rest)
    if not found:
        raise ValueError(f"%{line.name}: a loop of unknown length")
    return int(found[1])


def dims(shape: str) -> tuple[int, ...]:
    """Returns the dims of an array's shape, such as `f32[4,8]{1,0}`."""
    found = DIMS.match(shape)
    assert found, shape
    return tuple(int(size) for size in found[1].split(",") if size)


def matmul_flops(program: Program) -> float:
    """Returns the FLOPs of all matrix products in one step on one device: 2 x result x contracted dims each.

    Raises:
      ValueError: a matrix product that hides in a library call, and would be left out.
    """
    hidden = [line.name for line, _, _ in program.instructions("custom-call") if _is_matmul(line)]
    if hidden:
        raise ValueError(f"matrix products in library calls are not counted: {', '.join(hidden[:3])}")
    total = 0.0
    for line, computation, runs in program.instructions("dot"):
        shapes = {other.name: other.shape for other in program.computations[computation]}
        left, contracted = (re.findall(pattern, line.rest)[0] for pattern in (OPERAND, CONTRACTED))
        sizes = dims(shapes[left])
        width = math.prod(sizes[int(dim)] for dim in contracted.split(",") if dim)
        total += 2.0 * runs * math.prod(dims(line.shape)) * width
    return total


def _is_matmul(line: Instruction) -> bool:
    target = re.search(r'custom_call_target="([^"]*)"', line.rest)
    return bool(target) and any(word in target[1].lower() for word in MATMUL_LIBRARIES)


def copies_in_loops(program: Program, shapes: set[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Returns the names of copies, inside loops, of arrays with one of these (dtype, dims), such as ("f32", (4, 8))."""
    found = []
    for opcode in ("copy", "copy-start"):
        for line, _, runs in program.instructions(opcode):
            shape = line.shape.lstrip("(")
            if runs > 1 and (shape.partition("[")[0], dims(shape)) in shapes:
                found.append(line.name)
    return found


def num_transfers(program: Program, opcode: str) -> int:
    """Returns how often a collective runs in one step, asynchronous or not; `opcode` such as `collective-permute`."""
    return sum(runs for name in (opcode, f"{opcode}-start") for _, _, runs in program.instructions(name))
