"""Gradients over the data axis: each replica adds up its own microbatches, and what they found meets once a step.

The axis is manual while gradients are computed (`jax.shard_map`). Left to the partitioner, each microbatch's gradients
would be summed over the network at once, M times the traffic.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshtrain.layout.partition import axes_of_dims, spec_of_dims
from meshtrain.layout.placement import on_shards
from meshtrain.layout.trees import select
from meshtrain.layout.zero import DATA, MAX_LEVEL, over_data

Compute = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a parameter lives, and what becomes of its gradient.

    Attributes:
      spec: of the parameter.
      num_dims: of the parameter.
      dim: which dim of the gradient the data axis splits, counted from the end (-1 is the last); 0 for none.
    """

    spec: PartitionSpec
    num_dims: int
    dim: int = 0


@dataclasses.dataclass(frozen=True)
class Replicas:
    """How replicas work together on gradients.

    Attributes:
      mesh: the mesh.
      homes: a tree of `Home` like the parameters.
      level: of ZeRO (`zero.py`). Under 3 weights are split over the data axis, which then stays with the partitioner.
      is_manual: whether replicas add up by themselves; otherwise the data axis stays with the partitioner too.
      wire_dtype: of gradients as they cross the data axis; they are added up in float32 before.
      trained: a tree of bool like the parameters, which of them have gradients; None: all of them.
    """

    mesh: Mesh
    homes: Any
    level: int = 0
    is_manual: bool = True
    wire_dtype: DTypeLike = jnp.float32
    trained: Any = None

    @property
    def axes(self) -> frozenset[str]:
        """The manual axes: data, or none."""
        is_manual = self.is_manual and self.mesh.shape[DATA] > 1 and self.level < MAX_LEVEL
        return frozenset({DATA}) if is_manual else frozenset()

    @property
    def specs(self) -> Any:
        """Where parameters live."""
        return jax.tree.map(lambda home: home.spec, self.homes)

    @property
    def trained_homes(self) -> Any:
        """The homes of the parameters that have gradients, None for the others."""
        return select(self.homes, self.trained)[0]

    def data_parallel(self, compute: Compute, manual: frozenset[str] = frozenset()) -> Compute:
        """Returns `compute` run on each replica's shard of the batch; its sums and gradients are reduced over data.

        Args:
          compute: (parameters, batch, and arrays that are the same everywhere) -> (sums, gradients): any tree, and the
            one that `zeros` and `part` made for `trained_homes`. It sees its shards along the manual axes.
          manual: axes that are manual besides data.
        """
        axes = self.axes | manual
        if not axes:
            return compute
        parameters, whole = self.specs, PartitionSpec()
        shard = PartitionSpec(DATA) if self.axes else whole
        of_gradients = jax.tree.map(lambda home: home.spec, self.trained_homes)

        def on_replica(params: Any, batch: Any, *others: jax.Array) -> tuple[Any, Any]:
            sums, gradients = compute(params, batch, *others)
            if self.axes:
                # Gradients leave the region as [replicas, ...] and are reduced outside, where all axes are manual.
                return jax.lax.psum(sums, DATA), jax.tree.map(lambda leaf: leaf[None], gradients)
            return sums, gradients

        def run(params: Any, batch: Any, *others: jax.Array) -> tuple[Any, Any]:
            in_specs = (parameters, shard, *(whole for _ in others))
            out_specs = (whole, self._with_replicas(of_gradients) if self.axes else of_gradients)
            sums, gradients = on_shards(self.mesh, on_replica, in_specs, out_specs, axes=axes)(params, batch, *others)
            return sums, self._reduced(gradients) if self.axes else gradients

        return run

    def zeros(self, params: Any, homes: Any) -> Any:
        """Returns float32 zeros to which `part`s of these parameters' gradients are added."""

        def empty(leaf: jax.Array, home: Home) -> jax.Array:
            shape = list(leaf.shape)
            if self._scatters_each(home):
                shape[home.dim] //= self.mesh.shape[DATA]
            return jnp.zeros(shape, jnp.float32)

        return jax.tree.map(empty, params, homes)

    def accumulators(self, params: Any) -> Any:
        """Returns the abstract float32 sums that `zeros` allocates for trained parameters, each with its sharding.

        At level 2 `zeros` allocates one shard of each sum that divides over data; this is the whole array with that
        sharding. At other levels a sum has the shape and the sharding of its parameter.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s, global shapes; all of them, trained or not.
        """

        def accumulator(leaf: Any, home: Home) -> jax.ShapeDtypeStruct:
            spec = over_data(home.spec, home.num_dims, home.dim) if self._scatters_each(home) else home.spec
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(accumulator, select(params, self.trained)[0], self.trained_homes)

    def part(self, gradients: Any, homes: Any) -> Any:
        """Returns what a microbatch adds on this replica, float32: under level 2 its share of what all replicas found.

        Args:
          gradients: like the parameters; leading dims of a leaf may be missing.
          homes: the homes of these parameters.
        """
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
        if not any(self._scatters_each(home) for home in jax.tree.leaves(homes)):
            return gradients

        def trailing(leaf: jax.Array, home: Home) -> PartitionSpec:
            return spec_of_dims(axes_of_dims(home.spec, home.num_dims)[-leaf.ndim :])

        specs = jax.tree.map(trailing, gradients, homes)

        def scattered(gradients: Any) -> Any:
            return jax.tree.map(lambda leaf, home: self._scattered(leaf, home.dim), gradients, homes)

        return on_shards(self.mesh, scattered, (specs,), specs)(gradients)

    def _scatters_each(self, home: Home) -> bool:
        return bool(self.axes) and self.level == 2 and home.dim != 0

    def _scattered(self, x: jax.Array, dim: int) -> jax.Array:
        """Sums over replicas; each gets its part of a dim counted from the end, or all of it where that is 0."""
        sent = x.astype(self.wire_dtype)
        if dim == 0:
            return jax.lax.psum(sent, DATA).astype(jnp.float32)
        return jax.lax.psum_scatter(sent, DATA, scatter_dimension=x.ndim + dim, tiled=True).astype(jnp.float32)

    def _with_replicas(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: PartitionSpec(DATA, *spec), specs, is_leaf=_is_spec)

    def _reduced(self, gradients: Any) -> Any:
        """Sums [replicas, ...] over replicas; each gets all of a leaf or, from level 1 on, its shard."""
        is_sharded, homes = self.level > 0, self.trained_homes

        def reduce(leaf: jax.Array, home: Home) -> jax.Array:
            if self._scatters_each(home):
                return leaf[0]
            return self._scattered(leaf[0], home.dim if is_sharded else 0)

        def reduce_all(gradients: Any) -> Any:
            return jax.tree.map(reduce, gradients, homes)

        before = self._with_replicas(jax.tree.map(lambda home: home.spec, homes))
        after = jax.tree.map(lambda home: over_data(home.spec, home.num_dims, home.dim if is_sharded else 0), homes)
        return on_shards(self.mesh, reduce_all, (before,), after)(gradients)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
