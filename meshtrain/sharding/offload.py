"""Offload: with `offload.moments` the optimizer's moments are stored in host memory (`pinned_host`) between updates.

The step copies the shards to the devices before the update and back after it. The memory kind is part of each sharding,
from which layout.txt, checkpoints and the compiler read it.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding

from meshtrain.errors import Problem
from meshtrain.options import option
from meshtrain.sharding.trees import Arrays, Shardings

HOST, DEVICE = "pinned_host", "device"


@dataclasses.dataclass(frozen=True)
class OffloadOptions:
    """Selects the arrays that are stored in host memory."""

    moments: bool = option(False, "keep the optimizer's moments in host memory between steps")


def problems(what: str, devices: Sequence[jax.Device]) -> list[Problem]:
    """Returns an error line if these devices cannot address host memory, else [].

    Args:
      what: the option that requires host memory, with its value, such as `offload.moments=True`.
      devices: the devices of the mesh. Ahead-of-time devices that report no memory kinds are accepted.
    """
    try:
        kinds = [memory.kind for memory in devices[0].addressable_memories()]
    except (AttributeError, RuntimeError):
        return []
    if HOST in kinds:
        return []
    name, _, value = what.partition("=")
    # Without a GPU, the GPU compiler silently ignores memory kinds.
    known = f"only {', '.join(kinds)}" if kinds else "the compiler knows none without the device"
    there = f"{devices[0].platform} devices have no memory of kind {HOST} ({known})"
    return [
        Problem(name, got=f"{value}, but {there}", allowed="values that need no host memory", nearest="leave it out")
    ]


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in host memory: with memory kind `pinned_host`."""
    return sharding.with_memory_kind(HOST)


def is_on_host(sharding: jax.sharding.Sharding) -> bool:
    """Returns whether arrays with this sharding are in host memory."""
    return sharding.memory_kind == HOST


def fetch(tree: Arrays, shardings: Shardings, after: jax.Array | None = None) -> Arrays:
    """Copies the arrays of a pytree that are in host memory to the devices, inside a jitted function.

    Args:
      tree: a pytree of arrays, in host or device memory.
      shardings: a pytree of the same structure with the sharding of each array.
      after: an array that is computed before the copies start; None: the compiler decides when they start.
    """

    def fetch(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        if not is_on_host(sharding):
            return x
        if after is not None:
            x, _ = jax.lax.optimization_barrier((x, after))
        return jax.device_put(x, sharding.with_memory_kind(DEVICE))

    return jax.tree.map(fetch, tree, shardings)
