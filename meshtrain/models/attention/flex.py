"""Attention on GPUs by cuDNN's kernel with a score function: supports documents, capped scores and sinks.

cuDNN evaluates the function for each score inside its kernel, before the causal mask, the window and the softmax ("flex
attention"), so no [T, S] matrix is stored. JAX's interface is private and new. So `is_available` checks whether JAX's
functions have the parameters that this file passes. No GPU has run this kernel yet: `auto` never selects it.

b, T, S, N, G, H: see `attention.py`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.hardware.accelerators import Capability
from meshtrain.models.attention import kernel
from meshtrain.models.attention.attention import Attention, Documents

OLDEST_CAPABILITY: Capability = (9, 0)  # Hopper
OLDEST_CUDNN = 91300  # cuDNN 9.13
MASKED = -1e30  # the score of a query and a key in different documents
# Names of the parameters of the backward rule of JAX's function; `_static` and `_arrays` return their values.
BACKWARD = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length", "score_mod",
    "cudnn_version", "return_residual", "res", "grad_output",
)  # fmt: skip

Scores = Callable[..., jax.Array]  # (scores, arguments broadcastable to the scores) -> scores


class Static(NamedTuple):
    """The settings of the kernel that are not arrays.

    Attributes:
      scale: factor of products of queries and keys.
      causal: whether a query attends only to keys up to its position.
      window: number of keys that a causal query attends to; 0: all keys up to its position.
      cap: scores become cap tanh(score / cap); 0: no cap.
      masks_documents: whether a query attends only to keys of its document.
    """

    scale: float
    causal: bool
    window: int
    cap: float
    masks_documents: bool


@functools.cache
def is_available() -> bool:
    """Returns whether this version of JAX passes score functions to cuDNN, with the rules that `attend` calls."""
    try:
        rule = _module()._dot_product_attention.bwd
    except (ImportError, AttributeError):
        return False
    return tuple(inspect.signature(rule).parameters) == BACKWARD


def supports(capability: Capability | None) -> bool:
    """Returns whether JAX, the GPU and cuDNN support score functions: Hopper and cuDNN 9.13 are the oldest.

    Args:
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """
    if capability is None or capability < OLDEST_CAPABILITY or not is_available():
        return False
    try:
        return int(_module().check_cudnn_version()) >= OLDEST_CUDNN
    except RuntimeError:  # a machine without cuDNN, which only plans
        return True


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    attention: Attention,
    sinks: jax.Array | None = None,
    *,
    name: str,
    is_global: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention output of each head, [b, T, N, H], by cuDNN; for the arguments see `attention.py`.

    Document ids are compared as float32, which is exact for ids below 2^24.
    """
    static = Static(attention.scale, attention.causal, attention.window, attention.cap, documents is not None)
    ids = () if documents is None else documents
    of_queries, of_keys = (x.astype(jnp.float32) for x in ids) if ids else (None, None)
    cudnn = kernel.Kernel(_forward, _backward, static, name, of_global=static._replace(window=0))
    return kernel.attend(cudnn, sinks, q, k, v, of_queries, of_keys, is_global=is_global)


@functools.cache
def score_function(cap: float, masks_documents: bool) -> Scores | None:
    """Returns the function of scores that cuDNN evaluates: a cap, then a mask of documents; None without both.

    The function's arguments are scores float32 [b, N, T, S], and with `masks_documents` the document ids of queries
    [b, 1, T, 1] and of keys [b, 1, 1, S] in float32. It is the same object for the same arguments, so that JAX
    compiles it once.
    """
    if not cap and not masks_documents:
        return None

    def capped_within_documents(scores: jax.Array, *ids: jax.Array) -> jax.Array:
        scores = cap * jnp.tanh(scores / cap) if cap else scores
        return jnp.where(ids[0] == ids[1], scores, MASKED) if masks_documents else scores

    return capped_within_documents


def _forward(static: Static, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    heads, residuals = _module()._dot_product_attention.fwd(*_arrays(*arrays), *_static(static))
    # The rule's residuals are its arguments, the logarithms of the softmax's sums [b, N, T], and the heads.
    return heads, residuals[-2]


def _backward(static: Static, *given: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    *arrays, heads, log_sums, cotangent = given
    residuals = (*_arrays(*arrays), log_sums, heads)
    dq, dk, dv, *_ = _module()._dot_product_attention.bwd(*_static(static), residuals, cotangent)
    return dq, dk, dv


def _arrays(
    q: jax.Array, k: jax.Array, v: jax.Array, of_queries: jax.Array | None, of_keys: jax.Array | None
) -> tuple[Any, ...]:
    """Returns the array arguments of JAX's function.

    They are q [b, T, N, H], k and v [b, S, G, H], seven unused arrays (bias, lengths, offsets, pages), and the
    arguments of the score function: the ids of queries, float32 [b, T], and of keys, float32 [b, S], if not None.
    """
    unused = jnp.zeros(0, q.dtype)
    ids = () if of_queries is None or of_keys is None else (of_queries[:, None, :, None], of_keys[:, None, None, :])
    return (q, k, v, *[unused] * 7, ids)


def _static(static: Static) -> tuple[Any, ...]:
    module = _module()
    masks = module.MaskType.CAUSAL if static.causal else module.MaskType.NO_MASK
    scores = score_function(static.cap, static.masks_documents)
    seed, dropout_rate, has_bias_and_gradient = 42, 0.0, (False, False)
    layout, window = module.AttentionLayout.BTNH.value, static.window or None
    version = module.check_cudnn_version()
    return static.scale, seed, dropout_rate, has_bias_and_gradient, masks, layout, window, scores, version, False


def _module() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
