"""Rows of an embedding table whose vocabulary is split over mesh axes: each shard looks up what it holds.

Which rows of a split table a shard holds is written down here rather than left to the partitioner, whose gather aborts
the compiler on some meshes when a pipeline is around it.

b: sequences, T: tokens a sequence, D: embed dim, V: rows of the table (of one stage's share in a pipeline).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshtrain.layout.placement import Placement, axes_in

TABLE, ROWS, FOUND = ("vocab", "embed"), ("batch", "sequence"), ("batch", "sequence", "embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, rows: jax.Array, placement: Placement) -> jax.Array:
    """Returns table[rows], [b, T, D], and zeros for rows below 0 or from V on.

    Args:
      table: [V, D], gathered over the axes that split it for storage only.
      rows: int32 [b, T].
      placement: where table, rows and what is found live.
    """
    vocabulary, batch = _specs(table, rows, placement)
    axes = axes_in(vocabulary)

    def found(table: jax.Array, rows: jax.Array) -> jax.Array:
        local = rows - _index(axes) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        x = jnp.take(table, jnp.where(here, local, 0), axis=0, mode="clip")
        x = jnp.where(here[..., None], x, 0)
        # In float32: the CPU compiler aborts on a sum of bfloat16 over shards. All but one of the terms are 0.
        return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x

    return placement.on_shards(found, (vocabulary, batch), batch)(table, rows)


def _forward(table: jax.Array, rows: jax.Array, placement: Placement) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Of the table the backward pass needs the shape alone; the program does not keep the rest.
    return look_up(table, rows, placement), (table, rows)


def _backward(
    placement: Placement, kept: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    table, rows = kept
    vocabulary, batch = _specs(table, rows, placement)
    axes = axes_in(vocabulary)
    num_rows = table.shape[0] // placement.size(axes)

    def added(rows: jax.Array, cotangent: jax.Array) -> jax.Array:
        local = rows - _index(axes) * num_rows
        beyond = jnp.where((local >= 0) & (local < num_rows), local, num_rows)
        zeros = jnp.zeros((num_rows, cotangent.shape[-1]), jnp.float32)
        total = zeros.at[beyond].add(cotangent.astype(jnp.float32), mode="drop").astype(table.dtype)
        return jax.lax.psum(total, axes_in(batch)) if axes_in(batch) else total

    total = placement.on_shards(added, (batch, batch), vocabulary)(rows, cotangent)
    return total, np.zeros(rows.shape, jax.dtypes.float0)


look_up.defvjp(_forward, _backward)


def _specs(table: jax.Array, rows: jax.Array, placement: Placement) -> tuple[PartitionSpec, PartitionSpec]:
    return placement.weight_spec(table.shape, TABLE), placement.activation_spec(rows.shape, ROWS)


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    return jax.lax.axis_index(axes) if axes else 0
