"""Gradients over the data axis: each replica sums those of its own microbatches, and the sums are reduced once a step.

The axis is manual while gradients are computed (`jax.shard_map`). The partitioner would instead reduce the gradients of
each of M microbatches, which is M times the traffic.

Gradients of layers that a loop computes one after the other are reduced inside the backward loop of the last
microbatch (`reducing_layers`), so that the products of the next layer run beside the collective. All others are reduced
when the last microbatch is over.

M: microbatches.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshtrain.sharding.jaxprs import Hook
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.reduction import summed
from meshtrain.sharding.rules import DATA
from meshtrain.sharding.stored import GRADIENTS_LEVEL, MAX_LEVEL, Stored, StoredTree, axes_of_dims, spec_of_dims
from meshtrain.sharding.trees import Arrays, Masks, Shaped, Specs, select

Compute = Callable[..., tuple[Arrays, Arrays]]


class OverData(enum.Enum):
    """What becomes of the gradients of each replica.

    SUMMED: they are added up over data. STACKED: they leave as [replicas, ...], and what follows adds them up.
    INSIDE: whoever calls has entered the region of the data axis; they stay as they are.
    """

    SUMMED = "summed"
    STACKED = "stacked"
    INSIDE = "inside"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reduced:
    """A gradient sum that is reduced over data already, in place of the sum of one replica.

    Attributes:
      value: float32; at level 1 the shard of this replica.
    """

    value: jax.Array


@dataclasses.dataclass(frozen=True)
class Replicas:
    """How gradients are added up over microbatches and reduced over the replicas of the data axis.

    Attributes:
      mesh: the mesh.
      stored: a tree of `Stored` like the parameters.
      level: of ZeRO (`stored.py`). At level 3 weights are sharded over data, which is then left to the partitioner.
      is_manual: whether data is manual at levels 0 to 2; otherwise it is left to the partitioner.
      wire_dtype: the dtype in which gradients are reduced over data. The sums over microbatches are float32.
      trained: a tree of bool like the parameters, true for each with a gradient; None: all of them.
      crossing: what becomes of the gradients of each replica.
    """

    mesh: Mesh
    stored: StoredTree
    level: int = 0
    is_manual: bool = True
    wire_dtype: DTypeLike = jnp.float32
    trained: Masks = None
    crossing: OverData = OverData.SUMMED

    @property
    def axes(self) -> frozenset[str]:
        """The axes that are manual while gradients are computed: data, or none."""
        return frozenset({DATA}) if self.has_copies and self.crossing is not OverData.INSIDE else frozenset()

    @property
    def has_copies(self) -> bool:
        """Whether the data axis has several replicas of the weights, each with its own gradients."""
        return self.is_manual and self.mesh.shape[DATA] > 1 and self.level < MAX_LEVEL

    @property
    def specs(self) -> Specs:
        """The specs of the parameters."""
        return jax.tree.map(lambda weight: weight.parameter, self.stored)

    @property
    def trained_stored(self) -> StoredTree:
        """`Stored` of the parameters that have gradients, None for the others."""
        return select(self.stored, self.trained)[0]

    @property
    def trained_specs(self) -> Specs:
        """The specs of the parameters that have gradients, None for the others."""
        return select(self.specs, self.trained)[0]

    def data_parallel(self, compute: Compute, manual: frozenset[str] = frozenset()) -> Compute:
        """Returns `compute` run on each replica's shard of the batch; its sums and gradients are reduced over data.

        STACKED gradients are not: each leaf is [replicas, ...].

        Args:
          compute: (parameters, batch, further arrays that are replicated) -> (sums, gradients): any tree of scalars,
            and the tree that `zeros` and `part` make for `trained_stored`, with `Reduced` in place of an array where
            `compute` has reduced it. Its arrays are local along the manual axes.
          manual: axes that are manual besides data.
        """
        axes, is_stacked = self.axes | manual, self.crossing is OverData.STACKED
        if not axes and not is_stacked:
            return compute
        parameters, replicated = self.specs, PartitionSpec()
        batch_spec = PartitionSpec(DATA) if self.axes else replicated
        # Gradients leave the region as [replicas, ...] and are reduced outside, where all axes are manual.
        leave_stacked, of_gradients = bool(self.axes) or is_stacked, self.trained_specs

        def on_replica(params: Arrays, batch: Arrays, *others: jax.Array) -> tuple[Arrays, Arrays]:
            sums, gradients = compute(params, batch, *others)
            sums = jax.lax.psum(sums, DATA) if self.axes else sums
            return sums, jax.tree.map(lambda leaf: leaf[None], gradients) if leave_stacked else gradients

        def run(params: Arrays, batch: Arrays, *others: jax.Array) -> tuple[Arrays, Arrays]:
            in_specs = (parameters, batch_spec, *(replicated for _ in others))
            out_specs = (replicated, self.with_replicas(of_gradients) if leave_stacked else of_gradients)
            sums, gradients = on_shards(self.mesh, on_replica, in_specs, out_specs, axes=axes)(params, batch, *others)
            return sums, self._reduced(gradients) if self.axes and not is_stacked else gradients

        return run

    def zeros(self, params: Arrays, stored: StoredTree) -> Arrays:
        """Returns float32 zeros for the gradient sums of these parameters, with the local shapes that `part` returns.

        At level 2 a dim that divides over data has the size of one shard.
        """

        def zeros(leaf: jax.Array, weight: Stored) -> jax.Array:
            dim = weight.data_dim if self._scatters_each(weight) else 0
            return jnp.zeros(self.shard_shape(leaf, dim), jnp.float32)

        return jax.tree.map(zeros, params, stored)

    def shard_shape(self, leaf: jax.Array, dim: int) -> list[int]:
        """Returns the shape of an array that data splits along a dim, counted from the end; 0: along none."""
        shape = list(leaf.shape)
        if dim:
            shape[dim] //= self.mesh.shape[DATA]
        return shape

    def accumulators(self, params: Arrays) -> Arrays:
        """Returns the abstract float32 sums that `zeros` allocates for trained parameters, each with its sharding.

        Shapes are global: at level 2, where `zeros` returns one shard, this is the whole array with that sharding. At
        other levels a sum has the shape and the sharding of its parameter.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s, global shapes; all of them, trained or not.
        """

        def accumulator(leaf: Shaped, weight: Stored) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=NamedSharding(self.mesh, weight.gradient))

        return jax.tree.map(accumulator, select(params, self.trained)[0], self.trained_stored)

    def part(self, gradients: Arrays, stored: StoredTree) -> Arrays:
        """Returns what a microbatch adds to this replica's sums, float32; at level 2 reduce-scattered over data.

        Args:
          gradients: like the parameters, in any float dtype; a leaf may lack leading dims (one layer of a stack).
          stored: `Stored` of these parameters.
        """
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
        if not any(self._scatters_each(weight) for weight in jax.tree.leaves(stored)):
            return gradients

        # A weight that data does not divide is reduced once, after the last microbatch (`_reduced`).
        def scatter(leaf: jax.Array, weight: Stored) -> jax.Array:
            return self._reduce(leaf, weight) if self._scatters_each(weight) else leaf

        return self._on_each(scatter, gradients, stored)

    @property
    def reduces_in_loops(self) -> bool:
        """Whether gradients of layers in a loop are reduced inside the backward loop of the last microbatch.

        At level 2 those of every microbatch are scattered when its loops are over.
        """
        return bool(self.axes) and self.level < GRADIENTS_LEVEL and self.crossing is OverData.SUMMED

    def reduced_zeros(self, leaf: jax.Array, weight: Stored) -> jax.Array:
        """Returns float32 zeros with the local shape of a reduced gradient: at level 1 of one shard."""
        return jnp.zeros(self.shard_shape(leaf, weight.scattered_dim), jnp.float32)

    def reduced_layers(self, gradients: Arrays, stored: StoredTree) -> Arrays:
        """Returns the gradients of layers reduced over data, in `wire_dtype`; at level 1 the shards of this replica.

        Args:
          gradients: float32 sums of one replica, local along the manual axes.
          stored: `Stored` of these parameters.
        """
        return self._on_each(self._sent, gradients, stored)

    def reducing_layers(self, stored: Mapping[int, Stored]) -> Hook:
        """Returns the hook that reduces the gradients of one layer in its backward pass.

        What goes with the slices of a weight is (the local sum of the earlier microbatches or None, zeros from
        `reduced_zeros`). Forward it is the identity on the weights. Backward the gradient of the zeros is the reduced
        sum of all microbatches; the weights themselves have to be constants of the differentiation. So sums are float32
        and may be scattered, whatever dtype and shape the weights have.

        Args:
          stored: index of a weight -> its `Stored`.
        """

        @jax.custom_vjp
        def layer(weights: Arrays, sums: Arrays, zeros: Arrays) -> Arrays:
            return weights

        def forward(weights: Arrays, sums: Arrays, zeros: Arrays) -> tuple[Arrays, Arrays]:
            return weights, sums

        def backward(sums: Arrays, gradients: Arrays) -> tuple[None, None, Arrays]:
            parts = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
            totals = {index: part if sums[index] is None else sums[index] + part for index, part in parts.items()}
            return None, None, self._on_each(self._reduce, totals, {index: stored[index] for index in totals})

        layer.defvjp(forward, backward)

        def hook(weights: dict[int, jax.Array], given: dict[int, Arrays]) -> dict[int, jax.Array]:
            sums = {index: pair[0] for index, pair in given.items()}
            result: dict[int, jax.Array] = layer(weights, sums, {index: pair[1] for index, pair in given.items()})
            return result

        return hook

    def _on_each(
        self, function: Callable[[jax.Array, Stored], jax.Array], gradients: Arrays, stored: StoredTree
    ) -> Arrays:
        """Returns the function of each gradient, run where all axes are manual; a leaf may lack leading dims."""

        def trailing(leaf: jax.Array, weight: Stored) -> PartitionSpec:
            return spec_of_dims(axes_of_dims(weight.parameter, weight.num_dims)[-leaf.ndim :])

        def on_all(gradients: Arrays) -> Arrays:
            return jax.tree.map(function, gradients, stored)

        specs = jax.tree.map(trailing, gradients, stored)
        # XLA's CPU compiler aborts on a 16-bit all-reduce where an axis, be it of size 1, is not manual.
        is_narrow = jnp.dtype(self.wire_dtype).itemsize < 4
        return on_shards(self.mesh, on_all, (specs,), specs, is_opaque=is_narrow)(gradients)

    def _scatters_each(self, weight: Stored) -> bool:
        return bool(self.axes) and weight.gradient != weight.parameter

    def _reduce(self, x: jax.Array, weight: Stored) -> jax.Array:
        return self._sent(x, weight).astype(jnp.float32)

    def _sent(self, x: jax.Array, weight: Stored) -> jax.Array:
        """Returns a gradient reduced over data in `wire_dtype`; where it is scattered, the shard of this replica."""
        return summed(x.astype(self.wire_dtype), DATA, weight.scattered_dim)

    def with_replicas(self, specs: Specs) -> Specs:
        """Returns the specs of arrays of which each replica along data has one, stacked in front."""
        replicas = DATA if self.mesh.shape[DATA] > 1 else None
        return jax.tree.map(lambda spec: PartitionSpec(replicas, *spec), specs)

    def _reduced(self, gradients: Arrays) -> Arrays:
        """Reduces the gradients [replicas, ...] over data: an all-reduce at level 0, else a reduce-scatter.

        At level 2 `part` has scattered them already, except for weights in which no dim divides over data. Those of
        layers in a loop may be `Reduced`.
        """
        stored = self.trained_stored

        def reduce(leaf: jax.Array | Reduced, weight: Stored) -> jax.Array:
            if isinstance(leaf, Reduced):
                return leaf.value[0]
            return leaf[0] if self._scatters_each(weight) else self._reduce(leaf[0], weight)

        def reduce_all(gradients: Arrays) -> Arrays:
            return jax.tree.map(reduce, gradients, stored, is_leaf=lambda leaf: isinstance(leaf, Reduced))

        after = jax.tree.map(lambda weight: weight.moment, stored)
        return on_shards(self.mesh, reduce_all, (self.with_replicas(self.trained_specs),), after)(gradients)
