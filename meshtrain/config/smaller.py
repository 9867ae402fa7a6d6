"""Lists changes of a configuration that save memory, in order of the time that they cost; used for runs and plans."""

import dataclasses
from collections.abc import Iterator, Mapping

from meshtrain.cli.flags import construct, flatten
from meshtrain.config.mesh_checks import check, num_microbatches
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError, divisors
from meshtrain.options import Values
from meshtrain.sharding.param_sharding import MAX_LEVEL, num_parts
from meshtrain.sharding.rules import DATA, batch_axes, expert_axes, model_axes, sequence_axes, storage_axes

FROZEN_DTYPE, FROZEN = "precision.frozen_dtype", "bfloat16"  # halves the bytes of frozen weights
SPLITS_SUMS = 2  # the first ZeRO level that splits sums of gradients

Change = Values  # dotted key -> its new value


def with_change(config: Config, change: Change) -> Config:
    """Returns a copy of a configuration with new values for the dotted keys in `change`."""
    changed: Config = construct(config, flatten(dataclasses.asdict(config)) | change)
    return changed


def problems_of(config: Config, shape: Mapping[str, int]) -> list[Problem]:
    """Returns a problem for each reason why a configuration cannot run on a mesh with these sizes of axes."""
    try:
        return check(config, shape)
    except UserError as error:
        return list(error.problems)


def to_mesh(shape: Mapping[str, int]) -> Change:
    """Returns the change (dotted key -> value) that sets the mesh to these sizes of axes."""
    return {f"mesh.{axis}": size for axis, size in shape.items()}


def with_level(config: Config, level: int) -> Change:
    """Returns the change (dotted key -> value) that sets `zero.level`.

    If the configuration sets `zero.strategy`, the change also clears it, because a strategy determines the level.
    """
    strategy = {"zero.strategy": ""} if config.zero.strategy else {}
    return {"zero.level": level, **strategy}


def arguments(change: Change) -> str:
    """Returns a change as command-line arguments, such as `--config.zero.level=1`."""
    words = {True: "true", False: "false"}
    return " ".join(
        f"--config.{key}={words[value] if isinstance(value, bool) else value}" for key, value in change.items()
    )


def times_as_many(config: Config, shape: Mapping[str, int], temporary_bytes: float, room_bytes: float) -> int:
    """Returns the factor by which to multiply the number of microbatches so that the temporaries of a step fit.

    The factor is the smallest divisor (at least 2) of the number of sequences in a device's microbatch with which the
    temporaries fit, or else the largest divisor; 2 for a single sequence. The function assumes that temporaries are
    proportional to the size of a microbatch.

    Args:
      config: the configuration of the step, which does not fit the memory.
      shape: the size of each mesh axis.
      temporary_bytes: the bytes of the step's temporaries on a device.
      room_bytes: the bytes available for temporaries on a device.
    """
    sequences = config.batch_size // (num_parts(batch_axes(), shape) * num_microbatches(config, shape))
    times = divisors(sequences)[1:] or [2]
    return next((by for by in times if temporary_bytes / by <= room_bytes), times[-1])


def smaller(config: Config, shape: Mapping[str, int], times: int = 2, parts: Change | None = None) -> Iterator[Change]:
    """Yields changes (dotted key -> new value) that save memory; a change that costs less time comes earlier.

    A change may be illegal for this configuration, so the caller has to check it.

    Args:
      config: the configuration of a step that does not fit the memory.
      shape: the size of each mesh axis.
      times: the factor by which the change of microbatches multiplies their number.
      parts: a change that splits sequences over more devices; None or empty if it does not help.
    """
    level = config.zero.effective_level
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
        accumulates = num_microbatches(config, shape) > 1  # otherwise level 2 has no gradient sums to split
        lowest = SPLITS_SUMS if accumulates else MAX_LEVEL
        yield from (with_level(config, higher) for higher in range(max(lowest, level + 1), MAX_LEVEL + 1))
    if parts:
        yield parts
    # The axes that split weights, cheapest communication first: one axis is halved, another doubled.
    special = (*sequence_axes(), *expert_axes())
    splitting = [axis for axis in (*storage_axes(), *reversed(model_axes())) if axis not in special]
    for axis in (axis for axis in batch_axes() if axis not in special):
        for other in splitting[splitting.index(axis) + 1 if axis in splitting else 0 :]:
            if shape[axis] % 2 == 0:
                yield {f"mesh.{axis}": shape[axis] // 2, f"mesh.{other}": 2 * shape[other]}
