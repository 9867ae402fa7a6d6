"""Defines the strategies whose scaling is compared, and how each strategy uses a number of devices.

    data      complete weights on each device, the batch split over all devices
    fsdp      weights and batch split over all devices
    hybrid    weights split over a group of devices: a host, or several hosts if they need more; a copy on each group
    best      the mesh and options that a search has found, with a resized data axis (or fsdp, if data is 1)

Strong scaling keeps the configured batch at every number of devices. Weak scaling keeps the configured sequences per
device, at least one for each device that splits the batch. In both, microbatches keep the configured size (for `best`,
the size that the search has found) if there are enough sequences. So with more devices, first the number of
microbatches decreases, then their size.
"""

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.cli.tables import format_bytes
from meshtrain.config.mesh_checks import num_microbatches
from meshtrain.config.schema import Config
from meshtrain.config.smaller import Change, problems_of, to_mesh, with_change
from meshtrain.errors import divisors
from meshtrain.plan.search.candidates import MODEST, Candidate
from meshtrain.plan.search.estimate import Weights, estimate_bytes, placement_problems
from meshtrain.sharding.param_sharding import num_parts
from meshtrain.sharding.rules import AXES, DATA, PIPELINE, default_rules

STRONG, WEAK = "strong", "weak"
KINDS = (STRONG, WEAK)
FSDP = "fsdp"
HYBRID = "hybrid"
BEST = "best"
_SPLIT_BY_SIZE = ("batch_size", "accumulation_steps", "pipeline.num_microbatches")  # depend on the number of devices


@dataclasses.dataclass(frozen=True)
class Way:
    """A strategy that can run on any number of devices.

    Attributes:
      name: `data`, `fsdp`, `hybrid` or `best`.
      resized: the mesh axis whose size follows from the number of devices.
      fixed: mesh axis -> size of the other axes that are larger than 1.
      options: other changes of the configuration, dotted key -> value.
      microbatch: maximum number of sequences of a microbatch in one shard of the batch.
    """

    name: str
    resized: str
    fixed: Mapping[str, int]
    options: Change
    microbatch: int

    def shape(self, num_devices: int) -> dict[str, int] | None:
        """Returns mesh axis -> size; None if the number of devices is no multiple of the product of the `fixed` sizes.

        If `hybrid` has fewer devices than one copy of the weights needs, it has the mesh of `fsdp`.
        """
        if self.name == HYBRID and num_devices < self.fixed[FSDP]:
            return dict.fromkeys(AXES, 1) | {FSDP: num_devices}
        others = math.prod(self.fixed.values())
        if num_devices % others:
            return None
        return dict.fromkeys(AXES, 1) | {**self.fixed, self.resized: num_devices // others}


@dataclasses.dataclass(frozen=True)
class Point:
    """A strategy on one number of devices.

    Attributes:
      way: the strategy.
      kind: `strong` or `weak`.
      num_devices: number of devices of the mesh.
      batch_size: sequences per step.
      microbatch: number of sequences of a microbatch in one shard of the batch; 0 if the strategy cannot run.
      num_microbatches: number of microbatches per step.
      config: the configuration to run; None if the strategy cannot run.
      problem: the reason why the strategy cannot run, if it is known without a compiler; otherwise an empty text.
    """

    way: Way
    kind: str
    num_devices: int
    batch_size: int
    microbatch: int = 0
    num_microbatches: int = 0
    config: Config | None = None
    problem: str = ""

    @property
    def shape(self) -> dict[str, int]:
        """Mesh axis -> size; the strategy must have a mesh for this number of devices (`Way.shape` is not None)."""
        shape = self.way.shape(self.num_devices)
        assert shape is not None
        return shape


@dataclasses.dataclass(frozen=True)
class Basis:
    """The configuration to scale, on the cluster that the user named.

    Attributes:
      config: the configuration.
      num_devices: number of devices of the configured mesh, with which strong and weak scaling have the same batch.
      weights: the abstract training state of its task.
      capacity_bytes: usable memory of one device.
      devices_each: number of devices that fast links connect, see `Cluster.devices_each`.
    """

    config: Config
    num_devices: int
    weights: Weights
    capacity_bytes: float
    devices_each: int


def microbatch_of(config: Config, shape: Mapping[str, int]) -> int:
    """Returns the number of sequences of a configured microbatch in one shard of the batch; at least 1."""
    return max(1, config.batch_size // (_parts(config, shape) * num_microbatches(config, shape)))


def basic_ways(basis: Basis, shape: Mapping[str, int], largest: int) -> list[Way]:
    """Returns the strategies data, fsdp and hybrid.

    Args:
      basis: the configuration to scale.
      shape: mesh axis -> size, as configured.
      largest: the largest number of devices to plan, which limits the group of hybrid.
    """
    microbatch = microbatch_of(basis.config, shape)
    copy = _devices_of_a_copy(basis, largest)
    return [
        Way("data", DATA, {}, {}, microbatch),
        Way(FSDP, FSDP, {}, {}, microbatch),
        Way(HYBRID, DATA, {FSDP: copy}, {}, microbatch),
    ]


def _devices_of_a_copy(basis: Basis, largest: int) -> int:
    """Returns the number of devices over which hybrid splits one copy of the weights.

    The number of devices in a host is doubled until the weights and one sequence per device are estimated to fit.

    Args:
      basis: the configuration to scale.
      largest: the largest number of devices.
    """
    copy = basis.devices_each
    while 2 * copy <= largest:
        shape = dict.fromkeys(AXES, 1) | {FSDP: copy}
        one = with_change(basis.config, {"batch_size": copy, "accumulation_steps": 1, f"mesh.{FSDP}": copy})
        if _estimate(one, shape, basis) <= basis.capacity_bytes:
            break
        copy *= 2
    return copy


def way_of(found: Candidate, batch_size: int, config: Config) -> Way:
    """Returns the strategy that applies a search's candidate to any number of devices.

    Args:
      found: the candidate.
      batch_size: sequences per step in the search.
      config: the configuration that was searched.
    """
    resized = FSDP if found.shape[DATA] == 1 and found.shape[FSDP] > 1 else DATA
    fixed = {axis: size for axis, size in found.shape.items() if axis != resized and size > 1}
    changed = with_change(config, {**found.change, "batch_size": batch_size})
    decided = {f"mesh.{axis}" for axis in AXES} | set(_SPLIT_BY_SIZE)
    options = {key: value for key, value in found.change.items() if key not in decided}
    return Way(BEST, resized, fixed, options, microbatch_of(changed, found.shape))


def point(basis: Basis, way: Way, kind: str, num_devices: int) -> Point:
    """Returns a strategy on one number of devices; if it cannot run, the point contains the reason.

    Args:
      basis: the configuration to scale.
      way: the strategy.
      kind: `strong` or `weak`.
      num_devices: the number of devices.
    """
    shape = way.shape(num_devices)
    if shape is None:
        needed = math.prod(way.fixed.values())
        problem = f"{num_devices:,} devices are not a multiple of the {needed:,} devices of a replica"
        return Point(way, kind, num_devices, basis.config.batch_size, problem=problem)
    parts = _parts(basis.config, shape)
    batch = basis.config.batch_size
    if kind == WEAK:  # rounded up to a multiple of the batch's shards
        batch = parts * math.ceil(batch * num_devices / (basis.num_devices * parts))
    if batch % parts:
        problem = f"{batch:,} sequences cannot be divided evenly over {parts:,} devices"
        return Point(way, kind, num_devices, batch, problem=problem)
    problem = ""
    # The largest microbatch that divides the sequences of a batch shard is tried first.
    for microbatch in reversed([size for size in divisors(batch // parts) if size <= way.microbatch]):
        number = batch // parts // microbatch
        config = with_change(basis.config, _change(way, shape, batch, number))
        problem = problem_of(config, shape, basis)
        if not problem:
            return Point(way, kind, num_devices, batch, microbatch, number, config)
    return Point(way, kind, num_devices, batch, problem=problem)


def _change(way: Way, shape: Mapping[str, int], batch_size: int, number: int) -> Change:
    counts: Change = {"accumulation_steps": number}
    if shape[PIPELINE] > 1:
        counts = {"accumulation_steps": 1, "pipeline.num_microbatches": number}
    return to_mesh(shape) | way.options | counts | {"batch_size": batch_size}


def problem_of(config: Config, shape: Mapping[str, int], basis: Basis) -> str:
    """Returns the reason not to compile a configuration (it is illegal or far too large); '' if there is none."""
    if lines := placement_problems(config, shape, basis.weights) or problems_of(config, shape):
        return lines[0]
    guessed = _estimate(config, shape, basis)
    if guessed > MODEST * basis.capacity_bytes:
        return f"does not fit: about {format_bytes(int(guessed))} a device of {format_bytes(int(basis.capacity_bytes))}"
    return ""


def _estimate(config: Config, shape: Mapping[str, int], basis: Basis) -> float:
    """Returns the estimated bytes of one device; the batch size of `config` may differ from `basis.config`."""
    task = basis.weights.task
    units = task.num_units * config.batch_size // basis.config.batch_size
    weights = dataclasses.replace(basis.weights, task=dataclasses.replace(task, units_per_step=units))
    return estimate_bytes(config, shape, weights)


def _parts(config: Config, shape: Mapping[str, int]) -> int:
    return num_parts(default_rules(config.layout).activations["batch"], shape)
