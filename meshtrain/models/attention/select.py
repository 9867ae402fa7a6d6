"""Which implementation computes attention, and why.

T: tokens a sequence, S: tokens of the memory (T in self-attention), H: head dim.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.models.attention import blockwise, splash, triton

GPU = ("gpu", "cuda")


class Case(NamedTuple):
    """What attention has to do.

    Attributes:
      head_dim: H.
      lengths: (T, S).
      dtype: of queries, keys and values.
      platform: as JAX names it, such as `tpu`, `gpu` or `cuda`.
      masks_documents: whether a token attends to its own document only.
      window: how many keys a causal query attends to; 0: all before it.
      caps_scores: whether scores become cap tanh(score / cap).
      has_memory: whether keys and values are those of another sequence.
      gathers_keys: whether a device has a part of the queries and all keys (`context_parallel.py`).
    """

    head_dim: int
    lengths: tuple[int, int]
    dtype: DTypeLike
    platform: str
    masks_documents: bool = False
    window: int = 0
    caps_scores: bool = False
    has_memory: bool = False
    gathers_keys: bool = False


def chosen(asked: str, case: Case) -> tuple[str, str]:
    """Returns (the implementation that computes attention, why), the first a choice of `model.attention` but `auto`.

    `auto` means a kernel where one fits: splash on TPUs; on GPUs cuDNN's, or JAX's own, which takes documents and
    larger heads. Otherwise it means `blockwise` for long sequences, and `xla` for short ones. Only `xla`, and `cudnn`
    with documents, store a [T, S] matrix.

    Args:
      asked: one of the choices of `model.attention`; any but `auto` is returned as it is.
      case: what attention has to do.
    """
    if asked != "auto":
        return asked, f"model.attention={asked}"
    why = f"there is no kernel for {case.platform}"
    if case.gathers_keys:
        why = "no kernel takes a part of the queries with all keys"
    elif case.platform == "tpu":
        # A multiple of splash's blocks exactly where both lengths are.
        if splash.fits(case.head_dim, math.gcd(*case.lengths), case.dtype):
            return "splash", "JAX's kernel for TPUs takes it"
        why = "JAX's kernel takes bfloat16, heads of 64, 128 or 256, and multiples of 128 tokens"
    elif case.platform in GPU:
        refused = _refused_by_cudnn(case)
        if not refused:
            return "cudnn", "cuDNN's kernel takes it"
        why = f"cuDNN's kernel takes no {' and no '.join(refused)}"
        refused = _refused_by_triton(case)
        if not refused:
            return "triton", f"{why}, JAX's Pallas kernel does"
        why = f"{why}, JAX's Pallas kernel no {' and no '.join(refused)}"
    if math.prod(case.lengths) >= blockwise.FROM**2:
        return "blockwise", why
    return "xla", f"{why}, and scores are small below {blockwise.FROM:,} tokens"


def _refused_by_cudnn(case: Case) -> list[str]:
    # Every GPU with a cuDNN kernel takes heads of up to 128. GPUs from Hopper on take up to 256.
    fits = case.head_dim <= 128 and case.head_dim % 8 == 0
    refused = _wide(case) if fits else [*_wide(case), f"heads of {case.head_dim}"]
    # It takes documents as a [T, S] mask only: its packed form needs the largest number of documents in a sequence, and
    # stores the softmax's sums that often.
    return [*refused, *["documents"] * case.masks_documents, *["capped scores"] * case.caps_scores]


def _refused_by_triton(case: Case) -> list[str]:
    refused = _wide(case) if triton.takes(case.head_dim) else [*_wide(case), f"heads of {case.head_dim}"]
    refused += ["window"] * bool(case.window) + ["capped scores"] * case.caps_scores + ["memory"] * case.has_memory
    if min(case.lengths) < triton.GRANULE:
        refused.append(f"sequences of {min(case.lengths)} tokens")
    # The module is imported only where the kernel would be taken.
    return refused if refused or triton.is_there() else ["call from this version of JAX"]


def _wide(case: Case) -> list[str]:
    dtype = jnp.dtype(case.dtype)
    return [] if dtype.itemsize == 2 else [dtype.name]
