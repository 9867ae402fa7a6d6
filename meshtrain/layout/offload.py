"""What waits in the host's memory (`pinned_host`) while no device needs it: the optimizer's moments, if asked for.

The step fetches them before the update and sends them back after it, piece by piece as they are split. Memory kinds are
a property of a sharding, so that placements, checkpoints and the compiler all see the same.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshtrain.words.options import option

HOST, DEVICE = "pinned_host", "device"


@dataclasses.dataclass(frozen=True)
class OffloadOptions:
    """What is kept in the host's memory."""

    moments: bool = option(False, "the optimizer's moments; between steps devices hold none of them")


def problems(what: str, devices: Sequence[Any]) -> list[str]:
    """Returns one line where these devices have no memory of a host to put something into.

    Args:
      what: the option that asks for it, and its value.
      devices: those of the mesh. Of devices that are not there and do not tell, nothing is said.
    """
    try:
        kinds = [memory.kind for memory in devices[0].addressable_memories()]
    except (AttributeError, RuntimeError):
        return []
    if HOST in kinds:
        return []
    name, _, value = what.partition("=")
    # GPUs that are not there: their compiler would drop the wish without a word.
    known = f"only {', '.join(kinds)}" if kinds else "none that a compiler without the device knows"
    there = f"{devices[0].platform} devices have no memory of kind {HOST} ({known})"
    return [f"{name}: got {value}, and {there}; allowed: what stays on the device; nearest: leave it out"]


def on_host(home: NamedSharding) -> NamedSharding:
    """Returns the same placement in the memory of the hosts."""
    return home.with_memory_kind(HOST)


def is_on_host(home: Any) -> bool:
    """Returns whether a placement is in the memory of the hosts."""
    return home.memory_kind == HOST


def fetched(tree: Any, homes: Any, after: jax.Array | None = None) -> Any:
    """Returns a tree with what lives on the host brought to the devices, inside a jitted function.

    Args:
      tree: arrays.
      homes: the same structure; where each lives.
      after: nothing is fetched before this is computed; None leaves the time to the compiler.
    """

    def fetch(x: jax.Array, home: NamedSharding) -> jax.Array:
        if not is_on_host(home):
            return x
        if after is not None:
            x, _ = jax.lax.optimization_barrier((x, after))
        return jax.device_put(x, home.with_memory_kind(DEVICE))

    return jax.tree.map(fetch, tree, homes)
