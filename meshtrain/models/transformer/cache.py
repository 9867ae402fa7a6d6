"""The cache of a stack of layers: keys and values, or latents, of earlier tokens.

R: rows, C: slots, K: layers, G: key and value heads, H: head dim, L: latent and rotary channels. All rows store their
next token in the same slot, whatever their positions are: writing is one slice update, without communication on any
mesh. The slots of a shorter prompt's padding stay empty.
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
    """Returns the cache of a stack of layers: `keys` and `values` [K, R, C, G, H], or `latents` [K, R, C, L]."""
    if latent:
        of_latents = (num_layers, num_rows, num_slots, latent.width + latent.rotary)
        return {LATENTS: Entry(of_latents, dtype, ("layers", "batch", None, "latent"))}
    shape = (num_layers, num_rows, num_slots, attention.num_kv_heads, attention.head_dim)
    entry = Entry(shape, dtype, ("layers", "batch", None, "kv_heads", "head_dim"))
    return {"keys": entry, "values": entry}


def row_entries(num_rows: int, num_slots: int) -> dict[str, Entry]:
    """Returns the per-row fields of the KV cache (independent of layers).

    `filled` int32 [R, C] is 1 if a slot has a token of the row, `positions` int32 [R] is the position of the row's next
    token, and `slot` int32 is the slot of the next token of all rows.
    """
    return {
        "filled": Entry((num_rows, num_slots), jnp.int32, ("batch", None)),
        "positions": Entry((num_rows,), jnp.int32, ("batch",)),
        "slot": Entry((), jnp.int32, ()),
    }


def write(stored: Stored, new: Stored, slot: jax.Array | int) -> dict[str, jax.Array]:
    """Returns the entries of `stored` that `new` has, [K, R, C, ...], with `new` [K, R, T, ...] written at `slot`."""
    return {
        name: jax.lax.dynamic_update_slice_in_dim(stored[name], part.astype(stored[name].dtype), slot, axis=2)
        for name, part in new.items()
    }


def first_slots(lengths: jax.Array, num_slots: int) -> jax.Array:
    """Returns `filled` int32 [R, C] for prompts of these lengths, int32 [R], that start in slot 0."""
    return (jnp.arange(num_slots)[None] < lengths[:, None]).astype(jnp.int32)


def latest(filled: jax.Array, num_tokens: int) -> jax.Array:
    """Returns `filled`, int32 [R, C], with only the last `num_tokens` tokens of each row, or fewer if it has fewer."""
    num_from_here_on = jnp.cumsum(filled, axis=1, dtype=filled.dtype)
    num_from_here_on = num_from_here_on[:, -1:] - num_from_here_on + filled
    return jnp.where(num_from_here_on <= num_tokens, filled, 0)


def next_slot(filled: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns `filled` with a token in `slot` of every row."""
    ones = jnp.ones((filled.shape[0], 1), filled.dtype)
    return jax.lax.dynamic_update_slice_in_dim(filled, ones, slot, axis=1)
