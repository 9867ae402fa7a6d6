"""What a model gets to see of the mesh: where activations and weights at work live, while a function is traced.

Inside a `jax.shard_map` with manual axes shapes are local along those, and the partitioner neither sees such an axis
nor may be told about it: each function here leaves the axes that are manual where it is called out by itself.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshtrain.layout.partition import Names, axes_of_dims, num_parts, spec, spec_of_dims
from meshtrain.layout.rules import Rules


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where things live, and a way to write out what happens on each shard.

    Attributes:
      rules: the table; None means one device, where everything lives.
      mesh: the mesh; None as well then.
      storage_axes: mesh axes that split weights for storage only.
      keeps_gathered: whether a weight gathered for the forward pass is kept for the backward pass; otherwise it is
        gathered again, whatever else is kept.
    """

    rules: Rules | None
    mesh: Mesh | None
    storage_axes: tuple[str, ...] = ("fsdp",)
    keeps_gathered: bool = False

    @classmethod
    def nowhere(cls) -> "Placement":
        """Returns a placement that leaves everything as it is, for one device."""
        return cls(None, None)

    def activation(self, x: jax.Array, names: Names) -> jax.Array:
        """Returns `x` held to where the rules put an activation; `names` has a logical axis or None for each dim.

        Raises:
          UserError: see `partition.problems`.
        """
        return self._hold(x, self.activation_spec(x.shape, names))

    def weight(self, w: jax.Array, names: Names) -> jax.Array:
        """Returns `w`, a weight about to compute (cast already), gathered over the axes that split it for storage only.

        Without this the partitioner is free to leave the weight in pieces and to move activations instead, which is
        more. Where no axis splits weights for storage only there is nothing to gather, and `w` itself comes back.
        `names` has a logical axis or None for each dim.

        Raises:
          UserError: see `partition.problems`.
        """
        wanted = self.weight_spec(w.shape, names)
        return self._hold(w, wanted) if self.gathers_weights else w

    def activation_spec(self, shape: Sequence[int], names: Names) -> PartitionSpec:
        """Returns where the rules put an activation.

        Raises:
          UserError: see `partition.problems`.
        """
        if self.rules is None or self.mesh is None:
            return PartitionSpec()
        return spec(f"activation {tuple(names)}", shape, names, self.rules.activations, _sizes_here(self.mesh))

    def weight_spec(self, shape: Sequence[int], names: Names) -> PartitionSpec:
        """Returns where the rules put a weight at work.

        Raises:
          UserError: see `partition.problems`.
        """
        if self.rules is None or self.mesh is None:
            return PartitionSpec()
        return spec(f"weight {tuple(names)}", shape, names, self.rules.gathered, _sizes_here(self.mesh))

    @property
    def platform(self) -> str:
        """The platform of the devices, which may be those of a cluster that is not there: `cpu`, `tpu`, `gpu`, ..."""
        platform: str = jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform
        return platform

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are gathered at all: a storage axis is larger than 1 and not manual here."""
        return self.mesh is not None and any(_sizes_here(self.mesh)[axis] > 1 for axis in self.storage_axes)

    def is_gather(self, primitive: Any, params: Mapping[str, Any]) -> bool:
        """Returns whether an operation in a traced function is `weight` at work, for a `jax.checkpoint` policy.

        It is told from `activation` by its spec: batches are split over the storage axes, gathered weights are not.
        """
        if primitive.name != "sharding_constraint" or not self.gathers_weights:
            return False
        return not set(axes_in(params["sharding"].spec)) & set(self.storage_axes)

    def size(self, axes: Sequence[str]) -> int:
        """Returns the number of shards that mesh axes make together."""
        return 1 if self.mesh is None else num_parts(axes, self.mesh.shape)

    def on_shards(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *, is_opaque: bool = False
    ) -> Callable[..., Any]:
        """Returns `function` run on each device's shards; see `on_shards` below.

        Where something is whole on several devices it is not for differentiating through: give what contains it a
        backward pass of its own.
        """
        if self.mesh is None:
            return function
        return on_shards(self.mesh, function, in_specs, out_specs, is_opaque=is_opaque)

    def _hold(self, x: jax.Array, wanted: PartitionSpec) -> jax.Array:
        # An empty spec is not a free one: it says "whole on each device". Only a single device has nothing to be told.
        if self.mesh is None or not _is_split_here(self.mesh):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(_mesh_here(self.mesh), wanted))


def on_shards(
    mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any, *, is_opaque: bool = False
) -> Callable[..., Any]:
    """Returns `function` run on each device's shards: `jax.shard_map` over the axes that are not manual yet.

    Args:
      mesh: the mesh.
      function: what one device does with its shards.
      in_specs: of the arguments; axes that are manual already are left out.
      out_specs: of the results, likewise.
      is_opaque: the function brings a rule of its own for the partitioner (a library's kernel), which must not meet it
        where other axes are manual: axes of size 1 are made manual too. Otherwise they are left, which compiles faster.
    """
    axes = _automatic(mesh)
    if mesh.size == 1 or not axes or not (is_opaque or _is_split_here(mesh)):
        return function
    here = _mesh_here(mesh)
    return jax.shard_map(
        function,
        mesh=here,
        in_specs=manual_specs(in_specs, axes),
        out_specs=manual_specs(out_specs, axes),
        axis_names=axes,
        check_vma=False,
    )


def manual_specs(specs: Any, axes: frozenset[str]) -> Any:
    """Returns each spec with only the manual mesh axes in it, as `jax.shard_map` wants them.

    Args:
      specs: a tree of `PartitionSpec`.
      axes: names of the manual axes.
    """

    def keep(spec: PartitionSpec) -> PartitionSpec:
        return spec_of_dims([tuple(axis for axis in dim if axis in axes) for dim in axes_of_dims(spec, len(spec))])

    return jax.tree.map(keep, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def axes_in(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes that a spec names, in its order."""
    return tuple(axis for dim in axes_of_dims(spec, len(spec)) for axis in dim)


def _mesh_here(mesh: Mesh) -> Mesh | AbstractMesh:
    current = jax.sharding.get_abstract_mesh()
    return current if current.manual_axes else mesh


def _automatic(mesh: Mesh) -> frozenset[str]:
    return frozenset(mesh.axis_names) - frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _sizes_here(mesh: Mesh) -> dict[str, int]:
    return {axis: size if axis in _automatic(mesh) else 1 for axis, size in mesh.shape.items()}


def _is_split_here(mesh: Mesh) -> bool:
    return any(size > 1 for size in _sizes_here(mesh).values())
