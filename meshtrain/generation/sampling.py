"""Samples tokens from logits: greedily, or at random with temperature, top-k and top-p.

R: rows of the batch, one for each text; V: padded vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

_LEAST_TEMPERATURE = 1e-6  # float32 logits divided by a much smaller number overflow


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling options. They apply in the order temperature, top_k, top_p, as in Hugging Face's generation.

    Attributes:
      temperature: divisor of the logits. Below 1e-6 decoding is greedy: the most probable token is chosen.
      top_k: number of most probable tokens among which one is sampled; 0: all tokens.
      top_p: probability, above 0 up to 1. A token is sampled from the smallest set of most probable tokens whose
        probabilities sum to at least `top_p` (nucleus sampling, Holtzman et al. 2020); 1: all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def row_keys(key: jax.Array, prompts: jax.Array, samples: jax.Array) -> jax.Array:
    """Returns one random key per row, typed keys [R]. A row's key depends neither on the mesh nor on other rows.

    Args:
      key: the random key made from the seed.
      prompts: int32 [R], the index of each row's prompt among all prompts.
      samples: int32 [R], the index of each row among the samples for its prompt.
    """
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(jnp.broadcast_to(key, prompts.shape), prompts), samples)


def choose(logits: jax.Array, keys: jax.Array, index: jax.Array, sampling: Sampling) -> jax.Array:
    """Samples the next token of each of R rows; returns ids, int32 [R].

    Args:
      logits: float32 [R, vocabulary]; a token at minus infinity is never chosen.
      keys: typed keys [R], one for each row.
      index: int32 scalar, the number of tokens that each row has generated before; folded into the keys.
      sampling: temperature, top-k and top-p.
    """
    if sampling.temperature < _LEAST_TEMPERATURE:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = mask_logits(logits / sampling.temperature, sampling)
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def mask_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Sets the logits of tokens that top-k or top-p excludes to minus infinity; returns float32 [rows, vocabulary].

    Tokens with the same logit as the last included token are also included, so the order of equal logits is irrelevant.
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1.0:
        descending = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        least = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
