"""Selects the implementation of attention, gives a reason, and describes the communication for split sequences.

T: tokens per sequence, S: tokens of the memory (T in self-attention).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.errors import Problem, UserError, nearest_divisor
from meshtrain.hardware.accelerators import GPU, Capability, runs_kernels
from meshtrain.models.attention import blockwise, dot_product, flex, splash, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.models.fallback import NEWER_GPU, WITH_KERNELS, Fallback, missing
from meshtrain.sharding.param_sharding import num_parts
from meshtrain.sharding.rules import CONTEXT, TENSOR, sequence_axes

TAKE_PARTS = ("auto", "xla", "blockwise")  # implementations that support a part of the queries with all keys
APART = "model.within_documents=false, if tokens may attend to neighbouring documents"
# Kernel -> (its name in reasons, its name if JAX lacks it, whether the installed JAX has it).
_KERNELS: dict[str, tuple[str, str, Callable[[], bool]]] = {
    "cudnn": ("cuDNN's kernel", "interface to cuDNN's kernel", lambda: dot_product.has_cudnn()),
    "triton": ("JAX's Pallas kernel", "Pallas kernel for attention on GPUs", lambda: triton.is_available()),
    "splash": ("JAX's TPU kernel", "Pallas kernel for attention on TPUs", lambda: splash.is_available()),
}
LARGEST_MASK = 8192**2  # elements of a mask of documents, up to which `auto` selects cuDNN's kernel with a mask
BY_SCORES = "a score function masks documents, which no GPU has run yet"
# Share of an H100's peak that each implementation reaches (docs/results/accelerator.md).
SPEED = {"cudnn": 0.524, "triton": 0.289, "blockwise": 0.0676, "xla": 0.0541}
# Features that a kernel does not support: field of `Attention` -> (text, the option).
_CAP, _WINDOW = {"cap": ("capped scores", "attention_cap")}, {"window": ("window", "window")}
_SINKS = {"sinks": ("sinks", "sinks")}
_CANNOT = {"cudnn": _CAP | _SINKS, "triton": _WINDOW | _CAP, "flex": {}}


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
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """

    attention: Attention
    lengths: tuple[int, int]
    dtype: DTypeLike
    platform: str
    masks_documents: bool = False
    has_memory: bool = False
    gathers_keys: bool = False
    capability: Capability | None = None


def chosen(case: Case) -> tuple[str, str]:
    """Returns (name of the implementation that computes attention, reason for the selection).

    The name is a choice of the option `model.attention` other than `auto`. If the option is not `auto`, its value is
    returned.

    `auto` selects the first kernel that supports the case: splash on TPUs; on GPUs cuDNN's kernel, then JAX's Pallas
    kernel (`triton`). For packed documents and large heads, `auto` skips cuDNN's kernel. If no kernel supports the
    case, GPUs before Hopper use cuDNN's kernel with a mask of documents for up to `LARGEST_MASK` pairs of tokens.
    Otherwise `auto` selects `blockwise` for long sequences and `xla` for short sequences.

    `xla` stores a [T, S] matrix of scores, and cuDNN's kernel with a mask stores a [T, S] mask. In all other cases no
    [T, S] matrix is stored. If `cudnn` is requested, `uses_score_function` states which form of the kernel computes.

    Raises:
      UserError: `cudnn` is requested for capped scores or sinks, and the device does not support score functions.
    """
    needs_scores = [option for field, (_, option) in _CANNOT["cudnn"].items() if getattr(case.attention, field)]
    if case.attention.asked == "cudnn" and needs_scores and not uses_score_function(case):
        raise UserError(
            Problem(
                "model.attention",
                got=f"cudnn with model.{needs_scores[0]} on a device without score functions in cuDNN",
                allowed="auto, xla, blockwise, splash; cudnn from compute capability 9.0 and cuDNN 9.13 on",
                nearest="model.attention=auto",
            )
        )
    name, reasons = _select(case, is_available)
    if name == "xla" != case.attention.asked:
        reasons.append(f"below {blockwise.FROM:,} tokens, all scores need little memory")
    return name, "; ".join(reasons)


def is_available(kernel: str) -> bool:
    """Returns whether the installed JAX has a kernel: `cudnn`, `triton` or `splash`."""
    return _KERNELS[kernel][2]()


def _select(case: Case, has: Callable[[str], bool]) -> tuple[str, list[str]]:
    """Returns (name of the implementation, reasons for the selection).

    Args:
      case: the attention layer.
      has: function that returns whether JAX has a kernel. It is called only for kernels that support the case, because
        it may import the kernel's module.
    """
    asked, reasons = case.attention.asked, list[str]()
    if asked != "auto":
        form = BY_SCORES if uses_score_function(case) else "documents are a [T, S] mask"
        return asked, [f"model.attention={asked}", *[form] * (asked == "cudnn" and case.masks_documents)]
    if case.gathers_keys:
        reasons.append("no kernel supports a part of the queries with all keys")
    kernels = () if reasons else _kernels_of(case.platform)
    if kernels and not runs_kernels(case.capability):
        kernels, reasons = (), ["no kernel supports this GPU"]
    for kernel in kernels:
        refused, (name, if_missing, _) = _unsupported(kernel, case), _KERNELS[kernel]
        if not refused and has(kernel):
            follows = bool(reasons) and "not support" in reasons[-1]
            return kernel, [*reasons, f"{name} does" if follows else f"{name} supports it"]
        reasons.append(f"{name} {refused}" if refused else missing(if_missing))
    if kernels and _masks_documents_by_cudnn(case) and has("cudnn"):
        return "cudnn", [*reasons, "cuDNN's kernel with a [T, S] mask does"]
    reasons = reasons or [f"there is no kernel for {case.platform}"]
    return "blockwise" if math.prod(case.lengths) >= blockwise.FROM**2 else "xla", reasons


def uses_score_function(case: Case) -> bool:
    """Returns whether the implementation `cudnn` masks documents, caps scores and adds sinks by `flex.py`.

    Otherwise it masks documents by a [T, S] mask (`dot_product.py`), without caps and sinks.
    """
    attention = case.attention
    return bool(case.masks_documents or attention.cap or attention.sinks) and flex.supports(case.capability)


def _masks_documents_by_cudnn(case: Case) -> bool:
    """Returns whether `auto` may select cuDNN's kernel with a mask of documents: GPUs before Hopper, short masks."""
    before_hopper = case.capability is not None and case.capability < flex.OLDEST_CAPABILITY
    fits = math.prod(case.lengths) <= LARGEST_MASK
    return before_hopper and fits and not _unsupported("cudnn", case._replace(masks_documents=False))


def _kernels_of(platform: str) -> tuple[str, ...]:
    """Returns the attention kernels for a platform, the fastest first; () if there is none."""
    return ("splash",) if platform == "tpu" else ("cudnn", "triton") if platform in GPU else ()


def fallback(case: Case) -> Fallback | None:
    """Returns a report if `auto` selects a slower implementation than the fastest kernel; None if nothing is lost.

    This is so if the installed JAX lacks a kernel, or if no kernel supports the device. For long sequences, it is also
    so if no kernel supports the settings. On CPUs, and if `model.attention` names an implementation, nothing is lost.
    """
    kernels = _kernels_of(case.platform)
    if case.attention.asked != "auto" or not kernels:
        return None
    name, reasons = _select(case, is_available)
    of_device, _ = _select(case, lambda kernel: True)
    fastest, _ = _select(case._replace(capability=None), lambda kernel: True)
    lacks, is_kernel = name != of_device, name in kernels
    if not lacks and (is_kernel or fastest == name != "blockwise"):
        return None
    install = WITH_KERNELS if lacks else NEWER_GPU if fastest != name else ""
    options, after = _faster_options(case, name)
    cost = "slower than the kernel, not measured on TPUs"
    if case.platform in GPU:
        kernel = fastest if install else after or kernels[0]
        cost = f"about {SPEED[name] / SPEED[kernel]:.0%} of the kernel's speed on an H100"
    if name == "cudnn":
        cost = f"a mask of {2 * math.prod(case.lengths) / 1e6:.0f} MB for each sequence; the speed is not measured"
    change = ", or ".join(filter(None, (install, options))) or "the settings of a kernel: docs/design/planner.md"
    return Fallback(name, ", and ".join(reasons), cost, change)


def _faster_options(case: Case, name: str) -> tuple[str, str]:
    """Returns (changes of options, the kernel that `auto` selects after these changes); ("", "") if there are none.

    Args:
      case: the attention layer.
      name: the implementation that `auto` selects now, slower than the returned kernel.
    """
    whole = tuple(-(-length // splash.LANES) * splash.LANES for length in case.lengths)
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("precision.policy=bfloat16", {"dtype": jnp.bfloat16}, {}),
        (APART, {"masks_documents": False}, {}),
        (f"a sequence_length that is a multiple of {splash.LANES}", {"lengths": whole}, {}),
        ("heads of 128", {}, {"head_dim": 128}),
        (f"a mesh.{CONTEXT} that divides the heads", {"gathers_keys": False}, {}),
        ("model.window=0", {}, {"window": 0}),
        ("model.attention_cap=0", {}, {"cap": 0.0}),
        ("model.sinks=false", {}, {"sinks": False}),
    ]
    if case.masks_documents and uses_score_function(case) and not _unsupported("flex", case):
        return f"model.attention=cudnn, where {BY_SCORES}", "cudnn"
    kernels = _kernels_of(case.platform)
    faster = kernels[: kernels.index(name)] if name in kernels else kernels
    for num in (1, 2, 3):
        for chosen_changes in itertools.combinations(changes, num):
            changed = case
            for _, of_case, of_attention in chosen_changes:
                changed = changed._replace(**of_case)
                changed = changed._replace(attention=dataclasses.replace(changed.attention, **of_attention))
            kernel, _ = _select(changed, is_available)
            if kernel in faster:
                return " and ".join(text for text, _, _ in chosen_changes), kernel
    return "", ""


def _unsupported(kernel: str, case: Case) -> str:
    """Returns a reason why a kernel does not support a case, such as `does not support heads of 512`; '' if it does.

    Args:
      kernel: `cudnn`, `flex` (cuDNN's kernel with a score function), `triton` or `splash`.
      case: the attention layer.
    """
    attention, dtype, cudnn = case.attention.among(case.lengths[1]), jnp.dtype(case.dtype), kernel in ("cudnn", "flex")
    if kernel == "splash":
        # The gcd is a multiple of splash's blocks exactly if both lengths are.
        is_supported = splash.fits(attention.head_dim, math.gcd(*case.lengths), case.dtype)
        return "" if is_supported else "supports only bfloat16, heads of 64, 128 or 256, and multiples of 128 tokens"
    refused = [] if dtype.itemsize == 2 else [dtype.name]
    # Every GPU with a cuDNN kernel takes heads of up to 128. GPUs from Hopper on take up to 256.
    if attention.head_dim % 8 or attention.head_dim > (128 if cudnn else triton.LARGEST_HEAD_DIM):
        refused.append(f"heads of {attention.head_dim}")
    if kernel == "cudnn" and case.masks_documents:
        # cuDNN's kernel supports documents only as a [T, S] mask. Its form for packed sequences needs the maximum
        # number of documents in a sequence, and stores the softmax's sums for each document.
        refused.append("documents")
    refused += [words for field, (words, _) in _CANNOT[kernel].items() if getattr(attention, field)]
    if kernel == "triton":
        refused += ["memory"] * case.has_memory
        refused += [f"sequences of {min(case.lengths)} tokens"] * (min(case.lengths) < triton.GRANULE)
    return f"does not support {' or '.join(refused)}" if refused else ""


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
    kernel = "flex" if asked == "cudnn" and flex.is_available() else asked
    for field, (_, option) in (_CANNOT[kernel] if kernel in _CANNOT else {}).items():
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
