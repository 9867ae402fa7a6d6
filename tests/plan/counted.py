"""What tests count in a compiled program."""

import collections

from meshtrain.plan.hlo.shapes import dims


def num_transfers(program, opcode):
    """Returns how often a collective runs in one step, asynchronous or not; `opcode` such as `collective-permute`."""
    return sum(runs for _, _, runs in program.instructions(opcode, f"{opcode}-start"))


def copies_in_loops(program, shapes):
    """Returns the names of copies, inside loops, of arrays with one of these (dtype, dims), such as ("f32", (4, 8))."""
    found = []
    for line, _, runs in program.instructions("copy", "copy-start"):
        shape = line.shape.lstrip("(")
        if runs > 1 and (shape.partition("[")[0], dims(shape)) in shapes:
            found.append(line.name)
    return found


def gathered_twice(program):
    """Returns the operands that one computation gathers more than once, seen through what moves or casts them."""
    found = []
    for name, body in program.computations.items():
        lines, counts = {line.name: line for line in body}, collections.Counter()
        for line in body:
            if program.num_runs[name] and line.opcode in ("all-gather", "all-gather-start"):
                counts.update({_origin(operand, lines) for operand in line.operands})
        found += [operand for operand, count in counts.items() if count > 1]
    return found


def _origin(name, lines):
    moves = ("bitcast", "copy", "convert", "transpose", "copy-done", "copy-start")
    while name in lines and lines[name].operands and (lines[name].opcode in moves or "copy_fusion" in name):
        name = lines[name].operands[0]
    return name
