"""Measures the time and checks the result of one collective along one axis of a mesh.

A collective runs several times inside one compiled program, each time on the previous result, so that XLA can neither
remove nor merge repetitions. The program also returns the result of the first collective, which is compared with numpy.
A round is one run of the program. The fastest round is reported, because other work of the machine only adds time. The
dispatch of a round is included in the time, divided by the number of repeats.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshtrain.hardware.links import wire_share
from meshtrain.launch import peers
from meshtrain.probe.bench.operations import base, expected, operation, shift

NUM_ROUNDS = 7
_MOST_REPEATS, _LEAST_REPEATS, _REPEATED_BYTES = 51, 5, 2**26  # repeats are odd: one collective, and then pairs
# These collectives write their result to another buffer than their input; all-reduces do so for small arrays, on GPUs
# since jaxlib 0.12. With two of them in the loop body, the result is in the first buffer again; with one, each
# iteration would copy the array. Other collectives compute in place.
_IN_PAIRS = ("all-reduce", "all-to-all", "collective-permute")
_ITEM_BYTES = 4  # float32
Index: TypeAlias = Any  # index of a shard in its array: a slice of each dim; JAX's own type also has None


@dataclasses.dataclass(frozen=True)
class Timed:
    """The measurements of one collective of one size.

    Attributes:
      axis: the axis of the mesh along which the collective ran.
      operation: the name of the collective, an element of `links.OPERATIONS`.
      group_size: the number of devices along the axis.
      num_bytes: the bytes of the larger of a device's input and output (S in nccl-tests).
      seconds: for each round, the time of one collective in the slowest process.
      wrong: an error line for each process in which the result was wrong.
    """

    axis: str
    operation: str
    group_size: int
    num_bytes: int
    seconds: tuple[float, ...]
    wrong: tuple[str, ...] = ()

    @property
    def fastest_seconds(self) -> float:
        """The time of one collective in the fastest round."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """The ratio of the median to the fastest time of all rounds: 1 on an idle machine."""
        return statistics.median(self.seconds) / self.fastest_seconds

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends if the operation uses a ring; see `links.wire_share`."""
        return self.num_bytes * wire_share(self.operation, self.group_size)

    @property
    def algorithm_bytes_per_second(self) -> float:
        """The bytes of the array divided by the fastest time: algbw of nccl-tests."""
        return self.num_bytes / self.fastest_seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """The wire bytes divided by the fastest time: busbw of nccl-tests.

        This rate is comparable with the speed of a link, for every group size.
        """
        return self.wire_bytes / self.fastest_seconds


def measure_collective(
    mesh: Mesh,
    axis: str,
    name: str,
    num_bytes: int,
    *,
    num_rounds: int = NUM_ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Measures one collective in all groups along one axis simultaneously; all processes of the mesh call it.

    Args:
      mesh: the mesh of the devices; the groups along the axis work at the same time, as in a training step.
      axis: an axis with at least two devices.
      name: an element of `links.OPERATIONS`.
      num_bytes: the size of a device's array in bytes; rounded up so that it can be split evenly over the axis.
      num_rounds: how often the program runs after its first run, which compiles it.
      clock: a function that returns the time in seconds; called before and after each round.

    Raises:
      LostPeer: another process does not answer.
    """
    size = mesh.shape[axis]
    num_elements = -(-num_bytes // (_ITEM_BYTES * size)) * size
    num_repeats = repeats(num_elements * _ITEM_BYTES)
    x = inputs(mesh, num_elements)
    run = program(mesh, axis, name, num_repeats)
    wrong = difference(mesh, axis, name, jax.block_until_ready(run(x))[0])
    own = []
    for _ in range(num_rounds):
        start = clock()
        jax.block_until_ready(run(x))
        own.append((clock() - start) / num_repeats)
    answers = peers.gather_values("probe", {"seconds": own, "wrong": wrong})
    slowest = tuple(max(each) for each in zip(*(one["seconds"] for one in answers), strict=True))
    lines = tuple(f"process {index}: {one['wrong']}" for index, one in enumerate(answers) if one["wrong"])
    return Timed(axis, name, size, num_elements * _ITEM_BYTES, slowest, lines)


def repeats(num_bytes: int) -> int:
    """Returns how often a program repeats a collective: an odd number, large for small sizes to hide the dispatch.

    Args:
      num_bytes: the size of a device's array in bytes.
    """
    return max(_LEAST_REPEATS, min(_MOST_REPEATS, _REPEATED_BYTES // num_bytes | 1))


def inputs(mesh: Mesh, num_elements: int) -> jax.Array:
    """Returns the input of a collective, float32 [mesh.size, num_elements], sharded by row over all devices.

    Row r, for the r-th device in mesh order, is `base(num_elements)` + `shift(r)`.
    """
    common = base(num_elements)

    def row(index: Index) -> np.ndarray:
        return (common + np.float32(shift(_row(index))))[None]

    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size, num_elements), sharding, row)


def program(mesh: Mesh, axis: str, name: str, num_repeats: int) -> jax.stages.Wrapped:
    """Returns a jitted function that runs a collective several times, each time on the previous result.

    Its argument is float32 [mesh.size, E], with the E elements of a device in each row. Its results are the arrays
    after the (first, last) collective, in the same shape. Sums grow with each repeat and may overflow to infinity,
    which does not change the time.

    Args:
      mesh: the mesh of the devices.
      axis: the axis along which the collectives run.
      name: an element of `links.OPERATIONS`.
      num_repeats: the number of collectives, odd.
    """
    function = operation(name, axis, mesh.shape[axis], mesh.devices.flat[0].platform)

    in_pairs = name in _IN_PAIRS

    def several(_: jax.Array, x: jax.Array) -> jax.Array:
        return function(function(x)) if in_pairs else function(x)

    def many(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = function(rows[0])
        last = lax.fori_loop(0, (num_repeats - 1) // (1 + in_pairs), several, first)
        return first[None], last[None]

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(many, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False))


def difference(mesh: Mesh, axis: str, name: str, result: jax.Array) -> str:
    """Returns an error line about the first wrong element on this process's devices; empty if all elements are correct.

    Args:
      mesh: the mesh of the devices.
      axis: the axis along which the collective ran.
      name: an element of `links.OPERATIONS`.
      result: the output of one collective on `inputs`, float32 [mesh.size, elements of a device].
    """
    common, places = base(result.shape[1]), np.arange(mesh.size).reshape(mesh.devices.shape)
    along = mesh.axis_names.index(axis)
    for part in result.addressable_shards:
        where: list[Any] = [int(at) for at in np.unravel_index(_row(part.index), places.shape)]
        mine = where[along]
        where[along] = slice(None)
        group = places[tuple(where)]
        wanted, got = expected(name, common, [int(row) for row in group], mine), np.asarray(part.data)[0]
        if wrong := np.flatnonzero(wanted != got).tolist():
            return (
                f"{name} on {axis}: device {part.device.id}, number {mine} of its group, has {len(wrong)} wrong "
                f"elements of {got.size}; element {wrong[0]} is {got[wrong[0]]} instead of {wanted[wrong[0]]}"
            )
    return ""


def _row(index: Index) -> int:
    return int(index[0].start or 0)
