"""The share of packed pairs that greedy decoding gets right, from one forward pass.

b: sequences in a microbatch, T: tokens of targets in a sequence, V: padded vocabulary.
"""

import jax
import jax.numpy as jnp

from meshtrain.models.metrics import Ratio
from meshtrain.models.task import Batch


def exact_match(logits: jax.Array, batch: Batch) -> Ratio:
    """Returns the number of pairs whose targets are all the most probable token, and the number of pairs.

    That is the share of pairs which greedy decoding gets right: as long as all tokens before were right, it has the
    same input as here.

    Args:
      logits: float32 [b, T, V], padding at minus infinity.
      batch: with `targets`, `weights` and `segment_ids`. The tokens of a pair are neighbours. A pair counts if it has
        a target of weight above 0, and only such targets have to be right.
    """
    counts = batch["weights"] > 0
    wrong = counts & (jnp.argmax(logits, axis=-1) != batch["targets"])
    segment_ids = batch["segment_ids"]
    differs = segment_ids[:, 1:] != segment_ids[:, :-1]
    ends = jnp.ones_like(differs[:, :1])
    is_first, is_last = jnp.concatenate([ends, differs], axis=1), jnp.concatenate([differs, ends], axis=1)
    is_pair = is_last & (_sum_in_pair(counts, is_first) > 0)
    is_right = is_pair & (_sum_in_pair(wrong, is_first) == 0)
    return Ratio(jnp.sum(is_right.astype(jnp.float32)), jnp.sum(is_pair.astype(jnp.float32)))


def _sum_in_pair(marks: jax.Array, is_first: jax.Array) -> jax.Array:
    """Returns how many of a pair's tokens up to each one are marked, int32 [b, T]; both arguments are bool [b, T]."""
    total = jnp.cumsum(marks.astype(jnp.int32), axis=1)
    before_pair = jax.lax.cummax(jnp.where(is_first, total - marks, 0), axis=1)
    return total - before_pair
