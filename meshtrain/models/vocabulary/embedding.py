"""Look-ups in an embedding table whose rows are sharded: each shard looks up its own rows, and the results are summed.

This is a manual region because the partitioner's own gather aborts the compiler on some meshes inside a pipeline.
Where the residual stream is sharded along the sequence over the same axes, the sum is a reduce-scatter.

b: sequences in a microbatch, T: tokens a sequence, D: embed dim, v: rows of the table (one stage's part in a pipeline).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshtrain.sharding.placement import Placement
from meshtrain.sharding.stored import axes_in, axes_of_dims, spec_of_dims

TABLE, ROWS, RESIDUAL = ("vocab", "embed"), ("batch", "sequence"), ("batch", "residual_sequence", "embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, rows: jax.Array, placement: Placement) -> jax.Array:
    """Returns table[rows], [b, T, D], with zeros for rows below 0 or from v on.

    The result is sharded along the sequence as the residual stream is, if the table's rows are split over those axes.

    Args:
      table: [v, D], gathered over the axes that split it for storage only.
      rows: int32 [b, T].
      placement: the shardings of the table, the rows and the result.
    """
    vocabulary, batch = _specs(table, rows, placement)
    axes = axes_in(vocabulary)
    scattered = _scattered(table, rows, placement)
    summed = tuple(axis for axis in axes if axis not in scattered)
    # The CPU compiler aborts on a bfloat16 psum. The sum is exact in any dtype: all terms but one are 0.
    wire_dtype = jnp.float32 if axes and placement.platform == "cpu" else table.dtype

    def look_up_local(table: jax.Array, rows: jax.Array) -> jax.Array:
        local = rows - _index(axes) * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        x = jnp.take(table, jnp.where(here, local, 0), axis=0, mode="clip")
        x = jnp.where(here[..., None], x, 0)
        if scattered:
            x = jax.lax.psum_scatter(x.astype(wire_dtype), scattered, scatter_dimension=1, tiled=True)
        if summed:
            x = jax.lax.psum(x.astype(wire_dtype), summed)
        return x.astype(table.dtype)

    of_sequences, of_tokens = axes_of_dims(batch, len(ROWS))
    result = spec_of_dims([of_sequences, (*of_tokens, *scattered)])
    return placement.on_shards(look_up_local, (vocabulary, batch), result)(table, rows)


def _forward(table: jax.Array, rows: jax.Array, placement: Placement) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The backward pass reads only the shape and dtype of the table, so XLA drops this residual.
    return look_up(table, rows, placement), (table, rows)


def _backward(
    placement: Placement, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    table, rows = residuals
    vocabulary, batch = _specs(table, rows, placement)
    axes = axes_in(vocabulary)
    num_rows = table.shape[0] // placement.size(axes)

    def scatter_add(rows: jax.Array, cotangent: jax.Array) -> jax.Array:
        local = rows - _index(axes) * num_rows
        beyond = jnp.where((local >= 0) & (local < num_rows), local, num_rows)
        zeros = jnp.zeros((num_rows, cotangent.shape[-1]), jnp.float32)
        total = zeros.at[beyond].add(cotangent.astype(jnp.float32), mode="drop").astype(table.dtype)
        return jax.lax.psum(total, axes_in(batch)) if axes_in(batch) else total

    total = placement.on_shards(scatter_add, (batch, batch), vocabulary)(rows, cotangent)
    return total, np.zeros(rows.shape, jax.dtypes.float0)


look_up.defvjp(_forward, _backward)


def _specs(table: jax.Array, rows: jax.Array, placement: Placement) -> tuple[PartitionSpec, PartitionSpec]:
    return placement.weight_spec(table.shape, TABLE), placement.activation_spec(rows.shape, ROWS)


def _scattered(table: jax.Array, rows: jax.Array, placement: Placement) -> tuple[str, ...]:
    """Returns the mesh axes over which the sum of a look-up is scattered along the sequence."""
    vocabulary, batch = _specs(table, rows, placement)
    of_residual = placement.activation_spec((*rows.shape, table.shape[1]), RESIDUAL)
    _, of_tokens, _ = axes_of_dims(of_residual, len(RESIDUAL))
    _, already = axes_of_dims(batch, len(ROWS))
    further = of_tokens[len(already) :]
    return further if of_tokens[: len(already)] == already and set(further) <= set(axes_in(vocabulary)) else ()


def _index(axes: tuple[str, ...]) -> jax.Array | int:
    return jax.lax.axis_index(axes) if axes else 0
