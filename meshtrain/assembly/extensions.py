"""Makes the extension of a step that a configuration selects: a custom gradient reduction, or local steps."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assembly.placed import Placed
from meshtrain.config import extensions
from meshtrain.config.schema import Config
from meshtrain.errors import Problem, UserError
from meshtrain.models.task import AfterUpdate
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.param_sharding import is_names
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.reduction import Dims, Reduction
from meshtrain.sharding.rules import DATA
from meshtrain.sharding.trees import Arrays, leaves_with_paths, merge, path_text, select
from meshtrain.step.extension import PLAIN, Costs, Extension, FieldNames, Read, Shapes
from meshtrain.step.shardings import shardings
from meshtrain.step.state import COPY, TrainState
from meshtrain.step.step import Update

EXTRA = "extra/"  # prefix of the paths of an extension's arrays


def extension(config: Config, placed: Placed) -> Extension:
    """Returns the extension of a step that a configuration selects; `PLAIN` for the built-in sum of gradients."""
    reduction, make = extensions.of(config), extensions.make_extension(config)
    if make is not None:
        made: Extension = make(config, placed, reduction)
        return made
    if reduction is None:
        return PLAIN
    return (reduction.extension or reducing)(reduction, placed)


def reducing(reduction: Reduction, placed: Placed) -> Extension:
    """Returns an extension that applies a custom reduction in place of the built-in sum of gradients.

    The state of the reduction is stored in `TrainState.extra`.

    Args:
      reduction: the custom reduction.
      placed: the task on its mesh.
    """
    replicas, run = placed.replicas, reduced_over_data(reduction, placed.replicas)

    def update(update: Callable[..., Update], after_update: AfterUpdate | None) -> Update:
        return update(run, after_update)

    def begin(state: TrainState) -> TrainState:
        trained, _ = select(state.params, replicas.trained)
        return dataclasses.replace(state, extra=first_extra(reduction, replicas, trained))

    def names(fields: FieldNames, state: TrainState) -> FieldNames:
        trained, _ = select(placed.axes, replicas.trained)
        return {**fields, "extra": [(COPY, *axes) for axes in jax.tree.leaves(trained, is_leaf=is_names)]}

    costs = Costs(label="residual", reduction=reduction)
    return Extension(begin, names, update, restore=restoring(reduction.reshard), costs=costs)


def first_extra(reduction: Reduction, replicas: GradientSync, trained: Arrays) -> Arrays:
    """Returns the initial state of a reduction: float32 zeros [replicas, ...] for each gradient, or () without state.

    Args:
      reduction: the reduction; its `init` returns () if it has no state.
      replicas: the mesh, whose data axis has the replicas.
      trained: the trained parameters, with global shapes.

    Raises:
      UserError: `init` returns shapes that differ from the shapes of the gradients.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), trained)
    kept = reduction.init(shapes)
    if kept not in ((), shapes):
        raise UserError(
            Problem(
                extensions.KEY,
                got=f"'{reduction.name}', whose init returns {kept}",
                allowed="the shapes of its argument, or ()",
                nearest="lambda shapes: shapes",
            )
        )
    return jax.tree.map(lambda leaf: jnp.zeros((replicas.mesh.shape[DATA], *leaf.shape), leaf.dtype), kept)


def reduced_over_data(
    reduction: Reduction, replicas: GradientSync
) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """Returns a function (gradients, state) -> (reduced gradients, next state) that applies a custom reduction.

    The gradients are of the mean loss, [replicas, ...]. The reduced gradients have the shardings of the moments.

    Args:
      reduction: the custom reduction.
      replicas: the mesh, and the shardings of the parameters.
    """
    dims = jax.tree.map(lambda weight: weight.scattered_dim, replicas.trained_stored)

    def on_device(gradients: Arrays, extra: Arrays) -> tuple[Arrays, Arrays]:
        own, kept = jax.tree.map(lambda leaf: leaf[0], (gradients, extra))
        sums, left = checked_update(reduction, replicas, own, kept, dims)
        return sums, jax.tree.map(lambda leaf: leaf[None], left)

    def run(gradients: Arrays, extra: Arrays) -> tuple[Arrays, Arrays]:
        before = replicas.with_replicas(replicas.trained_specs)
        after = jax.tree.map(lambda weight: weight.moment, replicas.trained_stored)
        of_extra, axes = before if jax.tree.leaves(extra) else extra, frozenset(replicas.mesh.axis_names)
        return on_shards(replicas.mesh, on_device, (before, of_extra), (after, of_extra), axes=axes)(gradients, extra)

    return run


def checked_update(
    reduction: Reduction, replicas: GradientSync, gradients: Arrays, extra: Arrays, dims: Dims
) -> tuple[Arrays, Arrays]:
    """Calls `Reduction.update` on one device, and checks the pytrees, shapes and dtypes that it returns.

    Call this function in a region in which all mesh axes are manual, with the device's local shards.

    Args:
      reduction: the custom reduction.
      replicas: the mesh.
      gradients: a pytree of this device's float32 gradients of the mean loss.
      extra: this device's state of the reduction; () without state.
      dims: for each gradient the dim along which a replica gets its shard of the sum, counted from the end; 0: the
        full sum.

    Raises:
      UserError: `update` returns a pytree, shape or dtype that differs from its contract.
    """
    sum_of = lambda leaf, dim: jax.ShapeDtypeStruct(replicas.shard_shape(leaf, dim), jnp.float32)  # noqa: E731
    wanted = (jax.tree.map(sum_of, gradients, dims), extra)
    given = reduction.update(gradients, extra, DATA, dims)
    arrays = [
        [f"{path} {leaf.dtype.name}{list(leaf.shape)}" for path, leaf in leaves_with_paths(tree)]
        for tree in (jax.tree.map(jnp.asarray, given), wanted)
    ]
    for got, allowed in itertools.zip_longest(*arrays, fillvalue="nothing"):
        if got != allowed:
            raise UserError(
                Problem(
                    extensions.KEY,
                    got=f"'{reduction.name}', whose update returns {got}",
                    allowed=f"{allowed}, in the pair (gradients, state)",
                    nearest="pytrees with the structure of its arguments",
                )
            )
    return given


def restoring(
    reshard: Callable[[Arrays, int], Arrays], place: str = EXTRA
) -> Callable[[Read, Shapes, TrainState], TrainState]:
    """Returns a function that reads a checkpoint and converts its arrays for the current number of replicas.

    The function is a value for `Extension.restore`. It converts arrays [saved replicas, ...] of `TrainState.extra` to
    [replicas, ...]. All other arrays are read unchanged.

    Args:
      reshard: a function (pytree of arrays [saved replicas, ...], number of replicas) -> arrays [replicas, ...].
      place: selects the arrays to convert: arrays whose path in the state starts with this text.
    """

    def restore(read: Read, shapes: Shapes, like: TrainState) -> TrainState:
        def is_resharded(path: Sequence[object], _: object) -> bool:
            return f"{EXTRA}{path_text(path)}/".startswith(place)

        mask = jax.tree_util.tree_map_with_path(is_resharded, like.extra)
        wanted, others = select(like.extra, mask)
        saved = [shape[0] for path, shape in shapes.items() if path.startswith(place)]
        leaves = jax.tree.leaves(wanted)
        if not leaves or len(saved) != len(leaves) or saved[0] == leaves[0].shape[0]:
            return read(like)
        stored = jax.tree.map(functools.partial(_of_replicas, saved[0]), wanted)
        state = read(dataclasses.replace(like, extra=merge(stored, others)))
        before, others = select(state.extra, mask)
        share = jax.jit(reshard, static_argnums=1, out_shardings=shardings(wanted))
        return dataclasses.replace(state, extra=merge(share(before, leaves[0].shape[0]), others))

    return restore


def _of_replicas(num_replicas: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the abstract array `leaf`, [replicas, ...], with `num_replicas` as the size of its first dim.

    The first dim of the result is sharded over the data axis if the size of the axis divides `num_replicas`.
    """
    mesh = leaf.sharding.mesh
    replicas = DATA if num_replicas % mesh.shape[DATA] == 0 else None
    sharding = NamedSharding(mesh, PartitionSpec(replicas, *leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct((num_replicas, *leaf.shape[1:]), leaf.dtype, sharding=sharding)
