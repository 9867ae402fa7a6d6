"""The mesh: axis sizes from options and devices, and an order of devices that gives inner axes the fast links."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from meshtrain.errors import Problem, UserError, refuse
from meshtrain.options import option
from meshtrain.sharding.rules import AXES, AXIS_RECORDS, DATA, PIPELINE, sizes_text, storage_axes

SIMULATED_DEVICES = 8


# Annotated as Any because the type checker cannot know the fields of a class made from a table.
_Sizes: Any = dataclasses.make_dataclass(
    "_Sizes",
    [(axis.name, int, option(1, f"{axis.text}; -1: the remaining devices")) for axis in AXIS_RECORDS],
    frozen=True,
)


class MeshOptions(_Sizes):
    """The size of each axis of the mesh, in mesh order; 1 by default."""


def check(options: MeshOptions) -> list[Problem]:
    """Returns an error line for each invalid size: a second axis of -1, or a size below 1 that is not -1.

    Whether the sizes fit the devices is not checked.
    """
    sizes = dataclasses.asdict(options)
    lines = [
        Problem(
            f"mesh.{axis}",
            got=size,
            allowed="at least 1, or -1 for the remaining devices",
            nearest=-1 if size < 0 else 1,
        )
        for axis, size in sizes.items()
        if size < 1 and size != -1
    ]
    open_axes = [axis for axis in AXES if sizes[axis] == -1]
    if len(open_axes) > 1:
        fix = ", ".join(f"mesh.{axis}=1" for axis in open_axes[1:])
        names = ", ".join(f"mesh.{axis}" for axis in open_axes)
        lines.append(Problem(names, got=f"-1 for {len(open_axes)} axes", allowed="-1 for one", nearest=fix))
    return lines


def mesh_shape(
    options: MeshOptions, num_devices: int, *, simulated: bool, num_processes: int = 1, slice_size: int = 0
) -> dict[str, int]:
    """Returns the size of each axis, in mesh order; an axis of -1 gets the remaining devices.

    Args:
      options: the sizes in the configuration.
      num_devices: number of devices of all processes; ignored if devices are simulated.
      simulated: whether the devices are simulated on CPU; their number is then `num_needed(options)`.
      num_processes: number of processes. A single process may leave devices unused; several must use all devices.
      slice_size: number of devices of each TPU slice if there are several slices, else 0. With several slices, the mesh
        must fit in one slice or use complete slices.

    Raises:
      UserError: the problems of `check`, or sizes that do not fit the devices.
    """
    refuse(check(options))
    sizes = {axis: int(getattr(options, axis)) for axis in AXES}
    closed = math.prod(size for size in sizes.values() if size != -1)
    open_axis = next((axis for axis in AXES if sizes[axis] == -1), None)
    asked = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "data 1"
    if simulated:
        num_devices = num_needed(options)
    if open_axis is not None:
        if num_devices % closed or not num_devices:
            raise UserError(_uneven(open_axis, asked, closed, num_devices))
        sizes[open_axis] = num_devices // closed
    num_used = math.prod(sizes.values())
    refuse(_too_many(sizes, num_devices))
    if slice_size and num_used > slice_size and num_used % slice_size:
        raise UserError(
            Problem(
                "mesh",
                got=f"{asked}, {num_used} devices",
                allowed=f"at most the {slice_size} devices of a slice, or complete slices",
                nearest=_filling_override(sizes, num_used // slice_size * slice_size),
            )
        )
    if num_processes > 1 and num_used != num_devices:
        raise UserError(
            Problem(
                "mesh",
                got=f"{asked}, {num_used} devices",
                allowed=f"exactly the {num_devices} devices of {num_processes} processes",
                nearest=_filling_override(sizes, num_devices),
            )
        )
    return sizes


def num_needed(options: MeshOptions) -> int:
    """Returns the number of devices to simulate: the product of the axis sizes.

    An axis of -1 gets the largest size for which the product is at most 8, and at least size 1.

    Args:
      options: sizes for which `check` returns no problems.
    """
    sizes: list[int] = [getattr(options, axis) for axis in AXES]
    closed = math.prod(size for size in sizes if size != -1)
    return closed * max(1, SIMULATED_DEVICES // closed) if -1 in sizes else closed


def _uneven(open_axis: str, asked: str, closed: int, num_devices: int) -> str:
    below = num_devices // closed
    unused = num_devices - below * closed
    nearest = f"mesh.{open_axis}={below}, which leaves {unused} unused" if below else "smaller axes"
    return Problem(
        f"mesh.{open_axis}",
        got=(
            f"-1 (the remaining devices) in {asked}: {num_devices} devices are not divisible by the product of "
            f"the other axes, {closed}"
        ),
        allowed=f"other axes whose product divides {num_devices}",
        nearest=nearest,
    )


def _too_many(sizes: Mapping[str, int], num_devices: int) -> list[Problem]:
    """Returns an error line if the mesh needs more devices than are available, else [].

    The fix that the line suggests reduces the outermost axes first.
    """
    if (num_used := math.prod(sizes.values())) <= num_devices:
        return []
    fitted = dict(sizes)
    for axis in AXES:
        others = math.prod(size for name, size in fitted.items() if name != axis)
        fitted[axis] = max(1, min(fitted[axis], num_devices // others))
    fix = " ".join(f"mesh.{axis}={fitted[axis]}" for axis in AXES if fitted[axis] != sizes[axis])
    return [
        Problem(
            "mesh",
            got=f"{sizes_text(sizes)}, {num_used} devices",
            allowed=f"at most the {num_devices} available devices",
            nearest=fix,
        )
    ]


def _filling_override(sizes: Mapping[str, int], num_devices: int) -> str:
    """Returns an option as text, such as `mesh.data=4`, with which the mesh uses exactly `num_devices` devices.

    The option changes the size of the outermost axis for which this is possible. If it is possible for no axis, the
    text states the required product of all sizes.
    """
    for axis in AXES:
        others = math.prod(size for name, size in sizes.items() if name != axis)
        if num_devices % others == 0:
            return f"mesh.{axis}={num_devices // others}"
    return f"sizes whose product is {num_devices}"


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """Returns the mesh, with axes in mesh order, all of type Auto: the partitioner inserts the collectives.

    The outermost axes cross the slow network between slices, or between hosts of GPUs. The inner axes use the fast
    links within a slice or a host if they fit. `describe` reports the result.

    Args:
      shape: the size of each axis.
      devices: at least as many devices as the product of the sizes; the first are used. Devices of an ahead-of-time
        topology are allowed.

    Raises:
      UserError: there are fewer devices than the product.
    """
    sizes = tuple(shape[axis] for axis in AXES)
    refuse(_too_many(shape, len(devices)))
    return Mesh(_order_devices(sizes, list(devices[: math.prod(sizes)])), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _order_devices(sizes: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    how = _arrangement(devices)
    if how in ("slices", "hosts"):
        key = "slice_index" if how == "slices" else "process_index"
        outer = _outer_sizes(sizes, len({getattr(device, key) for device in devices}))
        inner = tuple(size // out for size, out in zip(sizes, outer, strict=True))
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, process_is_granule=how == "hosts", allow_split_physical_axes=True
        )
    if how == "torus":
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return np.asarray(devices).reshape(sizes)


def _arrangement(devices: Sequence[jax.Device]) -> str:
    """Returns how devices are ordered in the mesh.

    "slices" and "hosts" group devices by TPU slice or by host. "torus" follows the links of a TPU slice. "listed" is
    JAX's order of devices.
    """
    if devices[0].platform == "cpu":
        return "listed"
    tpu = devices[0].platform == "tpu"
    for how, key in (("slices", "slice_index"), ("hosts", "process_index")):
        if how == "hosts" and tpu:
            continue  # A slice is one torus over all its hosts: links between its hosts are as fast as others.
        sizes = collections.Counter(getattr(device, key, None) for device in devices)
        if len(sizes) > 1:
            # mesh_utils requires groups of one size; a mesh on a part of the machine may have several sizes.
            return how if len(set(sizes.values())) == 1 else "listed"
    return "torus" if tpu and getattr(devices[0], "coords", None) is not None else "listed"


def _outer_sizes(sizes: Sequence[int], num_groups: int) -> tuple[int, ...]:
    """Returns for each axis the number of groups of devices (slices or hosts) along it; the product is `num_groups`.

    The outermost axes get as many groups as possible.

    Args:
      sizes: the size of each axis, in mesh order.
      num_groups: number of groups, all of the same number of devices.
    """
    outer = []
    for size in sizes:
        outer.append(math.gcd(size, num_groups))
        num_groups //= outer[-1]
    assert num_groups == 1, "groups of equal size always divide the mesh"
    return tuple(outer)


def over_slices(mesh: Mesh) -> dict[str, int]:
    """Returns the number of TPU slices that each axis crosses, in mesh order; 1 for an axis within a slice."""
    slices = _numbers(mesh, "slice_index")
    lines = [np.moveaxis(slices, i, -1).reshape(-1, size)[0] for i, size in enumerate(slices.shape)]
    return {axis: len(set(line)) for axis, line in zip(mesh.axis_names, lines, strict=True)}


def first_slice(mesh: Mesh) -> Mesh:
    """Returns the submesh of the devices in the first TPU slice; the mesh itself if there is one slice."""
    over = over_slices(mesh)
    if math.prod(over.values()) == 1:
        return mesh
    return Mesh(mesh.devices[tuple(slice(mesh.shape[axis] // over[axis]) for axis in AXES)], AXES)


def advice(mesh: Mesh, num_machines: int = 0) -> list[tuple[str, str]]:
    """Returns [(problem, remedy)] if an axis that communicates in every layer crosses the slow network, else [].

    On TPUs, no axis except data and pipeline should leave a slice. On GPUs, the axes that store weights may also leave
    a host. The network between hosts of GPUs has 1/9 to 1/18 of the speed of the links inside a host; the network
    between slices has 1/30 or less.

    Args:
      mesh: a mesh of real or ahead-of-time devices.
      num_machines: number of machines on which the processes run; 0: one machine per process. If several processes run
        on one machine, the links between them are unknown, and the result is [].
    """
    platform = mesh.devices.flat[0].platform
    key, what, far = ("slice_index", "slice", ()) if platform == "tpu" else ("process_index", "host", storage_axes())
    numbers = _numbers(mesh, key)
    near = [axis for axis in _crossing(numbers) if axis not in (DATA, PIPELINE, *far)]
    if platform == "cpu" or not near or (platform != "tpu" and 0 < num_machines < len(set(numbers.flat))):
        return []
    return [
        (f"{', '.join(near)} crosses {what}s and sends in each layer", f"let {DATA} or {PIPELINE} cross them instead")
    ]


def _numbers(mesh: Mesh, key: str) -> np.ndarray:
    """Returns the attribute `key` of each device as an int array in the shape of the mesh; 0 if missing or None."""
    return np.vectorize(lambda device: getattr(device, key, None) or 0, otypes=[int])(mesh.devices)


def _crossing(numbers: np.ndarray) -> list[str]:
    """Returns the names of the mesh axes that cross slices or processes.

    Args:
      numbers: the number of the slice or process of each device, in the shape of the mesh (from `_numbers`). An axis is
        returned if the number changes along it.
    """
    return [axis for i, axis in enumerate(AXES) if (numbers != numbers.take([0], axis=i)).any()]


def describe(mesh: Mesh, num_machines: int = 0) -> str:
    """Describes a mesh in one line: sizes, devices, their order, and the axes that cross processes or slices.

    Args:
      mesh: a mesh of real or ahead-of-time devices.
      num_machines: number of machines on which the processes run; 0: one machine per process.
    """
    devices = list(mesh.devices.flat)
    sizes = sizes_text(mesh.shape) or "one device"
    order = {
        "slices": "slices outermost",
        "hosts": "hosts outermost",
        "torus": "along the torus",
        "listed": "in JAX's device order",
    }[_arrangement(devices)]
    num_processes = len({getattr(device, "process_index", None) or 0 for device in devices})
    processes = "hosts"
    if 0 < num_machines < num_processes:
        order = order.replace("hosts", "processes")
        processes = f"processes on {'one machine' if num_machines == 1 else f'{num_machines} machines'}"
    parts = [f"{sizes}: {len(devices)} x {devices[0].device_kind}, {order}"]
    for key, what in (("slice_index", "slices"), ("process_index", processes)):
        groups = _numbers(mesh, key)
        num_groups = len(set(groups.flat))
        if num_groups > 1:
            parts.append(f"{num_groups} {what}, crossed by {', '.join(_crossing(groups))}")
    return "; ".join(parts)
