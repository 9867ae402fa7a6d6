"""How probable given targets are, token by token, and summed over the segments of packed rows.

B: rows, T: tokens a row, V: padded vocabulary, S: segments in a row.
"""

import functools

import jax
import jax.numpy as jnp


def token_scores(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log probability of each target, float32 [B, T], and whether it is the most probable one, bool [B, T].

    Of equally probable tokens the one with the smallest id is the most probable, as `jnp.argmax` has it.

    Args:
      logits: float32 [B, T, V], padding at minus infinity.
      targets: int32 [B, T].
    """
    # A mask instead of a look-up: columns may be sharded.
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == targets


def segment_sums(values: jax.Array, segment_ids: jax.Array, num_segments: int) -> jax.Array:
    """Returns the sums of values [B, T] over each segment, [B, S]: column s is segment s + 1; 0 is padding.

    Args:
      values: float32 or int32 [B, T].
      segment_ids: int32 [B, T], from 0 to S.
      num_segments: S.
    """
    of_row = functools.partial(jax.ops.segment_sum, num_segments=num_segments + 1)
    return jax.vmap(of_row)(values, segment_ids)[:, 1:]


def segment_scores(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns sums over the targets of each segment that count: log probabilities, and how many a greedy choice misses.

    Both are [B, T], float32 and int32: a row has at most as many segments as tokens.

    Args:
      logits: float32 [B, T, V], padding at minus infinity.
      targets: int32 [B, T].
      weights: float32 [B, T]; a target counts where it is above 0.
      segment_ids: int32 [B, T], from 1; 0 is padding.
    """
    log_probabilities, is_greedy = token_scores(logits, targets)
    counts = weights > 0
    sums = segment_sums(jnp.where(counts, log_probabilities, 0.0), segment_ids, targets.shape[1])
    misses = segment_sums(jnp.where(counts & ~is_greedy, 1, 0), segment_ids, targets.shape[1])
    return sums, misses
