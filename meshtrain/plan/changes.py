"""The cheapest changes that would make a step fit, each compiled before it is named."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshtrain.config.config import Config, check
from meshtrain.plan.compile import compile_step, program_of
from meshtrain.plan.memory import memory
from meshtrain.plan.planner import Plan, shape_on
from meshtrain.plan.topology import Cluster
from meshtrain.plan.waiting import waiting_for
from meshtrain.words.errors import UserError
from meshtrain.words.flags import construct, flatten
from meshtrain.words.tables import format_bytes

NUM_NAMED = 3
MAX_COMPILED = 9

Change = dict[str, Any]


def with_change(config: Config, change: Change) -> Config:
    """Returns a configuration with some dotted keys changed."""
    changed: Config = construct(Config(), flatten(dataclasses.asdict(config)) | change)
    return changed


def arguments(change: Change) -> str:
    """Returns a change as words for the command line."""
    words = {True: "true", False: "false"}
    return " ".join(
        f"--config.{key}={words[value] if isinstance(value, bool) else value}" for key, value in change.items()
    )


def candidates(config: Config, shape: dict[str, int]) -> Iterator[Change]:
    """Yields changes that save memory, the cheapest in time first; whether they are legal is not looked at.

    Args:
      config: what does not fit.
      shape: its mesh.
    """
    if shape["tensor"] > 1 and not config.layout.sequence_parallel:
        yield {"layout.sequence_parallel": True}
    if shape["data"] > 1 and config.zero.effective_level == 0:
        yield {"zero.level": 1}
    if shape["pipeline"] > 1:
        yield {"pipeline.num_microbatches": 2 * config.pipeline.num_microbatches}
    else:
        yield {"accumulation_steps": 2 * config.accumulation_steps}
    if config.remat.policy != "full" and shape["pipeline"] == 1:
        yield {"remat.policy": "full"}
    if shape["data"] > 1:
        yield {"mesh.data": shape["data"] // 2, "mesh.fsdp": 2 * shape["fsdp"]}
        yield {"mesh.data": shape["data"] // 2, "mesh.tensor": 2 * shape["tensor"]}
        yield {"mesh.data": shape["data"] // 2, "mesh.pipeline": 2 * shape["pipeline"]}
    if shape["fsdp"] > 1:
        yield {"mesh.fsdp": shape["fsdp"] // 2, "mesh.tensor": 2 * shape["tensor"]}
        yield {"mesh.fsdp": shape["fsdp"] // 2, "mesh.pipeline": 2 * shape["pipeline"]}


def tried(config: Config, shape: dict[str, int]) -> Iterator[Change]:
    """Yields each change alone, then those that keep the mesh together."""
    together: Change = {}
    for change in candidates(config, shape):
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
    config, cluster = plan.compiled.assembly.config, plan.cluster
    # Attention was chosen for the target: what was asked for is what is changed.
    shape = dict(plan.compiled.assembly.mesh.shape)
    found: list[tuple[Change, int]] = []
    legal = [change for change in tried(config, shape) if not _refused(with_change(config, change), cluster)]
    for change in legal[:MAX_COMPILED]:
        spare = _spare(with_change(config, change), cluster, arguments(change))
        if spare is not None:
            found.append((change, spare))
        if len(found) == NUM_NAMED:
            break
    return found


def _refused(config: Config, cluster: Cluster) -> bool:
    try:
        return bool(check(config, shape_on(config, cluster)))
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
    """Returns what would make it fit, a line for each change."""
    found = cheapest(plan)
    if not found:
        return "no single change makes it fit: more devices, or another mesh (--search)"
    lines = [f"  {arguments(change)}   ({format_bytes(spare)} to spare)" for change, spare in found]
    return "\n".join(["each of these would make it fit, the cheapest first:", *lines])
