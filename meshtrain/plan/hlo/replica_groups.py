"""Parses replica groups in their four syntaxes, and maps them to mesh axes. Uses no JAX.

    {{0,1},{2,3}}                            lists of device numbers; {} is one group of all devices
    [4,2]<=[8]                               four groups of two devices, with the numbers 0 to 7 in order
    [4,2]<=[2,2,2]T(1,0,2)                   the numbers 0 to 7 in the order of a transposed array [2,2,2]
    mesh['a'=2,'b'=4] {'b'}                  along named axes of a mesh; 'b':(1)2 is a part of an axis,
                                             `, device_ids=([2,4]T(1,0))` gives the order of the mesh's devices
G: groups, n: devices in a group.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})?\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
ALONG = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}")
AXIS = re.compile(r"'([^']+)'=(\d+)")
ORDER = re.compile(r"\[([\d,]+)\]T\(([\d,]+)\)$")
PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
IRREGULAR = "irregular"


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
    """Returns the groups of a collective, int [groups, devices]; for a permute, (source, target) pairs, int [pairs, 2].

    Args:
      attributes: the text of the instruction's attributes.
      num_devices: number of devices of the program. The text `replica_groups={}` means one group of all devices.

    Raises:
      ValueError: the text matches none of the four syntaxes that the module's docstring lists.
    """
    if match := ALONG.search(attributes):
        return _along(match[1], match[2], match[3])
    if match := IOTA.search(attributes):
        return _device_numbers(match[2], match[3]).reshape(_numbers(match[1]))
    if match := LISTED.search(attributes):
        if not match[1]:
            return np.arange(num_devices).reshape(1, -1)
        groups = [[int(number) for number in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
        longest = max(map(len, groups))
        # Groups of different sizes are padded with their first device, which does not change their axes.
        return np.array([group + group[:1] * (longest - len(group)) for group in groups])
    raise ValueError(f"unknown replica groups: {attributes[:200]}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _device_numbers(dims: str, order: str | None) -> np.ndarray:
    """Returns the device numbers 0, 1, ... as an array, int [*dims], transposed if `order` is given.

    Args:
      dims: sizes separated by commas.
      order: the new order of the dims, separated by commas; None: not transposed.
    """
    sizes = _numbers(dims)
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(_numbers(order) if order else range(len(sizes)))


def _along(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Returns the groups along some axes of a mesh, int [groups, devices of a group].

    Args:
      mesh: the axes and their sizes, such as `'a'=2,'b'=4`.
      device_ids: the order of the mesh's devices, such as `[2,4]T(1,0)`; None: 0, 1, ...
      axes: the axes along which groups run, such as `'b'` or `'b':(1)2`.

    Raises:
      ValueError: `device_ids` has an unknown syntax.
    """
    sizes = {name: int(size) for name, size in AXIS.findall(mesh)}
    order = np.arange(math.prod(sizes.values()))
    if device_ids:
        match = ORDER.match(device_ids)
        if not match:
            raise ValueError(f"unknown order of devices: {device_ids}")
        order = _device_numbers(match[1], match[2])
    # If a part of an axis is given, the axis is split into (before, part, after), and groups run only along the part.
    shape, chosen = list[int](), list[int]()
    wanted = {name: (before, size) for name, before, size in PART.findall(axes)}
    for name, size in sizes.items():
        if name not in wanted:
            shape.append(size)
            continue
        before, part = (int(wanted[name][0]), int(wanted[name][1])) if wanted[name][0] else (1, size)
        chosen.append(len(shape) + 1)
        shape += [before, part, size // before // part]
    others = [dim for dim in range(len(shape)) if dim not in chosen]
    num_members = math.prod(shape[dim] for dim in chosen)
    return order.reshape(shape).transpose(others + chosen).reshape(-1, num_members)


def axes_of(groups: np.ndarray, mesh_shape: Mapping[str, int], *, are_pairs: bool = False) -> str:
    """Returns the mesh axes along which groups run, joined by `+` in mesh order.

    Args:
      groups: int [groups, devices of a group], positions in the flattened mesh.
      mesh_shape: mesh axis -> size, in mesh order.
      are_pairs: whether the groups are the (source, target) pairs of a permute, which need not cover the axis.

    Returns:
      The axes; '' if each group is a single device, `irregular` if groups are not complete lines, planes, ... of the
      mesh.
    """
    places = np.stack(np.unravel_index(groups, tuple(mesh_shape.values())), axis=-1)
    differs = (places != places[:, :1]).any(axis=(0, 1))
    names = [axis for axis, along in zip(mesh_shape, differs, strict=True) if along]
    is_whole = math.prod(mesh_shape[name] for name in names) == groups.shape[1]
    return "+".join(names) if is_whole or are_pairs else IRREGULAR
