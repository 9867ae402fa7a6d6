"""Attention on TPUs by JAX's own Pallas kernel ("splash"), which stores no [T, S] matrix of probabilities.

b: sequences in a microbatch, T: tokens a sequence, S: tokens of the memory (T in self-attention), N: query heads,
G: key and value heads, H: head dim.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# The kernel's blocks are multiples of a TPU's 128 lanes; larger ones read keys and values less often.
LANES, LARGEST_BLOCK = 128, 512
HEAD_DIMS = (64, 128, 256)


def fits(head_dim: int, sequence_length: int, dtype: DTypeLike) -> bool:
    """Returns whether `auto` means this kernel on a TPU.

    Args:
      head_dim: H; `auto` takes the sizes for which the tests compile the kernel.
      sequence_length: T; `auto` takes multiples of 128. The kernel itself pads others (`model.attention=splash`).
      dtype: of queries, keys and values; `auto` takes bfloat16 alone. The kernel ignores `jax_default_matmul_precision`
        in float32.
    """
    return head_dim in HEAD_DIMS and sequence_length % LANES == 0 and jnp.dtype(dtype) == jnp.bfloat16


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: tuple[jax.Array, jax.Array] | None,
    *,
    name: str,
    interpret: bool,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Returns heads [b, T, N, H]; logits, softmax and sums are float32.

    Args:
      q: [b, T, N, H].
      k: [b, S, G, H]; G divides N.
      v: as `k`.
      documents: int32 [b, T] and [b, S], the documents of queries and of keys, at least 0; a query attends to its own
        document only. None: each sequence is one document.
      name: marks the heads and the logarithms of the softmax's sums for `jax.checkpoint` policies.
      interpret: whether to run the kernel as plain JAX, slowly, on a device that is no TPU.
      causal: whether a query attends to the keys up to its own place only; then S is T.
      window: how many keys a causal query attends to, that of its own place among them; 0: all before it. Blocks of
        keys outside of it are skipped.
      scale: what scores are multiplied by; None: H^-0.5.
      cap: scores become cap tanh(score / cap); 0: they stay.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, length, num_heads, head_dim = q.shape
    # The kernel does not scale scores. Dividing in float32 rounds once; a 16-bit root and product would round twice.
    q = (q.astype(jnp.float32) / (1 / scale if scale else math.sqrt(head_dim))).astype(q.dtype)
    if documents is None and not causal and k.shape[1] % LANES:
        documents = (jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32))
    segments = None
    if documents is not None:
        # A document of its own hides the padding. A causal mask does too, because padding comes after every query.
        segments = splash.SegmentIds(*(_longer(ids, -1) for ids in documents))
    q, k, v = (_longer(x, 0).swapaxes(1, 2) for x in (q, k, v))
    shape = (q.shape[2], k.shape[2])
    mask: masks.Mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    if window:
        mask = masks.LocalMask(shape, (window - 1, 0), offset=0)
    of_q, of_kv = map(_block, shape)
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * num_heads),
        block_sizes=splash.BlockSizes(
            of_q, of_kv, block_q_dkv=of_q, block_kv_dkv=of_kv, block_q_dq=of_q, block_kv_dq=of_kv
        ),
        residual_checkpoint_name=name,
        attn_logits_soft_cap=cap or None,
        interpret=interpret,
    )
    heads: jax.Array = jax.vmap(kernel)(q, k, v, segments)
    return heads.swapaxes(1, 2)[:, :length]


def _block(length: int) -> int:
    return max(size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if length % size == 0)


def _longer(x: jax.Array, filler: int) -> jax.Array:
    """Returns `x` with its second dim padded to a multiple of the lanes."""
    num_tokens = -x.shape[1] % LANES
    widths = [(0, num_tokens if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=filler) if num_tokens else x
