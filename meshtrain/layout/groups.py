"""Groups that train apart: the data axis splits them, and gradients stay inside a group.

The number of groups is a choice of the algorithm, not of the mesh: a device along data computes one group, or several
one after the other, with the same results. fsdp, tensor and pipeline split the work inside a group.

G: groups, n: groups on one device along data.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.layout.axes import DATA
from meshtrain.layout.placement import Placement, on_shards
from meshtrain.layout.replicas import Compute, Replicas
from meshtrain.layout.trees import merged, select
from meshtrain.layout.wire import summed_leaves
from meshtrain.words.errors import UserError

GROUPS = "groups"  # the logical axis of the dim that stacks the arrays of all groups


@dataclasses.dataclass(frozen=True)
class Groups(Replicas):
    """How gradients are added up over the microbatches of each group. They are not reduced over data.

    Attributes:
      num_groups: G, a multiple of the data axis.
      placement: the sharding of a group's share of the batch.
      axes_of_batch: the logical axes of each entry of the batch.
    """

    num_groups: int = 1
    placement: Placement = dataclasses.field(default_factory=Placement.nowhere)
    axes_of_batch: Mapping[str, Sequence[str | None]] = dataclasses.field(default_factory=dict)

    @property
    def num_here(self) -> int:
        """The number of groups that one device along data computes, n."""
        return self.num_groups // self.mesh.shape[DATA]

    @property
    def reduces_in_loops(self) -> bool:
        """Whether gradients are reduced over data inside the backward loop; never, because groups do not share them."""
        return False

    def data_parallel(self, compute: Compute, manual: frozenset[str] = frozenset()) -> Compute:
        """Returns `compute` run for each group, on its weights and its share of the batch.

        The result takes trained parameters [G, ...], frozen ones without that dim, the batch [B, ...], arrays that are
        the same for all groups, and last a seed [G]. It returns sums [G] and gradients [G, ...].

        Args:
          compute: (parameters, batch, further arrays, seed) -> (sums, gradients) of one group; see `Replicas`.
          manual: axes that are manual besides data.
        """

        def on_device(params: Any, batch: Any, *others: jax.Array) -> tuple[Any, Any]:
            *shared, seeds = others
            trained, frozen = select(params, self.trained)

            def one(of_group: Any) -> tuple[Any, Any]:
                weights, share, seed = of_group
                return compute(merged(weights, frozen), share, *shared, seed)

            shares = {name: self._shares(x, self.axes_of_batch[name]) for name, x in batch.items()}
            if self.num_here > 1:
                return jax.lax.map(one, (trained, shares, seeds))
            done = one(jax.tree.map(lambda x: x[0], (trained, shares, seeds)))
            return jax.tree.map(lambda x: x[None], done)

        axes = self.axes | manual
        if not axes:
            return on_device
        trained, frozen = select(self.specs, self.trained)
        split, stacked = PartitionSpec(DATA), self._with_replicas(trained)

        def run(params: Any, batch: Any, *others: jax.Array) -> tuple[Any, Any]:
            whole = (PartitionSpec() for _ in others[1:])
            in_specs = (merged(stacked, frozen), split, *whole, split)
            return on_shards(self.mesh, on_device, in_specs, (split, stacked), axes=axes)(params, batch, *others)

        return run

    def accumulators(self, params: Any) -> Any:
        """Returns the abstract float32 gradients [G, ...] of trained parameters, each with its sharding.

        Args:
          params: arrays or `jax.ShapeDtypeStruct`s, global shapes without the dim of groups; trained or not.
        """

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, PartitionSpec(DATA, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((self.num_groups, *leaf.shape), leaf.dtype, sharding=sharding)

        return jax.tree.map(stacked, super().accumulators(params))

    def mean(self, tree: Any, residual: Any = ()) -> tuple[Any, Any]:
        """Returns the mean over groups of arrays like the trained parameters, and the residual of the next mean.

        Without compression it is one float32 all-reduce over data.

        Args:
          tree: float32 [G, ...].
          residual: a tree of float32 [devices along data, ...], what compressed means have not sent yet; empty without
            error feedback.
        """
        stacked = self._with_replicas(jax.tree.map(lambda weight: weight.parameter, self.trained_stored))
        whole = jax.tree.map(lambda weight: weight.parameter, self.trained_stored)
        of_residual = stacked if jax.tree.leaves(residual) else residual

        def on_device(tree: Any, residual: Any) -> tuple[Any, Any]:
            leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree))
            waiting = [leaf[0] for leaf in jax.tree.leaves(residual)] or [None] * len(leaves)
            sums, left = self._summed(leaves, waiting)
            means = [leaf / self.num_groups for leaf in sums]
            after = [leaf[None] for leaf in left if leaf is not None]
            return jax.tree.unflatten(structure, means), jax.tree.unflatten(jax.tree.structure(residual), after)

        return on_shards(self.mesh, on_device, (stacked, of_residual), (whole, of_residual))(tree, residual)

    def _summed(self, leaves: list[jax.Array], residuals: list[Any]) -> tuple[list[jax.Array], list[Any]]:
        """Returns the sums over data of local arrays, and their residuals, where all axes are manual."""
        size = self.mesh.shape[DATA]
        if self.is_compressed:
            return summed_leaves(leaves, residuals, [0] * len(leaves), self.compression, DATA, size)
        # One device sends nothing, so nothing is lost: what a larger mesh has left to it arrives now.
        sums = [leaf if left is None else leaf + left for leaf, left in zip(leaves, residuals, strict=True)]
        zeros = [None if left is None else jnp.zeros_like(left) for left in residuals]
        return (jax.lax.psum(sums, DATA) if size > 1 else sums), zeros

    def _shares(self, x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        """Returns one device's part of the batch, [n B / G, ...], as shares [n, B / G, ...] of consecutive examples.

        Each share is split over the axes that split a batch inside a group, by the logical axes of its dims.
        """
        shares = x.reshape(self.num_here, x.shape[0] // self.num_here, *x.shape[1:])
        return self.placement.activation(shares, (None, *axes)) if self.num_here > 1 else shares


def groups_of(
    replicas: Replicas, num_groups: int, placement: Placement, axes_of_batch: Mapping[str, Sequence[str | None]]
) -> Groups:
    """Returns replicas as groups that train apart.

    Args:
      replicas: of level 0.
      num_groups: G, a multiple of the data axis.
      placement: the sharding of a group's share of the batch.
      axes_of_batch: the logical axes of each entry of the batch.

    Raises:
      UserError: data is split over several devices and left to the partitioner.
    """
    if replicas.mesh.shape[DATA] > 1 and not replicas.is_manual:
        raise UserError(
            f"local_steps.groups: got {num_groups} on mesh.data = {replicas.mesh.shape[DATA]} with fsdp or an axis "
            "after it and a task without `takes_manual_axes`, or with weights split over data; allowed: a task with "
            "it, or one device along data; nearest: mesh.data=1"
        )
    fields = {field.name: getattr(replicas, field.name) for field in dataclasses.fields(replicas)}
    return Groups(**fields, num_groups=num_groups, placement=placement, axes_of_batch=axes_of_batch)
