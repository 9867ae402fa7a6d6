"""Attention with grouped queries, within the documents of a packed sequence: to the sequence itself or to a memory.

b: sequences in a microbatch, T: tokens a sequence, S: tokens of the memory (T in self-attention), D: embed dim,
N: query heads, G: key and value heads, H: head dim, C: slots of a cache.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.models.attention import blockwise, context_parallel, splash, triton
from meshtrain.models.attention.select import GPU, Case, chosen
from meshtrain.models.fp8 import product
from meshtrain.models.layers import Norm, adapted, capped, normal, rotate, weight
from meshtrain.models.remat import HEADS, QKV
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.stored import axes_of_dims


class Memory(NamedTuple):
    """What cross-attention reads, such as the output of an encoder.

    Attributes:
      states: [b, S, D], from which keys and values are projected.
      documents: int32 [b, S], the document of each token; None: the memory is one document.
    """

    states: jax.Array
    documents: jax.Array | None


class Slots(NamedTuple):
    """Which slots of a cache one new token of each row attends to.

    Attributes:
      filled: int32 [b, C], 1 where the row may attend to the slot, else 0. In self-attention the new token's slot is 1,
        and slots outside of a window are 0.
      own: int32 scalar, the slot of the new token; unused in attention to a memory.
    """

    filled: jax.Array
    own: jax.Array


# Collections of the Linen variables `keys` and `values`. `apply(..., mutable=[NEW])` also returns those of the tokens
# that it was given, [b, S, G, H]. With the collection CACHE, [b, C, G, H], a token attends to the tokens before it.
NEW, CACHE = "new", "cache"

QUERIES = ("batch", "sequence", "heads", "head_dim")

# The documents of the queries [b, T] and of the keys [b, S]; None: one document.
Segments = tuple[jax.Array, jax.Array] | None


class Attention(nn.Module):
    """Attention with heads sharded over the tensor axis: q, k, v column parallel, the output projection row parallel.

    [b, T, D] -> [b, T, D].

    Attributes:
      qkv_biases: adds biases to queries, keys and values, as `bias` does, which adds one to the output as well.
      qk_epsilon: of an RMSNorm over each head of queries and keys, before rotary positions (as Dehghani et al. 2023 do
        with LayerNorm); None: without these norms.
      window: how many tokens a causal query attends to, its own among them (Beltagy et al. 2020); 0: all before it.
      centered_scales: of the norms of queries and keys, see `Norm`.
      scale: what scores are multiplied by; None: H^-0.5.
      cap: scores become cap tanh(score / cap) (Bello et al. 2016); 0: they stay.
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
    causal: bool = True
    qkv_biases: bool = False
    qk_epsilon: float | None = None
    window: int = 0
    centered_scales: bool = False
    scale: float | None = None
    cap: float = 0.0

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array | None,
        documents: jax.Array | None,
        memory: Memory | None = None,
        slots: Slots | None = None,
        is_global: jax.Array | None = None,
    ) -> jax.Array:
        """Applies attention: with `causal` a query attends to the tokens up to its own, else to all of them.

        Args:
          x: [b, T, D].
          angles: rotary angles float32 [b, T, H / 2], or None without rotary positions. They are not applied to a
            memory, in which a token has another position than the query.
          documents: int32 [b, T], the document of each token; a query attends to its own document only. None: each
            sequence is one document.
          memory: what keys and values are made of; None: `x`. It needs `documents` exactly where it has its own.
          slots: where the keys and values stand in the collection CACHE that one token of each row, T = 1, attends to.
            With `causal` its own are added in their slot; otherwise the cache is a memory, which does not change. None:
            there is no cache.
          is_global: bool scalar, whether queries attend to all tokens before them in spite of the window; None: they do
            not. It is data, so that scanned layers with and without a window are compiled once.
        """
        source, of_keys = (x, documents) if memory is None else memory
        assert memory is None or (angles is None and not self.causal), "a memory has no order relative to the queries"
        assert (documents is None) == (of_keys is None), "either queries and keys have documents, or none of them"
        assert self.causal or not self.window, "a window is counted back from the query"
        q = self._normed("query_norm", self._project("query", x, self.num_heads, "heads"))
        k, v = self._keys_and_values(source, angles, slots)
        q = q if angles is None else rotate(q, angles)
        # Initial weights do not depend on the kernel. They are initialized in float32, which cuDNN's kernel rejects.
        # Their shapes are computed before JAX may query devices. No kernel takes a single query.
        how, masked = "xla", documents is not None
        if slots is None and not self.is_initializing():
            lengths = (x.shape[1], source.shape[1])
            window = self.window if self.window < lengths[1] else 0
            case = Case(
                self.head_dim, lengths, self.dtype, self.placement.platform, masked, window, self.cap > 0,
                memory is not None, self._gathers_keys(q),
            )  # fmt: skip
            how, _ = chosen(self.implementation, case)
        segments = None if documents is None or of_keys is None else (documents, of_keys)
        if slots is not None:
            segments = (jnp.ones_like(slots.filled[:, :1]), slots.filled)
        heads = self._attend(q, k, v, segments, self.causal and slots is None, how, is_global)
        heads = self.placement.activation(heads, QUERIES)
        # Policies save the results of these, of cuDNN's kernel outside of branches: a name would save an array twice.
        is_saved = how in ("splash", "triton", "blockwise") or (how == "cudnn" and is_global is None)
        heads = heads if is_saved else checkpoint_name(heads, HEADS)
        embed_dim, outer = x.shape[-1], normal(self.output_std)
        shape, axes = (self.num_heads, self.head_dim, embed_dim), ("heads", "head_dim", "embed")
        output = weight(self, "output", shape, axes, outer, self.placement, self.dtype)
        result = product(heads, output, self.placement)
        result = adapted(self, "output", heads, result, axes, self.placement, self.dtype)
        result = self.placement.cotangent(result, ("batch", "sequence", "embed"))
        if self.bias:
            zeros = nn.initializers.zeros_init()
            result = result + weight(self, "output_bias", (embed_dim,), ("norm",), zeros, self.placement, self.dtype)
        return result

    def _keys_and_values(
        self, source: jax.Array, angles: jax.Array | None, slots: Slots | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns keys, rotated, and values: [b, S, G, H] without a cache, otherwise [b, C, G, H]."""
        if slots is not None and not self.causal:
            return self.get_variable(CACHE, "keys"), self.get_variable(CACHE, "values")
        k = self._normed("key_norm", self._project("key", source, self.num_kv_heads, "kv_heads"))
        v = self._project("value", source, self.num_kv_heads, "kv_heads")
        k = k if angles is None else rotate(k, angles)
        if self.is_mutable_collection(NEW) and not self.is_initializing():
            self.put_variable(NEW, "keys", k)
            self.put_variable(NEW, "values", v)
        if slots is None:
            return k, v
        stored_k: jax.Array = self.get_variable(CACHE, "keys")
        stored_v: jax.Array = self.get_variable(CACHE, "values")
        is_own = (jnp.arange(stored_k.shape[1]) == slots.own)[None, :, None, None]
        return jnp.where(is_own, k, stored_k), jnp.where(is_own, v, stored_v)

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Segments,
        causal: bool,
        how: str,
        is_global: jax.Array | None,
    ) -> jax.Array:
        """Returns [b, T, N, H]."""
        # The slots of a cache are those of the window already. A window over all tokens is none: the kernels have paths
        # of their own for windows.
        window = self.window if causal and self.window < k.shape[1] else 0
        local, everywhere = (self._kernel(how, causal, size) for size in (window, 0))

        def run(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            segments: Segments,
            is_global: jax.Array | None,
            **place: jax.Array,
        ) -> jax.Array:
            # The branches have no collectives: stages of a pipeline may take different ones.
            if is_global is None or not window:
                return local(q, k, v, segments, **place)
            if how == "xla":
                here = jnp.where(is_global, k.shape[1], window)
                return self._kernel(how, causal, here)(q, k, v, segments, **place)
            branches = [functools.partial(branch, **place) for branch in (everywhere, local)]
            heads: jax.Array = jax.lax.cond(is_global, *branches, q, k, v, segments)
            return heads

        queries = self.placement.activation_spec(q.shape, QUERIES)
        keys = self.placement.activation_spec(k.shape, ("batch", "sequence", "kv_heads", "head_dim"))
        _, parts, *_ = axes_of_dims(queries, q.ndim)
        if how == "xla" and not parts:
            return run(q, k, v, segments, is_global)
        # A kernel has no partitioning rule, or one that fails where some axes are manual. So it runs on each device's
        # shards in a manual region. Each axis made manual here splits sequences, their tokens or heads: no array is
        # replicated, and no gradient has to be summed over devices. A loop over blocks runs there as well: the
        # partitioner need not see its slices.
        tokens = [self.placement.activation_spec(array.shape[:2], ("batch", "sequence")) for array in (q, k)]
        replicated = None if is_global is None else PartitionSpec()
        in_specs = (queries, keys, keys, tuple(tokens) if segments else None, replicated)
        on_device: context_parallel.Attend = run
        if parts:
            on_device = (
                context_parallel.by_keys(run, parts, causal=causal)
                if self._gathers_keys(q)
                else context_parallel.by_heads(run, parts)
            )
        on_shards = self.placement.on_shards(on_device, in_specs, queries, is_opaque=True)
        heads: jax.Array = on_shards(q, k, v, segments, is_global)
        return heads

    def _gathers_keys(self, q: jax.Array) -> bool:
        """Returns whether sequences are split over devices, and with q [b, T, N, H] there is no head for each."""
        _, parts, of_heads, _ = axes_of_dims(self.placement.activation_spec(q.shape, QUERIES), q.ndim)
        return bool(parts) and not context_parallel.has_heads(q.shape[2], self.placement.size((*parts, *of_heads)))

    def _kernel(self, how: str, causal: bool, window: int | jax.Array) -> context_parallel.Attend:
        """Returns an implementation as a function of q, k, v and documents."""
        options: Any = {"causal": causal, "window": window, "scale": self.scale, "cap": self.cap}
        if how == "blockwise":
            return functools.partial(blockwise.attend, name=HEADS, **options)
        if how == "splash":
            return functools.partial(splash.attend, name=HEADS, interpret=self.placement.platform != "tpu", **options)
        if how == "triton":
            interpret = self.placement.platform not in GPU
            return functools.partial(triton.attend, name=HEADS, interpret=interpret, **options)
        return functools.partial(_by_jax, how=how, **options)

    def _project(self, name: str, x: jax.Array, num_heads: int, axis: str) -> jax.Array:
        """Returns [b, T, num_heads, H]."""
        shape, axes = (x.shape[-1], num_heads, self.head_dim), ("embed", axis, "head_dim")
        kernel = weight(self, name, shape, axes, normal(self.init_std), self.placement, self.dtype)
        heads = product(x, kernel, self.placement)
        heads = adapted(self, name, x, heads, axes, self.placement, self.dtype)
        if self.bias or self.qkv_biases:
            zeros = nn.initializers.zeros_init()
            heads = heads + weight(self, f"{name}_bias", shape[1:], axes[1:], zeros, self.placement, self.dtype)
        return checkpoint_name(self.placement.activation(heads, ("batch", "sequence", axis, "head_dim")), QKV)

    def _normed(self, name: str, heads: jax.Array) -> jax.Array:
        """Returns [b, T, heads, H], each head normalized, or as it is without these norms."""
        if self.qk_epsilon is None:
            return heads
        norm = Norm("rmsnorm", self.qk_epsilon, False, self.placement, self.centered_scales, name=name)
        result: jax.Array = norm(heads)
        return result


def _by_jax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    causal: bool,
    how: Any,
    window: int | jax.Array,
    scale: float | None,
    cap: float,
    first: jax.Array | None = None,
) -> jax.Array:
    dtype = q.dtype
    if how == "xla" and dtype == jnp.float16:
        # JAX requests a float16 matmul that only GPUs have. The input of the softmax is float32 anyway.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    mask = same_document(*segments) if segments is not None else None
    local = None
    if first is not None:
        after = first + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
        seen = (after >= 0) & (after < window) if isinstance(window, jax.Array) or window else after >= 0
        mask, causal = seen[None, None] if mask is None else mask & seen, False
    elif isinstance(window, int) and mask is None and not cap:
        local = (window - 1, 0) if window else None
    elif isinstance(window, jax.Array) or window:
        # cuDNN's kernel takes a window or a mask. It needs `is_causal` with both: its window has no end.
        in_window = (jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1]) < window)[None, None]
        mask = in_window if mask is None else mask & in_window
    if cap:
        assert how == "xla", "the kernel has no cap"
        return with_cap(q, k, v, mask, causal, scale, cap).astype(dtype)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, is_causal=causal, implementation=how, local_window_size=local
    ).astype(dtype)


def with_cap(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, causal: bool, scale: float | None, cap: float
) -> jax.Array:
    """Returns attention with capped scores [b, T, N, H], written out; scores and softmax are float32.

    Args:
      q: [b, T, N, H].
      k: [b, S, G, H]; G divides N.
      v: as `k`.
      mask: bool, broadcastable to [b, 1, T, S], true where a query attends to a key; None: everywhere.
      causal: whether a query attends to the keys up to its own place only.
      scale: what scores are multiplied by; None: H^-0.5.
      cap: scores become cap tanh(score / cap).
    """
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("btgnh,bsgh->bgnts", groups, k, preferred_element_type=jnp.float32)
    scores = capped(scores * (scale or q.shape[3] ** -0.5), cap)
    if causal:
        before = jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
        mask = before if mask is None else mask & before
    if mask is not None:
        scores = jnp.where(mask[:, :, None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgnts,bsgh->btgnh", weights, v).reshape(q.shape)


def same_document(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
    """Returns bool [b, 1, T, S]: true where query and key are in the same document.

    Args:
      of_queries: int32 [b, T], the document of each query.
      of_keys: int32 [b, S], the document of each key.
    """
    return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
