"""Where the time of a compiled step goes, on the mesh it was compiled for or on a larger or smaller one. MODELLED.

A program that was compiled for one size of the batch's axes is nearly the program of another size: what a device
computes and the whole arrays that are gathered, scattered and reduced stay the same, if its microbatches do. Only the
groups of the collectives are larger. `spent` prices such a program for another mesh: each collective gets the group of
that mesh, the bytes of a ring of that size, and the links that such a group has there.

What this leaves out is what the compiler decides by the number of devices (which collectives it combines, and the
order of the program), and work on the shards of weights, which get smaller. So a step between two compiled ones is
priced from both, and the two are mixed.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from meshtrain.launch.links import wire_share
from meshtrain.layout.axes import AXES
from meshtrain.plan.collectives import Collective
from meshtrain.plan.hlo import Program
from meshtrain.plan.timing import Assumptions, Streams, transfer_seconds
from meshtrain.plan.topology import Cluster


@dataclasses.dataclass(frozen=True)
class Spent:
    """Where the seconds of a step go; they add up to the step.

    Attributes:
      computing: with links that take no time.
      idle: the part of a step without transfers in which a stage of a pipeline idles.
      waiting: axis, or axes joined by `+` -> seconds by which its transfers lengthen the step: the axis with the
        slowest network first, each on top of those after it.
      latency: the part of `waiting` that is left if links have no limit but their latency; it is no further summand.
    """

    computing: float
    idle: float
    waiting: Mapping[str, float]
    latency: float

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.computing + self.idle + sum(self.waiting.values())


def regrouped(found: Iterable[Collective], shape: Mapping[str, int]) -> list[Collective]:
    """Returns the collectives of a program as they are on a mesh of another size.

    Args:
      found: as compiled. Those without axes (`irregular`) stay as they are.
      shape: the size of each axis of the other mesh.
    """
    changed = []
    for one in found:
        axes = one.axes.split("+")
        if all(axis in shape for axis in axes):
            size = math.prod(shape[axis] for axis in axes)
            # A permute's pairs are no group: its `group_size` is 2 on any mesh.
            size = one.group_size if one.kind == "collective-permute" else size
            wire_bytes = one.logical_bytes * wire_share(one.kind, size)
            one = dataclasses.replace(one, group_size=size, wire_bytes=wire_bytes)
        changed.append(one)
    return changed


def spent(
    program: Program,
    found: Sequence[Collective],
    mesh: Mesh,
    cluster: Cluster,
    assumptions: Assumptions,
    idle_share: float,
) -> Spent:
    """Returns where the time of a program goes.

    Args:
      program: scheduled.
      found: its collectives, as they are on `mesh`; see `regrouped`.
      mesh: on which it runs, not necessarily the one it was compiled for.
      cluster: of accelerators whose peaks are known, with the devices of the mesh.
      assumptions: of the model.
      idle_share: share of a pipeline's rows in which a stage idles; 0 without a pipeline.
    """
    assert cluster.accelerator is not None
    accelerator = cluster.accelerator
    each = transfer_seconds(found, mesh, cluster, assumptions)

    def step(axes: Iterable[str], *, has_bytes: bool = True) -> float:
        """Returns the seconds of a step in which only transfers along these axes take time."""
        chosen = set(axes)
        alone = {
            one.name: (each[one.name][0] + (each[one.name][1] if has_bytes else 0.0)) if one.axes in chosen else 0.0
            for one in found
        }
        return Streams(program, accelerator, alone, assumptions).step()[0]

    order = sorted({one.axes for one in found}, key=_place)
    seconds = [step(order[number:]) for number in range(len(order) + 1)]
    free = seconds[-1]
    waiting = {axes: seconds[number] - seconds[number + 1] for number, axes in enumerate(order)}
    latency = step(order, has_bytes=False) - free if order else 0.0
    return Spent(free * (1 - idle_share), free * idle_share, waiting, latency)


def _place(axes: str) -> tuple[int, str]:
    """Returns what sorts axes, alone or joined, by the first of them in mesh order; unknown ones come last."""
    first = axes.partition("+")[0]
    return (AXES.index(first) if first in AXES else len(AXES), axes)


def mixed(one: Spent, other: Spent, share: float) -> Spent:
    """Returns `(1 - share)` of one and `share` of the other; a share outside of 0 to 1 continues the line."""

    def mix(first: float, second: float) -> float:
        return first + share * (second - first)

    names = dict.fromkeys([*one.waiting, *other.waiting])
    waiting = {
        name: mix(*(each.waiting[name] if name in each.waiting else 0.0 for each in (one, other))) for name in names
    }
    return Spent(
        mix(one.computing, other.computing),
        mix(one.idle, other.idle),
        waiting,
        mix(one.latency, other.latency),
    )
