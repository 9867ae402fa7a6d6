"""Lower bounds of the bytes that a device sends in a step, by axis, and the pipeline executor's own formula.

n: devices along an axis, M: microbatches, L: layers, A: bytes of the activations of one microbatch on one device.

    data      nothing with groups that train apart, but scalars; without,
              2 (n - 1) / n of the gradients in precision.reduce_dtype, once a step; or what the reduction that
              `reduction.name` names says of itself. Of weights that ZeRO splits:
              level 1 reduce-scatters gradients and gathers parameters, once; level 2 reduce-scatters M times;
              level 3 is like fsdp
    fsdp      (n - 1) / n of the weights in the compute dtype, M times: two gathers and one scatter of the gradients;
              one gather of what is not in the stack of layers: the loss applies the head's weight forward and backward
              at once, and the backward pass of a look-up reads no table.
              Where data stores weights as well (level 3) the two are one entry, `data+fsdp`: n is their product.
              Where the partitioner reduces over data, it does so over both together: one entry, the sum of the two
    tensor    what layers, look-up and head send, as the task's `Cost` says
    context   weights as over fsdp: where both are larger than 1, the entry of weights is `fsdp+context`, and `context`
              is attention's exchange alone, as `Cost` says
    expert    likewise: weights are the entry `fsdp+expert` but for those of experts, which stay split by expert and are
              the entry `fsdp`; `expert` is what the tokens of experts send, as `Cost` says
    pipeline  A each way for each chunk of a stage, M times; with sequence parallelism the tensor axis' share of it

The pipeline's needs a task that states its width. Along tensor and context nothing is known of a task without a cost.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from meshtrain.assemble import Assembly
from meshtrain.config.config import num_microbatches, units_on_device
from meshtrain.launch.links import wire_share
from meshtrain.models.cost import Cost
from meshtrain.pipeline.program import Segment, Signature, segments
from meshtrain.sharding.axes import AXES, CONTEXT, DATA, EXPERT, PIPELINE, TENSOR
from meshtrain.sharding.stored import MAX_LEVEL, ROUTER, STACKED, Names, axes_in, num_parts
from meshtrain.sharding.trees import select
from meshtrain.step.precision import compute_dtype, param_dtype

FSDP = "fsdp"
FLOAT32_BYTES = 4
GATHERS, SCATTERS = 2, 1  # of a layer's stored weight and of its gradient, for each microbatch
SCATTERS_EACH = 2  # the ZeRO level that reduce-scatters the gradients of each microbatch


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that the formulas use.

    Attributes:
      num_microbatches: M.
      activation_bytes: A, of one microbatch on one device, whole along the sequence, in the compute dtype; 0: unknown.
      residual_bytes: R, the same between layers, where sequence parallelism splits the sequence over tensor.
      gather_bytes: (joined) axes -> what a device sends to gather the weights that are stored over them, in the dtype
        in which they compute: those of layers twice, the others once.
      scatter_bytes: the same for one scatter of the gradients of those that are trained.
      reduced_bytes: of the gradients that replicas all-reduce over data, in the dtype in which they cross it.
      scattered_bytes: of the gradients that replicas reduce-scatter over data (ZeRO levels 1 and 2), likewise. Of a
        reduction of its own both are the bytes of an array for which a ring sends as much.
      updated_bytes: of the parameters of those, which are gathered over data after the update.
      cost: what else one microbatch costs a device.
    """

    num_microbatches: int
    activation_bytes: float
    residual_bytes: float
    gather_bytes: Mapping[str, float]
    scatter_bytes: Mapping[str, float]
    reduced_bytes: float
    scattered_bytes: float
    updated_bytes: float
    cost: Cost


def sizes(assembly: Assembly) -> Sizes:
    """Returns the sizes that the formulas use."""
    config, shape, task = assembly.config, dict(assembly.mesh.shape), assembly.task
    itemsize = jnp.dtype(compute_dtype(config.precision)).itemsize
    parts = num_microbatches(config, shape)
    activations = units_on_device(config, task, assembly.rules, shape) / parts * task.width * itemsize
    weights = _weights(assembly)
    reduced, scattered = reduced_and_scattered(assembly)
    reduced_itemsize, scattered_itemsize = _wire_itemsizes(assembly)
    return Sizes(
        num_microbatches=parts,
        activation_bytes=activations,
        residual_bytes=activations / (shape[TENSOR] if config.layout.sequence_parallel else 1),
        gather_bytes=gathered_bytes(assembly),
        scatter_bytes=_by_axes(assembly, (weight for weight in weights if weight.is_trained)),
        reduced_bytes=reduced * reduced_itemsize,
        scattered_bytes=scattered * scattered_itemsize,
        updated_bytes=scattered * jnp.dtype(param_dtype(config.precision)).itemsize,
        cost=assembly.cost,
    )


def reduced_and_scattered(assembly: Assembly, *, only_stacked: bool = False) -> tuple[int, int]:
    """Returns the gradients' elements on one device: (all-reduced over data, reduce-scattered over data).

    With `only_stacked` those of weights that stack layers.
    """
    replicas, reduced, scattered = assembly.replicas, 0, 0
    if assembly.apart is not None:  # groups send weights in a program of their own
        return 0, 0
    names = jax.tree.unflatten(jax.tree.structure(assembly.state), map(_Axes, assembly.names)).params
    of_weights = (assembly.state.params, replicas.stored, names)
    trained = [jax.tree.leaves(select(tree, replicas.trained)[0]) for tree in of_weights]
    for leaf, weight, axes in zip(*trained, strict=True):
        elements = math.prod(leaf.sharding.shard_shape(leaf.shape))
        if only_stacked and not set(axes.names) & set(STACKED):
            continue
        if replicas.level == 0 or weight.data_dim == 0:
            reduced += elements
        elif replicas.level < MAX_LEVEL:
            scattered += elements
    return reduced, scattered


def _wire_itemsizes(assembly: Assembly) -> tuple[float, float]:
    """Returns the bytes of an element that crosses data: (all-reduced, reduce-scattered)."""
    n, reduction = assembly.mesh.shape[DATA], assembly.replicas.reduction
    if reduction is None or n == 1:
        itemsize = jnp.dtype(assembly.replicas.wire_dtype).itemsize
        return itemsize, itemsize
    whole, scattered = (reduction.sent_bytes(1, n, is_scattered) for is_scattered in (False, True))
    return whole / wire_share("all-reduce", n), scattered / wire_share("reduce-scatter", n)


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The logical axes of one array, as a leaf of a tree."""

    names: Names


def layer_gradient_bytes(assembly: Assembly) -> float:
    """Returns the bytes that a device sends to reduce the gradients of stacked layers over data, once a step.

    0 where they do not cross data once a step in `precision.reduce_dtype`: one replica, ZeRO levels 2 and 3,
    another reduction, data left to the partitioner.
    """
    replicas, num_replicas = assembly.replicas, assembly.mesh.shape[DATA]
    if not replicas.reduces_in_loops:
        return 0.0
    reduced, scattered = reduced_and_scattered(assembly, only_stacked=True)
    sent = wire_share("all-reduce", num_replicas) * reduced + wire_share("reduce-scatter", num_replicas) * scattered
    return sent * jnp.dtype(replicas.wire_dtype).itemsize


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight that is stored in shards.

    Attributes:
      axes: over which it is gathered before it computes, joined by `+`.
      missing_bytes: what the other devices store of what one computes with, in the dtype in which it computes.
      of_layer: whether it belongs to one of a stack of layers.
      is_trained: whether it has a gradient.
    """

    axes: str
    missing_bytes: float
    of_layer: bool
    is_trained: bool


def _storing(assembly: Assembly) -> list[str]:
    """Returns the axes larger than 1 that store weights, in mesh order, and data where its gradients cross both."""
    shape, stored = assembly.mesh.shape, set(assembly.rules.storage_axes)
    if DATA not in assembly.replicas.axes and shape[FSDP] > 1 and shape[EXPERT] == 1:
        stored.add(DATA)  # the partitioner all-reduces a gradient over data and fsdp together
    return [axis for axis in AXES if shape[axis] > 1 and axis in stored]


def _weights(assembly: Assembly) -> list[_Weight]:
    """Returns all weights."""
    rules, shape, result = assembly.rules, dict(assembly.mesh.shape), list[_Weight]()
    storing = _storing(assembly)
    params = assembly.state.params
    trained = assembly.replicas.trained or jax.tree.map(lambda _: True, params)
    names = jax.tree.unflatten(jax.tree.structure(assembly.state), map(_Axes, assembly.names)).params
    leaves = [jax.tree.leaves(tree) for tree in (params, names, trained)]
    itemsize = jnp.dtype(compute_dtype(assembly.config.precision)).itemsize
    for leaf, axes, is_trained in zip(*leaves, strict=True):
        stay = [axis for name in axes.names if name for axis in rules.gathered[name]]
        # The partitioner gathers over all storage axes of a weight together.
        over = [axis for axis in storing if axis not in stay]
        num_shards = num_parts([axis for axis in axes_in(leaf.sharding.spec) if axis in over], shape)
        elements = math.prod(leaf.sharding.shard_shape(leaf.shape)) * (num_shards - 1)
        size = FLOAT32_BYTES if ROUTER in axes.names else itemsize
        of_layer = bool(set(axes.names) & set(STACKED))
        result.append(_Weight("+".join(over), elements * size, of_layer, is_trained))
    return result


def _by_axes(assembly: Assembly, weights: Iterable[_Weight]) -> dict[str, float]:
    """Returns (joined) axes -> bytes; the first entry is that of weights without experts."""
    result = dict[str, float]()
    if storing := _storing(assembly):
        result["+".join(storing)] = 0.0
    for weight in weights:
        if weight.axes:
            result[weight.axes] = (result[weight.axes] if weight.axes in result else 0.0) + weight.missing_bytes
    return result


def gathered_bytes(assembly: Assembly) -> dict[str, float]:
    """Returns (joined) axes -> what a device sends to gather each weight as often as a microbatch uses it."""
    once, again = (_by_axes(assembly, some) for some in (_weights(assembly), _of_layers(assembly)))
    return {axes: once[axes] + (GATHERS - 1) * (again[axes] if axes in again else 0.0) for axes in once}


def _of_layers(assembly: Assembly) -> list[_Weight]:
    return [weight for weight in _weights(assembly) if weight.of_layer]


def wire_bytes_minimum(assembly: Assembly) -> dict[str, float]:
    """Returns the least bytes on the wire for each axis larger than 1, in mesh order; unknown ones are left out.

    Several axes that store weights are one entry, joined by `+`: the partitioner gathers over them together, and
    reduces gradients over data with them where data is left to it. Weights of experts are gathered over fewer axes than
    others, and then have an entry of their own.
    """
    shape, size = dict(assembly.mesh.shape), sizes(assembly)
    larger, storing = [axis for axis in AXES if shape[axis] > 1], _storing(assembly)
    of_layers, of_others = size.cost.layer_bytes, size.cost.other_bytes
    least: dict[str, float] = {}
    for axis in larger:
        replicated = _replicated_bytes(assembly.replicas.level, size) if axis == DATA else 0.0
        replicated *= wire_share("reduce-scatter", shape[axis])
        if storing and axis == storing[0]:
            for joined, gathered in size.gather_bytes.items():
                each = gathered + SCATTERS * (size.scatter_bytes[joined] if joined in size.scatter_bytes else 0.0)
                least[joined] = size.num_microbatches * each
            least["+".join(storing)] += replicated
        if axis in of_layers or axis in of_others:
            # Weights and the exchange are one entry where no other axis stores weights.
            sent = sum(found[axis] for found in (of_layers, of_others) if axis in found)
            least[axis] = (least[axis] if axis in least else 0.0) + size.num_microbatches * sent
        elif axis == CONTEXT:
            least.pop(axis, None)
        elif axis in storing:
            continue
        elif axis == DATA:
            least[axis] = replicated
        elif axis == PIPELINE and assembly.task.width:
            chunks = assembly.program.schedule.num_chunks if assembly.program else 1
            least[axis] = 2.0 * size.num_microbatches * chunks * size.residual_bytes
    return least


def idle_bytes(assembly: Assembly, sent: Mapping[str, float]) -> dict[str, float]:
    """Returns what a pipeline's idle rows send: (joined) axis -> bytes; empty without a pipeline.

    On an idle row the layers of a stage send as on any other. All else, such as look-up, head and reduced gradients, is
    sent as often as `wire_bytes_minimum` has it. So only axes along which layers send in each row have an entry.

    Args:
      assembly: the assembly.
      sent: bytes on the wire for each entry of `wire_bytes_minimum`.
    """
    if assembly.program is None:
        return {}
    size, idle = sizes(assembly), idle_share(assembly)
    layers = _of_layers(assembly)
    gathered, scattered = (_by_axes(assembly, some) for some in (layers, (one for one in layers if one.is_trained)))
    times = (gathered, GATHERS), (scattered, SCATTERS), (size.cost.layer_bytes, 1)
    result: dict[str, float] = {}
    for axis, least in wire_bytes_minimum(assembly).items():
        if axis in gathered or axis in size.cost.layer_bytes:
            by_layers = sum(number * each[axis] for each, number in times if axis in each)
            result[axis] = idle * max(0.0, sent[axis] - (least - size.num_microbatches * by_layers))
    return result


def outer_wire_bytes_minimum(assembly: Assembly) -> float:
    """Returns the least bytes on the wire over data when groups are joined: an all-reduce of the weights."""
    trained, _ = select(assembly.state.params, assembly.replicas.trained)
    elements = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(trained))
    num_replicas, reduction = assembly.mesh.shape[DATA], assembly.replicas.reduction
    if reduction is not None:
        return reduction.sent_bytes(elements, num_replicas, False)
    return wire_share("all-reduce", num_replicas) * elements * FLOAT32_BYTES


def _replicated_bytes(level: int, size: Sizes) -> float:
    """Returns the bytes sent over data for weights that are not stored over it, before the factor (n - 1) / n."""
    scatters = size.num_microbatches if level == SCATTERS_EACH else 1
    return 2 * size.reduced_bytes + scatters * size.scattered_bytes + size.updated_bytes


def idle_share(assembly: Assembly) -> float:
    """Returns the share of a pipeline's rows in which a stage idles, averaged over stages; 0 without a pipeline."""
    return 1 - float(assembly.program.active.mean()) if assembly.program is not None else 0.0


def executor_bytes(assembly: Assembly) -> float | None:
    """Returns the bytes that the pipeline's executor sends over its axis, by its own formula.

    One permute of R a row. In each row whose body has them, embedding, its backward, the head's input and its cotangent
    sum R over the stages in float32, and the loss three numbers a token (R: activations as layers hand them on). One
    embedding comes before the first row, and one backward after the last.

    Returns:
      Bytes; None without a pipeline, or if the task does not state its width.
    """
    program, width = assembly.program, assembly.task.width
    if program is None or not width:
        return None
    size, shape = sizes(assembly), dict(assembly.mesh.shape)
    ring = wire_share("all-reduce", shape[PIPELINE])
    wider = FLOAT32_BYTES / jnp.dtype(compute_dtype(assembly.config.precision)).itemsize
    residual = ring * wider * size.residual_bytes
    numbers = 3 * ring * wider * size.activation_bytes / width

    def of(part: Segment | Signature) -> float:
        if isinstance(part, Segment):
            return part.count * sum(of(child) for child in part.body)
        row = size.residual_bytes + residual * (part.embed + part.embed_backward)
        return row + (2 * residual + numbers if part.head else 0.0)

    rows = segments(program, reduces=assembly.reduces_chunks)
    # Nothing reads what the very last row sends, and outside of a loop the compiler drops it.
    unsent = size.residual_bytes if rows[-1].count == 1 else 0.0
    return sum(of(segment) for segment in rows) + 2 * residual - unsent


def model_flops(assembly: Assembly) -> tuple[float, float] | None:
    """Returns (6 N + causal attention, 6 N + full attention) of one step, FLOPs a device; None if not stated.

    Causal attention is half of full attention (PaLM, Chowdhery et al. 2022, appendix B, counts full).
    """
    task = assembly.task
    if not task.flops_per_token:
        return None
    units = task.num_units / assembly.mesh.size
    return (task.flops_per_token - task.attention_flops_per_token / 2) * units, task.flops_per_token * units
