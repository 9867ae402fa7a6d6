"""Finds the dims and FLOPs of the matrix products of a compiled program, outside of attention kernels. Uses no JAX.

GPU and CPU programs write matrix products as `dot`, TPU programs as `convolution`, libraries as `custom-call`. Kernels
of experts multiply blocks of rows; each block belongs to one expert (`models/moe/grouped_matmul.py`). A program shows
the maximum number of blocks, and the kernels skip blocks without rows.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from meshtrain.plan.hlo.parse import Instruction, share_in
from meshtrain.plan.hlo.shapes import dims, dtypes

TARGET = re.compile(r'custom_call_target="([^"]*)"')
OPERATION = re.compile(r'op_name="([^"]*)"')
LIBRARY = re.compile(r"gemm|matmul", re.IGNORECASE)
LHS_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
LHS_BATCH = re.compile(r'"lhs_batch_dimensions":\s*\[([^\]]*)\]')
# The names that `models/moe/grouped_matmul_gpu.py` and `models/moe/grouped_matmul_tpu.py` give their kernels.
GROUPED = re.compile(r"\b(times|weights)_of_blocks\b")
GROUPED_TARGETS = ("__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "mosaic_gpu_v2", "tpu_custom_call")
WINDOW = re.compile(r"window=\{([^}]*)\}")
WINDOW_FIELD = re.compile(r"(\w+)=([\dx_\-]+)")
DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")


@dataclasses.dataclass(frozen=True)
class Product:
    """The dims of `batch` matrix products [rows, contracted] x [contracted, columns].

    For the gradients of experts' weights, whose products have different sizes, `contracted` is the mean over experts.
    """

    batch: float
    rows: float
    columns: float
    contracted: float

    @property
    def flops(self) -> float:
        """FLOPs of the products, 2 x result x contracted."""
        return 2.0 * math.prod(dataclasses.astuple(self))


def first_group(pattern: re.Pattern[str], line: Instruction) -> str:
    """Returns the text of a pattern's first group in an instruction's operands and attributes; '' without a match."""
    match = pattern.search(line.rest)
    return match[1] if match else ""


def is_product(line: Instruction) -> bool:
    """Returns whether an instruction is a matrix product; the products in attention kernels do not count."""
    return line.opcode in ("dot", "convolution") or _is_library(line) or grouped_kernel(line) is not None


def product_flops(line: Instruction, shapes: Mapping[str, str], shares: Mapping[str, float]) -> float:
    """Returns the FLOPs of a matrix product; 0 for other operations.

    Args:
      line: the operation.
      shapes: name of each operand -> its shape.
      shares: name scope -> share of an expert kernel's blocks that have rows, see `Program.shares`.

    Raises:
      ValueError: a library call or expert kernel does not state its dims, so its FLOPs cannot be counted.
    """
    if line.opcode == "convolution":
        return _convolution_flops(line, shapes)
    product = product_of(line, shapes, shares)
    return product.flops if product else 0.0


def product_of(line: Instruction, shapes: Mapping[str, str], shares: Mapping[str, float]) -> Product | None:
    """Returns the dims of a matrix product; None for convolutions (matrix products of TPUs) and for other operations.

    Args:
      line: the operation.
      shapes: name of each operand -> its shape.
      shares: name scope -> share of an expert kernel's blocks that have rows, see `Program.shares`.

    Raises:
      ValueError: a library call or expert kernel does not state its dims, so its FLOPs cannot be counted.
    """
    if line.opcode == "dot":
        contracted, batch = (line.attribute(f"lhs_{name}_dims") or "" for name in ("contracting", "batch"))
    elif _is_library(line):
        contracted, batch = first_group(LHS_CONTRACTED, line), first_group(LHS_BATCH, line)
        if not LHS_CONTRACTED.search(line.rest):
            raise ValueError(f"%{line.name}: a matrix product whose dims are not known")
    else:
        part = grouped_kernel(line)
        return _grouped_products(part, line, shapes, shares) if part else None
    left = dims(shapes[line.operands[0]])
    num_batch, depth = (math.prod(left[int(dim)] for dim in re.findall(r"\d+", text)) for text in (batch, contracted))
    rows = math.prod(left) // max(1, num_batch * depth)
    columns = math.prod(dims(line.shape)) // max(1, num_batch * rows)
    return Product(num_batch, rows, columns, depth)


def _is_library(line: Instruction) -> bool:
    return line.opcode == "custom-call" and bool(LIBRARY.search(first_group(TARGET, line)))


def grouped_kernel(line: Instruction) -> str | None:
    """Returns the kind of an expert kernel: `times` (rows x weights) or `weights` (gradients); None for other calls."""
    if line.opcode != "custom-call" or first_group(TARGET, line) not in GROUPED_TARGETS:
        return None
    match = GROUPED.search(first_group(OPERATION, line))
    return match[1] if match else None


def _grouped_products(part: str, line: Instruction, shapes: Mapping[str, str], shares: Mapping[str, float]) -> Product:
    arrays = line.operand_shapes(shapes)
    floats = [dims(shape) for shape in arrays if dtypes(shape)[0][0] in "bf" and len(dims(shape)) >= 2]
    if len(floats) != 2:
        raise ValueError(f"%{line.name}: products of blocks whose dims are not known")
    rows = used_share(line.rest, shares) * floats[0][0]
    if part == "times":
        return Product(1, rows, dims(line.shape)[-1], floats[0][1])
    num_experts, height, width = dims(line.shape)
    return Product(num_experts, height, width, rows / num_experts)


def used_share(text: str, shares: Mapping[str, float]) -> float:
    """Returns the share of an expert kernel's blocks that have rows, or of a gather's rows that are distinct.

    Returns 1 if the share is unknown.

    Args:
      text: the operation's attributes or name scopes.
      shares: name scope -> this share, as in `Program.shares`.
    """
    share = share_in(text, shares)
    return 1.0 if share is None else share


def _convolution_flops(line: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns the FLOPs of a convolution: 2 x result x input features x positions of the window.

    A TPU writes a matrix product over several dims as a convolution with padding. So positions of the window on
    padding, or between dilated elements, do not count.
    """
    labels = DIM_LABELS.search(line.rest)
    assert labels, line.rest
    left, right = (dims(shapes[name]) for name in line.operands[:2])
    result, fields = dims(line.shape), dict(WINDOW_FIELD.findall(first_group(WINDOW, line)))
    places = 1
    for dim in range(sum(label.isdigit() for label in labels[1])):
        size, num_outputs = left[labels[1].index(str(dim))], result[labels[3].index(str(dim))]
        places *= places_on_data(size, num_outputs, _window(fields, dim))
    outer = result[labels[3].index("b")] * result[labels[3].index("f")]
    # With batch groups, each output feature uses only one group of the batch, and the result has no batch dim.
    return 2.0 * outer * right[labels[2].index("i")] * places / int(first_group(BATCH_GROUPS, line) or 1)


@dataclasses.dataclass(frozen=True)
class Window:
    """One dim of a convolution's window.

    Attributes:
      size: number of elements of the window.
      stride: distance between the windows of neighboring outputs.
      low: number of padding elements before the first element of the left operand.
      left_dilation: distance between neighboring elements of the left operand.
      right_dilation: distance between neighboring elements of the window.
    """

    size: int
    stride: int
    low: int
    left_dilation: int
    right_dilation: int


def _window(fields: Mapping[str, str], dim: int) -> Window:
    def entry(name: str, default: int = 1) -> int:
        text = fields[name].split("x")[dim].partition("_")[0] if name in fields else ""
        return int(text or default)

    return Window(entry("size"), entry("stride"), entry("pad", 0), entry("lhs_dilate"), entry("rhs_dilate"))


def places_on_data(size: int, num_outputs: int, window: Window) -> int:
    """Returns the number of pairs (output, window position) along one dim that cover an element of the left operand.

    Args:
      size: size of the left operand along the dim.
      num_outputs: size of the result along the dim.
      window: the window along the dim.
    """
    end, result = (size - 1) * window.left_dilation + 1, 0
    first = np.arange(num_outputs) * window.stride - window.low
    for place in range(window.size):
        at = first + place * window.right_dilation
        result += int(np.count_nonzero((at >= 0) & (at < end) & (at % window.left_dilation == 0)))
    return result
