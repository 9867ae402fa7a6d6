"""Attention on TPUs by JAX's own Pallas kernel ("splash"), which stores no [T, S] matrix of probabilities.

b, T, S, N, G, H: see `attention.py`.
"""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.models.attention.attention import Attention, Documents, pad, pad_documents
from meshtrain.sharding.saved import mark_residuals

# The kernel's blocks are multiples of a TPU's 128 lanes; larger blocks read keys and values less often.
LANES, LARGEST_BLOCK = 128, 512
HEAD_DIMS = (64, 128, 256)


@functools.cache
def is_available() -> bool:
    """Returns whether this version of JAX has the kernel."""
    return importlib.util.find_spec("jax.experimental.pallas.ops.tpu.splash_attention") is not None


def fits(head_dim: int, sequence_length: int, dtype: DTypeLike) -> bool:
    """Returns whether `model.attention=auto` selects this kernel on a TPU.

    Args:
      head_dim: width of a head; `auto` accepts the sizes for which the tests compile the kernel.
      sequence_length: tokens per sequence; `auto` accepts multiples of 128. With `model.attention=splash`, other
        lengths are padded.
      dtype: dtype of queries, keys and values; `auto` accepts only bfloat16, because in float32 the kernel ignores
        `jax_default_matmul_precision`.
    """
    return head_dim in HEAD_DIMS and sequence_length % LANES == 0 and jnp.dtype(dtype) == jnp.bfloat16


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    attention: Attention,
    sinks: jax.Array | None = None,
    *,
    name: str,
    interpret: bool,
    is_global: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention output of each head, [b, T, N, H], by the TPU kernel; for the arguments see `attention.py`.

    Blocks of keys outside of the window are skipped. The kernel gets one sink per head, from the first query, because
    sinks are equal for all queries.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, num_heads, _ = q.shape
    shape = length + -length % LANES, k.shape[1] + -k.shape[1] % LANES
    # The kernel does not scale scores. Dividing in float32 rounds once; a 16-bit root and product would round twice.
    q = (q.astype(jnp.float32) / math.sqrt(attention.scalar or attention.head_dim)).astype(q.dtype)
    documents = pad_documents(documents, q, k, shape, attention.causal)
    segments = None if documents is None else splash.SegmentIds(*documents)
    q, k, v = (pad(x, size).swapaxes(1, 2) for x, size in zip((q, k, v), (*shape, shape[1]), strict=True))
    of_q, of_kv = map(_block, shape)
    sizes = splash.BlockSizes(
        of_q, of_kv, block_q_dkv=of_q, block_kv_dkv=of_kv, block_q_dq=of_q, block_kv_dq=of_kv
    )  # fmt: skip

    def run(window: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        mask: masks.Mask = masks.CausalMask(shape) if attention.causal else masks.FullMask(shape)
        if window:
            mask = masks.LocalMask(shape, (window - 1, 0), offset=0)
        kernel = splash.make_splash_mha_single_device(
            masks.MultiHeadMask([mask] * num_heads),
            block_sizes=sizes,
            attn_logits_soft_cap=attention.cap or None,
            interpret=interpret,
        )
        heads: jax.Array = jax.vmap(kernel)(q, k, v, segments, sinks)
        return heads

    windows = (attention.window,) if is_global is None else (0, attention.window)
    kernels = [functools.partial(run, window) for window in windows]
    own = None if sinks is None else sinks[:, 0]
    return mark_residuals(kernels, is_global, name, q, k, v, own).swapaxes(1, 2)[:, :length]


def _block(length: int) -> int:
    return max(size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if length % size == 0)
