"""A mesh without a pipeline on the same devices: generation has one token of each row at a time, no microbatches."""

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.config.config import check
from meshtrain.config.fields import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.errors import UserError, divisors
from meshtrain.sharding.axes import PIPELINE, partitioned_axes
from meshtrain.sharding.rules import Rules, default_rules
from meshtrain.sharding.stored import num_parts, rules_of_level


def without_pipeline(
    config: Config, shape: Mapping[str, int], make_task: MakeTask | None = None, rules: Rules | None = None
) -> tuple[Config, dict[str, int], str]:
    """Returns the configuration and the size of each mesh axis with the pipeline folded into tensor, fsdp or both.

    Tensor comes first: between two tokens it sends activations, and fsdp all weights. The batch becomes one example for
    each of its shards, because the run's batch need not divide by the new axes.

    Args:
      config: of the run.
      shape: the size of each mesh axis of the run.
      make_task: as in `config.check`.
      rules: as in `config.check`.

    Returns:
      The configuration, the sizes, and one line that says what was folded; `` where there is no pipeline.

    Raises:
      UserError: no way to fold it fits the model.
    """
    size = shape[PIPELINE]
    if size == 1:
        return config, dict(shape), ""
    table = rules_of_level(rules or default_rules(config.layout), config.zero.effective_level)
    outer, *_, inner = partitioned_axes()
    problems: list[str] = []
    for factor in sorted(set(divisors(size)), reverse=True):
        folded = {**shape, PIPELINE: 1, inner: shape[inner] * factor, outer: shape[outer] * (size // factor)}
        changed = dataclasses.replace(
            config,
            mesh=dataclasses.replace(config.mesh, **folded),
            batch_size=num_parts(table.activations["batch"], folded),
            accumulation_steps=1,
        )
        found = check(changed, folded, make_task, rules)
        if not found:
            return changed, folded, _line(shape, folded)
        problems = problems or found
    nearest = " ".join(f"--config.mesh.{axis}=1" for axis in shape if shape[axis] > 1)
    raise UserError(
        f"mesh.pipeline: got {size}; allowed: a size that {inner} or {outer} can take over to generate text on the "
        f"same {math.prod(shape.values())} devices ({problems[0].partition(';')[0]}); nearest: {nearest}"
    )


def _line(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    grown = " and ".join(axis for axis in after if after[axis] > before[axis])
    sizes = " x ".join(f"{axis} {size}" for axis, size in after.items() if size > 1)
    return f"the pipeline of {before[PIPELINE]} is folded into {grown}: {sizes}, on the same devices"
