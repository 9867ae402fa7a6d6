"""Counts the FLOPs of matrix products in a compiled program, for one step on one device. Uses no JAX.

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
# All Pallas kernels have the same target on TPUs; the name of the instruction or of its operation contains the kernel's
# name.
SPLASH_TARGET, SPLASH = "tpu_custom_call", re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# JAX's kernel for GPUs, and the scope that `models/attention/triton.py` gives it. The size of its grid dim after batch
# and heads is the number of blocks of queries (forward) or of keys (backward).
TRITON_TARGET, TRITON = "__gpu$xla.gpu.triton", re.compile(r"\bmha_(forward|backward)\b")
TRITON_CAUSAL = "triton_causal"
TRITON_BLOCKS = {"forward": re.compile(r"\bgrid_x = (\d+)"), "backward": re.compile(r"\bgrid_z = (\d+)")}
BLOCK = re.compile(r"\bblock_q(?:_dq|_dkv)?\W+(\d+)")
SLIDING_WINDOW = re.compile(r'"sliding_window_length":\s*"?(\d+)')
PROBABILITIES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')


class Attention(NamedTuple):
    """An attention kernel and one of its passes.

    Attributes:
      by: `cudnn`, `splash` (TPUs) or `triton` (GPUs).
      part: the pass: `forward` or `backward`; `fwd`, `dq` or `dkv` for splash.
    """

    by: str
    part: str

    def flops(self, query: Sequence[int], key: Sequence[int]) -> float:
        """Returns the FLOPs of the kernel, including the masked blocks, which it may skip.

        The number is 2 x P x batch x heads x queries x width x keys, for P matrix products in the pass (`PRODUCTS`).

        Args:
          query: shape of the query: [.., heads, T, H] for splash, [batch, T, heads, H] for other kernels.
          key: shape of the key, in the same order of dims.
        """
        return 2.0 * PRODUCTS[self] * math.prod(query) * key[-2 if self.by == "splash" else 1]


# Matrix products of one query block with all keys: forward q k and p v; backward q k again, and four for the gradients.
# Splash has two backward passes, which both compute q k and the gradient of the probabilities. Triton has both passes
# in one kernel.
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
      products: FLOPs outside of attention kernels.
      attention: FLOPs of attention kernels, without the blocks that a causal or sliding-window kernel skips.
      attention_full: FLOPs of attention kernels with skipped blocks, comparable with attention outside of kernels.
    """

    products: float
    attention: float
    attention_full: float

    @property
    def total(self) -> float:
        """FLOPs of products and attention, without the blocks that attention kernels skip."""
        return self.products + self.attention

    @property
    def full(self) -> float:
        """FLOPs of products and attention, with the blocks that attention kernels skip."""
        return self.products + self.attention_full


def matmul_flops(program: Program) -> Work:
    """Returns the FLOPs of a program's matrix products in one step; each iteration of a loop is counted.

    Raises:
      ValueError: a library call or an attention kernel does not state its dims, so its FLOPs cannot be counted.
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
    """Returns the attention kernel that an instruction calls; None for any other instruction."""
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
    """Returns the FLOPs of an attention kernel: (without skipped blocks, with skipped blocks).

    Args:
      line: the instruction that calls the kernel.
      shapes: name of each operand -> its shape.

    Raises:
      ValueError: the call does not state the kernel's dims.
    """
    kernel = attention_kernel(line)
    assert kernel, line.rest
    found = {"cudnn": _cudnn_flops, "splash": _splash_flops, "triton": _triton_flops}[kernel.by](line, shapes, kernel)
    if found is None:
        raise ValueError(f"%{line.name}: an attention kernel whose dims are not known")
    return found


def _splash_flops(line: Instruction, shapes: Mapping[str, str], kernel: Attention) -> tuple[float, float] | None:
    """Returns the FLOPs of a splash kernel (without skipped blocks, with skipped blocks); None if its dims are unknown.

    The operands are queries [.., heads, T, H], keys [.., kv heads, T, H], and integer masks. A mask has the dims [1,
    blocks of queries, maximum number of key blocks that a query block reads], or the last two in reverse. With a
    sliding window, this maximum is below the number of key blocks.
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
    # Blocks on the diagonal or on a window's border are computed completely.
    return full * sum(min(row + 1, most) for row in range(num_blocks)) / num_blocks**2, full


def _triton_flops(line: Instruction, shapes: Mapping[str, str], kernel: Attention) -> tuple[float, float] | None:
    """Returns the FLOPs of a Triton kernel (without skipped blocks, with skipped blocks); None if its dims are unknown.

    The kernel is JAX's for GPUs. If it is causal, it computes blocks on the diagonal completely.
    """
    blocks, heads = first_group(TRITON_BLOCKS[kernel.part], line), line.operands[:2]
    if not blocks or not all(name in shapes for name in heads):
        return None
    full, number = kernel.flops(*(dims(shapes[name]) for name in heads)), int(blocks)
    return full * (number + 1) / (2 * number) if TRITON_CAUSAL in first_group(OPERATION, line) else full, full


def _cudnn_flops(line: Instruction, shapes: Mapping[str, str], kernel: Attention) -> tuple[float, float] | None:
    """Returns the FLOPs of cuDNN's kernel (without skipped blocks, with skipped blocks); None if its dims are unknown.

    The call states the dims [batch, heads, queries, keys].
    """
    probabilities = first_group(PROBABILITIES, line)
    if not probabilities:
        return None
    batch, heads, queries, keys = (int(size.strip(' "')) for size in probabilities.split(","))
    full = kernel.flops((batch, queries, heads, dims(line.shape)[-1]), (batch, keys))
    # Without a sliding window, the call states the length 0 or no length.
    if window := int(first_group(SLIDING_WINDOW, line) or 0):
        return full * window * (2 * keys - window) / (2 * keys**2), full
    return full / 2 if "CAUSAL" in line.rest else full, full
