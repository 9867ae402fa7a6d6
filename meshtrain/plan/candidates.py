"""Which meshes, microbatches, schedules and remat policies a cluster could run; first guesses at what each needs.

The guess is arithmetic, and only decides what is compiled. b: sequences of a microbatch on a device, T: tokens,
D: embed dim, t: tensor. A layer keeps b T D (10 + 24 / t) bytes in 16 bits (Korthikanti et al. 2022, table 2, without
the matrix of probabilities, which a fused kernel does not keep); compiled programs were seen to keep 1.6 times that.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from meshtrain.config.checks import nearest_divisor
from meshtrain.config.config import Config, check, num_microbatches
from meshtrain.launch.hardware import Accelerator, usable_bytes
from meshtrain.layout.axes import AXES
from meshtrain.models.decoder_task import count_parameters, flops_per_token
from meshtrain.plan.changes import Change, with_change
from meshtrain.plan.topology import Cluster
from meshtrain.step.precision import compute_dtype
from meshtrain.words.errors import UserError

STATE_BYTES = 16  # of a parameter: itself, its gradient and two moments, all float32
MODEST = 1.15  # guesses above this share of the capacity are not compiled
LOGIT_BYTES = 8  # of one logit: itself, its gradient, and a float32 on the way
KEPT_SEEN = 1.6
EFFICIENCY = 0.6
MICROBATCHES_A_STAGE = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a configuration on a cluster, with guesses.

    Attributes:
      change: what it changes in the configuration.
      shape: its mesh.
      guessed_bytes: of one device.
      guessed_seconds: of a step.
    """

    change: Change
    shape: dict[str, int]
    guessed_bytes: float
    guessed_seconds: float


def candidates(config: Config, cluster: Cluster, *, only_mesh: bool) -> list[Candidate]:
    """Returns the legal ways that may fit, the fastest guess first.

    Args:
      config: what is to run.
      cluster: where.
      only_mesh: whether microbatches, schedules and remat policies stay as they are.
    """
    accelerator = cluster.accelerator
    capacity = usable_bytes(accelerator) if accelerator else math.inf
    size = _Model.of(config)
    devices_each = len(cluster.devices) // cluster.num_hosts
    found = []
    for shape in meshes(len(cluster.devices)):
        if cluster.platform == "cuda" and shape["tensor"] > devices_each:
            continue  # every layer would wait for the network
        for change in ways(config, shape, only_mesh=only_mesh):
            changed = with_change(config, change)
            if _is_refused(changed, shape):
                continue
            held = guessed_bytes(changed, shape, size)
            seconds = guessed_seconds(changed, shape, size, accelerator, devices_each)
            if held <= MODEST * capacity:
                found.append(Candidate(change, shape, held, seconds))
    return sorted(found, key=lambda one: one.guessed_seconds)


def _is_refused(config: Config, shape: dict[str, int]) -> bool:
    try:
        return bool(check(config, shape))
    except UserError:
        return True


def meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Yields every way to write a number of devices as a product of the four axes."""
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for inner in itertools.product(divisors, repeat=3):
        product = math.prod(inner)
        if num_devices % product == 0:
            yield dict(zip(AXES, (num_devices // product, *inner), strict=True))


def ways(config: Config, shape: dict[str, int], *, only_mesh: bool) -> Iterator[Change]:
    """Yields the changes worth a thought on one mesh: each has the mesh, and microbatches where they may change."""
    mesh: Change = {f"mesh.{axis}": size for axis, size in shape.items()}
    if only_mesh:
        yield mesh
        return
    sequences = config.batch_size // (shape["data"] * shape["fsdp"])
    if not sequences:
        return
    if shape["tensor"] > 1:
        mesh["layout.sequence_parallel"] = True
    if shape["pipeline"] == 1:
        for each, policy in itertools.product((1, 2, 4), ("full", "none")):
            parts = nearest_divisor(sequences, sequences // each or 1)
            yield {**mesh, "accumulation_steps": parts, "remat.policy": policy}
        return
    for a_stage, schedule in itertools.product(MICROBATCHES_A_STAGE, ("1f1b", "interleaved_1f1b")):
        parts = nearest_divisor(sequences, min(sequences, a_stage * shape["pipeline"]))
        chunks = 2 if schedule == "interleaved_1f1b" else 1
        yield {
            **mesh,
            "accumulation_steps": 1,
            "pipeline.schedule": schedule,
            "pipeline.num_microbatches": parts,
            "pipeline.num_chunks": chunks,
        }


@dataclasses.dataclass(frozen=True)
class _Model:
    num_parameters: int
    flops_per_token: float

    @classmethod
    def of(cls, config: Config) -> "_Model":
        positions = config.model.max_positions or config.sequence_length
        number = count_parameters(config.model, positions)
        return cls(number, flops_per_token(config.model, number, positions, config.sequence_length))


def guessed_bytes(config: Config, shape: dict[str, int], size: _Model) -> float:
    """Returns the bytes of one device, roughly: state, activations kept, logits."""
    weights = size.num_parameters / (shape["fsdp"] * shape["tensor"] * shape["pipeline"])
    moments = 8 / shape["data"] if config.zero.effective_level else 8
    itemsize = jnp.dtype(compute_dtype(config.precision)).itemsize
    tokens = config.batch_size * config.sequence_length / (shape["data"] * shape["fsdp"])
    tokens /= num_microbatches(config, shape)
    units = tokens * config.model.embed_dim * itemsize / 2
    tensor, layers = shape["tensor"], config.model.num_layers / shape["pipeline"]
    layer = KEPT_SEEN * units * (10 + 24 / tensor)
    if shape["pipeline"] > 1:
        kept = 2 * units * 2 * shape["pipeline"] * config.pipeline.num_chunks + layers * layer
    elif config.remat.policy == "none":
        kept = layers * layer
    else:
        kept = layers * 2 * units + layer
    logits = tokens * config.model.padded_vocab_size * LOGIT_BYTES / (tensor * shape["pipeline"])
    return (STATE_BYTES - 8 + moments) * weights + kept + logits


def guessed_seconds(
    config: Config, shape: dict[str, int], size: _Model, accelerator: Accelerator | None, devices_each: int
) -> float:
    """Returns the seconds of a step, roughly: products with the pipeline's idle rows, and half of what is sent.

    Args:
      config: what is to run.
      shape: its mesh.
      size: its model.
      accelerator: None where nothing is known.
      devices_each: devices of one host.
    """
    if accelerator is None:
        return float(math.prod(shape.values()))
    peak, link = accelerator.bfloat16_flops_per_second, accelerator.link_bytes_per_second
    network = accelerator.network_bytes_per_second or link
    # Devices of one host that gather together share their network adapters.
    together = max(1, min(shape["fsdp"], devices_each // shape["tensor"]))
    fsdp_speed = link if together == shape["fsdp"] else min(link, network * together)
    parts = num_microbatches(config, shape)
    recomputes = shape["pipeline"] > 1 or config.remat.policy == "full"
    tokens = config.batch_size * config.sequence_length
    work = tokens * size.flops_per_token / math.prod(shape.values()) * (4 / 3 if recomputes else 1)
    chunks = config.pipeline.num_chunks if shape["pipeline"] > 1 else 1
    bubble = 1 + (shape["pipeline"] - 1) / (parts * chunks)
    weights = size.num_parameters / (shape["tensor"] * shape["pipeline"])
    activation = 2 * tokens * config.model.embed_dim / (shape["data"] * shape["fsdp"])
    sent = {
        "fsdp": (shape["fsdp"] > 1) * 6 * weights * parts / fsdp_speed,
        "tensor": (shape["tensor"] > 1) * 10 * activation * config.model.num_layers / shape["pipeline"] / link,
        "data": (shape["data"] > 1) * 8 * weights / shape["fsdp"] / network,
        "pipeline": (shape["pipeline"] > 1) * 2 * activation * chunks / network,
    }
    return work * bubble / (EFFICIENCY * peak) + sum(sent.values()) / 2
