"""Changes of a configuration that save memory, cheapest in time first; used for runs and plans."""

import dataclasses
from collections.abc import Iterator, Mapping

from meshtrain.cli.flags import construct, flatten
from meshtrain.config.mesh_checks import check, num_microbatches
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError, divisors
from meshtrain.options import Values
from meshtrain.sharding.param_sharding import MAX_LEVEL, num_parts
from meshtrain.sharding.rules import DATA, batch_axes, expert_axes, model_axes, sequence_axes, storage_axes

FROZEN_DTYPE, FROZEN = "precision.frozen_dtype", "bfloat16"  # with which frozen weights take half of the bytes
SPLITS_SUMS = 2  # the first ZeRO level that splits sums of gradients

Change = Values  # dotted key -> its new value


def with_change(config: Config, change: Change) -> Config:
    """Returns a configuration with some dotted keys changed."""
    changed: Config = construct(config, flatten(dataclasses.asdict(config)) | change)
    return changed


def problems_of(config: Config, shape: Mapping[str, int]) -> list[Problem]:
    """Returns the reasons why a configuration cannot run on a mesh; [] if it can."""
    try:
        return check(config, shape)
    except UserError as error:
        return list(error.problems)


def to_mesh(shape: Mapping[str, int]) -> Change:
    """Returns the change to a mesh of these sizes."""
    return {f"mesh.{axis}": size for axis, size in shape.items()}


def with_level(config: Config, level: int) -> Change:
    """Returns the change to a ZeRO level; also unsets a strategy, which would contradict the level."""
    strategy = {"zero.strategy": ""} if config.zero.strategy else {}
    return {"zero.level": level, **strategy}


def arguments(change: Change) -> str:
    """Returns a change as command-line arguments."""
    words = {True: "true", False: "false"}
    return " ".join(
        f"--config.{key}={words[value] if isinstance(value, bool) else value}" for key, value in change.items()
    )


def times_as_many(config: Config, shape: Mapping[str, int], temporary_bytes: float, room_bytes: float) -> int:
    """Returns the factor for the number of microbatches: 2, or more if half of the temporaries is still too much.

    It is the smallest divisor of a microbatch's sequences on a device with which the temporaries fit, assuming that
    they shrink in proportion to microbatches.

    Args:
      config: of the step that does not fit.
      shape: its mesh.
      temporary_bytes: of the step's temporaries.
      room_bytes: available for temporaries.
    """
    sequences = config.batch_size // (num_parts(batch_axes(), shape) * num_microbatches(config, shape))
    times = divisors(sequences)[1:] or [2]
    return next((by for by in times if temporary_bytes / by <= room_bytes), times[-1])


def smaller(config: Config, shape: Mapping[str, int], times: int = 2, parts: Change | None = None) -> Iterator[Change]:
    """Yields changes that save memory, cheapest in time first; some may be illegal, which the caller has to check.

    Args:
      config: of the step that does not fit.
      shape: its mesh.
      times: factor for the number of microbatches.
      parts: the change that splits sequences over more devices; None or empty if it does not help.
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
