"""The record that describes an attention, and helpers that all implementations share.

An implementation is a function `attend(q, k, v, documents, attention, sinks, ..., first=None)` -> heads [b, T, N, H]:

    q          [b, T, N, H]
    k, v       [b, S, G, H]; G divides N
    documents  int32 [b, T] and [b, S], ids of the documents of queries and of keys, at least 0: a query attends only
               to its own document. None: each sequence is one document
    sinks      float32 [b, T, N], the same for each query, see `kernel.py`; None: there are none
    first      int32 scalar, the position of the first query among the keys, if a device has a part of the queries;
               None: queries and keys are the same tokens, or not causal
    name       marks the heads and the logarithms of the softmax's sums for `jax.checkpoint` policies
    interpret  whether to run a kernel as plain JAX, slowly, on a device of another kind

Scores, softmax and sums are float32. With causal attention S is T, unless queries are a part of the sequence.

b: sequences in a microbatch, T: tokens per sequence, S: tokens of the memory (T in self-attention), N: query heads, G:
key and value heads, H: head dim.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

Documents = tuple[jax.Array, jax.Array] | None
LATENTS = "latents"  # the cache's entry for latent attention


@dataclasses.dataclass(frozen=True)
class Attention:
    """The description of a layer's attention; layers, kernels, `select`, checks, caches and formulas read it.

    Attributes:
      num_heads: N of the model; a device may have some of them.
      num_kv_heads: G of the model.
      head_dim: H.
      asked: the requested implementation, one of the choices of `model.attention`.
      causal: whether a query attends only to the tokens up to its own position; otherwise to all of them.
      window: number of tokens that a causal query attends to, including its own (Beltagy et al. 2020); 0: all before
        it.
      scalar: products of queries and keys are divided by its square root; 0: by the square root of H.
      cap: scores become cap tanh(score / cap) (Bello et al. 2016); 0: no cap.
      qkv_biases: whether queries, keys and values have biases.
      output_bias: whether the output has a bias.
      qk_epsilon: of an RMSNorm over each head of queries and keys, before rotary positions (Dehghani et al. 2023 use
        LayerNorm); None: no norms.
      qk_of_all: whether one norm covers all heads of the queries, and one all heads of the keys.
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
        """The factor of products of queries and keys."""
        return 1 / math.sqrt(self.scalar or self.head_dim)

    def among(self, num_keys: int) -> "Attention":
        """Returns the attention without its window if the window covers all `num_keys` keys.

        Kernels have separate code paths for windows, which are then not needed.
        """
        return dataclasses.replace(self, window=self.window if self.window < num_keys else 0)


@dataclasses.dataclass(frozen=True)
class Latent:
    """The widths of latent attention; for the letters see `latent.py`.

    Attributes:
      width: R, of the latent of keys and values.
      query_width: of the latent of queries; 0: queries are projected from the residual stream.
      rotary: P, rotary channels of a head, at most H.
      values: W, of a value head.
      epsilon: of the norms of both latents.
    """

    width: int
    query_width: int
    rotary: int
    values: int
    epsilon: float


def pad(x: jax.Array, length: int, filler: int = 0) -> jax.Array:
    """Returns `x` with its second dim padded to `length`."""
    widths = [(0, length - x.shape[1] if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=filler) if length > x.shape[1] else x


def pad_documents(
    documents: Documents, q: jax.Array, k: jax.Array, lengths: tuple[int, int], causal: bool
) -> Documents:
    """Returns the document ids of queries and keys padded to these lengths; a separate id hides the padding.

    A causal mask hides padding too, because padding comes after every query: then the result may be None.
    """
    if documents is None:
        if causal or lengths[1] == k.shape[1]:
            return None
        documents = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
    of_queries, of_keys = (pad(ids, length, -1) for ids, length in zip(documents, lengths, strict=True))
    return of_queries, of_keys


def same_document(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
    """Returns bool [b, 1, T, S]: true if query and key are in the same document, from int32 [b, T] and [b, S]."""
    return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
