"""What attention computes, as one record, and what all of its implementations share.

An implementation is a function `attend(q, k, v, documents, attention, sinks, ..., first=None)` -> heads [b, T, N, H]:

    q          [b, T, N, H]
    k, v       [b, S, G, H]; G divides N
    documents  int32 [b, T] and [b, S], those of queries and of keys, at least 0: a query attends to its own document
               only. None: each sequence is one document
    sinks      float32 [b, T, N], the same for each query, see `kernel.py`; None: there are none
    first      int32 scalar, the place of the first query among the keys, where a device has a part of the queries;
               None: queries and keys are those of the same tokens, or not causal
    name       marks the heads and the logarithms of the softmax's sums for `jax.checkpoint` policies
    interpret  whether to run a kernel as plain JAX, slowly, on a device of another kind

Scores, softmax and sums are float32. With causal attention S is T but for parts of the queries.

b: sequences in a microbatch, T: tokens a sequence, S: tokens of the memory (T in self-attention), N: query heads,
G: key and value heads, H: head dim.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

Documents = tuple[jax.Array, jax.Array] | None
LATENTS = "latents"  # what caches hold of latent attention


@dataclasses.dataclass(frozen=True)
class Attention:
    """What the attention of a layer computes; layers, kernels, `select`, checks, caches and formulas read it.

    Attributes:
      num_heads: N of the whole model; a device may have some of them.
      num_kv_heads: G, likewise.
      head_dim: H.
      asked: which implementation, one of the choices of `model.attention`.
      causal: whether a query attends to the tokens up to its own place only; otherwise to all of them.
      window: how many tokens a causal query attends to, its own among them (Beltagy et al. 2020); 0: all before it.
      scalar: products of queries and keys are divided by its square root; 0: by that of H.
      cap: scores become cap tanh(score / cap) (Bello et al. 2016); 0: they stay.
      qkv_biases: whether queries, keys and values have biases.
      output_bias: whether the output has one.
      qk_epsilon: of an RMSNorm over each head of queries and keys, before rotary positions (as Dehghani et al. 2023 do
        with LayerNorm); None: without these norms.
      qk_of_all: whether that is one norm over all heads of the queries, and one over those of the keys.
      sinks: whether each head has a score that takes a part of the softmax.
      centered_scales: of the norms of queries and keys, see `Norm`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    asked: str = "auto"
    causal: bool = True
    window: int = 0
    scalar: float = 0
    cap: float = 0.0
    qkv_biases: bool = False
    output_bias: bool = False
    qk_epsilon: float | None = None
    qk_of_all: bool = False
    sinks: bool = False
    centered_scales: bool = False

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return 1 / math.sqrt(self.scalar or self.head_dim)

    def among(self, num_keys: int) -> "Attention":
        """Returns the same without a window over all keys, as kernels have paths of their own for windows."""
        return dataclasses.replace(self, window=self.window if self.window < num_keys else 0)


@dataclasses.dataclass(frozen=True)
class Latent:
    """The widths of latent attention, see `latent.py`.

    Attributes:
      width: R.
      query_width: of the latent of queries; 0: queries are projected from the residual stream.
      rotary: P, at most H.
      values: W.
      epsilon: of the norms of both latents.
    """

    width: int
    query_width: int
    rotary: int
    values: int
    epsilon: float


def padded(x: jax.Array, length: int, filler: int = 0) -> jax.Array:
    """Returns `x` with its second dim padded to `length`."""
    widths = [(0, length - x.shape[1] if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=filler) if length > x.shape[1] else x


def padded_documents(
    documents: Documents, q: jax.Array, k: jax.Array, lengths: tuple[int, int], causal: bool
) -> Documents:
    """Returns the documents of queries and keys padded to these lengths, with one of its own that hides the padding.

    A causal mask hides it too, because padding comes after every query: then there may be none.
    """
    if documents is None:
        if causal or lengths[1] == k.shape[1]:
            return None
        documents = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
    of_queries, of_keys = (padded(ids, length, -1) for ids, length in zip(documents, lengths, strict=True))
    return of_queries, of_keys


def same_document(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
    """Returns bool [b, 1, T, S]: true where query and key are in the same document, int32 [b, T] and [b, S]."""
    return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
