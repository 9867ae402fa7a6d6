"""Attention with grouped queries, within the documents of a packed sequence: self-attention and cross-attention.

b, T, S, N, G, H: see `attention.py`; D: embed dim, C: slots of a cache.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshtrain.hardware.accelerators import GPU
from meshtrain.models.attention import blockwise, context_parallel, dot_product, flex, splash, triton
from meshtrain.models.attention.attention import Attention, Documents
from meshtrain.models.attention.select import Case, chosen, uses_score_function
from meshtrain.models.layers import Norm, multiply, normal, weight
from meshtrain.models.remat import HEADS, QKV
from meshtrain.models.rotary import rotate
from meshtrain.sharding.param_sharding import axes_of_dims
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.saved import mark


class Memory(NamedTuple):
    """The sequence that cross-attention reads, such as the output of an encoder.

    Attributes:
      states: activations [b, S, D], from which keys and values are projected.
      documents: int32 [b, S], the document of each token; None: the memory is one document.
    """

    states: jax.Array
    documents: jax.Array | None


class Slots(NamedTuple):
    """The slots (places for tokens) of a cache that one new token of each row attends to.

    Attributes:
      filled: int32 [b, C] for C slots, 1 if the row's token attends to the slot, else 0. In self-attention it is 1 for
        the new token's slot, and 0 for slots outside of a window.
      own: int32 scalar, the slot of the new token; unused in cross-attention.
    """

    filled: jax.Array
    own: jax.Array


# Linen collections of the variables `keys` and `values`. `apply(..., mutable=[NEW])` also returns the keys and values
# of the tokens that it computes, [b, S, G, H]. The collection CACHE contains the keys and values of earlier tokens,
# [b, C, G, H], to which a new token attends.
NEW, CACHE = "new", "cache"

SINKS = "sinks"
QUERIES = ("batch", "sequence", "heads", "head_dim")


class MultiHead(nn.Module):
    """Multi-head attention, [b, T, D] -> [b, T, D], with heads sharded over the tensor axis.

    The projections to queries, keys and values are column parallel, the output projection is row parallel.

    Attributes:
      attention: settings of attention, such as the number of heads.
      init_std: standard deviation of the initial weights of queries, keys, values and sinks.
      output_std: standard deviation of the initial weights of the output projection.
      placement: determines the shardings of weights and activations.
      dtype: compute dtype.
    """

    attention: Attention
    init_std: float
    output_std: float
    placement: Placement
    dtype: DTypeLike

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: jax.Array | None,
        documents: jax.Array | None,
        memory: Memory | None = None,
        slots: Slots | None = None,
        is_global: jax.Array | None = None,
        stretch: jax.Array | float | None = None,
    ) -> jax.Array:
        """Returns the output of attention, [b, T, D].

        If attention is causal, a query attends to the tokens up to its position, otherwise to all tokens.

        Args:
          x: activations [b, T, D].
          angles: rotary angles float32 [b, T, H / 2]; None: no rotary positions. Must be None with a memory, whose
            positions are unrelated to the positions of queries.
          documents: int32 [b, T], the document of each token; a query attends only to tokens of its document. None:
            each sequence is one document.
          memory: the sequence from which keys and values are projected (cross-attention); None: `x` (self-attention).
            `memory.documents` is required if `documents` is given, and must be None otherwise.
          slots: for generation, the slots of the collection CACHE that the only token of each row (T = 1) attends to.
            If attention is causal, the token's keys and values replace the contents of its slot. Otherwise the cache
            contains the memory and does not change. None: no cache.
          is_global: bool scalar, whether queries ignore the window and attend to all tokens before them; None: they do
            not. It is an array, so that scanned layers with and without a window are compiled once.
          stretch: factor of rotated queries and keys, a number or float32 scalar; None: 1.
        """
        attention, (source, of_keys) = self.attention, (x, documents) if memory is None else memory
        causal = attention.causal
        assert memory is None or (angles is None and not causal), (
            "attention to a memory is not causal and has no rotary positions"
        )
        assert (documents is None) == (of_keys is None), "both queries and keys have documents, or neither"
        assert causal or not attention.window, "a window requires causal attention"
        q = self._norm_heads("query", self._project("query", x, attention.num_heads, "heads"), "heads")
        k, v = self._keys_and_values(source, angles, slots, stretch)
        q = q if angles is None else rotate(q, angles, stretch)
        return self._output(self._heads(q, k, v, documents, of_keys, slots, is_global, memory is not None), x.shape[-1])

    def _heads(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        documents: jax.Array | None,
        of_keys: jax.Array | None,
        slots: Slots | None,
        is_global: jax.Array | None,
        has_memory: bool = False,
    ) -> jax.Array:
        """Returns the attention output of each head, [b, T, N, width of v].

        `select.chosen` selects the implementation. G: key heads, C: slots of a cache.

        Args:
          q: queries [b, T, N, H], rotated.
          k: keys [b, S or C, G, H], rotated.
          v: values [b, S or C, G, width of v].
          documents: int32 [b, T], the document of each query; None: one document.
          of_keys: int32 [b, S], the document of each key; None: one document.
          slots: the slots of the cache that a query attends to, which replace documents; None: no cache.
          is_global: bool scalar, whether queries ignore the window; None: they do not.
          has_memory: whether keys and values come from a memory instead of the queries' sequence (cross-attention).
        """
        attention = self.attention
        # Initialization uses no kernel: it runs in float32, which cuDNN's kernel rejects, and its shapes are computed
        # before JAX may query devices. No kernel takes a single query.
        how = "xla"
        if slots is None and not self.is_initializing():
            lengths, platform = (q.shape[1], k.shape[1]), self.placement.platform
            masked, gathers = documents is not None, self._gathers_keys(q)
            capability = self.placement.compute_capability
            case = Case(attention, lengths, self.dtype, platform, masked, has_memory, gathers, capability)
            how, _ = chosen(case)
            how = "flex" if how == "cudnn" and uses_score_function(case) else how
        both = None if documents is None or of_keys is None else (documents, of_keys)
        if slots is not None:
            both = (jnp.ones_like(slots.filled[:, :1]), slots.filled)  # the slots already respect the window
            attention = dataclasses.replace(attention, causal=False, window=0)
        heads = self._attend(q, k, v, both, self._sinks(q), attention.among(k.shape[1]), how, is_global)
        heads = self.placement.activation(heads, QUERIES)
        # The results of these kernels are already marked; another mark would save an array twice.
        return heads if how in ("splash", "triton", "blockwise", "flex", "cudnn") else mark(heads, HEADS)

    def _output(self, heads: jax.Array, embed_dim: int) -> jax.Array:
        """Returns the output projection, [b, T, D], of the attention output of each head, [b, T, N, H]."""
        outer, zeros, place, dtype = normal(self.output_std), nn.initializers.zeros, self.placement, self.dtype
        shape, axes = (*heads.shape[2:], embed_dim), ("heads", "head_dim", "embed")
        output = weight(self, "output", shape, axes, outer, place, dtype)
        result = multiply(self, "output", heads, output, axes, place)
        result = place.cotangent(result, ("batch", "sequence", "embed"))
        if self.attention.output_bias:
            result = result + weight(self, "output_bias", (embed_dim,), ("norm",), zeros, place, dtype)
        return result

    def _keys_and_values(
        self, source: jax.Array, angles: jax.Array | None, slots: Slots | None, stretch: jax.Array | float | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns rotated keys and values: [b, S, G, H] of `source` without a cache, [b, C, G, H] with a cache.

        G: key heads, C: slots of the cache.

        Args:
          source: activations from which keys and values are projected, [b, S, D].
          angles: rotary angles float32 [b, S, H / 2]; None: no rotary positions.
          slots: for generation, the slots of the cache. If attention is causal, the new token's keys and values
            replace the contents of its slot. None: no cache.
          stretch: factor of rotated keys; None: 1.
        """
        if slots is not None and not self.attention.causal:
            return self.get_variable(CACHE, "keys"), self.get_variable(CACHE, "values")
        k = self._norm_heads("key", self._project("key", source, self.attention.num_kv_heads, "kv_heads"), "kv_heads")
        v = self._project("value", source, self.attention.num_kv_heads, "kv_heads")
        k = k if angles is None else rotate(k, angles, stretch)
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
        documents: Documents,
        sinks: jax.Array | None,
        attention: Attention,
        how: str,
        is_global: jax.Array | None,
    ) -> jax.Array:
        """Returns the attention output of each head, [b, T, N, width of v]; runs a kernel on each device's shards.

        Args:
          q: queries [b, T, N, H].
          k: keys [b, S or C, G, H], with G key heads; C is the number of slots of a cache.
          v: values [b, S or C, G, width of v].
          documents: document ids of queries and of keys; None: one document.
          sinks: scores of attention sinks, float32 [b, T, N]; None: no sinks.
          attention: settings of attention.
          how: name of the implementation, a choice of `model.attention` other than `auto`, or `flex` (cuDNN's kernel
            with a score function).
          is_global: bool scalar, whether queries ignore the window; None: they do not.
        """
        kernel = self._kernel(how, attention)
        is_global = is_global if attention.window else None

        def run(
            q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents, sinks: jax.Array | None,
            is_global: jax.Array | None, **place: jax.Array,
        ) -> jax.Array:  # fmt: skip
            # Some kernels have no windows.
            which = {} if is_global is None else {"is_global": is_global}
            return kernel(q, k, v, documents, sinks=sinks, **which, **place)

        queries = self.placement.activation_spec(q.shape, QUERIES)
        keys = self.placement.activation_spec(k.shape, ("batch", "sequence", "kv_heads", "head_dim"))
        _, parts, *_ = axes_of_dims(queries, q.ndim)
        if how == "xla" and not parts:
            return run(q, k, v, documents, sinks, is_global)
        # A kernel has no partitioning rule, or its rule fails if some axes are manual. So it runs on each device's
        # shards in a manual region. Each axis made manual here splits sequences, their tokens or heads: no array is
        # replicated, and no gradient has to be summed over devices. A loop over blocks runs there as well, so that the
        # partitioner does not see its slices.
        tokens = [self.placement.activation_spec(array.shape[:2], ("batch", "sequence")) for array in (q, k)]
        replicated = None if is_global is None else PartitionSpec()
        of_sinks = None if sinks is None else PartitionSpec(*queries[:3])
        in_specs = (queries, keys, keys, tuple(tokens) if documents else None, of_sinks, replicated)
        on_device: context_parallel.Attend = run
        if parts and self._gathers_keys(q):
            on_device = context_parallel.by_keys(run, parts, causal=attention.causal)
        elif parts:
            on_device = context_parallel.by_heads(run, parts)
        on_shards = self.placement.on_shards(on_device, in_specs, queries, is_opaque=True)
        heads: jax.Array = on_shards(q, k, v, documents, sinks, is_global)
        return heads

    def _sinks(self, q: jax.Array) -> jax.Array | None:
        """Returns the scores of attention sinks for queries [b, T, N, H], float32 [b, T, N]; None without sinks."""
        if not self.attention.sinks:
            return None
        own = weight(self, SINKS, q.shape[2:3], ("heads",), normal(self.init_std), self.placement, jnp.float32)
        return self.placement.activation(jnp.broadcast_to(own, q.shape[:3]), QUERIES[:3])

    def _gathers_keys(self, q: jax.Array) -> bool:
        """Returns whether devices with parts of a sequence must gather keys and values (`context_parallel.by_keys`).

        This is so if the number of heads in q, [b, T, N, H], is not a multiple of the devices that share a sequence.
        """
        _, parts, of_heads, _ = axes_of_dims(self.placement.activation_spec(q.shape, QUERIES), q.ndim)
        return bool(parts) and q.shape[2] % self.placement.size((*parts, *of_heads)) > 0

    def _kernel(self, how: str, attention: Attention) -> context_parallel.Attend:
        """Returns the selected implementation as a function of q, k, v and documents; values may be narrower than keys.

        Args:
          how: name of the implementation, a choice of `model.attention` other than `auto`, or `flex` (cuDNN's kernel
            with a score function).
          attention: settings of attention.
        """
        attend = self._of_equal_widths(how, attention)

        def padded(q: jax.Array, k: jax.Array, v: jax.Array, *others: Documents, **place: jax.Array) -> jax.Array:
            missing, width = k.shape[-1] - v.shape[-1], v.shape[-1]
            if not missing:
                return attend(q, k, v, *others, **place)
            return attend(q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing))), *others, **place)[..., :width]

        return padded

    def _of_equal_widths(self, how: str, attention: Attention) -> context_parallel.Attend:
        if how == "blockwise":
            return functools.partial(blockwise.attend, attention=attention, name=HEADS)
        if how == "flex":
            return functools.partial(flex.attend, attention=attention, name=HEADS)
        if how == "splash":
            interpret = self.placement.platform != "tpu"
            return functools.partial(splash.attend, attention=attention, name=HEADS, interpret=interpret)
        if how == "triton":
            interpret = self.placement.platform not in GPU
            return functools.partial(triton.attend, attention=attention, name=HEADS, interpret=interpret)
        return functools.partial(dot_product.attend, attention=attention, how="cudnn" if how == "cudnn" else "xla")

    def _project(
        self, name: str, x: jax.Array, num_heads: int, axis: str, width: int = 0, rows: str = "embed"
    ) -> jax.Array:
        """Returns `x` projected to heads, [b, T, num_heads, width].

        Args:
          name: name of the projection's weight.
          x: activations [b, T, ...].
          num_heads: number of heads in the result.
          axis: logical axis of the heads dim of the weight, such as `heads` or `kv_heads`.
          width: width of a head; 0: H.
          rows: logical axis of the weight's first dim, over which the product sums.
        """
        shape, axes = (x.shape[-1], num_heads, width or self.attention.head_dim), (rows, axis, "head_dim")
        kernel = weight(self, name, shape, axes, normal(self.init_std), self.placement, self.dtype)
        heads = multiply(self, name, x, kernel, axes, self.placement)
        if self.attention.qkv_biases:
            zeros = nn.initializers.zeros
            heads = heads + weight(self, f"{name}_bias", shape[1:], axes[1:], zeros, self.placement, self.dtype)
        return mark(self.placement.activation(heads, ("batch", "sequence", axis, "head_dim")), QKV)

    def _norm_heads(self, name: str, heads: jax.Array, axis: str) -> jax.Array:
        """Returns queries or keys [b, T, heads, H] after the norm of each head, or after one norm over all heads.

        Without norms of queries and keys, `heads` is returned unchanged.

        Args:
          name: `query` or `key`, the prefix of the norm's name.
          heads: queries or keys [b, T, heads, H].
          axis: logical axis of the heads, for the scale of a norm over all heads.
        """
        attention, epsilon = self.attention, self.attention.qk_epsilon
        if epsilon is None:
            return heads
        axes = (axis, "head_dim") if attention.qk_of_all else ("norm",)
        norm = Norm("rmsnorm", epsilon, False, self.placement, attention.centered_scales, axes, name=f"{name}_norm")
        result: jax.Array = norm(heads)
        return result
