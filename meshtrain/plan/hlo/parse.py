"""Parses scheduled HLO text, and counts how often each computation runs in one step. Uses no JAX.

The compilers' own cost analysis counts the body of a loop once; this parser counts every iteration. GPU programs state
the number of iterations as known_trip_count; for other programs the parser computes it from the loop's start, bound and
step.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

HEADER = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
# A tuple's shape contains spaces and may contain parentheses (tilings), so it ends before ` opcode(`.
INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)$"
)
CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|called_computations|true_computation|false_computation)"
    r"=\{?((?:%[\w.\-]+(?:, )?)+)"
)
# Metadata of TPU kernels is written on separate lines.
CONTINUED = re.compile(r"\n(?=\"|\}\})")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
NAME = re.compile(r"%([\w.\-]+)")
FRAME = re.compile(r"stack_frame_id=(\d+)")
SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# jax 0.12 starts a fusion that only slices before its result is needed.
FUSIONS = ("fusion", "fusion-start")
# These operations pass on a number unchanged; a loop counter may go through them.
TRANSPARENT = ("copy", "bitcast", "convert", "reshape", "opt-barrier", "copy-done", "copy-start")

IsHelper = Callable[[str, str], bool]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: the instruction's name, without the percent sign.
      shape: the result's shape as written, with its layout; the shape of a tuple is in parentheses.
      opcode: the operation, such as `dot`.
      rest: the text after the opening parenthesis: operands, then attributes.
      is_root: whether the instruction computes the result of its computation.
    """

    name: str
    shape: str
    opcode: str
    rest: str
    is_root: bool = False

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results are the operands."""
        return NAME.findall(self.rest[: _closing(self.rest)])

    def operand_shapes(self, shapes: Mapping[str, str]) -> list[str]:
        """Returns the shapes of the operands; operands that `shapes` does not contain are left out.

        Args:
          shapes: name of an instruction -> shape of its result.
        """
        return [shapes[name] for name in self.operands if name in shapes]

    @property
    def attributes(self) -> str:
        """The text of the instruction's attributes, which follow the operands."""
        return self.rest[_closing(self.rest) + 1 :]

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction calls."""
        return [name for group in CALLED.findall(self.rest) for name in NAME.findall(group)]

    @property
    def is_asynchronous(self) -> bool:
        """Whether the instruction only starts an operation; other work may run until the matching done instruction."""
        return self.opcode == "send" or (self.opcode.endswith("-start") and '"is_sync":true' not in self.rest)

    def attribute(self, name: str) -> str | None:
        """Returns the value of an attribute (a computation, a list of dims or a word) without % and braces, or None."""
        match = re.search(rf"\b{name}=(?:%([\w.\-]+)|\{{([\d,]*)\}}|(\w+))", self.rest)
        return next((part for part in match.groups() if part is not None), "") if match else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed program: its computations, and how often each of them runs in one step.

    Attributes:
      computations: name of a computation -> its instructions, in execution order.
      num_runs: name of a computation -> its runs in one step, through calls, fusions, and loops of known length.
      sources: id of a stack frame -> `file:line` of the innermost caller outside of installed packages and helpers.
      shares: name scope of operations -> a share or a number of iterations that depends on the data, as in `read`.
    """

    computations: Mapping[str, list[Instruction]]
    num_runs: Mapping[str, int]
    sources: Mapping[int, str] = dataclasses.field(default_factory=dict)
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def instructions(self, *opcodes: str) -> Iterator[tuple[Instruction, str, int]]:
        """Yields (instruction, name of its computation, runs in one step) for all instructions with these opcodes."""
        for name, body in self.computations.items():
            yield from ((line, name, self.num_runs[name]) for line in body if line.opcode in opcodes)

    def source(self, line: Instruction) -> str:
        """Returns `file:line` of the Python code that created an instruction, or an empty text."""
        match = FRAME.search(line.rest)
        frame = int(match[1]) if match else 0
        return self.sources[frame] if frame in self.sources else ""


def read(
    text: str, is_helper: IsHelper = lambda file, function: False, shares: Mapping[str, float] | None = None
) -> Program:
    """Parses the text of `compiled.as_text()`.

    Args:
      text: the scheduled program.
      is_helper: function (file, qualified name of a function) -> whether `Program.source` names the function's caller
        instead.
      shares: name scope of operations -> a number that the text does not contain, because it depends on the data. For a
        conditional, it is the share of its runs that take the second branch; for an expert kernel, the share of its
        blocks that have rows; for a gather, the share of its rows that are distinct; for a loop, the number of
        iterations. None: all numbers are unknown.

    Raises:
      ValueError: there is no entry computation, or a loop has an unknown length, so its operations cannot be counted.
    """
    computations: dict[str, list[Instruction]] = {}
    sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
    entry = current = section = ""
    for line in CONTINUED.sub("", text).splitlines():
        if not line:
            section = ""
        elif line in sections:
            section = line
        elif section:
            sections[section].append(line)
        elif header := HEADER.match(line):
            current = header["name"]
            computations[current] = []
            entry = current if header["entry"] else entry
        elif match := INSTRUCTION.match(line):
            parts = match.groupdict()
            is_root = bool(parts.pop("root"))
            computations[current].append(Instruction(**parts, is_root=is_root))
    if not entry:
        raise ValueError("no ENTRY computation: not the text of a compiled program")
    known = shares or {}
    return Program(computations, _num_runs(computations, entry, known), _sources(sections, is_helper), known)


def share_in(text: str, shares: Mapping[str, float]) -> float | None:
    """Returns the number in `shares` for an operation; None if no name scope in `shares` occurs in its text.

    If several name scopes occur, the first entry of `shares` is used.

    Args:
      text: the operation's attributes or name scopes.
      shares: name scope -> share of runs, blocks or rows, as in `Program.shares`.
    """
    return next((share for scope, share in shares.items() if re.search(rf"\b{scope}\b", text)), None)


def turns_in(text: str, known: Mapping[str, float]) -> float | None:
    """Returns the number of iterations of a loop according to the name scope directly around it; None if unknown.

    Args:
      text: the loop's attributes or name scopes, in which `/while` follows the scope.
      known: name scope -> number of iterations.
    """
    return next((turns for scope, turns in known.items() if re.search(rf"\b{scope}\)*/while\b", text)), None)


def runs_of_called(
    computations: Mapping[str, list[Instruction]], caller: str, line: Instruction, known: Mapping[str, float]
) -> dict[str, float]:
    """Returns computation -> how often one run of an instruction runs it: a loop's iterations, a branch's share, or 1.

    If the share of a conditional's branches is unknown, each branch counts as run once. A custom call runs none: its
    computation only describes the library's function to the library, such as a function of attention scores.

    Args:
      computations: name of each computation of the program -> its instructions.
      caller: name of the computation that contains the instruction.
      line: the instruction; if it calls no computation, the result is empty.
      known: name scope -> share or number of iterations, as in `Program.shares`.

    Raises:
      ValueError: the loop has neither known_trip_count nor a counter with a constant start, bound and step, and its
        scope is not in `known`.
    """
    if line.opcode == "conditional":
        return _branch_shares(line, known)
    if line.opcode == "custom-call":
        return {}
    return dict.fromkeys(line.called, _trip_count(computations, caller, line, known) if line.opcode == "while" else 1)


def _branch_shares(line: Instruction, known: Mapping[str, float]) -> dict[str, float]:
    match, share = BRANCHES.search(line.rest), share_in(line.rest, known)
    names = match[1] if match else f"%{line.attribute('false_computation')}, %{line.attribute('true_computation')}"
    branches = NAME.findall(names)
    if share is None or len(branches) != 2:
        return dict.fromkeys(branches, 1.0)
    return {branches[0]: 1 - share, branches[1]: share}


def _num_runs(computations: dict[str, list[Instruction]], entry: str, known: Mapping[str, float]) -> Mapping[str, int]:
    num_runs: collections.Counter[str] = collections.Counter({entry: 1})
    # The program's text lists a computation before its callers.
    for name in reversed(computations):
        if not num_runs[name]:
            continue
        for line in computations[name]:
            if "=%" in line.rest or "={%" in line.rest:
                called = runs_of_called(computations, name, line, known)
                num_runs.update({inner: round(num_runs[name] * times) for inner, times in called.items()})
    return num_runs


def _trip_count(
    computations: Mapping[str, list[Instruction]], caller: str, loop: Instruction, known: Mapping[str, float]
) -> int:
    if match := TRIP_COUNT.search(loop.rest):
        return int(match[1])
    condition, body = loop.attribute("condition"), loop.attribute("body")
    if condition and body:
        counted = _loop_count(computations, caller, loop, condition, body)
        if counted is not None:
            return counted
    turns = turns_in(loop.rest, known)
    if turns is not None:
        return round(turns)
    raise ValueError(f"%{loop.name}: a loop of unknown length")


def _loop_count(
    computations: Mapping[str, list[Instruction]], caller: str, loop: Instruction, condition: str, body: str
) -> int | None:
    """Returns ceil((bound - start) / step) of `for (i = start; i < bound; i += step)`; None for any other loop.

    Args:
      computations: name of each computation of the program -> its instructions.
      caller: name of the computation that contains the loop.
      loop: the `while` instruction.
      condition: name of the computation that tests the counter.
      body: name of the computation that is repeated.
    """
    lines, test = _lines_and_root(computations[condition])
    inner, arguments = lines, list[str]()
    if test.opcode == "fusion":
        arguments = test.operands
        inner, test = _lines_and_root(computations[test.attribute("calls") or ""])
    if test.opcode != "compare" or "direction=LT" not in test.rest:
        return None
    sides = [_outside(inner[name], lines, arguments) for name in test.operands]
    counter = _tuple_index(sides[0])
    initial = {line.name: line for line in computations[caller]}
    entries = initial[loop.operands[0]].operands if initial[loop.operands[0]].opcode == "tuple" else []
    bound = _constant(sides[1], lines)
    if bound is None and (index := _tuple_index(sides[1])) is not None and index < len(entries):
        bound = _constant(initial[entries[index]], initial)
    if counter is None or bound is None or counter >= len(entries):
        return None
    start = _constant(initial[entries[counter]], initial)
    step = _step(computations, body, counter)
    return None if start is None or not step else max(0, -(-(bound - start) // step))


def _lines_and_root(body: list[Instruction]) -> tuple[dict[str, Instruction], Instruction]:
    """Returns (name -> instruction, the root instruction) of a computation."""
    return {line.name: line for line in body}, next(line for line in body if line.is_root)


def _outside(line: Instruction, lines: Mapping[str, Instruction], arguments: list[str]) -> Instruction:
    """Returns `line`; if it is a parameter of a fusion, the instruction outside that computes the parameter's value.

    Args:
      line: an instruction, inside or outside of a fusion.
      lines: name -> instruction of the computation that contains the fusion.
      arguments: names of the fusion's operands; empty if the instruction is not in a fusion.
    """
    if line.opcode == "parameter" and arguments:
        return lines[arguments[int(line.rest.partition(")")[0])]]
    return line


def _tuple_index(line: Instruction) -> int | None:
    return int(line.attribute("index") or 0) if line.opcode == "get-tuple-element" else None


def _origin(line: Instruction, lines: Mapping[str, Instruction]) -> Instruction:
    while line.opcode in TRANSPARENT and line.operands and line.operands[0] in lines:
        line = lines[line.operands[0]]
    return line


def _constant(line: Instruction, lines: Mapping[str, Instruction]) -> int | None:
    line = _origin(line, lines)
    match = re.match(r"(-?\d+)\)", line.rest) if line.opcode == "constant" else None
    return int(match[1]) if match else None


def _step(computations: Mapping[str, list[Instruction]], body: str, counter: int) -> int | None:
    """Returns the constant that a loop body adds to the loop's counter; None if the body does not add a constant.

    Args:
      computations: name of each computation of the program -> its instructions.
      body: name of the computation that is repeated.
      counter: index of the counter in the tuple that the loop carries.
    """
    lines, root = _lines_and_root(computations[body])
    if root.opcode != "tuple":
        return None
    line = _origin(lines[root.operands[counter]], lines)
    if line.opcode == "fusion":
        lines, line = _lines_and_root(computations[line.attribute("calls") or ""])
    if line.opcode != "add":
        return None
    steps = [_constant(lines[name], lines) for name in line.operands]
    return next((step for step in steps if step is not None), None)


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes a parenthesis opened before the text, else the text's length."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text)


def _sources(sections: Mapping[str, list[str]], is_helper: IsHelper) -> dict[int, str]:
    """Returns id of a stack frame -> `file:line` of the innermost caller outside of installed packages and helpers.

    Args:
      sections: name of a section of the program's header -> its lines.
      is_helper: function (file, qualified name of a function) -> whether to skip the function's frames.
    """
    files, functions = (
        {number: text.strip('"') for number, text in map(_instruction_number, sections[section])}
        for section in ("FileNames", "FunctionNames")
    )
    fields = lambda text: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}  # noqa: E731
    places = {number: fields(text) for number, text in map(_instruction_number, sections["FileLocations"])}
    frames = {number: fields(text) for number, text in map(_instruction_number, sections["StackFrames"])}
    result = {}
    for number in frames:
        frame = number
        while frame in frames:
            place = places[frames[frame]["file_location_id"]]
            file = files[place["file_name_id"]]
            skipped = "site-packages" in file or "<" in file or is_helper(file, functions[place["function_name_id"]])
            if not skipped:
                folders = file.split("/")
                # The path from the innermost folder `meshtrain` on; without this folder, only the file's name.
                start = max((at for at, folder in enumerate(folders) if folder == "meshtrain"), default=-1)
                result[number] = f"{'/'.join(folders[start:])}:{place['line']}"
                break
            # Frames count from 1. Parent ids are one higher, so 1 means "none".
            parent = frames[frame]["parent_frame_id"] - 1 if "parent_frame_id" in frames[frame] else 0
            frame = parent if parent < frame else 0
    return result


def _instruction_number(line: str) -> tuple[int, str]:
    number, _, text = line.strip().partition(" ")
    return int(number), text
