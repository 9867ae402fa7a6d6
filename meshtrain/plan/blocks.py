"""Products in blocks of one expert each (`models/blocks.py`), as kernels write them in a program. No JAX.

A program shows as many blocks as there may be. The kernels skip those without rows: a scope tells how many have some if
all experts get as many rows.
"""

import re
from collections.abc import Mapping

from meshtrain.plan.hlo import SOME, Instruction
from meshtrain.plan.shapes import dims, dtypes

# The names that `models/blocks_gpu.py` and `models/blocks_tpu.py` give their kernels.
KERNEL = re.compile(r"\b(times|weights)_of_blocks\b")
TARGET = re.compile(r'custom_call_target="(__gpu\$xla\.gpu\.triton|triton_kernel_call_ffi|tpu_custom_call)"')
OPERATION = re.compile(r'op_name="([^"]*)"')


def kernel(line: Instruction) -> str | None:
    """Returns what a custom call computes: `times`, products, or `weights`, the weights' cotangent; None: neither."""
    operation = OPERATION.search(line.rest)
    if operation is None or not TARGET.search(line.rest):
        return None
    found = KERNEL.search(operation[1])
    return found[1] if found else None


def product(line: Instruction, shapes: Mapping[str, str]) -> tuple[float, float, float, float]:
    """Returns (products, rows, columns, contracted) of a kernel's call, of blocks that have rows.

    Args:
      line: a call of one of the kernels.
      shapes: of the operands.

    Raises:
      ValueError: the call does not say its dims.
    """
    part, arrays = kernel(line), [shapes[name] for name in line.operands if name in shapes]
    floats = [dims(shape) for shape in arrays if dtypes(shape)[0][0] in "bf" and len(dims(shape)) >= 2]
    if part is None or len(floats) != 2:
        raise ValueError(f"%{line.name}: products of blocks whose dims are not known")
    rows = used_share(line.rest) * floats[0][0]
    if part == "times":
        return 1, rows, dims(line.shape)[-1], floats[0][1]
    num_experts, height, width = dims(line.shape)
    return num_experts, height, width, rows / num_experts


def used_share(text: str) -> float:
    """Returns the share of the blocks that have rows, as an operation's scope says it; 1 where none does."""
    said = SOME.search(text)
    return int(said[1]) / int(said[2]) if said else 1.0
