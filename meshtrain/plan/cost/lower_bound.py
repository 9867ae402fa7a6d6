"""Computes lower bounds of the bytes that a device sends in a step, by mesh axis, and the pipeline executor's bytes.

n: devices along an axis, M: microbatches, A: bytes of the activations of one microbatch on one device.

    data      2 (n - 1) / n of the gradients in precision.reduce_dtype, once a step; or the bytes that a custom
              reduction (`reduction.name`) states. For weights that ZeRO splits:
              level 1 reduce-scatters gradients and gathers parameters, once; level 2 reduce-scatters M times;
              level 3 is like fsdp
    fsdp      (n - 1) / n of the weights in the compute dtype, M times: two gathers, and one scatter of the gradients.
              Weights outside the stack of layers need one gather: the loss applies the head's weight forward and
              backward at once, and the backward pass of a look-up reads no table.
              If data stores weights as well (level 3), there is one entry `data+fsdp`, and n is the product.
              If the partitioner reduces gradients over data, and expert is 1, it reduces them over data and fsdp
              together: there is one entry, the sum of both bounds
    tensor    bytes sent by layers, look-up and head, from the task's `Cost`
    context   weights as over fsdp: if both are larger than 1, weights have the entry `fsdp+context`, and `context`
              contains only the exchange of attention, from `Cost`
    expert    as for context: weights have the entry `fsdp+expert`, except for weights of experts, which stay split by
              expert and have the entry `fsdp`; `expert` contains the exchange of tokens, from `Cost`
    pipeline  A forward and A backward for each chunk of a stage, M times; sequence parallelism divides A by the size
              of the tensor axis

The bound of the pipeline requires a task that states its width. The bounds of tensor and context require a `Cost`.
"""

import collections
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.assembly.assemble import Assembly
from meshtrain.config.mesh_checks import num_microbatches, units_on_device
from meshtrain.hardware.links import wire_share
from meshtrain.pipeline.program import Segment, Signature, segments
from meshtrain.pipeline.stages import Stack
from meshtrain.sharding.param_sharding import MAX_LEVEL, ROUTER, STACKED, Names, ParamSharding, axes_in, num_parts
from meshtrain.sharding.rules import AXES, CONTEXT, DATA, EXPERT, PIPELINE, TENSOR
from meshtrain.sharding.trees import select
from meshtrain.step.precision import compute_dtype
from meshtrain.step.shardings import splits_masters

FSDP = "fsdp"
FLOAT32_BYTES = 4
GATHERS, SCATTERS = 2, 1  # gathers of a layer's weight and scatters of its gradient, per microbatch
SCATTERS_EACH = 2  # the ZeRO level that reduce-scatters the gradients of each microbatch


def _activation_bytes(assembly: Assembly) -> float:
    """Returns A, the activation bytes of one microbatch on one device; 0 if the task states no width.

    Activations have the compute dtype. The sequence is counted as if it were not split over the tensor axis.
    """
    config, shape, task = assembly.config, dict(assembly.mesh.shape), assembly.task
    units = units_on_device(config, task, assembly.placed.rules, shape) / num_microbatches(config, shape)
    return units * task.width * jnp.dtype(compute_dtype(config.precision)).itemsize


def _residual_bytes(assembly: Assembly) -> float:
    """Returns R, the bytes of one microbatch's activations between layers on one device; 0 if the task states no width.

    Sequence parallelism splits these activations over the tensor axis.
    """
    is_split = assembly.config.layout.sequence_parallel
    return _activation_bytes(assembly) / (assembly.mesh.shape[TENSOR] if is_split else 1)


class _Weight(NamedTuple):
    """A stored weight.

    Attributes:
      elements: number of elements on a device.
      axes: the logical axes of its dims.
      stored: the shardings of the weight, its gradient and its moments.
      is_trained: whether it has a gradient.
    """

    elements: int
    axes: Names
    stored: ParamSharding
    is_trained: bool

    @property
    def of_layer(self) -> bool:
        """Whether the weight belongs to the stacked layers."""
        return bool(set(self.axes) & set(STACKED))


def _weights(assembly: Assembly) -> list[_Weight]:
    """Returns a `_Weight` for each parameter of the assembly's state."""
    params, replicas, shape = assembly.state.params, assembly.placed.replicas, assembly.mesh.shape
    trained = replicas.trained or jax.tree.map(lambda _: True, params)
    # The indices of parameters among all leaves of the state, because the axes of the state are a list.
    places = jax.tree.unflatten(jax.tree.structure(assembly.state), range(len(assembly.states.names))).params
    leaves = [jax.tree.leaves(tree) for tree in (params, places, replicas.stored, trained)]
    return [
        _Weight(
            leaf.size // num_parts(axes_in(stored.parameter), shape), assembly.states.names[place], stored, is_trained
        )
        for leaf, place, stored, is_trained in zip(*leaves, strict=True)
    ]


def reduced_and_scattered(assembly: Assembly, *, only_stacked: bool = False) -> tuple[int, int]:
    """Returns the number of gradient elements on one device: (all-reduced over data, reduce-scattered over data).

    At ZeRO level 3, neither number includes the gradients of weights that are sharded over data. Both numbers are 0 if
    an extension, such as local SGD, sends no gradients between replicas.

    Args:
      assembly: the assembled step.
      only_stacked: whether only weights of stacked layers count.
    """
    level, reduced, scattered = assembly.placed.replicas.level, 0, 0
    if not assembly.extension.costs.sends_gradients:
        return 0, 0
    for weight in _weights(assembly):
        if not weight.is_trained or (only_stacked and not weight.of_layer):
            continue
        if level == 0 or weight.stored.data_dim == 0:
            reduced += weight.elements
        elif level < MAX_LEVEL:
            scattered += weight.elements
    return reduced, scattered


def _bytes_over_data(assembly: Assembly) -> float:
    """Returns the bytes that a device sends over data in a step, for gradients and for new weights that ZeRO gathers.

    Gradients are sent in `precision.reduce_dtype`, or as a custom reduction sends them. Gradients that ZeRO splits are
    reduce-scattered once a step (level 1) or for each microbatch (level 2), and the parameters are gathered after the
    update. At level 3, weights that are sharded over data, and their gradients, are not included.
    """
    n, replicas = assembly.mesh.shape[DATA], assembly.placed.replicas
    reduced, scattered = reduced_and_scattered(assembly)
    of_reduced = of_scattered = float(jnp.dtype(replicas.wire_dtype).itemsize)
    if (reduction := assembly.extension.costs.reduction) is not None:
        # Bytes per element of an equivalent ring collective.
        of_reduced = reduction.sent_bytes(1, n, False) / wire_share("all-reduce", n)
        of_scattered = reduction.sent_bytes(1, n, True) / wire_share("reduce-scatter", n)
    times = num_microbatches(assembly.config, assembly.mesh.shape) if replicas.level == SCATTERS_EACH else 1
    sent = 2 * (reduced * of_reduced) + times * (scattered * of_scattered) + _gathered_bytes(assembly)
    return sent * wire_share("reduce-scatter", n)


def _gathered_bytes(assembly: Assembly) -> int:
    """Returns the bytes of new weights on one device that are gathered over data once a step; 0 at ZeRO level 3.

    If ZeRO also splits the stored weights, weights of layers are cast to their compute dtype before the gather.
    """
    params, replicas, task = assembly.state.params, assembly.placed.replicas, assembly.task
    is_split = splits_masters(task, assembly.config.precision, replicas.level, assembly.mesh.shape, replicas.trained)
    if is_split and task.stages and task.stages.cast:
        params = {**params, "layers": jax.eval_shape(task.stages.cast, params["layers"])}
    leaves = [jax.tree.leaves(select(tree, replicas.trained)[0]) for tree in (params, replicas.stored)]
    return sum(
        leaf.size // num_parts(axes_in(weight.parameter), assembly.mesh.shape) * leaf.dtype.itemsize
        for leaf, weight in zip(*leaves, strict=True)
        if weight.is_scattered
    )


def layer_gradient_bytes(assembly: Assembly) -> float:
    """Returns the bytes that a device sends over data in a step to reduce the gradients of stacked layers.

    Returns 0 if these gradients are not reduced once a step in `precision.reduce_dtype`: with one replica, at ZeRO
    levels 2 and 3, with a custom reduction, with local steps, or if the partitioner reduces gradients over data. Also
    returns 0 if layers are unrolled, because then no loop distinguishes their gradients from other gradients.
    """
    replicas, num_replicas = assembly.placed.replicas, assembly.mesh.shape[DATA]
    if not replicas.reduces_in_loops or assembly.config.remat.unrolls:
        return 0.0
    reduced, scattered = reduced_and_scattered(assembly, only_stacked=True)
    sent = wire_share("all-reduce", num_replicas) * reduced + wire_share("reduce-scatter", num_replicas) * scattered
    return sent * jnp.dtype(replicas.wire_dtype).itemsize


def _storing(assembly: Assembly) -> list[str]:
    """Returns the axes larger than 1 that share one entry of `wire_bytes_minimum`, in mesh order.

    These are the axes over which stored weights are sharded. The data axis is added, although it shards no weight, if
    XLA's partitioner reduces gradients over data, fsdp is larger than 1, and expert is 1. Then a single collective
    reduces a gradient over data and fsdp, so its bytes cannot be assigned to one of these axes.
    """
    shape, stored = assembly.mesh.shape, set(assembly.placed.rules.storage_axes)
    if not assembly.placed.replicas.has_copies and shape[FSDP] > 1 and shape[EXPERT] == 1:
        stored.add(DATA)  # the partitioner all-reduces a gradient over data and fsdp together
    return [axis for axis in AXES if shape[axis] > 1 and axis in stored]


def _by_axes(assembly: Assembly, *, only_stacked: bool = False) -> collections.Counter[str]:
    """Returns axes joined by `+` -> bytes that a device sends per microbatch to gather weights and scatter gradients.

    A layer's weight is gathered twice, for the forward and the backward pass; any other weight once. The gradient of a
    trained weight is scattered once. The arrays are sent in the compute dtype, router weights in float32. The first key
    joins all axes that store weights; weights of experts are gathered over fewer axes.

    Args:
      assembly: the assembled step.
      only_stacked: whether only weights of stacked layers count.
    """
    shape, storing, gathered = assembly.mesh.shape, _storing(assembly), assembly.placed.rules.gathered
    result = collections.Counter({"+".join(storing): 0} if storing else {})
    itemsize = jnp.dtype(compute_dtype(assembly.config.precision)).itemsize
    for weight in _weights(assembly):
        stay = [axis for name in weight.axes if name for axis in gathered[name]]
        # The partitioner gathers over all storage axes of a weight together.
        over = [axis for axis in storing if axis not in stay]
        if not over or (only_stacked and not weight.of_layer):
            continue
        num_shards = num_parts([axis for axis in axes_in(weight.stored.parameter) if axis in over], shape)
        size = FLOAT32_BYTES if ROUTER in weight.axes else itemsize
        times = (GATHERS if weight.of_layer else 1) + (SCATTERS if weight.is_trained else 0)
        result["+".join(over)] += weight.elements * (num_shards - 1) * size * times
    return result


def wire_bytes_minimum(assembly: Assembly) -> dict[str, float]:
    """Returns axis, or axes joined by `+` -> minimum bytes that a device sends along them in a step, in mesh order.

    Axes of size 1, and axes whose minimum is unknown, have no entry. All axes over which weights are sharded have one
    common entry, joined by `+`, because the partitioner gathers a weight over all of these axes in one collective. This
    entry includes data if the partitioner reduces a gradient over data and fsdp in one collective (see `_storing`).
    Weights of experts are gathered over fewer axes, and then have a separate entry.
    """
    shape, storing = dict(assembly.mesh.shape), _storing(assembly)
    parts, known = num_microbatches(assembly.config, shape), (assembly.cost.layer_bytes, assembly.cost.other_bytes)
    least = dict[str, float]()
    for axis in (axis for axis in AXES if shape[axis] > 1):
        replicated = _bytes_over_data(assembly) if axis == DATA else 0.0
        if axis in storing[:1]:
            least |= {joined: float(parts * size) for joined, size in _by_axes(assembly).items()}
            least["+".join(storing)] += replicated
        if sent := [found[axis] for found in known if axis in found]:
            # Weights and the exchange have one entry if no other axis stores weights.
            least[axis] = (least[axis] if axis in least else 0.0) + parts * sum(sent)
        elif axis == CONTEXT:
            least.pop(axis, None)
        elif axis in storing:
            continue
        elif axis == DATA:
            least[axis] = replicated
        elif axis == PIPELINE and assembly.task.width:
            chunks = assembly.placed.program.schedule.num_chunks if assembly.placed.program else 1
            least[axis] = 2.0 * parts * chunks * _residual_bytes(assembly)
    return least


def idle_bytes(assembly: Assembly, sent: Mapping[str, float]) -> dict[str, float]:
    """Returns axis, or axes joined by `+` -> bytes that a device sends in a pipeline's idle clock ticks.

    Returns {} without a pipeline. In an idle tick the layers of a stage send the same bytes as in any other tick. Other
    traffic, such as look-up, head and reduced gradients, does not depend on the number of ticks. So only axes along
    which layers send in each tick have an entry.

    Args:
      assembly: the assembled step.
      sent: key of `wire_bytes_minimum` -> bytes that a device of the compiled program sends along these axes.
    """
    if assembly.placed.program is None:
        return {}
    parts, result = num_microbatches(assembly.config, assembly.mesh.shape), dict[str, float]()
    weights = _by_axes(assembly, only_stacked=True)
    for axis, least in wire_bytes_minimum(assembly).items():
        if by_layers := [found[axis] for found in (weights, assembly.cost.layer_bytes) if axis in found]:
            by_others = least - parts * sum(by_layers)
            result[axis] = idle_share(assembly) * max(0.0, sent[axis] - by_others)
    return result


def trained_elements(assembly: Assembly) -> int:
    """Returns the number of elements of trained weights on one device."""
    trained, _ = select(assembly.state.params, assembly.placed.replicas.trained)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(trained))


def idle_share(assembly: Assembly) -> float:
    """Returns the share of a pipeline's clock ticks in which a stage idles, averaged over stages; 0 without a pipeline.

    In a tick with padding layers, the stage idles for the padding's part of the tick.
    """
    program, stages = assembly.placed.program, assembly.task.stages
    if program is None or stages is None:
        return 0.0
    stack = Stack(stages.num_layers, program.schedule.num_stages, program.schedule.num_chunks)
    return 1 - float(program.cells.active.mean()) * stack.num_layers / stack.num_places


def executor_bytes(assembly: Assembly) -> float | None:
    """Returns the bytes that a device sends over the pipeline axis in a step, by a formula for the pipeline's executor.

    R: bytes of the activations between layers. Each clock tick permutes R once. In ticks with embedding, the backward
    pass of the embedding, or the head, R is summed over the stages, in the compute dtype if the width is even, else in
    float32. The head also sums the cotangent of its input in float32, and the loss sums three numbers per token. One
    embedding precedes the first tick, and the backward pass of one embedding follows the last.

    Returns:
      Bytes; None without a pipeline, or if the task does not state its width.
    """
    program, width = assembly.placed.program, assembly.task.width
    if program is None or not width:
        return None
    each, ring = _residual_bytes(assembly), wire_share("all-reduce", assembly.mesh.shape[PIPELINE])
    wider = FLOAT32_BYTES / jnp.dtype(compute_dtype(assembly.config.precision)).itemsize
    of_one, summed = ring * each * (wider if width % 2 else 1.0), ring * wider * each
    numbers = 3 * ring * wider * _activation_bytes(assembly) / width

    def of(part: Segment | Signature) -> float:
        if isinstance(part, Segment):
            return part.count * sum(of(child) for child in part.body)
        row = each + of_one * (part.embed + part.embed_backward)
        return row + (of_one + summed + numbers if part.head else 0.0)

    rows = segments(program)
    # The transfer of the very last tick is never read, and the compiler drops it outside of a loop.
    unsent = each if rows[-1].count == 1 else 0.0
    return sum(of(segment) for segment in rows) + 2 * of_one - unsent


def model_flops(assembly: Assembly) -> tuple[float, float] | None:
    """Returns the model's FLOPs per step and device: (with causal attention, with full attention).

    Returns None if the task does not state them.

    For a transformer with N parameters, both numbers are 6 N per token plus the FLOPs of attention. Causal attention
    has half the FLOPs of full attention. PaLM (Chowdhery et al. 2022, appendix B) counts full attention.
    """
    task = assembly.task
    if not task.flops_per_token:
        return None
    units = task.num_units / assembly.mesh.size
    return (task.flops_per_token - task.attention_flops_per_token / 2) * units, task.flops_per_token * units
