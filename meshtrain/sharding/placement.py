"""Sharding constraints and manual regions for models, which access the mesh only through a `Placement`.

Inside a `jax.shard_map`, shapes are local along its manual axes, and constraints for the partitioner must not name
these axes. Each function in this module drops the axes that are manual when it is called.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshtrain.hardware.accelerators import GPU, Capability
from meshtrain.sharding.jaxprs import inline_calls
from meshtrain.sharding.param_sharding import (
    MAX_LEVEL,
    Names,
    axes_of_dims,
    num_parts,
    param_sharding,
    spec,
    spec_of_dims,
)
from meshtrain.sharding.rules import DATA, LayoutOptions, Rules, default_rules
from meshtrain.sharding.saved import GATHERED, Tape, current, mark, under
from meshtrain.sharding.trees import ArrayFunction, Arrays, Specs


@dataclasses.dataclass(frozen=True)
class Placement:
    """Applies shardings to activations and gathered weights, and runs functions in manual regions.

    In each method, `names` are the logical axes of an array, a name or None for each dim. An array that the rules
    cannot split raises UserError with the reasons (`param_sharding.array_problems`).

    Attributes:
      rules: the table of rules: logical axis -> mesh axes.
      mesh: the mesh of devices; None means one device without shardings.
      keeps_gathered: whether a weight gathered in the forward pass is a residual of the backward pass. Otherwise the
        backward pass gathers it again, regardless of `remat.policy`.
      in_fp8: whether the operands of products with the weights of layers are 8-bit floats (`models/fp8.py`).
    """

    rules: Rules
    mesh: Mesh | None
    keeps_gathered: bool = False
    in_fp8: bool = False

    @classmethod
    def single_device(cls) -> "Placement":
        """Returns the placement for a single device, which has no mesh: its methods return arrays unchanged."""
        return cls(default_rules(LayoutOptions()), None)

    def for_decoding(self, names: Sequence[str]) -> "Placement":
        """Returns a copy of this placement for decoding one token at a time: some activation dims are not split.

        The copy has no 8-bit products: the time of a product with a single token is the time of reading the weights,
        and 8-bit operands do not shorten it.

        Args:
          names: the logical axes of activation dims that are too small to split when decoding, such as `sequence`.
        """
        entries = tuple(
            dataclasses.replace(rule, activations=()) if rule.name in names else rule for rule in self.rules.entries
        )
        return dataclasses.replace(self, rules=dataclasses.replace(self.rules, entries=entries), in_fp8=False)

    def activation(self, x: jax.Array, names: Names) -> jax.Array:
        """Returns `x` constrained to its sharding according to the rules."""
        return self._constrain(x, self.activation_spec(x.shape, names))

    def weight(self, w: jax.Array, names: Names) -> jax.Array:
        """Returns `w`, a weight in its compute dtype, gathered over the axes that split it for storage only.

        Without this constraint the partitioner may leave the weight sharded and move activations instead, which sends
        more bytes. If no axis splits weights for storage only, `w` is returned unchanged. Otherwise the result is
        marked as `GATHERED` for remat policies.
        """
        spec_of_weight = self.weight_spec(w.shape, names)
        return mark(self._constrain(w, spec_of_weight), GATHERED) if self.gathers_weights else w

    def as_stored(self, w: jax.Array, names: Names) -> jax.Array:
        """Returns `w`, a weight in its compute dtype, constrained to its stored sharding.

        Call it before `weight`, the method that gathers. Without this constraint the partitioner may gather the weight
        before the cast to the compute dtype, and send float32. If no axis splits weights for storage only, `w` is
        returned unchanged.
        """
        return self._constrain(w, self.stored_spec(w.shape, names)) if self.gathers_weights else w

    def cotangent(self, x: jax.Array, names: Names) -> jax.Array:
        """Returns `x` unchanged; constrains its cotangent to the sharding of an activation with `names`.

        The result of a row-parallel product may be scattered along the sequence. Both products of its backward pass
        read the complete cotangent. Without this constraint the partitioner would gather the cotangent twice.
        """
        if self.mesh is None or not _is_split_here(self.mesh):
            return x

        @jax.custom_vjp
        def identity(x: jax.Array) -> jax.Array:
            return x

        identity.defvjp(lambda x: (x, None), lambda _, cotangent: (self.activation(cotangent, names),))
        unchanged: jax.Array = identity(x)
        return unchanged

    def activation_spec(self, shape: Sequence[int], names: Names) -> PartitionSpec:
        """Returns the spec of an activation according to the rules, without the axes that are already manual."""
        if self.mesh is None:
            return PartitionSpec()
        return spec(f"activation {tuple(names)}", shape, names, self.rules.activations, _sizes_here(self.mesh))

    def weight_spec(self, shape: Sequence[int], names: Names) -> PartitionSpec:
        """Returns the spec of a gathered weight according to the rules, without the axes that are already manual."""
        if self.mesh is None:
            return PartitionSpec()
        return spec(f"weight {tuple(names)}", shape, names, self.rules.gathered, _sizes_here(self.mesh))

    def stored_spec(self, shape: Sequence[int], names: Names) -> PartitionSpec:
        """Returns the spec of a stored weight according to the rules, without the axes that are already manual."""
        if self.mesh is None:
            return PartitionSpec()
        level = MAX_LEVEL if DATA in self.rules.storage_axes else 0
        return param_sharding(shape, names, self.rules, _sizes_here(self.mesh), level).parameter

    @property
    def platform(self) -> str:
        """The platform of the mesh's devices (`cpu`, `tpu`, `gpu`, ...), real or ahead-of-time."""
        platform: str = jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform
        return platform

    @property
    def compute_capability(self) -> Capability | None:
        """The compute capability of NVIDIA GPUs, such as (9, 0); (0, 0) for other GPUs; None for other devices."""
        device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        if device.platform not in GPU:
            return None
        numbers = str(getattr(device, "compute_capability", "")).split(".")
        return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdigit, numbers)) else (0, 0)

    @property
    def gathers_weights(self) -> bool:
        """Whether the method `weight` gathers: a storage axis is larger than 1 and not already manual."""
        if self.mesh is None:
            return False
        return any(_sizes_here(self.mesh)[axis] > 1 for axis in self.rules.storage_axes)

    def largest(self, value: jax.Array) -> jax.Array:
        """Returns the elementwise maximum of `value` over the shards of the batch.

        A collective computes the maximum over the manual axes that split the batch. The partitioner computes it over
        the automatic axes. Values of different pipeline stages are not compared, because stages compute different
        layers.
        """
        if self.mesh is None:
            return value
        manual = jax.sharding.get_abstract_mesh().manual_axes
        over = tuple(axis for axis in self.rules.activations["batch"] if axis in manual and self.mesh.shape[axis] > 1)
        return jax.lax.pmax(value, over) if over else value

    def size(self, axes: Sequence[str]) -> int:
        """Returns the product of the sizes of mesh axes; 1 without a mesh."""
        return 1 if self.mesh is None else num_parts(axes, self.mesh.shape)

    def on_shards(
        self,
        function: ArrayFunction,
        in_specs: Specs,
        out_specs: Specs,
        *,
        axes: frozenset[str] | None = None,
        is_opaque: bool = False,
    ) -> ArrayFunction:
        """Returns a function that runs `function` on each device's shards; without a mesh, `function` itself.

        Args:
          function: the computation of one device on its shards. It may use collectives over `axes`.
          in_specs: the specs of the arguments.
          out_specs: the specs of the results.
          axes: the axes to make manual; None: all axes that are not manual yet.
          is_opaque: whether the function contains a library's kernel with its own partitioning rule, which requires all
            axes to be manual.
        """
        if self.mesh is None:
            return function
        return on_shards(self.mesh, function, in_specs, out_specs, axes=axes, is_opaque=is_opaque)

    def _constrain(self, x: jax.Array, wanted: PartitionSpec) -> jax.Array:
        # PartitionSpec() means replicated, not unconstrained, so it is applied too. One device needs no constraint.
        if self.mesh is None or not _is_split_here(self.mesh):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(_mesh_here(self.mesh), wanted))


def on_shards(
    mesh: Mesh,
    function: ArrayFunction,
    in_specs: Specs,
    out_specs: Specs,
    *,
    axes: frozenset[str] | None = None,
    is_opaque: bool = False,
) -> ArrayFunction:
    """Returns a function that runs `function` on each device's shards; only this code calls `jax.shard_map`.

    Inside another manual region the new region is nested: it uses the abstract mesh of the outer region, and axes that
    are already manual are neither entered again nor named in specs (arrays are already local along them).

    With `check_vma=False` a psum is transposed to another psum. So differentiate inside the region, not through it, or
    define the backward pass of the function that contains the region (`jax.custom_vjp`).

    Values that are marked in the region for remat policies (`saved.py`) are results of the region while a tape records,
    and arguments of the region while a tape replays.

    Args:
      mesh: the mesh of devices.
      function: the computation of one device on its shards. It may use collectives over `axes`.
      in_specs: the specs of the arguments. Axes that do not become manual are dropped from these specs.
      out_specs: the specs of the results. Axes that do not become manual are dropped from these specs.
      axes: the axes to make manual. None means all axes that are not manual yet; if all of these have size 1,
        `function` is returned without a region, which compiles faster.
      is_opaque: whether the function contains a library's kernel with its own partitioning rule. This kernel requires
        all axes to be manual, also axes of size 1, so a region is entered on every mesh of several devices.
    """
    assert axes is None or axes <= set(mesh.axis_names), f"the mesh does not have the axes {axes}"
    partitioned = _automatic(mesh)
    entered = partitioned if axes is None else partitioned & axes
    splits = mesh.size > 1 and (is_opaque or _is_split_here(mesh))
    if not entered or (axes is None and not splits):
        return function
    separate = inline_calls if entered != partitioned and mesh.devices.flat[0].platform == "tpu" else lambda run: run
    region = functools.partial(jax.shard_map, mesh=_mesh_here(mesh), axis_names=entered, check_vma=False)
    inputs, outputs = manual_specs(in_specs, entered), manual_specs(out_specs, entered)
    if (tape := current()) is None:
        return region(separate(function), in_specs=inputs, out_specs=outputs)
    # The value that each device saves is one row of an array over all devices of the region.
    rows = PartitionSpec(tuple(axis for axis in mesh.axis_names if axis in entered))
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if tape.replays:
        replay = region(separate(_replaying(function, tape)), in_specs=(rows, *inputs), out_specs=outputs)
        return lambda *arguments: replay(tape.values.pop(0), *arguments)
    record = region(separate(_recording(function, tape)), in_specs=inputs, out_specs=(outputs, rows))

    def run(*arguments: Arrays) -> Arrays:
        result, values = record(*arguments)
        tape.values.append(values)
        return result

    return run


def _recording(function: ArrayFunction, tape: Tape) -> ArrayFunction:
    """Returns a function of one device's shards that returns the result of `function` and the values that it marks."""

    def run(*arguments: Arrays) -> tuple[Arrays, list[Arrays]]:
        inner = Tape(tape.names)
        with under(inner):
            result = function(*arguments)
        return result, jax.tree.map(lambda value: value[None], inner.values)

    return run


def _replaying(function: ArrayFunction, tape: Tape) -> ArrayFunction:
    """Returns a function of the recorded values and one device's shards that returns the result of `function`."""

    def run(values: list[Arrays], *arguments: Arrays) -> Arrays:
        with under(Tape(tape.names, jax.tree.map(lambda value: value[0], values))):
            return function(*arguments)

    return run


def manual_specs(specs: Specs, axes: frozenset[str]) -> Specs:
    """Returns each spec of a pytree restricted to the manual mesh axes `axes`, as `jax.shard_map` requires."""

    def keep(spec: PartitionSpec) -> PartitionSpec:
        return spec_of_dims([tuple(axis for axis in dim if axis in axes) for dim in axes_of_dims(spec, len(spec))])

    return jax.tree.map(keep, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def _mesh_here(mesh: Mesh) -> Mesh | AbstractMesh:
    current = jax.sharding.get_abstract_mesh()
    return current if current.manual_axes else mesh


def _automatic(mesh: Mesh) -> frozenset[str]:
    return frozenset(mesh.axis_names) - frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _sizes_here(mesh: Mesh) -> dict[str, int]:
    return {axis: size if axis in _automatic(mesh) else 1 for axis, size in mesh.shape.items()}


def _is_split_here(mesh: Mesh) -> bool:
    return any(size > 1 for size in _sizes_here(mesh).values())
