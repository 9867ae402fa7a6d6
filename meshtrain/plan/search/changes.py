"""Searches the cheapest changes that make a step fit its device; each change is compiled before it is suggested."""

import itertools
from collections.abc import Iterator

from meshtrain.cli.tables import format_bytes
from meshtrain.config.schema import Config
from meshtrain.config.smaller import (
    FROZEN,
    FROZEN_DTYPE,
    Change,
    arguments,
    problems_of,
    smaller,
    times_as_many,
    with_change,
)
from meshtrain.errors import UserError
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.compile import compile_step, program_of
from meshtrain.plan.cluster.compile_thread import waiting_for
from meshtrain.plan.cost.context_sizes import activations_dominate, in_more_parts
from meshtrain.plan.cost.memory import Memory, memory
from meshtrain.plan.planner import Plan, shape_on

NUM_NAMED = 3
MAX_COMPILED = 11


def candidates(config: Config, shape: dict[str, int], held: Memory) -> Iterator[Change]:
    """Yields changes that save memory, cheapest in time first; some may be illegal, which the caller has to check.

    Args:
      config: the configuration of the step that does not fit.
      shape: mesh axis -> size of this step.
      held: the memory of this step.
    """
    # Splitting sequences does not help if weights take most of the memory.
    parts = in_more_parts(config, shape) if activations_dominate(held) else {}
    times = 2
    if held.compiler is not None and held.capacity_bytes is not None:
        temporary_bytes = held.compiler.temporary_bytes + held.uncertainty_bytes
        times = times_as_many(config, shape, temporary_bytes, held.capacity_bytes - held.compiler.arguments_bytes)
    return smaller(config, shape, times, parts)


def changes_to_try(config: Config, shape: dict[str, int], held: Memory) -> Iterator[Change]:
    """Yields each single change that may make the step fit, then the combination of all changes that keep the mesh.

    Args:
      config: the configuration of the step that does not fit.
      shape: mesh axis -> size of this step.
      held: the memory of this step.
    """
    together: Change = {}
    for change in candidates(config, shape, held):
        if change != {FROZEN_DTYPE: FROZEN} or held.state.parameters // 2 > -(held.margin_bytes or 0):
            yield change
        if not any(key.startswith("mesh.") for key in change):
            together |= change
    if len(together) > 1:
        yield together


def cheapest(plan: Plan) -> list[tuple[Change, int]]:
    """Returns up to three changes that make a step fit, each with the free memory that remains, in bytes.

    Args:
      plan: the plan of a step that does not fit.
    """
    config, cluster, result = plan.compiled.assembly.config, plan.cluster, list[tuple[Change, int]]()
    changes = changes_to_try(config, dict(plan.compiled.assembly.mesh.shape), plan.memory)
    legal = (change for change in changes if not _compiler_refuses(with_change(config, change), cluster))
    for change in itertools.islice(legal, MAX_COMPILED):
        spare = _spare(with_change(config, change), cluster, arguments(change))
        if spare is not None:
            result.append((change, spare))
        if len(result) == NUM_NAMED:
            break
    return result


def _compiler_refuses(config: Config, cluster: Cluster) -> bool:
    try:
        return bool(problems_of(config, shape_on(config, cluster)))
    except UserError:
        return True


def _spare(config: Config, cluster: Cluster, what: str) -> int | None:
    """Compiles a configuration and returns its free memory in bytes, or None if it does not fit.

    Args:
      config: the changed configuration.
      cluster: the target cluster.
      what: the change as text, shown while the compiler works.
    """

    def compiled() -> int | None:
        try:
            step = compile_step(config, shape_on(config, cluster), cluster)
        except UserError:
            return None
        held = memory(step, cluster, program_of(step))
        return held.margin_bytes if held.fits else None

    return waiting_for(f"trying {what}", compiled)


def text(plan: Plan) -> str:
    """Returns a line of text for each change that would make a step fit, or one line if no such change is known.

    Args:
      plan: the plan of a step that does not fit.
    """
    found = cheapest(plan)
    if not found:
        return "no single change makes it fit: more devices, or another mesh (--search)"
    lines = [f"  {arguments(change)}   ({format_bytes(spare)} to spare)" for change, spare in found]
    return "\n".join(["each of these would make it fit, the cheapest first:", *lines])
