"""Counts the bytes that an operation of a compiled program reads and writes. Uses no JAX."""

from collections.abc import Iterator, Mapping

from meshtrain.plan.hlo.parse import Instruction
from meshtrain.plan.hlo.products import grouped_kernel, used_share
from meshtrain.plan.hlo.shapes import dims, num_bytes

SLICES = ("dynamic-slice", "slice", "gather")
STACK = ("layers", "experts", "rows", "columns")  # dims of stacked expert weights, see `models/moe/grouped_matmul.py`


def bytes_moved(
    line: Instruction, body: list[Instruction], shapes: Mapping[str, str], shares: Mapping[str, float] | None = None
) -> float:
    """Returns the bytes that an operation reads and writes in device memory.

    If the operation slices an array, or updates a slice in place, only the slice counts. If a gather reads one row many
    times, this row stays in the cache, so only the distinct rows count as read.

    Args:
      line: the operation.
      body: the instructions of the fusion that the operation calls; [line] if the operation is no fusion.
      shapes: name of each operand -> its shape.
      shares: name scope of a gather -> distinct rows / all rows that it reads, see `parse.read`. A gather without an
        entry reads distinct rows only. None: there are no entries.
    """
    share = lambda one: used_share(one.rest, shares or {}) if one.opcode == "gather" else 1.0  # noqa: E731
    inside = {one.name: one for one in body}
    root = next((one for one in body if one.is_root), body[-1])
    if len(body) == 1:
        if line.opcode == "dynamic-update-slice":
            return 2 * num_bytes(shapes[line.operands[1]])
        reads = 0.0 if line.opcode in SLICES else sum(_read(line, shape) for shape in line.operand_shapes(shapes))
        return reads + num_bytes(line.shape) * (1 + share(line) if line.opcode in SLICES else 1)
    users: dict[str, list[Instruction]] = {}
    for one in body:
        for operand in one.operands:
            users.setdefault(operand, []).append(one)
    reads = 0.0
    for one in body:
        if one.opcode == "parameter" and one.name in users:
            found = list(_users(one, users))
            # The parameter must be the sliced array. If it is the index of a slice, its few bytes are read completely.
            slices = [user for value, user in found if user.opcode in SLICES and user.operands[0] == value.name]
            narrow = len(slices) + sum(_updates(user, value) for value, user in found) == len(found)
            sliced = sum(num_bytes(user.shape) * share(user) for user in slices)
            reads += sliced if narrow else num_bytes(one.shape)
    results = [inside[name] for name in root.operands if name in inside] if root.opcode == "tuple" else [root]
    return reads + sum(_bytes_written(one, inside) for one in results)


def _read(line: Instruction, shape: str) -> float:
    """Returns the bytes that an operation reads from one operand.

    An expert kernel reads only one layer of a weight that is stacked over layers.

    Args:
      line: the operation.
      shape: the operand's shape.
    """
    sizes = dims(shape) if grouped_kernel(line) else ()
    return num_bytes(shape) / (sizes[0] if len(sizes) == len(STACK) else 1)


def _users(line: Instruction, users: Mapping[str, list[Instruction]]) -> Iterator[tuple[Instruction, Instruction]]:
    """Yields (value, instruction that reads it) for an array and its bitcasts, which move no bytes.

    Args:
      line: the instruction that creates the array.
      users: name of an instruction -> the instructions that read its result.
    """
    for user in users[line.name]:
        if user.opcode == "bitcast" and user.name in users:
            yield from _users(user, users)
        else:
            yield line, user


def _updates(user: Instruction, line: Instruction) -> bool:
    return user.opcode == "dynamic-update-slice" and user.operands[0] == line.name


def _bytes_written(line: Instruction, inside: Mapping[str, Instruction]) -> float:
    """Returns the bytes that a fusion writes for one of its results; an update in place reads and writes its slice.

    Args:
      line: the instruction of the result.
      inside: name -> instruction of the fusion.
    """
    source = line
    while source.opcode in ("bitcast", "copy", "convert") and source.operands and source.operands[0] in inside:
        source = inside[source.operands[0]]
    if source.opcode == "dynamic-update-slice" and source.operands[1] in inside:
        return 2 * num_bytes(inside[source.operands[1]].shape)
    return num_bytes(line.shape)  # not the shape of `source`: a converted result is written in its final dtype
