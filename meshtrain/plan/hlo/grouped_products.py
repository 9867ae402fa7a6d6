"""Products in blocks of one expert each (`models/moe/grouped_matmul.py`), as kernels write them in a program. No JAX.

A program shows as many blocks as there may be. The kernels skip those without rows.
"""

import re
from collections.abc import Mapping

from meshtrain.plan.hlo.parse import Instruction, share_in
from meshtrain.plan.hlo.shapes import dims, dtypes

# The names that `models/moe/grouped_matmul_gpu.py` and `models/moe/grouped_matmul_tpu.py` give their kernels.
KERNEL = re.compile(r"\b(times|weights)_of_blocks\b")
TARGET = re.compile(r'custom_call_target="(__gpu\$xla\.gpu\.triton|triton_kernel_call_ffi|tpu_custom_call)"')
OPERATION = re.compile(r'op_name="([^"]*)"')


def kernel(line: Instruction) -> str | None:
    """Returns what a custom call computes: `times`, products, or `weights`, the weights' cotangent; None: neither."""
    operation = OPERATION.search(line.rest)
    if operation is None or not TARGET.search(line.rest):
        return None
    match = KERNEL.search(operation[1])
    return match[1] if match else None


def product(
    line: Instruction, shapes: Mapping[str, str], shares: Mapping[str, float]
) -> tuple[float, float, float, float]:
    """Returns (products, rows, columns, contracted) of a kernel's call, of blocks that have rows.

    Args:
      line: a call of one of the kernels.
      shapes: of the operands.
      shares: see `Program.shares`.

    Raises:
      ValueError: the call does not say its dims.
    """
    part, arrays = kernel(line), [shapes[name] for name in line.operands if name in shapes]
    floats = [dims(shape) for shape in arrays if dtypes(shape)[0][0] in "bf" and len(dims(shape)) >= 2]
    if part is None or len(floats) != 2:
        raise ValueError(f"%{line.name}: products of blocks whose dims are not known")
    rows = used_share(line.rest, shares) * floats[0][0]
    if part == "times":
        return 1, rows, dims(line.shape)[-1], floats[0][1]
    num_experts, height, width = dims(line.shape)
    return num_experts, height, width, rows / num_experts


def used_share(text: str, shares: Mapping[str, float]) -> float:
    """Returns the share of the blocks that have rows, by the scope in an operation's name; 1 where none is known."""
    share = share_in(text, shares)
    return 1.0 if share is None else share
