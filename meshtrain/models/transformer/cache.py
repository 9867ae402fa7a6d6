"""The KV cache of a stack of layers: keys and values, or latents, of earlier tokens.

R: rows (texts that are generated together), C: slots (places for tokens), K: layers, G: key and value heads, H: head
dim, L: latent and rotary channels. All rows store their next token in the same slot, whatever their positions are, so
writing is one slice update, without communication on any mesh. Slots of a prompt's padding are marked as empty.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.models.attention.attention import LATENTS, Attention, Latent
from meshtrain.models.task import Entry

Stored = Mapping[str, jax.Array]


def stack_entries(
    attention: Attention, num_layers: int, num_rows: int, num_slots: int, dtype: DTypeLike, latent: Latent | None = None
) -> dict[str, Entry]:
    """Returns the cache entries of a stack of layers: `keys` and `values` [K, R, C, G, H], or `latents` [K, R, C, L].

    G: key and value heads, H: head dim, L: latent and rotary channels.

    Args:
      attention: settings of attention: number of heads and their width.
      num_layers: K, number of layers.
      num_rows: R, number of texts.
      num_slots: C, maximum number of tokens in a text, including padding of the prompt.
      dtype: dtype of keys and values, or of latents.
      latent: widths of latent attention, for which only latents are cached; None: keys and values are cached.
    """
    if latent:
        of_latents = (num_layers, num_rows, num_slots, latent.width + latent.rotary)
        return {LATENTS: Entry(of_latents, dtype, ("layers", "batch", None, "latent"))}
    shape = (num_layers, num_rows, num_slots, attention.num_kv_heads, attention.head_dim)
    entry = Entry(shape, dtype, ("layers", "batch", None, "kv_heads", "head_dim"))
    return {"keys": entry, "values": entry}


def row_entries(num_rows: int, num_slots: int) -> dict[str, Entry]:
    """Returns the cache entries that all layers share: `filled`, `positions` and `slot`; R: rows (texts), C: slots.

    `filled` int32 [R, C] is 1 if a slot has a token of the row, else 0. `positions` int32 [R] is the position of each
    row's next token. `slot` int32 scalar is the slot in which all rows store their next token.
    """
    return {
        "filled": Entry((num_rows, num_slots), jnp.int32, ("batch", None)),
        "positions": Entry((num_rows,), jnp.int32, ("batch",)),
        "slot": Entry((), jnp.int32, ()),
    }


def write(stored: Stored, new: Stored, slot: jax.Array | int) -> dict[str, jax.Array]:
    """Returns cached arrays [K, R, C, ...], with T new tokens written to the slots from `slot` on.

    K: layers, R: rows (texts), C: slots.

    Args:
      stored: name -> cached array [K, R, C, ...].
      new: name -> array of the new tokens [K, R, T, ...]; only names in `new` are returned.
      slot: the slot of the first new token, an int or int32 scalar.
    """
    return {
        name: jax.lax.dynamic_update_slice_in_dim(stored[name], part.astype(stored[name].dtype), slot, axis=2)
        for name, part in new.items()
    }


def first_slots(lengths: jax.Array, num_slots: int) -> jax.Array:
    """Returns the cache entry `filled`, int32 [R, num_slots], for R prompts of these lengths that start in slot 0."""
    return (jnp.arange(num_slots)[None] < lengths[:, None]).astype(jnp.int32)


def latest(filled: jax.Array, num_tokens: int) -> jax.Array:
    """Returns `filled`, int32 [rows, slots], with 1 only for the slots of each row's last `num_tokens` tokens."""
    num_from_here_on = jnp.cumsum(filled, axis=1, dtype=filled.dtype)
    num_from_here_on = num_from_here_on[:, -1:] - num_from_here_on + filled
    return jnp.where(num_from_here_on <= num_tokens, filled, 0)


def next_slot(filled: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns `filled`, int32 [rows, slots], with `slot` marked as filled in every row."""
    ones = jnp.ones((filled.shape[0], 1), filled.dtype)
    return jax.lax.dynamic_update_slice_in_dim(filled, ones, slot, axis=1)
