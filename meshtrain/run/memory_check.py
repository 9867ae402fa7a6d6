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

PLANNED_ON = "h100"  # the GPU of the `plan` command that an error suggests
HOST_DEVICES = 8  # GPUs per host of this command
MOMENTS = ("bfloat16", "8bit")  # smaller values of `optimizer.moments`, the most exact first
NUM_ARRAYS = 3  # the number of largest arrays that an error lists


@dataclasses.dataclass(frozen=True)
class Room:
    """The memory that one process has for arrays.

    Attributes:
      limit_bytes: the maximum size of all arrays together.
      num_sharing: the number of this process's devices that share the memory.
      is_host: whether the memory is main memory, which also stores arrays that are offloaded to the host.
      what: a description of the memory for messages, such as `the memory of this machine or container`.
    """

    limit_bytes: int
    num_sharing: int
    is_host: bool
    what: str


def room_of(assembly: Assembly) -> Room | None:
    """Returns the memory that this process has for the arrays of an assembly; None if its size is not known."""
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
    what = f"the part of the memory of a {own[0].device_kind} that JAX uses"
    return Room(int(stats["bytes_limit"]), 1, is_host=False, what=what)


def state_bytes(assembly: Assembly, *, with_host: bool) -> int:
    """Returns the bytes of one device's training state, which exists during the complete run.

    Args:
      assembly: the run's assembly.
      with_host: whether to include moments that are offloaded to the host.
    """
    leaves = jax.tree.leaves(assembly.state)
    return sum(shard_bytes(leaf) for leaf in leaves if with_host or not is_on_host(leaf.sharding))


def refuse_too_large(assembly: Assembly, make_task: MakeTask | None = None, rules: Rules | None = None) -> None:
    """Checks that the training state fits the memory of every process. All processes call it.

    The size of the state is a lower bound: a step also needs temporary arrays.

    Args:
      assembly: the run's assembly; none of its arrays are allocated yet.
      make_task: the caller's task function; None: the function that `config.task` names.
      rules: the caller's rules, logical axis -> mesh axes; None: the built-in table.

    Raises:
      UserError: the state of a process does not fit; every process raises the same lines.
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
    """Checks that the weights fit the memory of every process, for commands that do not train. All processes call it.

    On a CPU, replicas of a loaded weight may share memory, so the needed bytes include each weight once.

    Raises:
      UserError: the weights of a process do not fit; every process raises the same lines.
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
    """Returns the bytes of training state that devices store in one memory: the sum over the devices that share it.

    Args:
      assembly: the run's assembly.
      room: the memory, from `room_of`: a device's memory, or main memory that all devices of this process share. Main
        memory also stores moments that are offloaded to the host.
    """
    return state_bytes(assembly, with_host=room.is_host) * room.num_sharing


def _state_fix(assembly: Assembly, room: Room, make_task: MakeTask | None, rules: Rules | None) -> str:
    """Returns the suggested fix for an error, as text: the first option change with which the state fits `room`.

    If no option change is sufficient, the fix is a `plan` command for a larger cluster.
    """
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
    """Yields option changes that shrink the training state.

    First come the changes of `smaller` to the mesh, the ZeRO level and the frozen dtype. Then come smaller dtypes of
    the optimizer's moments, first without and then with the highest ZeRO level.
    """
    keys = ("mesh.", "zero.", FROZEN_DTYPE)
    yield from (change for change in smaller(config, shape) if any(key.startswith(keys) for key in change))
    moments = [{"optimizer.moments": dtype} for dtype in MOMENTS if config.optimizer.moments != dtype]
    yield from moments
    yield from ({**with_level(config, MAX_LEVEL), **each} for each in moments)


def _plan(total_bytes: int) -> str:
    """Returns a command line, which plans a run on the minimum number of GPU hosts that can store `total_bytes`."""
    card = next(one for one in ACCELERATORS if one.name == PLANNED_ON)
    hosts = max(1, -(-total_bytes // (usable_bytes(card) * HOST_DEVICES)))
    return (
        f"a cluster: meshtrain plan --cluster={PLANNED_ON}:{hosts}x{HOST_DEVICES} --search with the same configuration"
    )


def warn_of_large_step(assembly: Assembly, step: jax.stages.Compiled) -> None:
    """Warns if the compiled step's peak exceeds the available memory; the peak may be an overestimate.

    Args:
      assembly: the run's assembly.
      step: the compiled training step.
    """
    room, planned = room_of(assembly), _account(step)
    if room is None or planned is None or not peers.is_main_process():
        return
    if (peak := planned.peak_bytes * room.num_sharing) > room.limit_bytes:
        warn(
            f"memory: the compiled step needs up to {format_bytes(peak)}, but "
            f"{format_bytes(room.limit_bytes)} is {room.what}; nearest: {_step_fix(assembly, room, planned)}"
        )


@contextmanager
def explain_memory(assembly: Assembly, step: jax.stages.Compiled | None = None) -> Iterator[None]:
    """Context manager: replaces an out-of-memory exception of the block by a UserError, whose line is `memory_problem`.

    Args:
      assembly: the run's assembly.
      step: the compiled training step; None if it is not compiled yet.

    Raises:
      UserError: the block raised RESOURCE_EXHAUSTED or MemoryError.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(memory_problem(assembly, step, error)) from error


def memory_problem(assembly: Assembly, step: jax.stages.Compiled | None, error: BaseException) -> str:
    """Returns the error line for exhausted memory: planned bytes of a device, the limit, the largest arrays, and a fix.

    Args:
      assembly: the run's assembly.
      step: the compiled training step; None if it is not compiled yet.
      error: the out-of-memory exception.
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
        got=f"'{first_line(error)}'; planned per device: {', '.join(parts)}; largest arrays: {largest}",
        allowed=f"at most {limit}",
        nearest=_step_fix(assembly, room, planned),
    )


def _step_fix(assembly: Assembly, room: Room | None, planned: Statistics | None) -> str:
    """Returns the fix for an error, as text: the valid option change that saves memory at the lowest cost in time.

    If there is no such change, the fix is a `plan` command for a larger cluster.

    Args:
      assembly: the run's assembly.
      room: the available memory; None if it is not known.
      planned: the compiled step's memory on one device; None if the compiler has not reported it.
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
