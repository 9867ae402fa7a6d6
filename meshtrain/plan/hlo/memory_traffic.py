"""Counts the bytes that an operation of a compiled program reads and writes. Uses no JAX."""

from collections.abc import Iterator, Mapping

from meshtrain.plan.hlo.parse import Instruction
from meshtrain.plan.hlo.products import grouped_kernel, used_share
from meshtrain.plan.hlo.shapes import dims, num_bytes

SLICES = ("dynamic-slice", "slice", "gather")
STACK = ("layers", "experts", "rows", "columns")  # dims of weights of all layers, see `models/moe/grouped_matmul.py`


def bytes_moved(
    line: Instruction, body: list[Instruction], shapes: Mapping[str, str], shares: Mapping[str, float] | None = None
) -> float:
    """Returns the bytes that an operation reads and writes.

    If it slices an array or updates it in place, only the slice counts.

    A gather reads only a share of distinct rows; the other rows repeat one row that stays in the cache.

    Args:
      line: the operation.
      body: the instructions of the fusion, or the operation itself.
      shapes: of the operands.
      shares: see `Program.shares`; None: not known.
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
            # Only the sliced array counts, not the index of a slice, which has a few bytes.
            slices = [user for value, user in found if user.opcode in SLICES and user.operands[0] == value.name]
            narrow = len(slices) + sum(_updates(user, value) for value, user in found) == len(found)
            sliced = sum(num_bytes(user.shape) * share(user) for user in slices)
            reads += sliced if narrow else num_bytes(one.shape)
    results = [inside[name] for name in root.operands if name in inside] if root.opcode == "tuple" else [root]
    return reads + sum(_bytes_written(one, inside) for one in results)


def _read(line: Instruction, shape: str) -> float:
    """Returns the bytes that an operation reads of an operand.

    A kernel of experts reads one layer of a stacked weight.
    """
    sizes = dims(shape) if grouped_kernel(line) else ()
    return num_bytes(shape) / (sizes[0] if len(sizes) == len(STACK) else 1)


def _users(line: Instruction, users: Mapping[str, list[Instruction]]) -> Iterator[tuple[Instruction, Instruction]]:
    """Yields (value, its user) for all users of an array and of its bitcasts, which move no bytes."""
    for user in users[line.name]:
        if user.opcode == "bitcast" and user.name in users:
            yield from _users(user, users)
        else:
            yield line, user


def _updates(user: Instruction, line: Instruction) -> bool:
    return user.opcode == "dynamic-update-slice" and user.operands[0] == line.name


def _bytes_written(line: Instruction, inside: Mapping[str, Instruction]) -> float:
    while line.opcode in ("bitcast", "copy", "convert") and line.operands and line.operands[0] in inside:
        line = inside[line.operands[0]]
    if line.opcode == "dynamic-update-slice" and line.operands[1] in inside:
        return 2 * num_bytes(inside[line.operands[1]].shape)
    return num_bytes(line.shape)
