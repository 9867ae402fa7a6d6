"""Causal self-attention with grouped queries, within the documents of a packed sequence.

b: sequences, T: tokens a sequence, D: embed dim, N: query heads, K: key and value heads, H: head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from meshtrain.layout.placement import Placement
from meshtrain.models.layers import normal, rotate, weight
from meshtrain.models.remat import HEADS


class Attention(nn.Module):
    """Heads split over the tensor axis: column-parallel q, k, v, row-parallel output. [b, T, D] -> [b, T, D]."""

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
    def __call__(self, x: jax.Array, angles: jax.Array | None, mask: jax.Array | None) -> jax.Array:
        """Applies attention.

        Args:
          x: [b, T, D].
          angles: rotary angles float32 [b, T, H / 2], or None without rotary positions.
          mask: bool [b, 1, T, T], true where a query (rows) may see a key (columns), besides causality; or None.
        """
        q = self._project("query", x, self.num_heads, "heads")
        k = self._project("key", x, self.num_kv_heads, "kv_heads")
        v = self._project("value", x, self.num_kv_heads, "kv_heads")
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        # Initial weights are made in float32, which cuDNN's kernel does not take, and do not depend on what follows.
        implementation: Any = "xla" if self.is_initializing() else self.implementation
        if implementation == "auto":
            fits = fused_kernel_fits(self.head_dim, self.dtype, jax.default_backend())
            implementation = "cudnn" if fits and mask is None else "xla"
        heads = self._attend(q, k, v, mask, implementation)
        heads = checkpoint_name(self.placement.activation(heads, ("batch", "sequence", "heads", "head_dim")), HEADS)
        embed_dim, outer = x.shape[-1], normal(self.output_std)
        shape, axes = (self.num_heads, self.head_dim, embed_dim), ("heads", "head_dim", "embed")
        output = weight(self, "output", shape, axes, outer, self.placement, self.dtype)
        result = jax.lax.dot_general(heads, output, (((2, 3), (0, 1)), ((), ())))
        if self.bias:
            zeros = nn.initializers.zeros_init()
            result = result + weight(self, "output_bias", (embed_dim,), ("norm",), zeros, self.placement, self.dtype)
        return result

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, how: Any) -> jax.Array:
        """Returns [b, T, N, H]."""
        if how != "cudnn":
            if self.dtype == jnp.float16:
                # JAX asks for a float16 product that only GPUs have; what the softmax is taken of is float32 anyway.
                q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
            heads = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=how)
            return heads.astype(self.dtype)
        # The kernel's own rule for the partitioner fails where some axes are manual: what each shard does is written
        # out. Every axis that is left splits sequences or heads, so that nothing is replicated, and no gradient summed.
        queries = self.placement.activation_spec(q.shape, ("batch", "sequence", "heads", "head_dim"))
        keys = self.placement.activation_spec(k.shape, ("batch", "sequence", "kv_heads", "head_dim"))
        kernel = functools.partial(jax.nn.dot_product_attention, mask=mask, is_causal=True, implementation=how)
        return self.placement.on_shards(kernel, (queries, keys, keys), queries, is_opaque=True)(q, k, v)

    def _project(self, name: str, x: jax.Array, num_heads: int, axis: str) -> jax.Array:
        """Returns [b, T, num_heads, H]."""
        shape, axes = (x.shape[-1], num_heads, self.head_dim), ("embed", axis, "head_dim")
        kernel = weight(self, name, shape, axes, normal(self.init_std), self.placement, self.dtype)
        heads = jax.lax.dot_general(x, kernel, (((2,), (0,)), ((), ())))
        if self.bias:
            zeros = nn.initializers.zeros_init()
            heads = heads + weight(self, f"{name}_bias", shape[1:], axes[1:], zeros, self.placement, self.dtype)
        return self.placement.activation(heads, ("batch", "sequence", axis, "head_dim"))


def fused_kernel_fits(head_dim: int, dtype: DTypeLike, platform: str) -> bool:
    """Returns whether `auto` means cuDNN's kernel, which keeps no matrix of probabilities, and takes no mask either.

    Args:
      head_dim: H.
      dtype: of queries, keys and values.
      platform: as JAX names it, `gpu` or `cuda` for NVIDIA's.
    """
    # The limit of head dims that every GPU with such a kernel has; those from Hopper on take up to 256.
    return platform in ("gpu", "cuda") and jnp.dtype(dtype).itemsize == 2 and head_dim <= 128 and head_dim % 8 == 0


def same_document(segment_ids: jax.Array) -> jax.Array:
    """Returns bool [b, 1, T, T]: true where query and key stand in the same document of a packed sequence.

    Args:
      segment_ids: int32 [b, T].
    """
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
