"""Selects the implementation of attention, gives a reason, and describes the communication for split sequences.

T: tokens per sequence, S: tokens of the memory (T in self-attention).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.errors import Problem, nearest_divisor
from meshtrain.hardware.accelerators import GPU
from meshtrain.models.attention import blockwise, splash, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.sharding.param_sharding import num_parts
from meshtrain.sharding.rules import CONTEXT, TENSOR, sequence_axes

TAKE_PARTS = ("auto", "xla", "blockwise")  # implementations that support a part of the queries with all keys
# Features that a kernel does not support: field of `Attention` -> (text, the option).
_CAP, _WINDOW = {"cap": ("capped scores", "attention_cap")}, {"window": ("window", "window")}
_SINKS = {"sinks": ("sinks", "sinks")}
_CANNOT = {"cudnn": _CAP | _SINKS, "triton": _WINDOW | _CAP}


class Case(NamedTuple):
    """The properties of an attention layer that determine which implementation computes it.

    Attributes:
      attention: settings of attention.
      lengths: (number of queries T, number of keys S) of a sequence.
      dtype: dtype of queries, keys and values.
      platform: platform of the devices as JAX names it, such as `tpu`, `gpu` or `cuda`.
      masks_documents: whether a token attends only to tokens of its document.
      has_memory: whether keys and values come from a memory instead of the queries' sequence (cross-attention).
      gathers_keys: whether a device has a part of the queries and all keys (`context_parallel.by_keys`).
    """

    attention: Attention
    lengths: tuple[int, int]
    dtype: DTypeLike
    platform: str
    masks_documents: bool = False
    has_memory: bool = False
    gathers_keys: bool = False


def chosen(case: Case) -> tuple[str, str]:
    """Returns (name of the implementation that computes attention, reason for the selection).

    The name is a choice of the option `model.attention` other than `auto`. If the option is not `auto`, its value is
    returned.

    `auto` selects the first kernel that supports the case: splash on TPUs; on GPUs cuDNN's kernel, then JAX's Pallas
    kernel (`triton`). For packed documents and large heads, `auto` skips cuDNN's kernel. If no kernel supports the
    case, `auto` selects `blockwise` for long sequences and `xla` for short sequences.

    `xla` stores a [T, S] matrix of scores. If `cudnn` is requested for packed documents, it stores a [T, S] mask.
    In all other cases no [T, S] matrix is stored.
    """
    attention = case.attention
    if attention.asked != "auto":
        return attention.asked, f"model.attention={attention.asked}"
    why = f"there is no kernel for {case.platform}"
    if case.gathers_keys:
        why = "no kernel supports a part of the queries with all keys"
    elif case.platform == "tpu":
        # The gcd is a multiple of splash's blocks exactly if both lengths are.
        if splash.fits(attention.head_dim, math.gcd(*case.lengths), case.dtype):
            return "splash", "JAX's TPU kernel supports it"
        why = "JAX's kernel supports only bfloat16, heads of 64, 128 or 256, and multiples of 128 tokens"
    elif case.platform in GPU:
        refused = _unsupported("cudnn", case)
        if not refused:
            return "cudnn", "cuDNN's kernel supports it"
        why = f"cuDNN's kernel does not support {' or '.join(refused)}"
        refused = _unsupported("triton", case)
        # The module is imported only if the kernel would be used.
        if not refused and triton.is_there():
            return "triton", f"{why}; JAX's Pallas kernel does"
        why = f"{why}; JAX's Pallas kernel does not support {' or '.join(refused or ['this version of JAX'])}"
    if math.prod(case.lengths) >= blockwise.FROM**2:
        return "blockwise", why
    return "xla", f"{why}; below {blockwise.FROM:,} tokens, all scores need little memory"


def _unsupported(kernel: str, case: Case) -> list[str]:
    """Returns a text for each property of the case that the GPU kernel `cudnn` or `triton` does not support.

    An example is `heads of 512`. The list is empty if the kernel supports the case.
    """
    attention, dtype = case.attention.among(case.lengths[1]), jnp.dtype(case.dtype)
    refused = [] if dtype.itemsize == 2 else [dtype.name]
    # Every GPU with a cuDNN kernel takes heads of up to 128. GPUs from Hopper on take up to 256.
    if attention.head_dim % 8 or attention.head_dim > (128 if kernel == "cudnn" else triton.LARGEST_HEAD_DIM):
        refused.append(f"heads of {attention.head_dim}")
    if kernel == "cudnn" and case.masks_documents:
        # cuDNN's kernel supports documents only as a [T, S] mask. Its form for packed sequences needs the maximum
        # number of documents in a sequence, and stores the softmax's sums for each document.
        refused.append("documents")
    refused += [words for field, (words, _) in _CANNOT[kernel].items() if getattr(attention, field)]
    if kernel == "triton":
        refused += ["memory"] * case.has_memory
        refused += [f"sequences of {min(case.lengths)} tokens"] * (min(case.lengths) < triton.GRANULE)
    return refused


def problems(attention: Attention, computes_in: str, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each reason why the requested implementation cannot compute this attention.

    Args:
      attention: settings of attention; `asked` is the requested implementation.
      computes_in: name of the compute dtype, such as `bfloat16`.
      mesh_shape: mesh axis -> size.
    """
    problems, asked = list[Problem](), attention.asked
    if asked == "cudnn" and computes_in == "float32":
        problems.append(
            Problem(
                "model.attention",
                got="cudnn computing in float32",
                allowed="cudnn with a 16-bit policy",
                nearest="model.attention=xla, or precision.policy=bfloat16",
                depends_on=["precision.policy", "precision.compute_dtype"],
            )
        )
    for field, (_, option) in (_CANNOT[asked] if asked in _CANNOT else {}).items():
        if value := getattr(attention, field):
            problems.append(
                Problem(
                    "model.attention",
                    got=f"{asked} with model.{option} = {value}, which its kernel does not support",
                    allowed="auto, xla, blockwise, splash",
                    nearest="model.attention=auto",
                    depends_on=[f"model.{option}"],
                )
            )
    if asked not in TAKE_PARTS and gathers_keys(attention, mesh_shape):
        num_shards, heads = of_sequence(mesh_shape), attention.num_heads
        axes = [axis for axis in (*sequence_axes(), TENSOR) if mesh_shape[axis] > 1]
        over = " x ".join(f"mesh.{axis} = {mesh_shape[axis]}" for axis in axes)
        fits = nearest_divisor(heads // (num_shards // mesh_shape[CONTEXT]), mesh_shape[CONTEXT])
        problems.append(
            Problem(
                "model.attention",
                got=(
                    f"{asked} with model.num_heads = {heads}, which is not a multiple of {num_shards} = "
                    f"{over}, so keys are gathered for parts of the queries"
                ),
                allowed=", ".join(TAKE_PARTS),
                nearest=f"model.attention=auto, or mesh.{CONTEXT}={fits}",
                depends_on=["model.num_heads", f"mesh.{CONTEXT}"],
            )
        )
    return problems


def of_sequence(mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of devices that share the attention of one sequence.

    These are the devices along the mesh axes that split a sequence's tokens or heads.
    """
    return num_parts((*sequence_axes(), TENSOR), mesh_shape)


def gathers_keys(attention: Attention, mesh_shape: Mapping[str, int]) -> bool:
    """Returns whether devices with parts of a sequence must gather keys and values instead of exchanging heads.

    This is so if the number of heads is not a multiple of the devices that share a sequence.

    Args:
      attention: settings of attention; only the number of query heads is read.
      mesh_shape: mesh axis -> size.
    """
    return mesh_shape[CONTEXT] > 1 and attention.num_heads % of_sequence(mesh_shape) > 0


def exchange(attention: Attention, more: float, mesh_shape: Mapping[str, int]) -> str:
    """Describes the context-parallel communication in one line; empty without context parallelism.

    Args:
      attention: settings of attention.
      more: factor by which gathered keys increase the computation: number of all pairs of a query and a key, divided by
        the number of pairs that the mask allows. It is printed only if devices gather keys.
      mesh_shape: mesh axis -> size.
    """
    num_shards, size, num_heads = of_sequence(mesh_shape), mesh_shape[CONTEXT], attention.num_heads
    if size == 1:
        return ""
    if gathers_keys(attention, mesh_shape):
        return (
            f"all-gather of keys and values over {CONTEXT}, because {num_heads} heads are not a multiple of "
            f"{num_shards} devices per sequence: each device computes its queries with all keys, {more:.3g} times the "
            "products of attention"
        )
    of_tensor = attention.num_kv_heads // (num_shards // size)
    times = math.lcm(of_tensor, size) // of_tensor
    repeated = f", with each key and value head repeated {times} times" if times > 1 else ""
    here = num_heads // num_shards
    return f"all-to-all over {CONTEXT}: each device computes {here} of {num_heads} heads{repeated}"
