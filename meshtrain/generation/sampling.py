"""Chooses one token from logits: greedily, or at random with temperature, top-k and top-p.

R: rows, V: padded vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

_LEAST_TEMPERATURE = 1e-6  # float32 logits divided by a much smaller number overflow


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The three options apply in this order, as in Hugging Face's generation.

    Attributes:
      temperature: logits are divided by it; below 1e-6 the most probable token is chosen, as at 0.
      top_k: only this number of most probable tokens remain; 0: all tokens.
      top_p: only the most probable tokens remain whose probabilities sum to this, including the token that crosses it
        (nucleus sampling, Holtzman et al. 2020); 1: all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def row_keys(key: jax.Array, prompts: jax.Array, samples: jax.Array) -> jax.Array:
    """Returns one random key per row, keys [R]; it depends neither on the mesh nor on the other rows of the batch.

    Args:
      key: the random key made from the seed.
      prompts: int32 [R], the index of each row's prompt in the request.
      samples: int32 [R], the index of the row among the samples of its prompt.
    """
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(jnp.broadcast_to(key, prompts.shape), prompts), samples)


def choose(logits: jax.Array, keys: jax.Array, index: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns one token for each row, int32 [R].

    Args:
      logits: float32 [R, V]; a token at minus infinity is never chosen.
      keys: the keys of the rows, keys [R].
      index: int32 scalar, the number of tokens generated before.
      sampling: how to choose.
    """
    if sampling.temperature < _LEAST_TEMPERATURE:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = mask_logits(logits / sampling.temperature, sampling)
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def mask_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns logits float32 [R, V], at minus infinity for tokens that top-k and top-p exclude.

    Tokens as probable as the last included token are included, too, so that the order of equal logits does not matter.
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
