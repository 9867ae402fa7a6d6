"""The ways to run whose scaling is compared, and how each of them runs a number of devices.

    data      whole weights on each device, the batch split over all
    fsdp      weights and batch split over all
    hybrid    weights split over a host, or over as many as it takes to hold them; a copy on each such group
    best      the mesh and options that a search has found, its data axis (or fsdp, where data is 1) resized

Strong scaling keeps the configured batch at every number of devices. Weak scaling keeps the configured sequences a
device, and gives each device that splits the batch at least one. In both a microbatch stays as large as configured
(for the search's best as large as it has found) as long as there is enough to split, so that more devices mean fewer
microbatches, and only then smaller ones.
"""

import dataclasses
import math
from collections.abc import Mapping

from meshtrain.cli.tables import format_bytes
from meshtrain.config.config import Config, num_microbatches
from meshtrain.config.smaller import Change, problems_of, to_mesh, with_change
from meshtrain.errors import divisors
from meshtrain.plan.search.candidates import MODEST, Candidate
from meshtrain.plan.search.estimate import Weights, guessed_bytes, placement_problems
from meshtrain.sharding.rules import AXES, DATA, PIPELINE, default_rules
from meshtrain.sharding.stored import num_parts

STRONG, WEAK = "strong", "weak"
KINDS = (STRONG, WEAK)
FSDP = "fsdp"
HYBRID = "hybrid"
BEST = "best"
_SPLIT_BY_SIZE = ("batch_size", "accumulation_steps", "pipeline.num_microbatches")  # a number of devices decides these


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run any number of devices.

    Attributes:
      name: data, fsdp, hybrid or best.
      resized: the axis whose size follows from the number of devices.
      fixed: axis -> size of the other axes that are larger than 1.
      options: what else is changed in the configuration.
      microbatch: most sequences of a microbatch in one part of the batch.
    """

    name: str
    resized: str
    fixed: Mapping[str, int]
    options: Change
    microbatch: int

    def shape(self, num_devices: int) -> dict[str, int] | None:
        """Returns the size of each axis; None where the number of devices is no multiple of the fixed sizes.

        A hybrid of less devices than one copy takes is a part of one: fsdp alone.
        """
        if self.name == HYBRID and num_devices < self.fixed[FSDP]:
            return dict.fromkeys(AXES, 1) | {FSDP: num_devices}
        others = math.prod(self.fixed.values())
        if num_devices % others:
            return None
        return dict.fromkeys(AXES, 1) | {**self.fixed, self.resized: num_devices // others}


@dataclasses.dataclass(frozen=True)
class Point:
    """One way on one number of devices.

    Attributes:
      way: the way.
      kind: `strong` or `weak`.
      num_devices: of the mesh.
      batch_size: sequences a step.
      microbatch: sequences of a microbatch in one part of the batch; 0 where it cannot run.
      num_microbatches: a step.
      config: what runs; None where it cannot.
      problem: why it cannot run or needs no compiler to be refused; otherwise an empty text.
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
        """The size of each axis."""
        shape = self.way.shape(self.num_devices)
        assert shape is not None
        return shape


@dataclasses.dataclass(frozen=True)
class Basis:
    """What is scaled.

    Attributes:
      config: the configuration.
      num_devices: of its mesh, where strong and weak scaling meet.
      weights: of its task.
      capacity_bytes: what a program can use of one device.
      devices_each: devices of a host.
    """

    config: Config
    num_devices: int
    weights: Weights
    capacity_bytes: float
    devices_each: int


def microbatch_of(config: Config, shape: Mapping[str, int]) -> int:
    """Returns the sequences of a microbatch in one part of the batch, as configured; at least one."""
    return max(1, config.batch_size // (_parts(config, shape) * num_microbatches(config, shape)))


def plain_ways(basis: Basis, shape: Mapping[str, int], largest: int) -> list[Way]:
    """Returns data, fsdp and hybrid.

    Args:
      basis: what is scaled.
      shape: its configured mesh.
      largest: the largest number of devices.
    """
    microbatch = microbatch_of(basis.config, shape)
    copy = _devices_of_a_copy(basis, largest)
    return [
        Way("data", DATA, {}, {}, microbatch),
        Way(FSDP, FSDP, {}, {}, microbatch),
        Way(HYBRID, DATA, {FSDP: copy}, {}, microbatch),
    ]


def _devices_of_a_copy(basis: Basis, largest: int) -> int:
    """Returns a host's devices, or as many hosts' as hold the weights and one example each, by guess."""
    copy = basis.devices_each
    while 2 * copy <= largest:
        shape = dict.fromkeys(AXES, 1) | {FSDP: copy}
        one = with_change(basis.config, {"batch_size": copy, "accumulation_steps": 1, f"mesh.{FSDP}": copy})
        if _guessed(one, shape, basis) <= basis.capacity_bytes:
            break
        copy *= 2
    return copy


def way_of(found: Candidate, batch_size: int, config: Config) -> Way:
    """Returns the way that a search's candidate is on any number of devices.

    Args:
      found: the candidate.
      batch_size: with which it was searched.
      config: the configuration that was searched.
    """
    resized = FSDP if found.shape[DATA] == 1 and found.shape[FSDP] > 1 else DATA
    fixed = {axis: size for axis, size in found.shape.items() if axis != resized and size > 1}
    changed = with_change(config, {**found.change, "batch_size": batch_size})
    decided = {f"mesh.{axis}" for axis in AXES} | set(_SPLIT_BY_SIZE)
    options = {key: value for key, value in found.change.items() if key not in decided}
    return Way(BEST, resized, fixed, options, microbatch_of(changed, found.shape))


def point(basis: Basis, way: Way, kind: str, num_devices: int) -> Point:
    """Returns one way on one number of devices, or why it cannot run."""
    shape = way.shape(num_devices)
    if shape is None:
        needed = math.prod(way.fixed.values())
        problem = f"{num_devices:,} devices are no multiple of the {needed:,} that one copy takes"
        return Point(way, kind, num_devices, basis.config.batch_size, problem=problem)
    parts = _parts(basis.config, shape)
    batch = basis.config.batch_size
    if kind == WEAK:  # the next multiple of the parts
        batch = parts * math.ceil(batch * num_devices / (basis.num_devices * parts))
    if batch % parts:
        problem = f"{batch:,} sequences do not divide over {parts:,} devices"
        return Point(way, kind, num_devices, batch, problem=problem)
    problem = ""
    # The largest that divides the sequences in a part comes first.
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
    """Returns why a configuration is not compiled: it is not legal, or far too large; otherwise an empty text."""
    if lines := placement_problems(config, shape, basis.weights) or problems_of(config, shape):
        return lines[0]
    guessed = _guessed(config, shape, basis)
    if guessed > MODEST * basis.capacity_bytes:
        return f"does not fit: about {format_bytes(int(guessed))} a device of {format_bytes(int(basis.capacity_bytes))}"
    return ""


def _guessed(config: Config, shape: Mapping[str, int], basis: Basis) -> float:
    """Returns the guessed bytes of a device, for the batch of this configuration."""
    task = basis.weights.task
    units = task.num_units * config.batch_size // basis.config.batch_size
    weights = dataclasses.replace(basis.weights, task=dataclasses.replace(task, units_per_step=units))
    return guessed_bytes(config, shape, weights)


def _parts(config: Config, shape: Mapping[str, int]) -> int:
    return num_parts(default_rules(config.layout).activations["batch"], shape)
