"""The least that a step has to send for this model and mesh, bytes a device, and what the executor's formula says.

n: devices along an axis, M: microbatches, L: layers, A: bytes of the activations of one microbatch on one device.

    data      2 (n - 1) / n of the gradients in precision.reduce_dtype, once a step. Of weights that ZeRO splits:
              level 1 reduce-scatters gradients and gathers parameters, once; level 2 reduce-scatters M times;
              level 3 is like fsdp
    fsdp      (n - 1) / n of the weights in the compute dtype, M times: two gathers and one scatter
    tensor    2 (n - 1) / n of A, M times: 4 a layer (5 where the forward is computed again), one for the
              look-up and one for the head
    pipeline  A each way for each chunk of a stage, M times; with sequence parallelism the tensor axis' share of it
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.assemble import Assembly
from meshtrain.config.config import num_microbatches
from meshtrain.layout.placement import axes_in
from meshtrain.layout.zero import DATA, MAX_LEVEL
from meshtrain.pipeline.program import Segment, Signature, segments
from meshtrain.step.precision import compute_dtype, param_dtype

FLOAT32_BYTES = 4
REDUCTIONS_A_LAYER = 4
RECOMPUTED_REDUCTIONS = 1  # of two in a layer's forward: nothing waits for the sum at its end
LOOKUP_AND_HEAD = 2
GATHERS_AND_SCATTER = 3
SCATTERS_EACH = 2  # the ZeRO level that reduce-scatters the gradients of each microbatch


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the formulas are made of.

    Attributes:
      num_microbatches: M.
      activation_bytes: A, of one microbatch on one device, whole along the sequence, in the compute dtype.
      residual_bytes: R, the same between layers, where sequence parallelism splits the sequence over tensor.
      stored_bytes: storage axis -> bytes of the weights split over it, gathered, in the compute dtype.
      reduced_bytes: of the gradients that replicas all-reduce over data, in the dtype in which they cross it.
      scattered_bytes: of the gradients that replicas reduce-scatter over data (ZeRO levels 1 and 2), likewise.
      updated_bytes: of the parameters of those, which are gathered over data after the update.
      layers_of_stage: L / S.
    """

    num_microbatches: int
    activation_bytes: float
    residual_bytes: float
    stored_bytes: dict[str, float]
    reduced_bytes: float
    scattered_bytes: float
    updated_bytes: float
    layers_of_stage: float


def sizes(assembly: Assembly) -> Sizes:
    """Returns the sizes behind the formulas of one step."""
    config, shape = assembly.config, dict(assembly.mesh.shape)
    itemsize = jnp.dtype(compute_dtype(config.precision)).itemsize
    parts = num_microbatches(config, shape)
    sequences = config.batch_size / (parts * shape["data"] * shape["fsdp"])
    leaves = jax.tree.leaves(assembly.state.params)
    stored = {axis: sum(_gathered(leaf, axis) * itemsize for leaf in leaves) for axis in assembly.rules.storage_axes}
    reduced, scattered = _reduced_and_scattered(assembly)
    wire_itemsize = jnp.dtype(assembly.replicas.wire_dtype).itemsize
    activations = sequences * config.sequence_length * config.model.embed_dim * itemsize
    return Sizes(
        num_microbatches=parts,
        activation_bytes=activations,
        residual_bytes=activations / (shape["tensor"] if config.layout.sequence_parallel else 1),
        stored_bytes=stored,
        reduced_bytes=reduced * wire_itemsize,
        scattered_bytes=scattered * wire_itemsize,
        updated_bytes=scattered * jnp.dtype(param_dtype(config.precision)).itemsize,
        layers_of_stage=config.model.num_layers / shape["pipeline"],
    )


def _reduced_and_scattered(assembly: Assembly) -> tuple[int, int]:
    """Returns the gradients' elements on one device: (all-reduced over data, reduce-scattered over data)."""
    replicas, reduced, scattered = assembly.replicas, 0, 0
    for leaf, home in zip(jax.tree.leaves(assembly.state.params), jax.tree.leaves(replicas.homes), strict=True):
        elements = math.prod(leaf.sharding.shard_shape(leaf.shape))
        if replicas.level == 0 or home.dim == 0:
            reduced += elements
        elif replicas.level < MAX_LEVEL:
            scattered += elements
    return reduced, scattered


def _gathered(leaf: Any, axis: str) -> float:
    """Elements on one device of a weight once it is gathered over an axis that splits it; 0 where none does."""
    if axis not in axes_in(leaf.sharding.spec):
        return 0.0
    return float(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.sharding.mesh.shape[axis])


def wire_bytes_minimum(assembly: Assembly) -> dict[str, float]:
    """Returns the least bytes on the wire for each axis larger than 1, in mesh order."""
    config, shape, size = assembly.config, dict(assembly.mesh.shape), sizes(assembly)
    share = {axis: (n - 1) / n for axis, n in shape.items()}
    recomputes = shape["pipeline"] > 1 or config.remat.policy == "full"
    reductions = REDUCTIONS_A_LAYER + (RECOMPUTED_REDUCTIONS if recomputes else 0)
    tensor = reductions * size.layers_of_stage + LOOKUP_AND_HEAD
    chunks = assembly.program.schedule.num_chunks if assembly.program else 1
    times = size.num_microbatches
    minimum = {
        "data": share["data"] * _data_bytes(assembly.replicas.level, size),
        "pipeline": 2.0 * times * chunks * size.residual_bytes,
        "fsdp": share["fsdp"] * GATHERS_AND_SCATTER * times * _stored(size, "fsdp"),
        "tensor": 2 * share["tensor"] * tensor * times * size.activation_bytes,
    }
    return {axis: minimum[axis] for axis in shape if shape[axis] > 1}


def _stored(size: Sizes, axis: str) -> float:
    return size.stored_bytes[axis] if axis in size.stored_bytes else 0.0


def _data_bytes(level: int, size: Sizes) -> float:
    stored = GATHERS_AND_SCATTER * size.num_microbatches * _stored(size, DATA)
    scatters = size.num_microbatches if level == SCATTERS_EACH else 1
    return stored + 2 * size.reduced_bytes + scatters * size.scattered_bytes + size.updated_bytes


def idle_share(assembly: Assembly) -> float:
    """Returns the share of a pipeline's rows in which a stage idles, averaged over stages; 0 without a pipeline."""
    return 1 - float(assembly.program.active.mean()) if assembly.program is not None else 0.0


def executor_bytes(assembly: Assembly) -> float | None:
    """Returns what the pipeline's executor sends over its axis by its own formula; None without a pipeline.

    One permute of R a row. In each row whose body has them, embedding, its backward, the head's input and its cotangent
    sum R over the stages in float32, and the loss three numbers a token (R: activations as layers hand them on). One
    embedding comes before the first row, and one backward after the last.
    """
    program = assembly.program
    if program is None:
        return None
    size, config, shape = sizes(assembly), assembly.config, dict(assembly.mesh.shape)
    ring = 2 * (shape["pipeline"] - 1) / shape["pipeline"]
    wider = FLOAT32_BYTES / jnp.dtype(compute_dtype(config.precision)).itemsize
    residual = ring * wider * size.residual_bytes
    numbers = 3 * ring * wider * size.activation_bytes / config.model.embed_dim

    def of(part: Segment | Signature) -> float:
        if isinstance(part, Segment):
            return part.count * sum(of(child) for child in part.body)
        row = size.residual_bytes + residual * (part.embed + part.embed_backward)
        return row + (2 * residual + numbers if part.head else 0.0)

    rows = segments(program)
    # Nobody reads what the very last row sends, and outside of a loop the compiler leaves it out.
    unsent = size.residual_bytes if rows[-1].count == 1 else 0.0
    return sum(of(segment) for segment in rows) + 2 * residual - unsent


def model_flops(assembly: Assembly) -> tuple[float, float] | None:
    """Returns (6 N + causal attention, 6 N + full attention) of one step, FLOPs a device; None for a model unknown.

    Causal attention is half of full attention (PaLM, Chowdhery et al. 2022, appendix B, counts full).
    """
    config, task = assembly.config, assembly.task
    if not task.flops_per_token:
        return None
    tokens = config.batch_size * config.sequence_length / assembly.mesh.size
    model = config.model
    attention = 12.0 * model.num_layers * config.sequence_length * model.num_heads * model.width_of_head
    return (task.flops_per_token - attention / 2) * tokens, task.flops_per_token * tokens
