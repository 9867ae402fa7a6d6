"""The abstract training state: shapes, logical axes and shardings. Nothing here allocates an array.

In memory an interleaved pipeline has the layers in chunks; checkpoints have them in layer order (`pipeline.stages`).
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from meshtrain.errors import UserError
from meshtrain.models.abstract_weights import named_params
from meshtrain.models.metrics import Metrics
from meshtrain.models.task import AfterUpdate, Batch, Entry, Params, Task, checked_after_update
from meshtrain.pipeline import stages
from meshtrain.sharding import offload
from meshtrain.sharding.axes import DATA, partitioned_axes
from meshtrain.sharding.gradients import Replicas
from meshtrain.sharding.rules import Rules
from meshtrain.sharding.stored import (
    MAX_LEVEL,
    STACKED,
    Names,
    StoredTree,
    axes_in,
    axes_of_dims,
    is_names,
    num_parts,
    spec_of_dims,
    stored,
)
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
from meshtrain.step.state import GROUPS, REPLICAS, REPLICATED_FIELDS, TrainState
from meshtrain.step.step import with_sequence_index


def abstract_params(task: Task, num_chunks: int, num_devices: int) -> tuple[Params, NamesTree]:
    """Returns abstract parameters as they are stored, and their logical axes; see `named_params`."""
    params, axes = named_params(task.init, on_one_device=num_devices == 1)
    if num_chunks > 1:
        chunked = lambda leaf: stages.chunked_names(leaf, num_chunks)  # noqa: E731
        axes = {**axes, "layers": jax.tree.map(chunked, axes["layers"], is_leaf=is_names)}
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)  # noqa: E731
    return jax.eval_shape(lambda: in_chunks(zeros(), num_chunks)), axes


def abstract_metrics(task: Task, batch: Mapping[str, Entry]) -> Metrics:
    """Returns the abstract sums of the metrics of a global batch in training."""

    def metrics(params: Params, batch: Batch) -> Metrics:
        return task.loss(params, with_sequence_index(batch), jax.random.key(0), True)[2]

    shapes = {name: jax.ShapeDtypeStruct(entry.shape, entry.dtype) for name, entry in batch.items()}
    return jax.eval_shape(metrics, named_params(task.init)[0], shapes)


def in_chunks(params: Params, num_chunks: int) -> Params:
    """Returns parameters in layer order reshaped to chunks, as the step takes them."""
    return params if num_chunks == 1 else {**params, "layers": stages.chunked(params["layers"], num_chunks)}


def after_update_of(task: Task, num_chunks: int) -> AfterUpdate | None:
    """Returns `Task.after_update` for parameters as the step has them; only those that it moves are reshaped."""
    after_update = task.after_update and checked_after_update(task.after_update)
    if after_update is None or num_chunks == 1:
        return after_update

    def on_chunks(params: Params, metrics: Metrics) -> Params:
        in_order = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), params["layers"])
        after = after_update({**params, "layers": in_order}, metrics)
        of_step = lambda new, old, leaf: leaf if new is old else new.reshape(leaf.shape)  # noqa: E731
        return {**after, "layers": jax.tree.map(of_step, after["layers"], in_order, params["layers"])}

    return on_chunks


def replicas_of(
    task: Task,
    specs: StoredTree,
    mesh: Mesh,
    level: int,
    wire_dtype: DTypeLike,
    trained: Masks,
) -> Replicas:
    """Returns how gradients are reduced over the data axis.

    Args:
      task: what is trained.
      specs: a tree of `Stored` like the parameters.
      mesh: the mesh.
      level: of ZeRO.
      wire_dtype: of gradients in collectives over data.
      trained: a tree of bool like the parameters, true for each with a gradient.

    Raises:
      UserError: level 2 with a task that cannot be traced where data is manual: it reduces gradients in such a region.
    """
    is_manual = task.takes_manual_axes or num_parts(partitioned_axes(), mesh.shape) == 1
    # A user's rule may shard weights over data. Then data has no replicas of them and is left to the partitioner.
    is_manual &= level == MAX_LEVEL or not any(DATA in axes_in(one.parameter) for one in jax.tree.leaves(specs))
    if level == 2 and not is_manual:
        raise UserError(
            "zero.level: got 2 with fsdp or an axis after it and a task without `takes_manual_axes`, or with weights "
            "split over data; allowed: 0, 1, 3, or a task with it; nearest: zero.level=1"
        )
    return Replicas(mesh, specs, level, is_manual, wire_dtype, trained)


def layer_bytes(params: Params, axes: NamesTree, replicas: Replicas, num_together: int) -> int:
    """Returns the bytes that one device reduces over data in one iteration of the backward loop, 0 where none does.

    Args:
      params: abstract, global shapes.
      axes: their logical axes.
      replicas: how gradients are reduced over data.
      num_together: layers in one iteration.
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


def placed(
    abstract: TrainState, names: list[Names], rules: Rules, mesh: Mesh, level: int, *, moments_on_host: bool = False
) -> TrainState:
    """Returns the abstract state with a sharding on each leaf.

    Args:
      abstract: the state.
      names: logical axes of each leaf, in the order of `jax.tree.leaves`.
      rules: the table.
      mesh: the mesh.
      level: of ZeRO.
      moments_on_host: whether the optimizer's arrays are in host memory; scalars stay on the device.

    Raises:
      UserError: a leaf that cannot be split as the rules say.
    """

    def place(path: Sequence[KeyEntry], leaf: jax.ShapeDtypeStruct, axes: Names) -> jax.ShapeDtypeStruct:
        field = path[0].name
        if axes[:1] in ((REPLICAS,), (GROUPS,)):
            # One for each: data splits the first dim, and the others are split as those of the weight.
            of_weight = stored(leaf.shape[1:], axes[1:], rules, mesh.shape, 0, path_text(path)).parameter
            replicas = (DATA,) if mesh.shape[DATA] > 1 else ()
            spec = spec_of_dims([replicas, *axes_of_dims(of_weight, leaf.ndim - 1)])
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        specs = stored(leaf.shape, axes, rules, mesh.shape, 0 if field in REPLICATED_FIELDS else level, path_text(path))
        is_moment = field == "opt_state"
        sharding = NamedSharding(mesh, specs.moment if is_moment else specs.parameter)
        if moments_on_host and is_moment and leaf.ndim > 0:
            sharding = offload.on_host(sharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    with_shardings = [place(path, leaf, axes) for (path, leaf), axes in zip(leaves, names, strict=True)]
    return jax.tree.unflatten(structure, with_shardings)


def placed_states(
    abstract: TrainState, names: list[Names], rules: Rules, mesh: Mesh, level: int, *, moments_on_host: bool
) -> tuple[TrainState, TrainState]:
    """Returns the abstract state as `placed` has it, and the same with layers in layer order, as checkpoints store it.

    For the arguments see `placed`.

    Raises:
      UserError: a leaf that cannot be split as the rules say.
    """
    in_order, names_in_order = in_layer_order(abstract, names), [stages.layer_order_names(leaf) for leaf in names]
    kept = placed(in_order, names_in_order, rules, mesh, level, moments_on_host=moments_on_host)
    return placed(abstract, names, rules, mesh, level, moments_on_host=moments_on_host), kept


def in_layer_order(abstract: TrainState, names: list[Names]) -> TrainState:
    """Returns the abstract state with the shapes that checkpoints have."""
    leaves, structure = jax.tree.flatten(abstract)
    shapes = [stages.layer_order_shape(leaf.shape, axes) for leaf, axes in zip(leaves, names, strict=True)]
    in_order = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
    return jax.tree.unflatten(structure, in_order)


def shardings(abstract: Arrays) -> Shardings:
    """Returns the sharding of each leaf of a tree from `placed`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def reshaper(before: Arrays, after: Arrays) -> ArrayFunction:
    """Returns the function that reshapes a tree of arrays; the identity where the shapes are the same.

    Args:
      before: the abstract tree, with shardings, of the argument.
      after: the abstract tree, with shardings, of the result.
    """
    if jax.tree.map(lambda x: x.shape, before) == jax.tree.map(lambda x: x.shape, after):
        return lambda state: state

    def reshape(tree: Arrays) -> Arrays:
        on_device = offload.fetched(tree, shardings(before))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), on_device, after)

    return jax.jit(reshape, out_shardings=shardings(after))
