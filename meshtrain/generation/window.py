"""Generates text with `Task.logits` for tasks without `Task.decode`: one forward pass for each new token.

R: rows, P: tokens of a prompt after padding, T: tokens of a sequence, V: padded vocabulary.
"""

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp

from meshtrain.models.task import Batch, Cache, Decode, Entry, Params

Logits = Callable[[Params, Batch], jax.Array]


def by_window(logits: Logits, batch: Mapping[str, Entry] | Mapping[str, jax.ShapeDtypeStruct]) -> Decode:
    """Returns a `Decode` that computes each new token from `Task.logits`; its cache has the last T tokens of each row.

    Only the last T - 1 tokens of a prompt are used (the last token if T is 1). When a row has T tokens, each new token
    removes its oldest token.

    Args:
      logits: `Task.logits`: (params, batch of R rows) -> float32 [R, T, vocabulary].
      batch: name -> entry of the task's batch, including `tokens` [B, T].
    """
    length = int(batch["tokens"].shape[1])

    def after(params: Params, window: jax.Array, filled: jax.Array) -> tuple[jax.Array, Cache]:
        of_all = logits(params, batch_of(window, batch))
        last = jnp.take_along_axis(of_all, (filled - 1)[:, None, None], axis=1)[:, 0]
        return last, {"window": window, "filled": filled}

    def prefill(params: Params, tokens: jax.Array, lengths: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        filled = jnp.minimum(lengths, max(length - 1, 1))
        place = jnp.arange(length)[None]
        from_place = jnp.minimum((lengths - filled)[:, None] + place, tokens.shape[1] - 1)
        window = jnp.where(place < filled[:, None], jnp.take_along_axis(tokens, from_place, axis=1), 0)
        return after(params, window, filled)

    def step(params: Params, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        window, filled = cache["window"], cache["filled"]
        is_full = filled == length
        window = jnp.where(is_full[:, None], jnp.roll(window, -1, axis=1), window)
        filled = jnp.where(is_full, length - 1, filled)
        window = jnp.where(jnp.arange(length)[None] == filled[:, None], tokens[:, None], window)
        return after(params, window, filled + 1)

    def cache(num_rows: int, prompt_length: int, num_steps: int) -> dict[str, Entry]:
        return {
            "window": Entry((num_rows, length), jnp.int32, ("batch", None)),
            "filled": Entry((num_rows,), jnp.int32, ("batch",)),
        }

    return Decode(prefill, step, cache)


def batch_of(window: jax.Array, wanted: Collection[str]) -> Batch:
    """Returns a batch in which each row is one document, with the entries that the task's batch has.

    Args:
      window: int32 [R, T], the tokens.
      wanted: names of the entries to return: `tokens`, `targets`, `segment_ids`, `positions`, `weights`.
    """
    ones = jnp.ones(window.shape, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(window.shape[1]), window.shape)
    every = {
        "tokens": window,
        "targets": window,
        "segment_ids": ones,
        "positions": positions,
        "weights": ones.astype(jnp.float32),
    }
    return {name: every[name] for name in wanted}
