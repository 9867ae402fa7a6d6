"""Searches a faster step that uses free memory: unrolled layers without recomputation, compiled before the advice."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.schema import Config
from meshtrain.config.smaller import Change, arguments, problems_of, with_change
from meshtrain.errors import UserError, divisors
from meshtrain.hardware.accelerators import usable_bytes
from meshtrain.plan import planner
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cluster.compile_thread import waiting_for
from meshtrain.plan.findings import UNROLLED, can_unroll
from meshtrain.plan.planner import Faster, Plan
from meshtrain.plan.search.estimate import estimate_bytes, estimate_seconds, weights_of
from meshtrain.sharding.param_sharding import num_parts
from meshtrain.sharding.rules import default_rules

MAX_COMPILED = 2
SHORT_SECONDS = 0.02
MUCH_RECOMPUTED = 0.05  # share of the modelled step
MUCH_FASTER = 0.98  # share of the modelled step; a smaller gain is not worth the compilation of unrolled layers


def changes(config: Config, shape: dict[str, int], cluster: Cluster) -> Iterator[Change]:
    """Yields changes that unroll layers and recompute nothing, fewest microbatches first.

    By the estimates of a search, the changed step fits in memory and is faster. (More microbatches gather weights more
    often, which may cost more than the recomputation.)

    Args:
      config: the configuration of the step.
      shape: mesh axis -> size.
      cluster: the target cluster; it has an accelerator.
    """
    assert cluster.accelerator is not None
    parts, weights, accelerator = num_microbatches(config, shape), weights_of(config), cluster.accelerator
    capacity, near = usable_bytes(accelerator), cluster.devices_each
    now = estimate_seconds(config, shape, weights, accelerator, near)
    sequences = config.batch_size // num_parts(default_rules(config.layout).activations["batch"], shape)
    for number in divisors(sequences):
        change = UNROLLED | ({"accumulation_steps": number} if number != parts else {})
        changed = with_change(config, change)
        if number < parts or problems_of(changed, shape):
            continue
        seconds = estimate_seconds(changed, shape, weights, accelerator, near)
        if estimate_bytes(changed, shape, weights) <= capacity and seconds <= now:
            yield change


def matters(plan: Plan) -> bool:
    """Returns whether a faster step is worth a compilation: the step is not short, and recomputes or copies in loops.

    Args:
      plan: the plan of the step; the result is false for CPUs, whose time is not modelled.
    """
    if plan.timing is None or plan.cluster.platform == "cpu" or plan.timing.step_seconds < SHORT_SECONDS:
        return False
    policy = plan.compiled.assembly.config.remat.policy
    return policy == "none" or plan.recomputed_seconds > MUCH_RECOMPUTED * plan.timing.step_seconds


def with_faster(plan: Plan) -> Plan:
    """Returns a plan with `Plan.faster` set, if unrolled layers without recomputation fit and take less time.

    At most `MAX_COMPILED` changes are compiled. The plan is returned unchanged for CPUs, and if it does not surely fit.

    Args:
      plan: the plan of the step.
    """
    config, shape = plan.compiled.assembly.config, dict(plan.compiled.assembly.mesh.shape)
    if not matters(plan) or plan.memory.fits is not True or not can_unroll(config, shape):
        return plan
    for change in itertools.islice(changes(config, shape, plan.cluster), MAX_COMPILED):
        work = functools.partial(planner.plan, with_change(config, change), shape, plan.cluster, plan.assumptions)
        try:
            other = waiting_for(f"trying {arguments(change)}", work)
        except UserError:
            continue
        if other.memory.fits is True and other.memory.compiler and other.timing and plan.timing:
            seconds = other.timing.step_seconds
            is_faster = seconds < MUCH_FASTER * plan.timing.step_seconds
            faster = Faster(change, seconds, other.memory.compiler.peak_bytes)
            return dataclasses.replace(plan, faster=faster) if is_faster else plan
    return plan
