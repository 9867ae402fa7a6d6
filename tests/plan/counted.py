"""What tests count in a compiled program."""

from meshtrain.plan.shapes import dims


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
