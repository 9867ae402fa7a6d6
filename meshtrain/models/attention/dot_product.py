"""Attention by `jax.nn.dot_product_attention` (`xla`, `cudnn`), or by plain einsums for capped scores and sinks.

b, T, S, N, G, H: see `attention.py`.
"""

import functools
import inspect
from typing import Literal

import jax
import jax.numpy as jnp

from meshtrain.models.attention.attention import Attention, Documents, same_document
from meshtrain.models.layers import cap_values
from meshtrain.models.remat import HEADS
from meshtrain.sharding.saved import mark_residuals


def has_cudnn() -> bool:
    """Returns whether this version of JAX has a public interface to cuDNN's kernel."""
    return "implementation" in inspect.signature(jax.nn.dot_product_attention).parameters


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    attention: Attention,
    sinks: jax.Array | None = None,
    *,
    how: Literal["xla", "cudnn"],
    first: jax.Array | None = None,
    is_global: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention output of each head, [b, T, N, H].

    Args:
      q: queries [b, T, N, H].
      k: keys [b, S, G, H].
      v: values [b, S, G, H].
      documents: int32 [b, T] and [b, S], the document ids of queries and of keys; None: one document.
      attention: settings of attention.
      sinks: scores of attention sinks, float32 [b, T, N]; None: no sinks.
      how: value of the argument `implementation` of `jax.nn.dot_product_attention`.
      first: int32 scalar, the position of the first query among the keys, if `q` is a part of the sequence; None: `q`
        is the complete sequence.
      is_global: bool scalar, whether the window of `attention` is ignored; None: it is not ignored.
    """
    dtype, causal, cap, window = q.dtype, attention.causal, attention.cap, attention.window
    if how == "xla" and dtype == jnp.float16:
        # JAX requests a float16 matmul that only GPUs support. The input of the softmax is float32 anyway.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    mask = same_document(*documents) if documents is not None else None
    if how == "cudnn":
        windows = (window,) if is_global is None else (0, window)
        kernels = [functools.partial(_cudnn, mask=mask, attention=attention, window=each) for each in windows]
        heads: jax.Array = mark_residuals(kernels, is_global, HEADS, q, k, v).astype(dtype)
        return heads
    reach = window if is_global is None else jnp.where(is_global, k.shape[1], window)
    distance = (0 if first is None else first) + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    local, seen = None, None
    if first is not None:
        seen, causal = (distance >= 0) & (distance < reach) if window else distance >= 0, False
    elif window and mask is None and is_global is None and not cap and sinks is None:
        local = (window - 1, 0)
    elif window:
        seen = distance < reach
    if seen is not None:
        mask = seen[None, None] if mask is None else mask & seen
    if cap or sinks is not None:
        return _plain_attention(q, k, v, mask, causal, attention, sinks).astype(dtype)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=attention.scale, is_causal=causal, implementation="xla", local_window_size=local
    ).astype(dtype)


def _cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, attention: Attention, window: int
) -> jax.Array:
    """Returns the attention output of each head, [b, T, N, H], by cuDNN's kernel.

    Args:
      q: queries [b, T, N, H].
      k: keys [b, S, G, H].
      v: values [b, S, G, H].
      mask: bool, broadcastable to [b, 1, T, S], true if a query attends to a key; None: no mask.
      attention: settings of attention, without cap and sinks.
      window: tokens to which a query attends; 0: all.
    """
    # The kernel takes either a window or a mask. Both need `is_causal`: a window does not exclude later keys.
    local = (window - 1, 0) if window and mask is None else None
    if window and mask is not None:
        mask = mask & (jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1]) < window)[None, None]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=attention.scale, is_causal=attention.causal, implementation="cudnn",
        local_window_size=local,
    )  # fmt: skip


def _plain_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    causal: bool,
    attention: Attention,
    sinks: jax.Array | None,
) -> jax.Array:
    """Returns the attention output of each head, [b, T, N, H], by einsums that store all scores.

    Args:
      q: queries [b, T, N, H].
      k: keys [b, S, G, H].
      v: values [b, S, G, H].
      mask: bool, broadcastable to [b, 1, T, S], true if a query attends to a key; None: no mask.
      causal: whether a query attends only to keys up to its position, in addition to `mask`.
      attention: settings of attention: scale and cap.
      sinks: scores of attention sinks, float32 [b, T, N]; None: no sinks.
    """
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("btgnh,bsgh->bgnts", groups, k, preferred_element_type=jnp.float32)
    scores = cap_values(scores * attention.scale, attention.cap)
    if causal:
        before = jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
        mask = before if mask is None else mask & before
    if mask is not None:
        scores = jnp.where(mask[:, :, None], scores, jnp.finfo(scores.dtype).min)
    if sinks is not None:
        own = sinks.reshape(groups.shape[:-1]).transpose(0, 2, 3, 1)[..., None]
        scores = jnp.concatenate([scores, own.astype(scores.dtype)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bgnts,bsgh->btgnh", weights, v).reshape(q.shape)
