"""Rows of an array read in another order, with transposes that read as well. Kernels add rows up in any order.

t: tokens, k: choices of a token, R: rows, D: width.
"""

import jax
import jax.numpy as jnp


def places_of(elements: jax.Array, num: int) -> jax.Array:
    """Returns int32 [num], the row in which each element stands; R: in none.

    Args:
      elements: int32 [R], the element in each row, each in one at most; `num` for padding.
      num: how many elements there are.
    """
    # Rows of padding write behind the elements.
    places = jnp.full(num + 1, elements.size, jnp.int32)
    return places.at[elements].set(jnp.arange(elements.size, dtype=jnp.int32))[:-1]


# The next two are each other's transposes.
@jax.custom_vjp
def spread(x: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the activations of each row's token, [R, D], zeros for padding.

    Args:
      x: [t, D].
      tokens: int32 [R], the token of each row, t for padding.
      places: int32 [t, k], the row of each choice; R: it has none.
    """
    return jnp.take(x, tokens, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collected(rows: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the sum of each token's rows, [t, D], added up in float32.

    Args:
      rows: [R, D].
      tokens: as in `spread`.
      places: as in `spread`.
    """
    of_choices = jnp.take(rows, places, axis=0, mode="fill", fill_value=0)
    return jnp.sum(of_choices, axis=1, dtype=jnp.float32).astype(rows.dtype)


def _of_spread(indices: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return collected(cotangent, *indices), None, None


def _of_collected(indices: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return spread(cotangent, *indices), None, None


spread.defvjp(lambda x, *indices: (spread(x, *indices), indices), _of_spread)
collected.defvjp(lambda rows, *indices: (collected(rows, *indices), indices), _of_collected)
