"""Products with weights of which each row has its own expert's: rows stand in blocks of one expert each.

Nothing is dropped and no shape depends on what was chosen: each expert's rows are padded to whole blocks.

C: choices (an expert for a token), E: experts, m: rows a block, R: rows of all blocks, D, F: dims of a weight.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Blocks(NamedTuple):
    """Which choice stands in which row.

    Attributes:
      rows: int32 [R], the choice in each row; C: none, the row is padding.
      owners: int32 [R / m], the expert of each block, ascending; E: the block has no rows.
    """

    rows: jax.Array
    owners: jax.Array


def arranged(chosen: jax.Array, num_experts: int, block_rows: int) -> Blocks:
    """Returns the choices sorted by expert, those of one expert in their order, each expert in whole blocks.

    There are ceil(C / m) + E blocks, enough for any choices; those without rows come last.

    Args:
      chosen: int32 [C], from 0 to E; E is no expert here, and its choices stand in no row.
      num_experts: E.
      block_rows: m.
    """
    (num_choices,) = chosen.shape
    num_blocks = -(-num_choices // block_rows) + num_experts
    ordered, order = jax.lax.sort((chosen, jnp.arange(num_choices, dtype=jnp.int32)), num_keys=1, is_stable=True)
    bounds = jnp.searchsorted(ordered, jnp.arange(num_experts + 1, dtype=chosen.dtype)).astype(jnp.int32)
    sizes = bounds[1:] - bounds[:-1]
    counts = (sizes + block_rows - 1) // block_rows
    ends = jnp.cumsum(counts)
    owners = jnp.sum(jnp.arange(num_blocks)[:, None] >= ends, axis=1, dtype=jnp.int32)
    # The last expert's numbers stand for those of no expert; `is_real` is false there.
    safe = jnp.minimum(owners, num_experts - 1)
    place = (jnp.arange(num_blocks) - (ends - counts)[safe])[:, None] * block_rows + jnp.arange(block_rows)
    is_real = (place < sizes[safe][:, None]) & (owners < num_experts)[:, None]
    index = jnp.clip(bounds[safe][:, None] + place, 0, num_choices - 1)
    return Blocks(jnp.where(is_real, order[index], num_choices).reshape(-1), owners)


@jax.custom_vjp
def product(rows: jax.Array, weights: jax.Array, owners: jax.Array) -> jax.Array:
    """Returns [R, F], each block of rows times the weight of its owner, summed in float32; zeros where it has none.

    Args:
      rows: [R, D].
      weights: [E, D, F], of the rows' dtype.
      owners: int32 [R / m], see `Blocks`.
    """
    return _product(rows, weights, owners)


def _product(rows: jax.Array, weights: jax.Array, owners: jax.Array) -> jax.Array:
    width, dtype = weights.shape[2], rows.dtype

    def times(block: jax.Array, owner: jax.Array) -> jax.Array:
        return jnp.dot(block, weights[owner], preferred_element_type=jnp.float32).astype(dtype)

    def of_block(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        block, owner = given
        empty = jnp.zeros((block.shape[0], width), dtype)
        result: jax.Array = jax.lax.cond(owner < weights.shape[0], times, lambda *_: empty, block, owner)
        return result

    blocks = rows.reshape(owners.size, -1, rows.shape[1])
    results: jax.Array = jax.lax.map(of_block, (blocks, owners))
    return results.reshape(-1, width)


def _of_weights(rows: jax.Array, cotangent: jax.Array, owners: jax.Array, num_experts: int) -> jax.Array:
    """Returns the cotangent of the weights [E, D, F], float32: each block adds to that of its owner."""

    def add(sums: jax.Array, block: jax.Array, of_result: jax.Array, owner: jax.Array) -> jax.Array:
        found = jnp.dot(block.T, of_result, preferred_element_type=jnp.float32)
        return sums.at[owner].add(found)

    def of_block(sums: jax.Array, given: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        is_real = given[2] < num_experts
        return jax.lax.cond(is_real, add, lambda sums, *_: sums, sums, *given), None

    blocks, of_results = (x.reshape(owners.size, -1, x.shape[1]) for x in (rows, cotangent))
    zeros = jnp.zeros((num_experts, rows.shape[1], cotangent.shape[1]), jnp.float32)
    sums: jax.Array = jax.lax.scan(of_block, zeros, (blocks, of_results, owners))[0]
    return sums


def _forward(
    rows: jax.Array, weights: jax.Array, owners: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _product(rows, weights, owners), (rows, weights, owners)


def _backward(
    residuals: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, owners = residuals
    of_rows = _product(cotangent, weights.swapaxes(1, 2), owners)
    return of_rows, _of_weights(rows, cotangent, owners, weights.shape[0]).astype(weights.dtype), None


product.defvjp(_forward, _backward)
