"""The settings of attention (`Attention`, `Latent`), and functions that all implementations share.

An implementation is a function `attend(q, k, v, documents, attention, sinks, ..., first=None)` -> heads [b, T, N, H]:

    q          queries [b, T, N, H]
    k, v       keys and values [b, S, G, H]; G divides N
    documents  int32 [b, T] and [b, S], ids of the documents of queries and of keys, at least 0. A query attends only to
               keys with its document id. None: each sequence is one document
    attention  the settings, an `Attention`
    sinks      float32 [b, T, N], the scores of attention sinks, equal for all queries, see `kernel.py`; None: no sinks
    first      int32 scalar, the position of the first query among the keys, if a device has a part of the queries;
               None: queries and keys are the same tokens, or attention is not causal
    is_global  bool scalar, whether the window is ignored, for implementations with windows; None: it is not ignored
    name       name of the heads and of the logarithms of the softmax's sums, as marked values for remat policies
    interpret  whether to run a kernel as plain JAX, slowly, on a platform for which it is not made

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
    """The settings of a layer's attention. Layers, kernels, checks, caches and cost formulas read them.

    Attributes:
      num_heads: number of query heads in the model, N; a device may compute only a part of them.
      num_kv_heads: number of key heads in the model, G, equal to the number of value heads.
      head_dim: width of a query or key head, H.
      asked: the requested implementation, one of the choices of the option `model.attention`.
      causal: whether a query attends only to tokens up to its position; otherwise it attends to all tokens.
      window: number of tokens that a causal query attends to, including its own token (Beltagy et al. 2020); 0: all
        tokens up to its position.
      scalar: number whose square root divides the products of queries and keys; 0: H.
      cap: scores become cap tanh(score / cap) (Bello et al. 2016); 0: no cap.
      qkv_biases: whether the projections of queries, keys and values have biases.
      output_bias: whether the output projection has a bias.
      qk_epsilon: epsilon of an RMSNorm over each head of queries and keys, before rotary positions (Dehghani et al.
        2023 use LayerNorm); None: no norms.
      qk_of_all: whether one norm covers all heads of the queries, and one norm all heads of the keys.
      sinks: whether each head has a learned sink, an additional score in the softmax without a value (`kernel.py`).
      centered_scales: whether the norms of queries and keys multiply by 1 + scale instead of scale.
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
        """The factor of products of queries and keys: 1 / sqrt(`scalar`), or 1 / sqrt(`head_dim`) if `scalar` is 0."""
        return 1 / math.sqrt(self.scalar or self.head_dim)

    def among(self, num_keys: int) -> "Attention":
        """Returns the settings for attention over `num_keys` keys: window 0 if it covers all keys, else unchanged.

        A window that covers all keys excludes no key, and kernels have separate code for windows.
        """
        return dataclasses.replace(self, window=self.window if self.window < num_keys else 0)


@dataclasses.dataclass(frozen=True)
class Latent:
    """The settings of multi-head latent attention (`latent.py`).

    Attributes:
      width: width of the latent from which keys and values are projected, R.
      query_width: width of the latent from which queries are projected; 0: they are projected from the residual stream.
      rotary: number of rotary channels of a query or key head, P, at most H.
      values: width of a value head, W.
      epsilon: epsilon of the norms of both latents.
    """

    width: int
    query_width: int
    rotary: int
    values: int
    epsilon: float


def pad(x: jax.Array, length: int, filler: int = 0) -> jax.Array:
    """Returns `x`, [b, T, ...], with its second dim padded to `length` by `filler`; unchanged if T is not smaller."""
    widths = [(0, length - x.shape[1] if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=filler) if length > x.shape[1] else x


def pad_documents(
    documents: Documents, q: jax.Array, k: jax.Array, lengths: tuple[int, int], causal: bool
) -> Documents:
    """Returns the document ids of queries and keys padded to these lengths, with the id -1 for padding.

    Queries of a document do not attend to padding, because the ids differ. Padding follows all tokens. Without
    documents, the result is None if attention is causal, because the causal mask hides padding, or if no key is
    padding. Otherwise all tokens get the id 0.

    Args:
      documents: int32 [b, T] and [b, S], the ids of queries and of keys; None: each sequence is one document.
      q: queries [b, T, ...].
      k: keys [b, S, ...].
      lengths: (padded T, padded S).
      causal: whether a query attends only to keys up to its position.
    """
    if documents is None:
        if causal or lengths[1] == k.shape[1]:
            return None
        documents = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
    of_queries, of_keys = (pad(ids, length, -1) for ids, length in zip(documents, lengths, strict=True))
    return of_queries, of_keys


def same_document(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
    """Returns a mask bool [b, 1, T, S] for T queries and S keys, true if query and key are in the same document.

    Args:
      of_queries: int32 [b, T], document ids of queries.
      of_keys: int32 [b, S], document ids of keys.
    """
    return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
