"""Causal self-attention with grouped queries, within the documents of a packed sequence.

b: sequences in a microbatch, T: tokens a sequence, D: embed dim, N: query heads, G: key and value heads, H: head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from meshtrain.layout.placement import Placement
from meshtrain.models import splash
from meshtrain.models.layers import normal, rotate, weight
from meshtrain.models.remat import HEADS


class Attention(nn.Module):
    """Attention with heads sharded over the tensor axis: q, k, v column parallel, the output projection row parallel.

    [b, T, D] -> [b, T, D].
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    implementation: str
    init_std: float
    output_std: float
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, angles: jax.Array | None, documents: jax.Array | None) -> jax.Array:
        """Applies attention.

        Args:
          x: [b, T, D].
          angles: rotary angles float32 [b, T, H / 2], or None without rotary positions.
          documents: int32 [b, T], the document of each token; a query attends to its own document only. None: each
            sequence is one document.
        """
        q = self._project("query", x, self.num_heads, "heads")
        k = self._project("key", x, self.num_kv_heads, "kv_heads")
        v = self._project("value", x, self.num_kv_heads, "kv_heads")
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        # Initial weights do not depend on the kernel. They are initialized in float32, which cuDNN's kernel rejects.
        # Their shapes are computed before JAX may query devices.
        how, masked = "xla", documents is not None
        if not self.is_initializing():
            platform = self.placement.platform
            how = chosen(self.implementation, self.head_dim, x.shape[1], self.dtype, masked, platform)
        heads = self._attend(q, k, v, documents, how)
        heads = self.placement.activation(heads, ("batch", "sequence", "heads", "head_dim"))
        # Splash names its results itself. A second name would save the same array twice.
        heads = heads if how == "splash" else checkpoint_name(heads, HEADS)
        embed_dim, outer = x.shape[-1], normal(self.output_std)
        shape, axes = (self.num_heads, self.head_dim, embed_dim), ("heads", "head_dim", "embed")
        output = weight(self, "output", shape, axes, outer, self.placement, self.dtype)
        result = jax.lax.dot_general(heads, output, (((2, 3), (0, 1)), ((), ())))
        if self.bias:
            zeros = nn.initializers.zeros_init()
            result = result + weight(self, "output_bias", (embed_dim,), ("norm",), zeros, self.placement, self.dtype)
        return result

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, how: str) -> jax.Array:
        """Returns [b, T, N, H]."""
        if how == "xla":
            if self.dtype == jnp.float16:
                # JAX requests a float16 matmul that only GPUs have. The input of the softmax is float32 anyway.
                q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            return _by_jax(q, k, v, documents, how).astype(self.dtype)
        # A kernel has no partitioning rule, or one that fails where some axes are manual. So it runs on each device's
        # shards in a manual region. Each axis made manual here splits sequences or heads: no array is replicated, and
        # no gradient has to be summed over devices.
        if how == "splash":
            interpret = self.placement.platform != "tpu"
            kernel: Any = functools.partial(splash.attend, name=HEADS, interpret=interpret)
        else:
            kernel = functools.partial(_by_jax, how=how)
        queries = self.placement.activation_spec(q.shape, ("batch", "sequence", "heads", "head_dim"))
        keys = self.placement.activation_spec(k.shape, ("batch", "sequence", "kv_heads", "head_dim"))
        tokens = self.placement.activation_spec(q.shape[:2], ("batch", "sequence"))
        run = self.placement.on_shards(kernel, (queries, keys, keys, tokens), queries, is_opaque=True)
        heads: jax.Array = run(q, k, v, documents)
        return heads

    def _project(self, name: str, x: jax.Array, num_heads: int, axis: str) -> jax.Array:
        """Returns [b, T, num_heads, H]."""
        shape, axes = (x.shape[-1], num_heads, self.head_dim), ("embed", axis, "head_dim")
        kernel = weight(self, name, shape, axes, normal(self.init_std), self.placement, self.dtype)
        heads = jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ())))
        if self.bias:
            zeros = nn.initializers.zeros_init()
            heads = heads + weight(self, f"{name}_bias", shape[1:], axes[1:], zeros, self.placement, self.dtype)
        return self.placement.activation(heads, ("batch", "sequence", axis, "head_dim"))


def chosen(
    asked: str, head_dim: int, sequence_length: int, dtype: DTypeLike, masks_documents: bool, platform: str
) -> str:
    """Returns the implementation that computes attention: `xla`, `cudnn` or `splash`.

    `auto` means cuDNN's kernel on GPUs and splash on TPUs where they support the shapes. Neither stores the [T, T]
    matrix of probabilities. With documents cuDNN's kernel would need a [T, T] mask, so `auto` means `xla` there.

    Args:
      asked: one of the choices of `model.attention`; any but `auto` is returned as it is.
      head_dim: H.
      sequence_length: T.
      dtype: of queries, keys and values.
      masks_documents: whether a token attends to its own document only.
      platform: as JAX names it, such as `tpu`, `gpu` or `cuda`.
    """
    if asked != "auto":
        return asked
    if platform == "tpu" and splash.fits(head_dim, sequence_length, dtype):
        return "splash"
    # Every GPU with a cuDNN kernel supports head dims up to 128. GPUs from Hopper on support up to 256.
    fits_cudnn = jnp.dtype(dtype).itemsize == 2 and head_dim <= 128 and head_dim % 8 == 0
    return "cudnn" if platform in ("gpu", "cuda") and fits_cudnn and not masks_documents else "xla"


def _by_jax(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None, how: Any) -> jax.Array:
    mask = same_document(documents) if documents is not None else None
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=how)


def same_document(segment_ids: jax.Array) -> jax.Array:
    """Returns bool [b, 1, T, T]: true where query and key are in the same document of a packed sequence.

    Args:
      segment_ids: int32 [b, T].
    """
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
