"""Measures all collectives along all axes of a mesh, from small sizes up to the free memory."""

import dataclasses
import os
import socket
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from meshtrain.hardware.links import OPERATIONS
from meshtrain.launch import peers
from meshtrain.probe.bench.link_fit import Fit, fit
from meshtrain.probe.bench.timed import NUM_ROUNDS, Timed, measure_collective, repeats

GROWTH = 4  # factor from one size to the next
# Copies of the largest array on a device: input, first and last result, loop state, temporary buffers of collectives.
_COPIES = 8
_UNKNOWN_BYTES = 2**32
Measure = Callable[[Mesh, str, str, int], Timed]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All measurements of one mesh.

    Attributes:
      platform: the devices' `jax.Device.device_kind`.
      shape: mesh axis -> its size.
      num_processes: the number of processes of the mesh.
      num_hosts: the number of hosts of these processes.
      sizes: the requested sizes in bytes; the largest sizes of a slow operation may have been skipped.
      rows: the measurements, one for each axis, operation and size.
      fits: the fits, one for each axis and operation.
    """

    platform: str
    shape: dict[str, int]
    num_processes: int
    num_hosts: int
    sizes: tuple[int, ...]
    rows: tuple[Timed, ...]
    fits: tuple[Fit, ...]


def sizes(smallest_bytes: int, largest_bytes: int) -> list[int]:
    """Returns the sizes in bytes to measure: the smallest size, and each further size four times the previous one.

    >>> sizes(1024, 70000)
    [1024, 4096, 16384, 65536]
    """
    result = [smallest_bytes]
    while result[-1] * GROWTH <= largest_bytes:
        result.append(result[-1] * GROWTH)
    return result


def room_bytes(mesh: Mesh) -> int:
    """Returns the size in bytes of the largest array that the benchmark can use, given the free memory of every device.

    The benchmark needs several copies of the array. Simulated devices share half of their host's memory. All processes
    must call this function, and get the same number.
    """
    own = [device for device in mesh.devices.flat if device.process_index == peers.index()]
    if own[0].platform == "cpu":
        num_neighbours = peers.gather_values("host", socket.gethostname()).count(socket.gethostname())
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // (num_neighbours * len(own))
    else:
        memory = [device.memory_stats() for device in own]  # some allocators report no statistics
        free = min(each["bytes_limit"] - each["bytes_in_use"] if each else _UNKNOWN_BYTES for each in memory)
    return int(min(peers.gather_values("room", free)) // _COPIES)


def sweep(
    mesh: Mesh,
    all_bytes: Sequence[int],
    limit_seconds: float,
    *,
    measure: Measure = measure_collective,
    tell: Callable[[Timed], object] = lambda _: None,
) -> Sweep:
    """Measures every operation along every axis with at least two devices; all processes of the mesh call it.

    Args:
      mesh: the mesh of the devices.
      all_bytes: the sizes of a device's array in bytes, ascending.
      limit_seconds: maximum of `expected_seconds` for one size of an operation; if a size would take longer, it and
        all larger sizes of this operation are skipped.
      measure: a function (mesh, axis, operation, bytes) -> the measurement of one collective.
      tell: a function that is called with each measurement, for example to show progress.

    Raises:
      LostPeer: another process does not answer.
    """
    hosts = peers.gather_values("hosts", socket.gethostname())
    rows, fits = list[Timed](), list[Fit]()
    for axis in (name for name, size in mesh.shape.items() if size > 1):
        num_hosts = hosts_along(mesh, axis, hosts)
        for operation in OPERATIONS:
            found = list[Timed]()
            for num_bytes in all_bytes:
                if found and expected_seconds(found, num_bytes) > limit_seconds:
                    break
                found.append(measure(mesh, axis, operation, num_bytes))
                tell(found[-1])
            rows += found
            fits.append(fit(found, num_hosts))
    platform = mesh.devices.flat[0].device_kind
    shape = {axis: int(size) for axis, size in mesh.shape.items()}
    return Sweep(platform, shape, peers.count(), len(set(hosts)), tuple(all_bytes), tuple(rows), tuple(fits))


def expected_seconds(found: Sequence[Timed], num_bytes: int) -> float:
    """Returns the expected seconds to measure a larger size in all rounds, extrapolated from the last two sizes.

    It depends only on values that all processes share, so that all of them skip the same sizes.

    Args:
      found: the measurements of smaller sizes, at least one; with a single size the time is assumed constant.
      num_bytes: the larger size, in bytes.
    """
    last, before = found[-1], found[max(0, len(found) - 2)]
    grown = max(0.0, last.fastest_seconds - before.fastest_seconds) / max(1, last.num_bytes - before.num_bytes)
    each = last.fastest_seconds + grown * (num_bytes - last.num_bytes)
    return each * repeats(num_bytes) * (1 + NUM_ROUNDS)


def hosts_along(mesh: Mesh, axis: str, hosts: Sequence[str]) -> int:
    """Returns the number of hosts that a group of devices along an axis spans; the maximum over all groups.

    Args:
      mesh: the mesh of the devices.
      axis: an axis of the mesh.
      hosts: the host name of each process, by process index.
    """
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return max(len({hosts[device.process_index] for device in group}) for group in groups)
