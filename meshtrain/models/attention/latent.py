"""Multi-head latent attention: keys and values of all heads are projected from one latent per token, which is cached.

    c = norm(x W_down)                                    the latent; one additional rotary key is shared by all heads
    k, v = c W_up                                         for each head; the rotary channels of k are the shared key
    q = norm(x W_query_down) W_query, or x W_query        its last channels are rotary

In training keys and values are computed for each head, and any implementation of attention can be used. A generated
token attends to the latents themselves: (q W_up) c equals q (c W_up), so the cache has no heads (DeepSeek-AI 2024,
DeepSeek-V2, section 2.1 and appendix C; DeepSeek-V3, section 2.1.1).

b, T, N, H: see `attention.py`; D: embed dim, R: width of a latent, P: rotary channels of a head, W: width of a value,
C: slots of the cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from meshtrain.models.attention import dot_product
from meshtrain.models.attention.attention import LATENTS, Latent
from meshtrain.models.attention.multi_head import CACHE, NEW, Memory, MultiHead, Slots
from meshtrain.models.layers import Norm, multiply, normal, weight, with_adapter
from meshtrain.models.remat import QKV
from meshtrain.models.rotary import rotate_neighbours
from meshtrain.sharding.saved import mark

ROWS = "from_latent"


class LatentAttention(MultiHead):
    """Multi-head latent attention, [b, T, D] -> [b, T, D]: heads are sharded over the tensor axis, latents are not.

    Attributes:
      latent: widths of the latents, of rotary channels and of values.
    """

    latent: Latent

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

        The collection NEW gets the `latents` [b, T, R + P] of these tokens. The collection CACHE provides the `latents`
        [b, C, R + P] of earlier tokens. R: width of a latent, P: rotary channels, C: slots of the cache.

        Args:
          x: activations [b, T, D].
          angles: rotary angles float32 [b, T, P / 2].
          documents: int32 [b, T], the document of each token; None: each sequence is one document.
          memory: must be None, because latents are computed from `x`.
          slots: for generation, the slots of the cache that the only token of each row attends to; None: no cache.
          is_global: bool scalar, whether queries ignore the window; None: they do not.
          stretch: YaRN factor of all channels of queries and keys, a number or float32 scalar; None: no factor.
            (`MultiHead` multiplies only rotated queries and keys.)
        """
        assert memory is None, "latent attention has no memory"
        assert angles is not None, "latent attention has rotary channels"
        latents = self._latents(x, angles)
        if self.is_mutable_collection(NEW) and not self.is_initializing():
            self.put_variable(NEW, LATENTS, latents)
        source, width = x, self.latent.query_width
        if width:
            source = self._norm_latent("query_latent_norm", self._down("query_down", x, width))
        q = self._project("query", source, self.attention.num_heads, "heads", rows=ROWS if width else "embed")
        q = q if stretch is None else q * jnp.asarray(stretch**2, q.dtype)  # once for queries, once for keys
        q, of_rotary = jnp.split(q, [self.attention.head_dim - self.latent.rotary], axis=-1)
        of_rotary = rotate_neighbours(of_rotary, angles)
        if slots is not None:
            heads = self._among_latents(q, of_rotary, latents, slots)
        else:
            k, v = self._of_heads(latents)
            q = jnp.concatenate([q, of_rotary], axis=-1)
            heads = self._heads(q, k, v, documents, documents, None, is_global)
        return self._output(heads, x.shape[-1])

    def _down(self, name: str, x: jax.Array, width: int) -> jax.Array:
        """Returns `x` projected to a latent, [b, T, width]; `name` is the name of the projection's weight."""
        axes = ("embed", "latent")
        kernel = weight(self, name, (x.shape[-1], width), axes, normal(self.init_std), self.placement, self.dtype)
        down = multiply(self, name, x, kernel, axes, self.placement)
        return mark(self.placement.activation(down, ("batch", "sequence", "latent")), QKV)

    def _norm_latent(self, name: str, x: jax.Array) -> jax.Array:
        centered = self.attention.centered_scales
        normed: jax.Array = Norm("rmsnorm", self.latent.epsilon, False, self.placement, centered, name=name)(x)
        return normed

    def _latents(self, x: jax.Array, angles: jax.Array) -> jax.Array:
        """Returns the normalized latents and the rotated key that all heads share, concatenated: [b, T, R + P].

        R: width of a latent, P: rotary channels. `x` is [b, T, D]; `angles` are the rotary angles [b, T, P / 2].
        """
        both = self._down("key_value_down", x, self.latent.width + self.latent.rotary)
        latents, shared = jnp.split(both, [self.latent.width], axis=-1)
        shared = rotate_neighbours(shared[:, :, None], angles)[:, :, 0]
        return jnp.concatenate([self._norm_latent("latent_norm", latents), shared], axis=-1)

    def _of_heads(self, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys [b, T, N, H] and values [b, T, N, W], projected from latents [b, T, R + P].

        N: heads, H: width of a key, W: width of a value, R: width of a latent, P: rotary channels.
        """
        num_heads, width = self.attention.num_heads, self._width_of_keys
        compressed, shared = jnp.split(latents, [self.latent.width], axis=-1)
        both = self._project("key_value", compressed, num_heads, "heads", width + self.latent.values, ROWS)
        k, v = jnp.split(both, [width], axis=-1)
        shared = jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], self.latent.rotary))
        return jnp.concatenate([k, shared], axis=-1), v

    @property
    def _width_of_keys(self) -> int:
        """The number of a key head's channels without rotary positions, H - P."""
        return self.attention.head_dim - self.latent.rotary

    def _among_latents(self, q: jax.Array, of_rotary: jax.Array, latents: jax.Array, slots: Slots) -> jax.Array:
        """Returns the attention output of each head, [b, 1, N, W], for one token per row that attends to the cache.

        N: heads, H: width of a query, W: width of a value, R: width of a latent, P: rotary channels.

        Args:
          q: channels of the query without rotary positions, [b, 1, N, H - P].
          of_rotary: rotated channels of the query, [b, 1, N, P].
          latents: latents of the new token, [b, 1, R + P].
          slots: the slots of the cache that the token attends to.
        """
        o, latent, num_heads = self.attention, self.latent, self.attention.num_heads
        shape = (latent.width, num_heads, self._width_of_keys + latent.values)
        axes = (ROWS, "heads", "head_dim")
        kernel = weight(self, "key_value", shape, axes, normal(self.init_std), self.placement, self.dtype)
        kernel = with_adapter(self, "key_value", kernel)
        of_keys, of_values = jnp.split(kernel, [self._width_of_keys], axis=-1)
        stored: jax.Array = self.get_variable(CACHE, LATENTS)
        is_own = (jnp.arange(stored.shape[1]) == slots.own)[None, :, None]
        keys = jnp.where(is_own, latents, stored)[:, :, None]
        q = jnp.concatenate([jnp.einsum("btnh,rnh->btnr", q, of_keys), of_rotary], axis=-1)
        # One key and value head for all query heads; the scores equal those with separate keys for each head.
        among = dataclasses.replace(
            o, num_kv_heads=1, head_dim=q.shape[-1], scalar=o.scalar or o.head_dim, causal=False, window=0
        )
        documents = jnp.ones_like(slots.filled[:, :1]), slots.filled
        sinks = self._sinks(q)
        heads = dot_product.attend(q, keys, keys, documents, among, sinks, how="xla")[..., : latent.width]
        return jnp.einsum("btnr,rnw->btnw", heads, of_values)
