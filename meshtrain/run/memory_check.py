"""Checks before any allocation that a run fits the devices' memory, and explains out-of-memory errors in one line.

On a CPU all simulated devices of a process share the memory of its machine or container.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.assembly.facts import array_rows
from meshtrain.cli.tables import format_bytes
from meshtrain.config.schema import Config
from meshtrain.config.smaller import (
    FROZEN_DTYPE,
    Change,
    arguments,
    problems_of,
    smaller,
    times_as_many,
    with_change,
    with_level,
)
from meshtrain.config.tasks import MakeTask
from meshtrain.errors import Problem, UserError, first_line, is_out_of_memory, refuse, warn
from meshtrain.hardware.accelerators import ACCELERATORS, usable_bytes
from meshtrain.launch import peers
from meshtrain.launch.host_memory import most_bytes
from meshtrain.sharding.mesh import mesh_shape
from meshtrain.sharding.offload import is_on_host
from meshtrain.sharding.param_sharding import MAX_LEVEL
from meshtrain.sharding.rules import Rules
from meshtrain.sharding.trees import shard_bytes
from meshtrain.step.device_memory import Statistics, statistics

PLANNED_ON = "h100"  # the card of the plan that a message names
HOST_DEVICES = 8  # devices per host of this card
MOMENTS = ("bfloat16", "8bit")  # fewer bytes of the optimizer's state, the most exact first
NUM_ARRAYS = 3  # the largest, in a message


@dataclasses.dataclass(frozen=True)
class Room:
    """The memory that one process has for arrays.

    Attributes:
      limit_bytes: the maximum for all arrays.
      num_sharing: the number of this process' devices that share the memory.
      is_host: whether it is main memory, which also stores arrays that are offloaded to the host.
      what: the memory's owner as text, for messages.
    """

    limit_bytes: int
    num_sharing: int
    is_host: bool
    what: str


def room_of(assembly: Assembly) -> Room | None:
    """Returns the memory for the arrays of an assembly; None if it is not known."""
    own = [device for device in assembly.mesh.devices.flat if device.process_index == jax.process_index()]
    if not own:
        return None
    if own[0].platform == "cpu":
        limit = most_bytes()
        what = "the memory of this machine or container"
        return None if limit is None else Room(limit, len(own), is_host=True, what=what)
    stats = own[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    what = f"the part of one {own[0].device_kind} that JAX uses"
    return Room(int(stats["bytes_limit"]), 1, is_host=False, what=what)


def state_bytes(assembly: Assembly, *, with_host: bool) -> int:
    """Returns the bytes of one device's training state, which exists during the complete run.

    Args:
      assembly: of the run.
      with_host: whether to include moments that are offloaded to the host.
    """
    leaves = jax.tree.leaves(assembly.state)
    return sum(shard_bytes(leaf) for leaf in leaves if with_host or not is_on_host(leaf.sharding))


def refuse_too_large(assembly: Assembly, make_task: MakeTask | None = None, rules: Rules | None = None) -> None:
    """Checks that the training state fits the memory. The state is a lower bound, because a step needs more.

    Args:
      assembly: of the run; nothing has been allocated.
      make_task: see `assemble`.
      rules: see `assemble`.

    Raises:
      UserError: in all processes if the state of one does not fit.
    """
    room = room_of(assembly)
    problems = list[str]()
    if room is not None and (needed := bytes_needed(assembly, room)) > room.limit_bytes:
        num_devices = f" on {room.num_sharing} devices" if room.num_sharing > 1 else " on a device"
        problems = [
            Problem(
                "memory",
                got=f"{format_bytes(needed)} of training state{num_devices}",
                allowed=f"at most {format_bytes(room.limit_bytes)}, {room.what}",
                nearest=_state_fix(assembly, room, make_task, rules),
            )
        ]
    refuse(peers.share_problems("memory", problems))


def refuse_large_weights(assembly: Assembly) -> None:
    """Checks that the weights fit the memory, for commands that do not train.

    On a CPU, replicas of a loaded weight may share memory, so each weight is included once.

    Raises:
      UserError: in all processes if the weights do not fit.
    """
    room, problems = room_of(assembly), list[str]()
    if room is not None:
        leaves = jax.tree.leaves(assembly.state.params)
        whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) // peers.count()
        needed = whole if room.is_host else sum(map(shard_bytes, leaves))
        if needed > room.limit_bytes:
            problems = [
                Problem(
                    "memory",
                    got=f"{format_bytes(needed)} of weights",
                    allowed=f"at most {format_bytes(room.limit_bytes)}, {room.what}",
                    nearest="more devices or a machine with more memory",
                )
            ]
    refuse(peers.share_problems("memory", problems))


def bytes_needed(assembly: Assembly, room: Room) -> int:
    """Returns the bytes of the training state that the memory must store."""
    return state_bytes(assembly, with_host=room.is_host) * room.num_sharing


def _state_fix(assembly: Assembly, room: Room, make_task: MakeTask | None, rules: Rules | None) -> str:
    """Returns the first change with which the training state fits; if there is none, a plan for a larger cluster."""
    config, shape = assembly.config, dict(assembly.mesh.shape)
    for change in _smaller_states(config, shape):
        changed = with_change(config, change)
        try:
            sizes = mesh_shape(changed.mesh, assembly.mesh.size, simulated=False)
            other = assemble(changed, sizes, list(assembly.mesh.devices.flat), make_task, rules)
        except UserError:
            continue
        if (needed := bytes_needed(other, room)) <= room.limit_bytes:
            return f"{arguments(change)} ({format_bytes(needed)})"
    return _plan(state_bytes(assembly, with_host=True) * assembly.mesh.size)


def _smaller_states(config: Config, shape: Mapping[str, int]) -> Iterator[Change]:
    """Yields the changes of `smaller` that shrink the training state, then moments in fewer bytes, and both."""
    keys = ("mesh.", "zero.", FROZEN_DTYPE)
    yield from (change for change in smaller(config, shape) if any(key.startswith(keys) for key in change))
    moments = [{"optimizer.moments": dtype} for dtype in MOMENTS if config.optimizer.moments != dtype]
    yield from moments
    yield from ({**with_level(config, MAX_LEVEL), **each} for each in moments)


def _plan(total_bytes: int) -> str:
    """Returns the command that plans a run on the minimum number of GPU hosts that can store this many bytes."""
    card = next(one for one in ACCELERATORS if one.name == PLANNED_ON)
    hosts = max(1, -(-total_bytes // (usable_bytes(card) * HOST_DEVICES)))
    return f"a cluster: meshtrain plan --cluster={PLANNED_ON}:{hosts}x{HOST_DEVICES} --search, same configuration"


def warn_of_large_step(assembly: Assembly, step: jax.stages.Compiled) -> None:
    """Warns if the compiled step's peak exceeds the available memory; the peak may be an overestimate.

    Args:
      assembly: of the run.
      step: its compiled step.
    """
    room, planned = room_of(assembly), _account(step)
    if room is None or planned is None or not peers.is_main_process():
        return
    if (peak := planned.peak_bytes * room.num_sharing) > room.limit_bytes:
        warn(
            f"memory: the compiled step takes up to {format_bytes(peak)}, and {format_bytes(room.limit_bytes)} is "
            f"{room.what}; nearest: {_step_fix(assembly, room, planned)}"
        )


@contextmanager
def explain_memory(assembly: Assembly, step: jax.stages.Compiled | None = None) -> Iterator[None]:
    """Turns a device's lack of memory in the block into one line: planned bytes, limit, largest arrays, a change.

    Args:
      assembly: of the run.
      step: its compiled step; None before there is one.

    Raises:
      UserError: in place of RESOURCE_EXHAUSTED and MemoryError.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(memory_problem(assembly, step, error)) from error


def memory_problem(assembly: Assembly, step: jax.stages.Compiled | None, error: BaseException) -> str:
    """Returns the line about memory that has run out.

    Args:
      assembly: of the run.
      step: its compiled step; None before there is one.
      error: the raised exception.
    """
    room, planned = room_of(assembly), None if step is None else _account(step)
    parts = [f"training state {format_bytes(state_bytes(assembly, with_host=False))}"]
    if planned:
        parts += [f"temporaries {format_bytes(planned.temporary_bytes)}", f"peak {format_bytes(planned.peak_bytes)}"]
    rows = sorted(array_rows(assembly), key=lambda row: -row.num_bytes_per_device)[:NUM_ARRAYS]
    largest = ", ".join(f"{row.path} {format_bytes(row.num_bytes_per_device)}" for row in rows)
    limit = f"{format_bytes(room.limit_bytes)}, {room.what}" if room else "the device's memory"
    return Problem(
        "memory",
        got=f"'{first_line(error)}'; planned for a device: {', '.join(parts)}; largest arrays: {largest}",
        allowed=f"at most {limit}",
        nearest=_step_fix(assembly, room, planned),
    )


def _step_fix(assembly: Assembly, room: Room | None, planned: Statistics | None) -> str:
    """Returns the cheapest valid change that saves memory, and the command that finds others.

    Args:
      assembly: of the run.
      room: the available memory; None if it is not known.
      planned: the compiler's account of the step; None before there is one.
    """
    config, shape, times = assembly.config, dict(assembly.mesh.shape), 2
    if room and planned:
        left = room.limit_bytes / room.num_sharing - planned.arguments_bytes
        times = times_as_many(config, shape, planned.temporary_bytes, left)
    for change in smaller(config, shape, times):
        changed = with_change(config, change)
        try:
            sizes = mesh_shape(changed.mesh, assembly.mesh.size, simulated=False)
        except UserError:
            continue
        if not problems_of(changed, sizes):
            return f"{arguments(change)} (meshtrain plan compiles alternatives)"
    return _plan(state_bytes(assembly, with_host=True) * assembly.mesh.size)


def _account(step: jax.stages.Compiled) -> Statistics | None:
    analysis = step.memory_analysis()
    return None if analysis is None else statistics(analysis)
