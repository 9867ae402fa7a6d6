"""Gradients of a chunk of layers, reduced over data beside the rows that follow the chunk's last backward row.

A stage finishes its chunks one after the other, S rows apart, and idles or works on other chunks meanwhile. So the
reduction of all chunks but the last has rows to run beside, which a reduction after the last row has not.

V: chunks a stage, K: layers in a chunk, U: layers in a unit, S: stages.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.models.task import Params
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.program import Program, finished
from meshtrain.sharding.gradients import Replicas
from meshtrain.sharding.trees import Tree, merged, select


class Reduced(NamedTuple):
    """Gradients that are reduced over data, of the first so many chunks in the order of `finished`.

    Level 0 keeps them where the sums of one replica were.
    """

    scattered: Params  # float32 [V K / U, U, ...], this replica's shards; None for gradients that are not scattered
    num_chunks: jax.Array  # int32 scalar


def reduces_early(program: Program, replicas: Replicas) -> bool:
    """Returns whether the gradients of a chunk are reduced as soon as they are complete."""
    return replicas.reduces_in_loops and program.schedule.num_chunks > 1


class Reduction:
    """Reduces the gradients of one chunk after the other: `begin` before other rows, `end` after them."""

    def __init__(self, program: Program, replicas: Replicas, stored: Tree, num_units: int) -> None:
        """Stores the order of chunks; `stored` has a `Stored` for each of the trained layers, `num_units` is K / U."""
        self.replicas, self.stored, self.num_units = replicas, stored, num_units
        self.chunks = np.array([chunk for _, chunk in finished(program)], np.int32)
        self.is_scattered = replicas.are_scattered(stored)

    def start(self, units: Params) -> Reduced:
        """Returns the result before the first reduction; `units` are the trained layers [V K / U, U, ...]."""
        scattered, stored = select(units, self.is_scattered)[0], select(self.stored, self.is_scattered)[0]
        return Reduced(jax.tree.map(self.replicas.reduced_zeros, scattered, stored), jnp.int32(0))

    def begin(self, layers: Params, reduced: Reduced) -> tuple[Params, Params, jax.Array]:
        """Returns `layers`, the reduced gradients of the next chunk [K / U, U, ...], and the place of its first unit.

        Args:
          layers: the sums of this replica, [V K / U, U, ...].
          reduced: what is reduced already.
        """
        place = ring.take(jnp.asarray(self.chunks), reduced.num_chunks) * self.num_units
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, place, self.num_units), layers)
        # Later rows add to other chunks in place. Unless the slices are made first, XLA copies all sums for that.
        layers, part = jax.lax.optimization_barrier((layers, self.replicas.as_sent(part)))
        return layers, self.replicas.reduced_layers(part, self.stored), place

    def end(self, layers: Params, reduced: Reduced, parts: Params, place: jax.Array) -> tuple[Params, Reduced]:
        """Returns (layers, reduced) with the parts of `begin` in their place."""
        # A barrier here would make XLA's scheduler end the collective before the rows between.
        scattered, replicated = select(parts, self.is_scattered)
        with_sums, without = select(layers, self.is_scattered)

        def put(leaf: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, part.astype(leaf.dtype), place, 0)

        after = Reduced(jax.tree.map(put, reduced.scattered, scattered), reduced.num_chunks + 1)
        return merged(with_sums, jax.tree.map(put, without, replicated)), after

    def finished(self, layers: Params, reduced: Reduced) -> Params:
        """Returns the reduced gradients of all chunks, [V K / U, U, ...]."""
        return merged(reduced.scattered, select(layers, self.is_scattered)[1])
