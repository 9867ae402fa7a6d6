"""The cheapest changes that would make a step fit. Each is compiled before it is suggested."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from meshtrain.cli.flags import construct, flatten
from meshtrain.cli.tables import format_bytes
from meshtrain.config.config import Config, check, num_microbatches
from meshtrain.errors import UserError, divisors
from meshtrain.options import Values
from meshtrain.plan.cost.context_sizes import activations_dominate, in_more_parts
from meshtrain.plan.cost.memory import Memory, memory
from meshtrain.plan.planner import Plan, shape_on
from meshtrain.plan.target.clusters import Cluster
from meshtrain.plan.target.compile import compile_step, program_of
from meshtrain.plan.target.compile_thread import waiting_for
from meshtrain.sharding.rules import DATA, batch_axes, expert_axes, model_axes, sequence_axes, storage_axes
from meshtrain.sharding.stored import MAX_LEVEL, num_parts

NUM_NAMED = 3
MAX_COMPILED = 11
FROZEN_DTYPE, FROZEN = "precision.frozen_dtype", "bfloat16"  # in which frozen weights take half of the bytes
SPLITS_SUMS = 2  # the ZeRO level from which on sums of gradients are split

Change = Values  # dotted key -> its new value


def with_change(config: Config, change: Change) -> Config:
    """Returns a configuration with some dotted keys changed."""
    changed: Config = construct(config, flatten(dataclasses.asdict(config)) | change)
    return changed


def problems_of(config: Config, shape: Mapping[str, int]) -> list[str]:
    """Returns why a configuration cannot run on a mesh; empty if it can."""
    try:
        return check(config, shape)
    except UserError as error:
        return list(error.problems)


def to_mesh(shape: Mapping[str, int]) -> Change:
    """Returns the change to a mesh of these sizes."""
    return {f"mesh.{axis}": size for axis, size in shape.items()}


def with_level(config: Config, level: int) -> Change:
    """Returns the change to a ZeRO level; it unsets a strategy, which would contradict the level."""
    strategy = {"zero.strategy": ""} if config.zero.strategy else {}
    return {"zero.level": level, **strategy}


def arguments(change: Change) -> str:
    """Returns a change as command-line arguments."""
    words = {True: "true", False: "false"}
    return " ".join(
        f"--config.{key}={words[value] if isinstance(value, bool) else value}" for key, value in change.items()
    )


def times_as_many(config: Config, shape: Mapping[str, int], held: Memory) -> int:
    """Returns by what to multiply the number of microbatches: 2, or more where half of the temporaries is too much.

    It is the smallest divisor of a microbatch's sequences on a device with which the temporaries fit, if these shrink
    as microbatches do.

    Args:
      config: of the step that does not fit.
      shape: its mesh.
      held: its memory.
    """
    if held.compiler is None or held.capacity_bytes is None:
        return 2
    temporary = held.compiler.temporary_bytes
    room = held.capacity_bytes - held.compiler.arguments_bytes
    sequences = config.batch_size // (num_parts(batch_axes(), shape) * num_microbatches(config, shape))
    times = divisors(sequences)[1:] or [2]
    return next((by for by in times if (temporary + held.uncertainty_bytes) / by <= room), times[-1])


def candidates(config: Config, shape: dict[str, int], held: Memory) -> Iterator[Change]:
    """Yields changes that save memory, the cheapest in time first; the caller refuses those that are not legal.

    Args:
      config: of the step that does not fit.
      shape: its mesh.
      held: its memory.
    """
    level, times = config.zero.effective_level, times_as_many(config, shape, held)
    has_frozen, dtypes = bool(config.lora.rank or config.optimizer.trainable), config.precision
    if has_frozen and dtypes.frozen_dtype == "auto" and dtypes.param_dtype != FROZEN:
        yield {FROZEN_DTYPE: FROZEN}
    if shape["tensor"] > 1 and not config.layout.sequence_parallel:
        yield {"layout.sequence_parallel": True}
    if shape[DATA] > 1 and level == 0:
        yield with_level(config, 1)
    if shape["pipeline"] > 1:
        yield {"pipeline.num_microbatches": times * config.pipeline.num_microbatches}
    else:
        yield {"accumulation_steps": times * config.accumulation_steps}
    if config.remat.policy != "full":
        yield {"remat.policy": "full"}
    if shape[DATA] > 1:
        accumulates = num_microbatches(config, shape) > 1  # otherwise there are no sums for level 2 to split
        lowest = SPLITS_SUMS if accumulates else MAX_LEVEL
        yield from (with_level(config, higher) for higher in range(max(lowest, level + 1), MAX_LEVEL + 1))
    # What is known to be weights is not helped by shorter parts of sequences.
    if activations_dominate(held) and (parts := in_more_parts(config, shape)):
        yield parts
    # The axes that split weights, the cheapest to communicate over first: half of one goes to the next.
    special = (*sequence_axes(), *expert_axes())
    splitting = [axis for axis in (*storage_axes(), *reversed(model_axes())) if axis not in special]
    for axis in (axis for axis in batch_axes() if axis not in special):
        for other in splitting[splitting.index(axis) + 1 if axis in splitting else 0 :]:
            if shape[axis] % 2 == 0:
                yield {f"mesh.{axis}": shape[axis] // 2, f"mesh.{other}": 2 * shape[other]}


def tried(config: Config, shape: dict[str, int], held: Memory) -> Iterator[Change]:
    """Yields each change alone if it may be enough, then all that keep the mesh combined; see `candidates`."""
    together: Change = {}
    for change in candidates(config, shape, held):
        if change != {FROZEN_DTYPE: FROZEN} or held.state.parameters // 2 > -(held.margin_bytes or 0):
            yield change
        if not any(key.startswith("mesh.") for key in change):
            together |= change
    if len(together) > 1:
        yield together


def cheapest(plan: Plan) -> list[tuple[Change, int]]:
    """Returns up to three changes that make a step fit, and the bytes each leaves to spare.

    Args:
      plan: of a step that does not fit.
    """
    config, cluster, result = plan.compiled.assembly.config, plan.cluster, list[tuple[Change, int]]()
    changes = tried(config, dict(plan.compiled.assembly.mesh.shape), plan.memory)
    legal = (change for change in changes if not _refused(with_change(config, change), cluster))
    for change in itertools.islice(legal, MAX_COMPILED):
        spare = _spare(with_change(config, change), cluster, arguments(change))
        if spare is not None:
            result.append((change, spare))
        if len(result) == NUM_NAMED:
            break
    return result


def _refused(config: Config, cluster: Cluster) -> bool:
    try:
        return bool(problems_of(config, shape_on(config, cluster)))
    except UserError:
        return True


def _spare(config: Config, cluster: Cluster, what: str) -> int | None:
    """Returns the margin in bytes where a configuration fits, None where it does not."""

    def compiled() -> int | None:
        try:
            step = compile_step(config, shape_on(config, cluster), cluster)
        except UserError:
            return None
        held = memory(step, cluster, program_of(step))
        return held.margin_bytes if held.fits else None

    return waiting_for(f"trying {what}", compiled)


def text(plan: Plan) -> str:
    """Returns the changes that would make a step fit, a line for each."""
    found = cheapest(plan)
    if not found:
        return "no single change makes it fit: more devices, or another mesh (--search)"
    lines = [f"  {arguments(change)}   ({format_bytes(spare)} to spare)" for change, spare in found]
    return "\n".join(["each of these would make it fit, the cheapest first:", *lines])
