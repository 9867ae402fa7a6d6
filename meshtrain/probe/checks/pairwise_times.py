"""Measures the time that each process takes to exchange data with other processes, pair by pair."""

import time
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_NUM_ELEMENTS = 2**18  # float32: 1 MiB per device
_NUM_REPEATS = 8
_NUM_ROUNDS = 5
MOST_PARTNERS = 7  # each partner needs its own compiled program
_PROCESS, _DEVICE = "process", "device"


def tournament(num_processes: int, most: int = MOST_PARTNERS) -> list[list[tuple[int, int]]]:
    """Returns rounds of disjoint pairs of processes; no pair occurs twice (the circle method).

    >>> tournament(4)
    [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]

    Args:
      num_processes: the number of processes; if it is odd, one process has no partner in each round.
      most: the maximum number of rounds.
    """
    circle: list[int | None] = [*range(num_processes), *([None] if num_processes % 2 else [])]
    rounds = []
    for _ in range(min(most, len(circle) - 1)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def time_pairs(devices: Sequence[jax.Device], own: int) -> dict[int, list[float]]:
    """Returns partner process -> the seconds of an exchange of 1 MiB per device in each round; all processes call it.

    Each device of a process exchanges data with the device of the same number in the partner process.

    Args:
      devices: the devices of all processes, the same number in each.
      own: the index of this process.
    """
    processes = sorted({device.process_index for device in devices})
    grid = np.array([[each for each in devices if each.process_index == process] for process in processes])
    mesh = Mesh(grid, (_PROCESS, _DEVICE))
    spec = PartitionSpec((_PROCESS, _DEVICE))
    # Created on each device: device_put of a host array would compare it between all processes.
    x = jax.make_array_from_callback(
        (grid.size, _NUM_ELEMENTS), NamedSharding(mesh, spec), lambda index: np.ones((1, _NUM_ELEMENTS), np.float32)
    )
    result: dict[int, list[float]] = {}
    for pairs in tournament(len(processes)):
        run = _exchange(mesh, spec, pairs)
        jax.block_until_ready(run(x))
        seconds = []
        for _ in range(_NUM_ROUNDS):
            start = time.perf_counter()
            jax.block_until_ready(run(x))
            seconds.append((time.perf_counter() - start) / _NUM_REPEATS)
        for a, b in pairs:
            if processes.index(own) in (a, b):
                result[processes[a] if processes[b] == own else processes[b]] = seconds
    return result


def _exchange(mesh: Mesh, spec: PartitionSpec, pairs: Sequence[tuple[int, int]]) -> jax.stages.Wrapped:
    both = [*pairs, *((b, a) for a, b in pairs)]

    def many(x: jax.Array) -> jax.Array:
        # A process without a partner receives zeros.
        return lax.fori_loop(0, _NUM_REPEATS, lambda _, each: lax.ppermute(each, _PROCESS, both), x)

    return jax.jit(jax.shard_map(many, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
