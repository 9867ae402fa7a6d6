"""Lists the meshes, microbatches, schedules, remat policies and ZeRO levels to consider, fastest estimate first."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.schema import Config
from meshtrain.config.smaller import SPLITS_SUMS, Change, problems_of, to_mesh, with_change, with_level
from meshtrain.errors import divisors, nearest_divisor
from meshtrain.hardware.accelerators import usable_bytes
from meshtrain.pipeline.schedules import SEARCHED
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.cost.context_sizes import sizes_to_try
from meshtrain.plan.findings import UNROLLED, can_unroll
from meshtrain.plan.search.estimate import Weights, estimate_bytes, estimate_seconds, placement_problems, weights_of
from meshtrain.sharding.param_sharding import MAX_LEVEL, num_parts
from meshtrain.sharding.rules import AXES, CONTEXT, DATA, EXPERT, default_rules, model_axes, partitioned_axes

MODEST = 1.15  # estimates may be too high by this factor: above this multiple of the capacity, candidates are dropped
MICROBATCHES_A_STAGE = (2, 4, 8)
LESS_KEPT = ("selective", "full")  # remat policies that save fewer activations, the fastest first
# With experts, `selective` saves mostly the rows of experts.
LESS_KEPT_OF_EXPERTS = ("selective", "save_attention", "full")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change of the configuration, with estimates of its memory and time on the target cluster.

    Attributes:
      change: dotted key -> value, to be changed in the configuration.
      shape: mesh axis -> size.
      guessed_bytes: estimated bytes of one device.
      guessed_seconds: estimated seconds of a step.
    """

    change: Change
    shape: dict[str, int]
    guessed_bytes: float
    guessed_seconds: float


def candidates(config: Config, cluster: Cluster, *, only_mesh: bool) -> list[Candidate]:
    """Returns the legal candidates that may fit in the devices' memory, fastest estimate first.

    Args:
      config: the configuration to vary.
      cluster: the target cluster.
      only_mesh: whether only the mesh varies, and microbatches, schedules, remat policies and the ZeRO level stay as
        configured.
    """
    weights, accelerator = weights_of(config), cluster.accelerator
    capacity = usable_bytes(accelerator) if accelerator else math.inf
    num_devices, result = len(cluster.devices), []
    shares = expert_sizes(weights, num_devices, cluster.devices_each)
    has_slow_network = cluster.platform == "cuda" or cluster.num_slices > 1
    for shape in meshes(num_devices, sizes_to_try(config, num_devices), shares):
        if has_slow_network and num_parts(_inside_layers(), shape) > cluster.devices_each:
            continue  # every layer would communicate over the network
        if placement_problems(config, shape, weights):
            continue
        for change in ways(config, shape, only_mesh=only_mesh, has_experts=weights.num_experts > 0):
            levels = [{}] if only_mesh else _levels(with_change(config, change), shape, weights)
            guesses = [_candidate(config, {**change, **level}, shape, weights, cluster) for level in levels]
            one = _first_that_fits(guesses, capacity)
            # The check comes last because it costs the most.
            if one is not None and not problems_of(with_change(config, one.change), shape):
                result.append(one)
    return sorted(result, key=lambda one: one.guessed_seconds)


def expert_sizes(weights: Weights, num_devices: int, devices_each: int) -> list[int]:
    """Returns the sizes of the expert axis to consider: 1, and powers of 2 that divide the number of experts.

    Each layer sends tokens to all devices of the axis, so only fast links may connect them.

    Args:
      weights: the abstract training state of the task.
      num_devices: number of devices in the cluster.
      devices_each: number of devices that fast links connect, see `Cluster.devices_each`.
    """
    most = math.gcd(weights.num_experts, num_devices) if weights.num_experts else 1
    return [size for size in divisors(most) if size <= devices_each and not size & (size - 1)]


def _inside_layers() -> tuple[str, ...]:
    """Returns the axes that communicate within every layer."""
    return tuple(axis for axis in model_axes() if axis in partitioned_axes())


def _first_that_fits(guesses: list[Candidate], capacity: float) -> Candidate | None:
    """Returns the first candidate with estimated bytes up to `capacity`, else the first up to `MODEST` x `capacity`.

    Estimates may be too high by the factor `MODEST`. Returns None if all estimates are larger.

    Args:
      guesses: candidates that differ in their ZeRO level, lowest level first, because higher levels send more.
      capacity: usable bytes of a device.
    """
    limits = (capacity, MODEST * capacity)
    return next((one for limit in limits for one in guesses if one.guessed_bytes <= limit), None)


def _candidate(config: Config, change: Change, shape: dict[str, int], weights: Weights, cluster: Cluster) -> Candidate:
    """Returns the candidate for a change, with the estimated bytes and seconds of the changed configuration.

    Args:
      config: the configuration to vary.
      change: dotted key -> value, to be changed in the configuration.
      shape: mesh axis -> size, after the change.
      weights: the abstract training state of the task.
      cluster: the target cluster.
    """
    changed = with_change(config, change)
    seconds = estimate_seconds(changed, shape, weights, cluster.accelerator, cluster.devices_each)
    return Candidate(change, shape, estimate_bytes(changed, shape, weights), seconds)


def meshes(num_devices: int, parts: Sequence[int] = (1,), shares: Sequence[int] = (1,)) -> Iterator[dict[str, int]]:
    """Yields axis -> size for every mesh with this number of devices.

    Args:
      num_devices: the product of the sizes.
      parts: allowed sizes of the context axis, which splits sequences.
      shares: allowed sizes of the expert axis.
    """
    outer, *others = AXES
    choices = dict.fromkeys(others, divisors(num_devices)) | {CONTEXT: parts, EXPERT: shares}
    for inner in itertools.product(*choices.values()):
        product = math.prod(inner)
        if num_devices % product == 0:
            yield {outer: num_devices // product} | dict(zip(choices, inner, strict=True))


def ways(config: Config, shape: dict[str, int], *, only_mesh: bool, has_experts: bool = False) -> Iterator[Change]:
    """Yields the changes to try on one mesh: each sets the mesh, microbatches, remat policy and pipeline schedule.

    With experts, a single microbatch with all sequences is tried too: weights of experts are large compared to the work
    of a token, and are gathered for each microbatch. Without recomputation, layers are unrolled.

    Args:
      config: the configuration to vary.
      shape: mesh axis -> size.
      only_mesh: whether to set only the mesh.
      has_experts: whether the model has experts.
    """
    mesh = to_mesh(shape)
    if only_mesh:
        yield mesh
        return
    sequences = config.batch_size // num_parts(default_rules(config.layout).activations["batch"], shape)
    if not sequences:
        return
    if shape["tensor"] > 1:
        mesh["layout.sequence_parallel"] = True
    less_kept = LESS_KEPT_OF_EXPERTS if has_experts else LESS_KEPT
    if shape["pipeline"] == 1:
        sizes = (1, 2, 4, sequences) if has_experts else (1, 2, 4)
        counts = dict.fromkeys(nearest_divisor(sequences, sequences // each or 1) for each in sizes)
        unrolled = {"remat.unroll": True} if can_unroll(config, shape) else {}
        for parts, policy in itertools.product(counts, ("none", *less_kept)):
            loop = unrolled if policy == UNROLLED["remat.policy"] else {}
            yield {**mesh, "accumulation_steps": parts, "remat.policy": policy, **loop}
        return
    most = (min(sequences, a_stage * shape["pipeline"]) for a_stage in MICROBATCHES_A_STAGE)
    counts = dict.fromkeys(nearest_divisor(sequences, number) for number in most)
    for parts, (schedule, chunks), policy in itertools.product(counts, SEARCHED.items(), less_kept):
        yield {
            **mesh,
            "accumulation_steps": 1,
            "remat.policy": policy,
            "pipeline.schedule": schedule,
            "pipeline.num_microbatches": parts,
            "pipeline.num_chunks": chunks,
        }


def _levels(config: Config, shape: dict[str, int], weights: Weights) -> list[Change]:
    """Returns the changes of the ZeRO level to try on one mesh: {} (the configured level), then each higher level.

    Args:
      config: the configuration, changed to this mesh.
      shape: mesh axis -> size.
      weights: the abstract training state of the task.
    """
    if shape[DATA] == 1:
        return [{}]
    higher = range(config.zero.effective_level + 1, MAX_LEVEL + 1)
    is_manual = weights.task.takes_manual_axes or num_parts(partitioned_axes(), shape) == 1
    splits_sums = is_manual and num_microbatches(config, shape) > 1
    return [{}, *(with_level(config, level) for level in higher if level != SPLITS_SUMS or splits_sums)]
