"""Sums gradients over the data axis: each replica adds up its own microbatches, and the sums are reduced once a step.

The data axis is manual while gradients are computed (`jax.shard_map`). With an automatic data axis, the partitioner
would reduce the gradients of each of M microbatches, which is M times the traffic.

If a loop computes layers one after the other, the gradients of these layers are reduced inside the backward loop of the
last microbatch (`reducing_layers`). Then the matrix products of the next layer run while the collective is in flight.
All other gradients are reduced after the last microbatch.

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
from meshtrain.sharding.param_sharding import (
    GRADIENTS_LEVEL,
    MAX_LEVEL,
    ParamSharding,
    ParamShardings,
    axes_of_dims,
    spec_of_dims,
)
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.reduction import sum_over
from meshtrain.sharding.rules import DATA
from meshtrain.sharding.trees import Arrays, Masks, Shaped, Specs, select

Compute = Callable[..., tuple[Arrays, Arrays]]


class OverData(enum.Enum):
    """How the gradients of the replicas along the data axis are combined.

    SUMMED: gradients are added up over the data axis. STACKED: gradients are returned as [replicas, ...], and the
    caller adds them up. INSIDE: the caller is already in the manual region of the data axis; it gets the
    gradients of its replica, and nothing is added up.
    """

    SUMMED = "summed"
    STACKED = "stacked"
    INSIDE = "inside"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reduced:
    """Marks a gradient that is already summed over the data axis, in a pytree of one replica's gradients.

    Attributes:
      value: the summed gradient, float32; at ZeRO level 1 only the shard of this replica.
    """

    value: jax.Array


@dataclasses.dataclass(frozen=True)
class GradientSync:
    """Adds up gradients over microbatches and reduces them over the replicas of the data axis.

    Attributes:
      mesh: the mesh of devices.
      stored: a pytree of `ParamSharding` with the structure of the parameters.
      level: the ZeRO level, 0 to 3 (table in `param_sharding.py`). At level 3 weights are sharded over the data axis,
        and the partitioner reduces gradients.
      is_manual: whether the data axis is manual at levels 0 to 2; if not, the partitioner reduces gradients over it.
      wire_dtype: the dtype in which gradients are reduced over the data axis. Sums over microbatches are float32.
      trained: a pytree of bool with the structure of the parameters, true for each parameter with a gradient; None: all
        parameters have gradients.
      crossing: how the gradients of the replicas are combined: summed, stacked, or not at all.
    """

    mesh: Mesh
    stored: ParamShardings
    level: int = 0
    is_manual: bool = True
    wire_dtype: DTypeLike = jnp.float32
    trained: Masks = None
    crossing: OverData = OverData.SUMMED

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that are manual while gradients are computed: the data axis, or none."""
        return frozenset({DATA}) if self.has_copies and self.crossing is not OverData.INSIDE else frozenset()

    @property
    def has_copies(self) -> bool:
        """Whether the data axis has several replicas of the weights, each with its own gradients."""
        return self.is_manual and self.mesh.shape[DATA] > 1 and self.level < MAX_LEVEL

    @property
    def specs(self) -> Specs:
        """A pytree with the `PartitionSpec` of each parameter."""
        return jax.tree.map(lambda weight: weight.parameter, self.stored)

    @property
    def trained_stored(self) -> ParamShardings:
        """A pytree with the `ParamSharding` of each trained parameter and None for each frozen parameter."""
        return select(self.stored, self.trained)[0]

    @property
    def trained_specs(self) -> Specs:
        """A pytree with the `PartitionSpec` of each trained parameter and None for each frozen parameter."""
        return select(self.specs, self.trained)[0]

    def data_parallel(self, compute: Compute, manual: frozenset[str] = frozenset()) -> Compute:
        """Returns a function that runs `compute` on each replica's part of a batch and adds up the replicas' results.

        The returned function has the arguments and the results of `compute`, with global arrays. Its sums and gradients
        are reduced over the data axis. With `OverData.STACKED` only the sums are reduced, and each gradient is
        [replicas, ...]. With `OverData.INSIDE`, at level 3 or with one replica, `compute` gets the complete batch that
        the caller passes, and nothing is reduced.

        Args:
          compute: a function (parameters, batch, further replicated arrays) -> (sums, gradients), on arrays that are
            local along the manual axes. `sums` is a pytree of scalars such as the loss. `gradients` has the structure
            of `trained_stored` and the shapes of the arrays that `zeros` returns, with `Reduced` in place of each array
            that `compute` has already reduced.
          manual: mesh axes to make manual in addition to the data axis.
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

    def zeros(self, params: Arrays, stored: ParamShardings) -> Arrays:
        """Returns float32 zeros, the gradient sums of one replica before the first microbatch.

        A sum has the shape of its parameter. At level 2 it is only this replica's shard: the dim that the data axis
        splits has the size of one shard.

        Args:
          params: a pytree of parameters, local along the manual axes; only their shapes are read.
          stored: `ParamSharding` of these parameters.
        """

        def zeros(leaf: jax.Array, weight: ParamSharding) -> jax.Array:
            dim = weight.data_dim if self._scatters_each(weight) else 0
            return jnp.zeros(self.shard_shape(leaf, dim), jnp.float32)

        return jax.tree.map(zeros, params, stored)

    def shard_shape(self, leaf: jax.Array, dim: int) -> list[int]:
        """Returns the shape of one replica's shard of an array if the data axis splits its dim `dim`.

        Args:
          leaf: the array before the split; only its shape is read.
          dim: the dim to split, counted from the end (-1 is the last); 0: no dim is split.
        """
        shape = list(leaf.shape)
        if dim:
            shape[dim] //= self.mesh.shape[DATA]
        return shape

    def accumulators(self, params: Arrays) -> Arrays:
        """Returns the abstract float32 sums that `zeros` allocates for the trained parameters, each with its sharding.

        Shapes are global, and equal to the shapes of the parameters. At level 2 the sharding of a sum also splits it
        over the data axis; at other levels a sum has the sharding of its parameter.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s with global shapes, for all parameters, trained or not.
        """

        def accumulator(leaf: Shaped, weight: ParamSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=NamedSharding(self.mesh, weight.gradient))

        return jax.tree.map(accumulator, select(params, self.trained)[0], self.trained_stored)

    def part(self, gradients: Arrays, stored: ParamShardings) -> Arrays:
        """Returns the gradients of one microbatch in float32, to be added to this replica's sums.

        At level 2 the gradients are reduce-scattered over the data axis.

        Args:
          gradients: a pytree with the structure of the parameters, in any float dtype; a leaf may lack leading dims
            (one layer of a stack).
          stored: `ParamSharding` of these parameters.
        """
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
        if not any(self._scatters_each(weight) for weight in jax.tree.leaves(stored)):
            return gradients

        # The gradient of a weight that the data axis does not divide is reduced after the last microbatch (`_reduced`).
        def scatter(leaf: jax.Array, weight: ParamSharding) -> jax.Array:
            return self._reduce(leaf, weight) if self._scatters_each(weight) else leaf

        return self._on_each(scatter, gradients, stored)

    @property
    def reduces_in_loops(self) -> bool:
        """Whether gradients of layers in a loop are reduced inside the backward loop of the last microbatch.

        False at level 2, at which these gradients are reduce-scattered after the backward pass of each microbatch.
        """
        return bool(self.axes) and self.level < GRADIENTS_LEVEL and self.crossing is OverData.SUMMED

    def reduced_zeros(self, leaf: jax.Array, weight: ParamSharding) -> jax.Array:
        """Returns float32 zeros in the shape of a parameter's gradient on one replica after the reduction.

        At level 1 this is the shape of the replica's shard, at level 0 the shape of the parameter.

        Args:
          leaf: the parameter, or one layer of it; only its shape is read.
          weight: its `ParamSharding`.
        """
        return jnp.zeros(self.shard_shape(leaf, weight.scattered_dim), jnp.float32)

    def reduced_layers(self, gradients: Arrays, stored: ParamShardings) -> Arrays:
        """Returns gradients of layers, summed over the data axis: this replica's shards at level 1, else the full sums.

        Sums are computed and returned in `wire_dtype`.

        Args:
          gradients: a pytree with this replica's gradient sums over microbatches, local along the manual axes.
          stored: a pytree of the same structure with the `ParamSharding` of each layer weight.
        """
        return self._on_each(self._sent, gradients, stored)

    def reducing_layers(self, stored: Mapping[int, ParamSharding]) -> Hook:
        """Returns a hook for `jaxprs.Traced.run` that reduces each layer's gradients in the layer's backward pass.

        The hook gets the weights of a layer and, for each weight, a pair: this replica's gradient sum of the earlier
        microbatches (None if there are none), and zeros from `reduced_zeros`. It returns the weights unchanged. In the
        backward pass the gradient of the zeros is the sum of all microbatches, reduced over the data axis; the weights
        get no gradient. So the caller differentiates with respect to the zeros. Reason: JAX requires a gradient to have
        the shape and dtype of its argument. The reduced sum is float32 and may be one shard, so it fits the zeros, but
        not every weight.

        Args:
          stored: index of a weight in the list that was passed to `jaxprs.trace` -> its `ParamSharding`.
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
        self, function: Callable[[jax.Array, ParamSharding], jax.Array], gradients: Arrays, stored: ParamShardings
    ) -> Arrays:
        """Applies a function to each gradient in a region in which all mesh axes are manual; returns the results.

        Args:
          function: a function (gradient, its `ParamSharding`) -> result; both arrays are one device's shards.
          gradients: a pytree of gradients; a leaf may lack leading dims (one layer of a stack).
          stored: `ParamSharding` of the parameters.
        """

        def trailing(leaf: jax.Array, weight: ParamSharding) -> PartitionSpec:
            return spec_of_dims(axes_of_dims(weight.parameter, weight.num_dims)[-leaf.ndim :])

        def on_all(gradients: Arrays) -> Arrays:
            return jax.tree.map(function, gradients, stored)

        specs = jax.tree.map(trailing, gradients, stored)
        # XLA's CPU compiler aborts on a 16-bit all-reduce if any axis, even of size 1, is not manual.
        is_narrow = jnp.dtype(self.wire_dtype).itemsize < 4
        return on_shards(self.mesh, on_all, (specs,), specs, is_opaque=is_narrow)(gradients)

    def _scatters_each(self, weight: ParamSharding) -> bool:
        return bool(self.axes) and weight.gradient != weight.parameter

    def _reduce(self, x: jax.Array, weight: ParamSharding) -> jax.Array:
        return self._sent(x, weight).astype(jnp.float32)

    def _sent(self, x: jax.Array, weight: ParamSharding) -> jax.Array:
        """Returns the sum of a gradient over the data axis in `wire_dtype`: the full sum, or this replica's shard.

        Args:
          x: this replica's gradient.
          weight: its `ParamSharding`. `scattered_dim` is the dim of the shards; 0: return the full sum.
        """
        return sum_over(x.astype(self.wire_dtype), DATA, weight.scattered_dim)

    def with_replicas(self, specs: Specs) -> Specs:
        """Returns the specs of arrays [replicas, ...], given the specs of arrays without the dim of replicas.

        The data axis splits the dim of replicas.
        """
        replicas = DATA if self.mesh.shape[DATA] > 1 else None
        return jax.tree.map(lambda spec: PartitionSpec(replicas, *spec), specs)

    def _reduced(self, gradients: Arrays) -> Arrays:
        """Reduces gradients [replicas, ...] over the data axis: by an all-reduce at level 0, else by a reduce-scatter.

        The gradient of a weight without a dim that the data axis divides is all-reduced at every level. At level 2
        `part` has already reduce-scattered all other gradients, which are returned unchanged. The value of a `Reduced`
        gradient is already summed too, and is returned unchanged.
        """
        stored = self.trained_stored

        def reduce(leaf: jax.Array | Reduced, weight: ParamSharding) -> jax.Array:
            if isinstance(leaf, Reduced):
                return leaf.value[0]
            return leaf[0] if self._scatters_each(weight) else self._reduce(leaf[0], weight)

        def reduce_all(gradients: Arrays) -> Arrays:
            return jax.tree.map(reduce, gradients, stored, is_leaf=lambda leaf: isinstance(leaf, Reduced))

        after = jax.tree.map(lambda weight: weight.moment, stored)
        return on_shards(self.mesh, reduce_all, (self.with_replicas(self.trained_specs),), after)(gradients)
