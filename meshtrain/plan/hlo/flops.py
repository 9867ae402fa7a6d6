"""Counts the work of matrix products in a compiled program, in FLOPs of one step on one device. No JAX.

GPU and CPU programs write them as `dot`, TPU programs as `convolution`, libraries as `custom-call`. Attention kernels
are opaque calls, whose products are counted by a formula.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from meshtrain.plan.hlo import grouped_products
from meshtrain.plan.hlo.parse import Instruction, Program
from meshtrain.plan.hlo.shapes import dims, dtypes

MATMUL_TARGETS = re.compile(r"gemm|matmul", re.IGNORECASE)
CUDNN_ATTENTION = re.compile(r"fmha", re.IGNORECASE)
TARGET = re.compile(r'custom_call_target="([^"]*)"')
# All Pallas kernels have one target on TPUs; the instruction, or the operation that made it, has the kernel's name.
PALLAS_TARGET = "tpu_custom_call"
SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# JAX's kernel for GPUs, and the scope that `models/attention/triton.py` gives it; the first dim of its grid that is not
# batch or heads has a place for each block of queries (forward), or of keys (backward).
TRITON_TARGET, TRITON, TRITON_CAUSAL = (
    "__gpu$xla.gpu.triton",
    re.compile(r"\bmha_(forward|backward)\b"),
    "triton_causal",
)
TRITON_BLOCKS = {"forward": re.compile(r"\bgrid_x = (\d+)"), "backward": re.compile(r"\bgrid_z = (\d+)")}
OPERATION = re.compile(r'op_name="([^"]*)"')
BLOCK = re.compile(r"\bblock_q(?:_dq|_dkv)?\W+(\d+)")
LHS_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
LHS_BATCH = re.compile(r'"lhs_batch_dimensions":\s*\[([^\]]*)\]')
CONTRACTED_BY_LIBRARY = (LHS_CONTRACTED, LHS_BATCH)
SLIDING_WINDOW = re.compile(r'"sliding_window_length":\s*"?(\d+)')
PROBABILITIES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')
WINDOW = re.compile(r"window=\{([^}]*)\}")
WINDOW_FIELD = re.compile(r"(\w+)=([\dx_\-]+)")
DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
BATCH_GROUPS = re.compile(r"batch_group_count=(\d+)")
# Matrix products of one query block with all keys: forward q k and p v; backward q k again, and four for the gradients.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
# JAX's kernel for TPUs has two backward passes, of which each computes q k, and the gradient of the probabilities.
SPLASH_PRODUCTS = {"fwd": FORWARD_PRODUCTS, "dq": 3, "dkv": 4}
# That for GPUs has both in one kernel.
TRITON_PRODUCTS = {"forward": FORWARD_PRODUCTS, "backward": 3 + 4}


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of matrix products of one step on one device.

    Attributes:
      products: outside of attention kernels.
      attention: inside attention kernels; of a causal kernel, or one with a window, the part that it does not skip.
      attention_full: the same with nothing skipped, comparable with products outside of kernels.
    """

    products: float
    attention: float
    attention_full: float

    @property
    def total(self) -> float:
        """Products and attention together."""
        return self.products + self.attention


def matmul_flops(program: Program) -> Work:
    """Returns the work of a step.

    Raises:
      ValueError: a library call or an attention kernel whose dims are not known, and whose work would be left out.
    """
    per_computation = {
        name: _work(body, {line.name: line.shape for line in body}, program.shares)
        for name, body in program.computations.items()
    }
    runs = program.num_runs
    return Work(*(sum(runs[name] * work[i] for name, work in per_computation.items()) for i in range(3)))


def _work(
    body: list[Instruction], shapes: Mapping[str, str], shares: Mapping[str, float]
) -> tuple[float, float, float]:
    products = attention = attention_full = 0.0
    for line in body:
        if line.opcode == "dot":
            products += dot_flops(line, shapes)
        elif line.opcode == "convolution":
            products += convolution_flops(line, shapes)
        elif line.opcode == "custom-call":
            if is_attention(line):
                done, full = attention_flops(line, shapes)
                attention, attention_full = attention + done, attention_full + full
            elif is_library_product(line):
                products += library_flops(line, shapes)
            elif grouped_products.kernel(line):
                products += 2.0 * math.prod(grouped_products.product(line, shapes, shares))
    return products, attention, attention_full


def is_product(line: Instruction) -> bool:
    """Returns whether an instruction itself multiplies matrices."""
    if line.opcode == "custom-call":
        return is_attention(line) or is_library_product(line) or grouped_products.kernel(line) is not None
    return line.opcode in ("dot", "convolution")


def is_attention(line: Instruction) -> bool:
    """Returns whether a custom call is an attention kernel."""
    target = TARGET.search(line.rest)
    if target is None:
        return False
    return bool(CUDNN_ATTENTION.search(target[1])) or is_triton(line) or _splash(line) is not None


def is_triton(line: Instruction) -> bool:
    """Returns whether a custom call is JAX's attention kernel for GPUs."""
    return _triton(line) is not None


def _triton(line: Instruction) -> str | None:
    """Returns the pass of JAX's kernel for GPUs that a custom call is: forward or backward; None for something else."""
    target, operation = TARGET.search(line.rest), OPERATION.search(line.rest)
    if target is None or operation is None or target[1] != TRITON_TARGET:
        return None
    match = TRITON.search(operation[1])
    return match[1] if match else None


def _splash(line: Instruction) -> str | None:
    """Returns the pass of JAX's kernel for TPUs that a custom call is: fwd, dq or dkv; None for something else."""
    target = TARGET.search(line.rest)
    if target is None or target[1] != PALLAS_TARGET:
        return None
    operation = OPERATION.search(line.rest)
    match = SPLASH.search(line.name) or (SPLASH.search(operation[1]) if operation else None)
    return match[1] if match else None


def is_library_product(line: Instruction) -> bool:
    """Returns whether a custom call is a library's matrix product."""
    target = TARGET.search(line.rest)
    return target is not None and bool(MATMUL_TARGETS.search(target[1]))


def dot_flops(line: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns 2 x result x contracted dims."""
    left = dims(shapes[line.operands[0]])
    contracted = line.attribute("lhs_contracting_dims") or ""
    return 2.0 * math.prod(dims(line.shape)) * math.prod(left[int(dim)] for dim in contracted.split(",") if dim)


def convolution_flops(line: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns 2 x result x input features x the window's positions that hold data.

    A TPU writes a matrix product over several dims as a convolution with padding; positions on padding, or between
    dilated elements, do not count.
    """
    labels = DIM_LABELS.search(line.rest)
    assert labels, line.rest
    left, right = (dims(shapes[name]) for name in line.operands[:2])
    result = dims(line.shape)
    window = WINDOW.search(line.rest)
    fields = dict(WINDOW_FIELD.findall(window[1])) if window else {}
    places = 1
    for dim in range(sum(label.isdigit() for label in labels[1])):
        size, num_outputs = left[labels[1].index(str(dim))], result[labels[3].index(str(dim))]
        places *= places_on_data(size, num_outputs, _window(fields, dim))
    outer = result[labels[3].index("b")] * result[labels[3].index("f")]
    groups = BATCH_GROUPS.search(line.rest)
    # With batch groups, each output feature sees one group of the batch alone, and the result has no batch left.
    shared = int(groups[1]) if groups else 1
    return 2.0 * outer * right[labels[2].index("i")] * places / shared


@dataclasses.dataclass(frozen=True)
class Window:
    """One dim of a convolution's window: places, steps, zeros before the left operand, steps between elements."""

    size: int
    stride: int
    low: int
    left_dilation: int
    right_dilation: int


def _window(fields: Mapping[str, str], dim: int) -> Window:
    def entry(name: str) -> str:
        return fields[name].split("x")[dim] if name in fields else ""

    return Window(
        size=int(entry("size") or 1),
        stride=int(entry("stride") or 1),
        low=int(entry("pad").partition("_")[0] or 0),
        left_dilation=int(entry("lhs_dilate") or 1),
        right_dilation=int(entry("rhs_dilate") or 1),
    )


def places_on_data(size: int, num_outputs: int, window: Window) -> int:
    """Returns how many pairs (output, window place) of one dim hold an element of the left operand.

    Args:
      size: elements of the left operand.
      num_outputs: elements of the result.
      window: of this dim.
    """
    end, result = (size - 1) * window.left_dilation + 1, 0
    first = np.arange(num_outputs) * window.stride - window.low
    for place in range(window.size):
        at = first + place * window.right_dilation
        result += int(np.count_nonzero((at >= 0) & (at < end) & (at % window.left_dilation == 0)))
    return result


def library_flops(line: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns 2 x result x contracted dims of a library's matrix product.

    Raises:
      ValueError: the call does not say which dims are contracted.
    """
    match = LHS_CONTRACTED.search(line.rest)
    if not match:
        raise ValueError(f"%{line.name}: a matrix product whose dims are not known")
    left = dims(shapes[line.operands[0]])
    contracted = [int(dim.strip(' "')) for dim in match[1].split(",") if dim.strip()]
    return 2.0 * math.prod(dims(line.shape)) * math.prod(left[dim] for dim in contracted)


def attention_flops(line: Instruction, shapes: Mapping[str, str]) -> tuple[float, float]:
    """Returns 2 x products x batch x heads x queries x keys x width: (the part that is not skipped, all).

    Args:
      line: a call of an attention kernel.
      shapes: of the operands.

    Raises:
      ValueError: the call does not say the kernel's dims.
    """
    if part := _triton(line):
        return _triton_flops(line, shapes, part)
    part = _splash(line)
    return _cudnn_flops(line) if part is None else _splash_flops(line, shapes, part)


def _splash_flops(line: Instruction, shapes: Mapping[str, str], part: str) -> tuple[float, float]:
    """Returns `attention_flops` of splash: queries [.., heads, T, H], keys [.., kv heads, T, H]; masks are integers.

    A mask has the dims [1, blocks of queries, blocks of keys that a block of queries reads at most], or the last two in
    reverse. With a window these are fewer than all blocks of keys.
    """
    arrays = [shapes[name] for name in line.operands if name in shapes]
    heads = [dims(shape) for shape in arrays if dtypes(shape)[0] in ("bf16", "f32") and len(dims(shape)) >= 3]
    if len(heads) < 3:
        raise ValueError(f"%{line.name}: an attention kernel whose dims are not known")
    query, key = heads[:2]
    full = splash_flops(part, query, key)
    block = BLOCK.search(line.rest)
    if not block:
        return full / 2, full
    num_blocks = query[-2] // int(block[1])
    masks = [sorted(dims(shape)[1:]) for shape in arrays if dtypes(shape)[0][0] == "s" and len(dims(shape)) == 3]
    most = min((least for least, largest in masks if largest == num_blocks), default=num_blocks)
    # Blocks on the diagonal, and those that a window's border crosses, are computed whole.
    return full * sum(min(row + 1, most) for row in range(num_blocks)) / num_blocks**2, full


def splash_flops(part: str, query: Sequence[int], key: Sequence[int]) -> float:
    """Returns the FLOPs of one pass of JAX's kernel for TPUs, nothing skipped.

    Args:
      part: a key of `SPLASH_PRODUCTS`.
      query: dims [.., heads, T, H].
      key: dims [.., kv heads, T, H].
    """
    return 2.0 * SPLASH_PRODUCTS[part] * math.prod(query) * key[-2]


def _triton_flops(line: Instruction, shapes: Mapping[str, str], part: str) -> tuple[float, float]:
    """Returns `attention_flops` of JAX's kernel for GPUs; a causal one computes blocks on the diagonal whole."""
    num_blocks, operation = TRITON_BLOCKS[part].search(line.rest), OPERATION.search(line.rest)
    if num_blocks is None or operation is None or not all(name in shapes for name in line.operands[:2]):
        raise ValueError(f"%{line.name}: an attention kernel whose dims are not known")
    full = triton_flops(part, *(dims(shapes[name]) for name in line.operands[:2]))
    number = int(num_blocks[1])
    return full * (number + 1) / (2 * number) if TRITON_CAUSAL in operation[1] else full, full


def triton_flops(part: str, query: Sequence[int], key: Sequence[int]) -> float:
    """Returns the FLOPs of one pass of JAX's kernel for GPUs, nothing skipped.

    Args:
      part: a key of `TRITON_PRODUCTS`.
      query: dims [batch, T, heads, H].
      key: likewise, its heads repeated.
    """
    return 2.0 * TRITON_PRODUCTS[part] * math.prod(query) * key[1]


def _cudnn_flops(line: Instruction) -> tuple[float, float]:
    """Returns `attention_flops` of cuDNN's kernel, whose call has the dims [batch, heads, queries, keys]."""
    target, probabilities = TARGET.search(line.rest), PROBABILITIES.search(line.rest)
    if not target or not probabilities:
        raise ValueError(f"%{line.name}: an attention kernel whose dims are not known")
    sizes = [int(size.strip(' "')) for size in probabilities[1].split(",")]
    width = dims(line.shape)[-1]
    num_products = BACKWARD_PRODUCTS if "backward" in target[1].lower() else FORWARD_PRODUCTS
    full = 2.0 * num_products * math.prod(sizes) * width
    match = SLIDING_WINDOW.search(line.rest)
    # Without a window its length is written as 0, or left out.
    if match and (window := int(match[1])):
        return full * window * (2 * sizes[-1] - window) / (2 * sizes[-1] ** 2), full
    return full / 2 if "CAUSAL" in line.rest else full, full
