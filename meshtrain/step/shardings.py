"""The abstract training state: its shapes, the logical axes and the sharding of each leaf. No array is allocated.

On the devices a pipeline arranges layers in stages and chunks, with padding layers after them. Checkpoints store layers
in layer order, [layers, ...] (`pipeline.stages`). Without a pipeline, layers are in layer order on the devices too.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.models.metrics import Metrics
from meshtrain.models.task import LAYERS, AfterUpdate, Batch, Entry, Params, Task, check_after_update
from meshtrain.optim.states import state_axes
from meshtrain.pipeline import stages
from meshtrain.pipeline.stages import Stack, reshape_stack
from meshtrain.sharding import offload
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.param_sharding import (
    MAX_LEVEL,
    MOMENTS_LEVEL,
    STACKED,
    Names,
    axes_in,
    axes_of_dims,
    is_names,
    num_parts,
    param_sharding,
    params_with_axes,
    spec_of_dims,
    split_further,
)
from meshtrain.sharding.rules import DATA, PIPELINE, Rules
from meshtrain.sharding.trees import (
    ArrayFunction,
    Arrays,
    KeyEntry,
    Masks,
    NamesTree,
    Shardings,
    leaves_with_paths,
    path_text,
    select,
)
from meshtrain.step.precision import PrecisionOptions, compute_dtype, param_dtype
from meshtrain.step.state import COPY, REPLICATED_FIELDS, TrainState
from meshtrain.step.step import with_sequence_index


def abstract_params(task: Task, stack: Stack | None, num_devices: int) -> tuple[Params, NamesTree]:
    """Returns a task's abstract parameters, with global shapes (not of shards), and their logical axes.

    A pipeline's layers are stacked as in `Stack.shape`, with padding layers. Without a pipeline they are in layer
    order, [L, ...] for L layers.

    Args:
      task: the task, which defines the parameters.
      stack: the pipeline's arrangement of layers; None: no pipeline.
      num_devices: number of devices. With one device, a parameter without logical axes has None for each dim.

    Raises:
      UserError: a parameter has invalid logical axes (`params_with_axes`).
    """
    params, axes = params_with_axes(task.init, on_one_device=num_devices == 1)
    if stack is not None:
        of_layers = jax.tree.map(lambda names: (*stack.names[:-1], *names), axes["layers"], is_leaf=is_names)
        axes = {**axes, "layers": of_layers}
    return jax.eval_shape(lambda params: stack_layers(params, stack), params), axes


def abstract_metrics(task: Task, batch: Mapping[str, Entry]) -> Metrics:
    """Returns the abstract metrics (name -> sum over a global batch) that the task's loss returns in training.

    Args:
      task: the task.
      batch: entry name -> shape and dtype of the global array.
    """

    def metrics(params: Params, batch: Batch) -> Metrics:
        return task.loss(params, with_sequence_index(batch), jax.random.key(0), True)[2]

    shapes = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in batch.items()}
    return jax.eval_shape(metrics, params_with_axes(task.init)[0], shapes)


def stack_layers(params: Params, stack: Stack | None) -> Params:
    """Converts parameters from layer order, [layers, ...], to a pipeline's stages; unchanged if `stack` is None."""
    return params if stack is None else {**params, "layers": stack.of_layers(params["layers"])}


def after_update_of(task: Task, stack: Stack | None) -> AfterUpdate | None:
    """Returns `Task.after_update` for parameters as the devices store them; None if the task has no such function.

    A pipeline stores layers arranged in stages. The returned function converts them to layer order for the task's
    function, and converts back only the arrays that the task's function changed.

    Args:
      task: the task.
      stack: the pipeline's arrangement of layers; None: no pipeline.
    """
    after_update = task.after_update and check_after_update(task.after_update)
    if after_update is None or stack is None or stack.shape == (stack.num_layers,):
        return after_update

    def on_stack(params: Params, metrics: Metrics) -> Params:
        feature_dims = lambda leaf: leaf.shape[len(stack.shape) :]  # noqa: E731
        in_order = jax.tree.map(
            lambda leaf: reshape_stack(leaf, (stack.num_layers, *feature_dims(leaf)), stack), params["layers"]
        )
        after = after_update({**params, "layers": in_order}, metrics)
        of_step = lambda new, old, leaf: leaf if new is old else reshape_stack(new, leaf.shape, stack)  # noqa: E731
        return {**after, "layers": jax.tree.map(of_step, after["layers"], in_order, params["layers"])}

    return on_stack


def layer_bytes(params: Params, axes: NamesTree, replicas: GradientSync, num_together: int) -> int:
    """Returns the bytes of gradients that one iteration of the backward loop over layers reduces, on one device.

    Gradients are reduced over the data axis. The result is 0 if the loop reduces no gradients.

    Args:
      params: abstract parameters with global shapes.
      axes: a pytree with the structure of the parameters: the logical axes of each parameter.
      replicas: the reduction of gradients over data.
      num_together: the number of layers in one iteration.
    """
    if not replicas.reduces_in_loops:
        return 0
    names, total = dict(leaves_with_paths(axes, is_leaf=is_names)), 0
    trained, _ = select(params, replicas.trained)
    weights = jax.tree.leaves(replicas.trained_stored)
    for (path, leaf), weight in zip(leaves_with_paths(trained), weights, strict=True):
        num_layers = math.prod(size for size, name in zip(leaf.shape, names[path], strict=True) if name in STACKED)
        if set(names[path]) & set(STACKED):
            num_shards = num_parts(axes_in(weight.parameter), replicas.mesh.shape)
            total += leaf.size // num_layers // num_shards
    return total * num_together * jnp.dtype(replicas.wire_dtype).itemsize


def axes_of_fields(
    abstract: TrainState, transformation: optax.GradientTransformation, params: Params, axes: NamesTree, mask: Masks
) -> dict[str, list[Names]]:
    """Returns field of `TrainState` -> the logical axes of its arrays, in the order of `jax.tree.leaves` of the field.

    A new field of `TrainState` gets its entry here, or in `REPLICATED_FIELDS`. An extension adds the entry of `extra`.

    Args:
      abstract: the abstract state.
      transformation: the optimizer.
      params: abstract parameters.
      axes: a pytree with the structure of the parameters: the logical axes of each parameter.
      mask: a pytree with the structure of the parameters: true for each trained parameter; None: all are trained.
    """
    (trained, _), (trained_axes, _) = select(params, mask), select(axes, mask)
    return {
        "params": jax.tree.leaves(axes, is_leaf=is_names),
        "opt_state": state_axes(transformation, trained, trained_axes),
        **{
            name: [(None,) * leaf.ndim for leaf in jax.tree.leaves(getattr(abstract, name))]
            for name in REPLICATED_FIELDS
        },
    }


def axes_of_leaves(state: Arrays, of_fields: Mapping[str, Sequence[Names]]) -> list[Names]:
    """Returns the logical axes of each array of a state, in the order of `jax.tree.leaves(state)`.

    Args:
      state: a dataclass that is a pytree, such as an abstract `TrainState`.
      of_fields: field name -> logical axes of each of the field's arrays, for example from `axes_of_fields`.
    """
    result = list[Names]()
    for field in dataclasses.fields(state):
        what = f"{type(state).__name__}.{field.name}"
        if num_arrays := len(jax.tree.leaves(getattr(state, field.name))):
            assert field.name in of_fields, f"{what} has arrays but no logical axes: see axes_of_fields"
            num_axes = len(of_fields[field.name])
            assert num_arrays == num_axes, f"{what} has {num_arrays} arrays but {num_axes} logical axes"
            result += of_fields[field.name]
    return result


def splits_masters(
    task: Task, precision: PrecisionOptions, level: int, mesh_shape: Mapping[str, int], trained: Masks
) -> bool:
    """Returns whether stored weights are sharded over data at ZeRO levels 1 and 2, in the same way as their moments.

    A pipeline casts its layers to the compute dtype once a step, into an unsharded copy. If the stored dtype is wider
    than the compute dtype, the shards are cast first and gathered before the first clock tick. This sends fewer bytes
    than gathering the new weights after the update, and avoids a second unsharded copy. Frozen weights do not change,
    so gathering them in each step would be wasted; if any weight is frozen, the result is false.

    Args:
      task: the task, whose stages define the cast.
      precision: the options that select the stored dtype and the compute dtype.
      level: the ZeRO level.
      mesh_shape: the size of each mesh axis.
      trained: a pytree of bool, true for each trained weight.
    """
    casts = task.stages is not None and task.stages.cast is not None and mesh_shape[PIPELINE] > 1
    is_wider = jnp.dtype(param_dtype(precision)).itemsize > jnp.dtype(compute_dtype(precision)).itemsize
    return casts and is_wider and all(jax.tree.leaves(trained)) and MOMENTS_LEVEL <= level < MAX_LEVEL


def sharded_states(
    abstract: TrainState,
    names: list[Names],
    rules: Rules,
    replicas: GradientSync,
    stack: Stack | None,
    *,
    moments_on_host: bool,
    masters_are_split: bool,
) -> tuple[TrainState, TrainState]:
    """Returns the abstract state with shardings twice: as stored on the devices, and in layer order for checkpoints.

    On the devices, a pipeline's layers are arranged in stages. If the number of layers is not divisible by the number
    of stages, the pipeline axis shards another dim of the state in layer order, provided that its size is divisible.

    Args:
      abstract: the abstract state without shardings, with a pipeline's layers arranged in stages.
      names: the logical axes of each leaf, in the order of `jax.tree.leaves`.
      rules: the table of rules: logical axis -> mesh axes.
      replicas: the mesh, the ZeRO level, and the shardings of parameters.
      stack: the pipeline's arrangement of layers; None: no pipeline.
      moments_on_host: whether the optimizer's arrays are in host memory; scalars stay on the device.
      masters_are_split: whether parameters have the sharding of their moments (the result of `splits_masters`).

    Raises:
      UserError: a leaf cannot be sharded by the rules.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    mesh, level = replicas.mesh, replicas.level

    def spec(path: Sequence[KeyEntry], shape: Sequence[int], axes: Names) -> PartitionSpec:
        at = axes.index(LAYERS) if stack and LAYERS in axes else -1
        if stack and at >= 0 and shape[at] == stack.num_layers and stack.num_layers % stack.num_stages:
            over_stages = rules.parameters[LAYERS]
            rest = spec(path, shape, (*axes[:at], None, *axes[at + 1 :]))
            return split_further(rest, shape, over_stages, mesh.shape)
        if axes[:1] == (COPY,):
            # The first dim has an entry per replica and is sharded over data. The other dims are sharded as the weight.
            of_weight = param_sharding(shape[1:], axes[1:], rules, mesh.shape, 0, path_text(path)).parameter
            replicas = (DATA,) if mesh.shape[DATA] > 1 else ()
            return spec_of_dims([replicas, *axes_of_dims(of_weight, len(shape) - 1)])
        of_level = 0 if path[0].name in REPLICATED_FIELDS else level
        specs = param_sharding(shape, axes, rules, mesh.shape, of_level, path_text(path))
        is_split = path[0].name == "opt_state" or (path[0].name == "params" and masters_are_split)
        return specs.moment if is_split else specs.parameter

    def placed(shapes: Sequence[Sequence[int]], names: Sequence[Names]) -> TrainState:
        with_shardings = []
        for (path, leaf), shape, axes in zip(leaves, shapes, names, strict=True):
            sharding = NamedSharding(mesh, spec(path, shape, axes))
            if moments_on_host and path[0].name == "opt_state" and leaf.ndim > 0:
                sharding = offload.on_host(sharding)
            with_shardings.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding))
        return jax.tree.unflatten(structure, with_shardings)

    shapes = [leaf.shape for _, leaf in leaves]
    in_order = [stages.layer_order_shape(shape, axes, stack) for shape, axes in zip(shapes, names, strict=True)]
    kept = placed(in_order, [stages.layer_order_names(axes) for axes in names])
    return placed(shapes, names), kept


def shardings(abstract: Arrays) -> Shardings:
    """Returns a pytree with the sharding of each leaf of an abstract pytree."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def reshaper(before: Arrays, after: Arrays, stack: Stack | None) -> ArrayFunction:
    """Returns a jitted function that converts a state from layer order to a pipeline's arrangement, or the reverse.

    The function is the identity if the shapes of `before` and `after` are the same.

    Args:
      before: the abstract argument of the function, with shardings.
      after: the abstract result of the function, with shardings.
      stack: the pipeline's arrangement of layers in `before` or in `after`; None: no pipeline.
    """
    if jax.tree.map(lambda x: x.shape, before) == jax.tree.map(lambda x: x.shape, after):
        return lambda state: state

    def reshape(tree: Arrays) -> Arrays:
        on_device = offload.fetch(tree, shardings(before))
        return jax.tree.map(lambda x, like: reshape_stack(x, like.shape, stack), on_device, after)

    return jax.jit(reshape, out_shardings=shardings(after))
