"""Counts the work of matrix products in a compiled program, in FLOPs of one step on one device. No JAX.

Attention kernels are opaque calls, whose products are counted by a formula.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshtrain.plan.hlo.parse import Instruction, Program
from meshtrain.plan.hlo.products import OPERATION, TARGET, first_group, product_flops
from meshtrain.plan.hlo.shapes import dims, dtypes

CUDNN = re.compile(r"fmha", re.IGNORECASE)
# All Pallas kernels have one target on TPUs; the instruction, or the operation that made it, has the kernel's name.
SPLASH_TARGET, SPLASH = "tpu_custom_call", re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# JAX's kernel for GPUs, and the scope that `models/attention/triton.py` gives it; the first dim of its grid that is not
# batch or heads has a place for each block of queries (forward), or of keys (backward).
TRITON_TARGET, TRITON = "__gpu$xla.gpu.triton", re.compile(r"\bmha_(forward|backward)\b")
TRITON_CAUSAL = "triton_causal"
TRITON_BLOCKS = {"forward": re.compile(r"\bgrid_x = (\d+)"), "backward": re.compile(r"\bgrid_z = (\d+)")}
BLOCK = re.compile(r"\bblock_q(?:_dq|_dkv)?\W+(\d+)")
SLIDING_WINDOW = re.compile(r'"sliding_window_length":\s*"?(\d+)')
PROBABILITIES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')


class Attention(NamedTuple):
    """An attention kernel, `cudnn`, `splash` (JAX's for TPUs) or `triton` (JAX's for GPUs), and which pass it is."""

    by: str
    part: str

    def flops(self, query: Sequence[int], key: Sequence[int]) -> float:
        """Returns 2 x products x batch x heads x queries x width x keys, nothing skipped.

        Args:
          query: dims, of splash [.., heads, T, H], of others [batch, T, heads, H].
          key: likewise.
        """
        return 2.0 * PRODUCTS[self] * math.prod(query) * key[-2 if self.by == "splash" else 1]


# Matrix products of one query block with all keys: forward q k and p v; backward q k again, and four for the gradients.
# Splash has two backward passes, of which each computes q k, and the gradient of the probabilities. Triton has both in
# one kernel.
PRODUCTS = {
    Attention("cudnn", "forward"): 2,
    Attention("cudnn", "backward"): 5,
    Attention("splash", "fwd"): 2,
    Attention("splash", "dq"): 3,
    Attention("splash", "dkv"): 4,
    Attention("triton", "forward"): 2,
    Attention("triton", "backward"): 3 + 4,
}


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

    @property
    def full(self) -> float:
        """The same with nothing of attention skipped."""
        return self.products + self.attention_full


def matmul_flops(program: Program) -> Work:
    """Returns the work of a step.

    Raises:
      ValueError: a library call or an attention kernel whose dims are not known, and whose work would be left out.
    """
    works = [(program.num_runs[name], _work(body, program.shares)) for name, body in program.computations.items()]
    return Work(*(sum(runs * work[i] for runs, work in works) for i in range(3)))


def _work(body: list[Instruction], shares: Mapping[str, float]) -> tuple[float, float, float]:
    shapes = {line.name: line.shape for line in body}
    products = attention = attention_full = 0.0
    for line in body:
        if attention_kernel(line):
            done, full = attention_flops(line, shapes)
            attention, attention_full = attention + done, attention_full + full
        else:
            products += product_flops(line, shapes, shares)
    return products, attention, attention_full


def attention_kernel(line: Instruction) -> Attention | None:
    """Returns the attention kernel that an instruction calls; None for anything else."""
    if line.opcode != "custom-call":
        return None
    target, operation = first_group(TARGET, line), first_group(OPERATION, line)
    if CUDNN.search(target):
        return Attention("cudnn", "backward" if "backward" in target.lower() else "forward")
    if target == TRITON_TARGET and (match := TRITON.search(operation)):
        return Attention("triton", match[1])
    if target == SPLASH_TARGET and (match := SPLASH.search(line.name) or SPLASH.search(operation)):
        return Attention("splash", match[1])
    return None


def attention_flops(line: Instruction, shapes: Mapping[str, str]) -> tuple[float, float]:
    """Returns the FLOPs of an attention kernel: (the part that is not skipped, all).

    Args:
      line: a call of an attention kernel.
      shapes: of the operands.

    Raises:
      ValueError: the call does not say the kernel's dims.
    """
    kernel = attention_kernel(line)
    assert kernel, line.rest
    found = {"cudnn": _cudnn_flops, "splash": _splash_flops, "triton": _triton_flops}[kernel.by](line, shapes, kernel)
    if found is None:
        raise ValueError(f"%{line.name}: an attention kernel whose dims are not known")
    return found


def _splash_flops(line: Instruction, shapes: Mapping[str, str], kernel: Attention) -> tuple[float, float] | None:
    """Returns `attention_flops` of splash: queries [.., heads, T, H], keys [.., kv heads, T, H]; masks are integers.

    A mask has the dims [1, blocks of queries, blocks of keys that a block of queries reads at most], or the last two in
    reverse. With a window these are fewer than all blocks of keys.
    """
    arrays = line.operand_shapes(shapes)
    heads = [dims(shape) for shape in arrays if dtypes(shape)[0] in ("bf16", "f32") and len(dims(shape)) >= 3]
    if len(heads) < 3:
        return None
    query, key = heads[:2]
    full, block = kernel.flops(query, key), first_group(BLOCK, line)
    if not block:
        return full / 2, full
    num_blocks = query[-2] // int(block)
    masks = [sorted(dims(shape)[1:]) for shape in arrays if dtypes(shape)[0][0] == "s" and len(dims(shape)) == 3]
    most = min((least for least, largest in masks if largest == num_blocks), default=num_blocks)
    # Blocks on the diagonal, and those that a window's border crosses, are computed whole.
    return full * sum(min(row + 1, most) for row in range(num_blocks)) / num_blocks**2, full


def _triton_flops(line: Instruction, shapes: Mapping[str, str], kernel: Attention) -> tuple[float, float] | None:
    """Returns `attention_flops` of JAX's kernel for GPUs; a causal one computes blocks on the diagonal whole."""
    blocks, heads = first_group(TRITON_BLOCKS[kernel.part], line), line.operands[:2]
    if not blocks or not all(name in shapes for name in heads):
        return None
    full, number = kernel.flops(*(dims(shapes[name]) for name in heads)), int(blocks)
    return full * (number + 1) / (2 * number) if TRITON_CAUSAL in first_group(OPERATION, line) else full, full


def _cudnn_flops(line: Instruction, shapes: Mapping[str, str], kernel: Attention) -> tuple[float, float] | None:
    """Returns `attention_flops` of cuDNN's kernel, whose call has the dims [batch, heads, queries, keys]."""
    probabilities = first_group(PROBABILITIES, line)
    if not probabilities:
        return None
    batch, heads, queries, keys = (int(size.strip(' "')) for size in probabilities.split(","))
    full = kernel.flops((batch, queries, heads, dims(line.shape)[-1]), (batch, keys))
    # Without a window its length is written as 0, or left out.
    if window := int(first_group(SLIDING_WINDOW, line) or 0):
        return full * window * (2 * keys - window) / (2 * keys**2), full
    return full / 2 if "CAUSAL" in line.rest else full, full
