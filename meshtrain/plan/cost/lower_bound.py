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

import collections
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.assemble import Assembly
from meshtrain.config.config import num_microbatches, units_on_device
from meshtrain.launch.links import wire_share
from meshtrain.pipeline.program import Segment, Signature, segments
from meshtrain.pipeline.stages import Stack
from meshtrain.sharding.rules import AXES, CONTEXT, DATA, EXPERT, PIPELINE, TENSOR
from meshtrain.sharding.stored import MAX_LEVEL, ROUTER, STACKED, Names, Stored, axes_in, num_parts
from meshtrain.sharding.trees import select
from meshtrain.step.precision import compute_dtype
from meshtrain.step.shardings import splits_masters

FSDP = "fsdp"
FLOAT32_BYTES = 4
GATHERS, SCATTERS = 2, 1  # of a layer's stored weight and of its gradient, for each microbatch
SCATTERS_EACH = 2  # the ZeRO level that reduce-scatters the gradients of each microbatch


def _activation_bytes(assembly: Assembly) -> float:
    """Returns A, of one microbatch on one device, whole along the sequence, in the compute dtype; 0: unknown."""
    config, shape, task = assembly.config, dict(assembly.mesh.shape), assembly.task
    units = units_on_device(config, task, assembly.rules, shape) / num_microbatches(config, shape)
    return units * task.width * jnp.dtype(compute_dtype(config.precision)).itemsize


def _residual_bytes(assembly: Assembly) -> float:
    """Returns R, the same between layers, where sequence parallelism splits the sequence over tensor."""
    is_split = assembly.config.layout.sequence_parallel
    return _activation_bytes(assembly) / (assembly.mesh.shape[TENSOR] if is_split else 1)


class _Weight(NamedTuple):
    """A weight as it is stored.

    Attributes:
      elements: that a device stores.
      axes: its logical axes.
      stored: its sharding.
      is_trained: whether it has a gradient.
    """

    elements: int
    axes: Names
    stored: Stored
    is_trained: bool

    @property
    def of_layer(self) -> bool:
        """Whether it belongs to one of a stack of layers."""
        return bool(set(self.axes) & set(STACKED))


def _weights(assembly: Assembly) -> list[_Weight]:
    """Returns all weights."""
    params, replicas, shape = assembly.state.params, assembly.replicas, assembly.mesh.shape
    trained = replicas.trained or jax.tree.map(lambda _: True, params)
    # The places of parameters among all leaves of the state, whose axes are a list.
    places = jax.tree.unflatten(jax.tree.structure(assembly.state), range(len(assembly.names))).params
    leaves = [jax.tree.leaves(tree) for tree in (params, places, replicas.stored, trained)]
    return [
        _Weight(leaf.size // num_parts(axes_in(stored.parameter), shape), assembly.names[place], stored, is_trained)
        for leaf, place, stored, is_trained in zip(*leaves, strict=True)
    ]


def reduced_and_scattered(assembly: Assembly, *, only_stacked: bool = False) -> tuple[int, int]:
    """Returns the gradients' elements on one device: (all-reduced over data, reduce-scattered over data).

    With `only_stacked` those of weights that stack layers.
    """
    level, reduced, scattered = assembly.replicas.level, 0, 0
    if assembly.apart is not None:  # groups send weights in a program of their own
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
    """Returns what replicas send for weights that are not stored over data: for their gradients, and the new weights.

    Gradients cross in `precision.reduce_dtype`, or as a reduction of its own sends them; those that ZeRO splits are
    reduce-scattered once (level 1) or for each microbatch (2), and the parameters gathered after the update.
    """
    n, replicas = assembly.mesh.shape[DATA], assembly.replicas
    reduced, scattered = reduced_and_scattered(assembly)
    of_reduced = of_scattered = float(jnp.dtype(replicas.wire_dtype).itemsize)
    if replicas.reduction is not None:
        # Of an array for which a ring sends as much.
        of_reduced = replicas.reduction.sent_bytes(1, n, False) / wire_share("all-reduce", n)
        of_scattered = replicas.reduction.sent_bytes(1, n, True) / wire_share("reduce-scatter", n)
    times = num_microbatches(assembly.config, assembly.mesh.shape) if replicas.level == SCATTERS_EACH else 1
    sent = 2 * (reduced * of_reduced) + times * (scattered * of_scattered) + _gathered_bytes(assembly)
    return sent * wire_share("reduce-scatter", n)


def _gathered_bytes(assembly: Assembly) -> int:
    """Returns the bytes on one device of new weights that are gathered over data once a step; at level 3 none are.

    Where the weights are stored in shards, those of layers are cast first.
    """
    params, replicas, task = assembly.state.params, assembly.replicas, assembly.task
    is_split = splits_masters(task, assembly.config.precision, replicas.level, assembly.mesh.shape, replicas.trained)
    if is_split and task.stages and task.stages.cast:
        params = {**params, "layers": jax.eval_shape(task.stages.cast, params["layers"])}
    leaves = [jax.tree.leaves(select(tree, replicas.trained)[0]) for tree in (params, replicas.stored)]
    return sum(
        leaf.size // num_parts(axes_in(weight.parameter), assembly.mesh.shape) * leaf.dtype.itemsize
        for leaf, weight in zip(*leaves, strict=True)
        if weight.is_scattered and assembly.apart is None
    )


def layer_gradient_bytes(assembly: Assembly) -> float:
    """Returns the bytes that a device sends to reduce the gradients of stacked layers over data, once a step.

    0 where they do not cross data once a step in `precision.reduce_dtype`: one replica, ZeRO levels 2 and 3,
    another reduction, data left to the partitioner; and where no loop over layers tells them from others.
    """
    replicas, num_replicas = assembly.replicas, assembly.mesh.shape[DATA]
    if not replicas.reduces_in_loops or assembly.config.remat.unrolls:
        return 0.0
    reduced, scattered = reduced_and_scattered(assembly, only_stacked=True)
    sent = wire_share("all-reduce", num_replicas) * reduced + wire_share("reduce-scatter", num_replicas) * scattered
    return sent * jnp.dtype(replicas.wire_dtype).itemsize


def _storing(assembly: Assembly) -> list[str]:
    """Returns the axes larger than 1 that store weights, in mesh order, and data where its gradients cross both."""
    shape, stored = assembly.mesh.shape, set(assembly.rules.storage_axes)
    if DATA not in assembly.replicas.axes and shape[FSDP] > 1 and shape[EXPERT] == 1:
        stored.add(DATA)  # the partitioner all-reduces a gradient over data and fsdp together
    return [axis for axis in AXES if shape[axis] > 1 and axis in stored]


def _by_axes(assembly: Assembly, *, only_stacked: bool = False) -> collections.Counter[str]:
    """Returns (joined) axes -> bytes sent for each microbatch; the first entry is that of weights without experts.

    Each weight is gathered as often as it is used, in the dtype in which it computes, and its gradient is scattered.
    With `only_stacked` those of weights that stack layers.
    """
    shape, storing, gathered = assembly.mesh.shape, _storing(assembly), assembly.rules.gathered
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
    """Returns the least bytes on the wire for each axis larger than 1, in mesh order; unknown ones are left out.

    Several axes that store weights are one entry, joined by `+`: the partitioner gathers over them together, and
    reduces gradients over data with them where data is left to it. Weights of experts are gathered over fewer axes than
    others, and then have an entry of their own.
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
            # Weights and the exchange are one entry where no other axis stores weights.
            least[axis] = (least[axis] if axis in least else 0.0) + parts * sum(sent)
        elif axis == CONTEXT:
            least.pop(axis, None)
        elif axis in storing:
            continue
        elif axis == DATA:
            least[axis] = replicated
        elif axis == PIPELINE and assembly.task.width:
            chunks = assembly.program.schedule.num_chunks if assembly.program else 1
            least[axis] = 2.0 * parts * chunks * _residual_bytes(assembly)
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
    parts, result = num_microbatches(assembly.config, assembly.mesh.shape), dict[str, float]()
    weights = _by_axes(assembly, only_stacked=True)
    for axis, least in wire_bytes_minimum(assembly).items():
        if by_layers := [found[axis] for found in (weights, assembly.cost.layer_bytes) if axis in found]:
            by_others = least - parts * sum(by_layers)
            result[axis] = idle_share(assembly) * max(0.0, sent[axis] - by_others)
    return result


def outer_wire_bytes_minimum(assembly: Assembly) -> float:
    """Returns the least bytes on the wire over data when groups are joined: an all-reduce of the weights."""
    trained, _ = select(assembly.state.params, assembly.replicas.trained)
    elements = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(trained))
    num_replicas, reduction = assembly.mesh.shape[DATA], assembly.replicas.reduction
    if reduction is not None:
        return reduction.sent_bytes(elements, num_replicas, False)
    return wire_share("all-reduce", num_replicas) * elements * FLOAT32_BYTES


def idle_share(assembly: Assembly) -> float:
    """Returns the share of a pipeline's rows in which a stage idles, averaged over stages; 0 without a pipeline.

    In a chunk with empty places it idles for their part of the row.
    """
    program, stages = assembly.program, assembly.task.stages
    if program is None or stages is None:
        return 0.0
    stack = Stack(stages.num_layers, program.schedule.num_stages, program.schedule.num_chunks)
    return 1 - float(program.cells.active.mean()) * stack.num_layers / stack.num_places


def executor_bytes(assembly: Assembly) -> float | None:
    """Returns the bytes that the pipeline's executor sends over its axis, by its own formula.

    One permute of R a row. In each row whose body has them, embedding, its backward and the head's input sum R over
    the stages, in its dtype where the width is even, else in float32; the head sums its cotangent in float32, and the
    loss three numbers a token (R: activations as layers hand them on). One embedding comes before the first row, and
    one backward after the last.

    Returns:
      Bytes; None without a pipeline, or if the task does not state its width.
    """
    program, width = assembly.program, assembly.task.width
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
    # Nothing reads what the very last row sends, and outside of a loop the compiler drops it.
    unsent = each if rows[-1].count == 1 else 0.0
    return sum(of(segment) for segment in rows) + 2 * of_one - unsent


def model_flops(assembly: Assembly) -> tuple[float, float] | None:
    """Returns (6 N + causal attention, 6 N + full attention) of one step, FLOPs a device; None if not stated.

    Causal attention is half of full attention (PaLM, Chowdhery et al. 2022, appendix B, counts full).
    """
    task = assembly.task
    if not task.flops_per_token:
        return None
    units = task.num_units / assembly.mesh.size
    return (task.flops_per_token - task.attention_flops_per_token / 2) * units, task.flops_per_token * units
