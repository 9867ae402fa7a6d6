"""Operations of one stage on its own shards, inside a manual region over the pipeline axis.

M: microbatches, b: sequences in a microbatch, T: tokens a sequence, D: embed dim, S: stages, V: chunks a stage,
K: layers in a chunk, U: layers in a unit (`Stages.num_together`), L: layers.

Layers are stored as [K S, ...] where V is 1, else as [V, K S, ...], with the dim of size K S sharded over the stages.
Chunk c of stage s holds the layers (c S + s) K ... (c S + s) K + K - 1. The order in memory is the layer order, so a
leaf [L, ...] of a checkpoint is a reshape. Dims may stand before these, such as that of the replicas.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshtrain.errors import UserError
from meshtrain.models.metrics import are_metrics, is_scalar
from meshtrain.models.task import Activations, Batch, LayerSums, Params, Stages
from meshtrain.models.vocabulary.losses import psum_of_one
from meshtrain.sharding.stored import Names
from meshtrain.sharding.trees import Arrays, Tree

PIPELINE = "pipeline"
MANUAL = frozenset({PIPELINE})


def take(tree: Arrays, index: jax.Array, dim: int = 0) -> Arrays:
    """Returns x[index] along a dim of each array. Without negative indices the compiled program is half as long."""

    def one(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(one, tree)


def microbatch(batch: Batch, index: jax.Array) -> Batch:
    """Returns a microbatch [b, ...] of [b, M, ...]. `index` may differ between stages; it is clamped to 0 .. M - 1."""
    return take(batch, index, dim=1)


def num_microbatches(batch: Batch) -> int:
    """Returns M of a batch [b, M, ...]."""
    return int(jax.tree.leaves(batch)[0].shape[1])


def with_cast_layers(stages: Stages, params: Params) -> Params:
    """Returns parameters with the layers in their compute dtypes, if the model casts them once a step.

    Called before the manual region, which gathers the weights that ZeRO shards: so they are gathered in these dtypes.
    """
    return {**params, "layers": stages.cast(params["layers"])} if stages.cast else params


def split_layers(params: Params) -> tuple[Params, Params]:
    """Returns (the layers, all other parameters)."""
    return params["layers"], {name: value for name, value in params.items() if name != "layers"}


def chunk_of(layers: Params, chunk: jax.Array, num_chunks: int) -> Params:
    """Returns the layers of one chunk of this stage, each leaf [K, ...]."""
    return layers if num_chunks == 1 else take(layers, chunk)


def in_units(layers: Params, num_chunks: int, num_in_unit: int) -> Params:
    """Returns the layers of this stage as [V K / U, U, ...], U layers a unit: what is computed in one call.

    A unit is a slice of the first dim alone, so that products and sums can read and write it in place.

    Args:
      layers: each leaf [K, ...], or [V, K, ...] where there are chunks.
      num_chunks: V.
      num_in_unit: U, a divisor of K.
    """
    num_dims = 1 if num_chunks == 1 else 2
    return jax.tree.map(lambda leaf: leaf.reshape(-1, num_in_unit, *leaf.shape[num_dims:]), layers)


def from_units(units: Params, num_chunks: int) -> Params:
    """Returns arrays [V K / U, U, ...] as layers are stored, the inverse of `in_units`."""
    leading = (-1,) if num_chunks == 1 else (num_chunks, -1)
    return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[2:]), units)


def run_layers(
    stages: Stages, layers: Params, x: Activations, batch: Batch, rng: jax.Array, start: jax.Array | int, train: bool
) -> tuple[Activations, LayerSums]:
    """Returns the result of `Stages.repeated`, (activations, sums), after checking it.

    Raises:
      UserError: it returns something else, or activations with another tree, shapes or dtypes than its input.
    """
    allowed = "allowed: (activations, None) or (activations, (loss, metrics))"
    output = stages.repeated(layers, x, batch, rng, start, train)
    if not isinstance(output, tuple) or len(output) != 2:
        raise UserError(f"stages.repeated: got {_text(output)}; {allowed}; nearest: return activations, None")
    y, sums = output
    if _text(y) != _text(x):
        raise UserError(
            f"stages.repeated: got activations {_text(y)}; allowed: those of its input, {_text(x)}; nearest: the same "
            "tree, shapes and dtypes"
        )
    if not (sums is None or _are_sums(sums)):
        raise UserError(
            f"stages.repeated: got sums {_text(sums)}; {allowed}, a float32 scalar and a dict of float32 "
            "metrics; nearest: (loss, {})"
        )
    return y, sums


def _text(tree: Tree) -> str:
    leaf_text = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)  # noqa: E731
    return str(jax.tree.map(leaf_text, tree)).replace("'", "")


def _are_sums(sums: Tree) -> bool:
    is_pair = isinstance(sums, tuple) and len(sums) == 2 and is_scalar(sums[0]) and are_metrics(sums[1])
    return is_pair and all(getattr(leaf, "dtype", None) == jnp.float32 for leaf in jax.tree.leaves(sums))


def add_at(total: Params, part: Params, place: jax.Array, active: jax.Array) -> Params:
    """Returns the accumulators of all units of this stage, with the gradients of one unit added where `active`.

    Args:
      total: each leaf [V K / U, U, ...].
      part: each leaf [U, ...]; it may hold infinities and NaN where `active` is false.
      place: int32 scalar, index of the unit.
      active: bool scalar.
    """
    # XLA makes one kernel of the addition and the update in place where slice and update have the same shape and read
    # the same instruction as their index. Without the barrier each may get its own copy of the index's arithmetic.
    place = jax.lax.optimization_barrier(place)

    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        # The part is masked before the addition, so that `total` is read once.
        before = jax.lax.dynamic_index_in_dim(total, place, 0, keepdims=True, allow_negative_indices=False)
        after = before + jnp.where(active, part, 0)[None]
        return jax.lax.dynamic_update_index_in_dim(total, after, place, 0, allow_negative_indices=False)

    return jax.tree.map(add, total, part)


def first_layer(chunk: jax.Array | int, num_stages: int, num_layers: int, num_chunks: int) -> jax.Array:
    """Returns the index in the whole model of the first layer of this stage's chunk: (c S + s) K."""
    layers_in_chunk = num_layers // (num_stages * num_chunks)
    return (chunk * num_stages + jax.lax.axis_index(PIPELINE)) * layers_in_chunk


def from_stage(tree: Arrays, here: jax.Array) -> Arrays:
    """Broadcasts the arrays of the one stage where `here` is true to all stages; zeros if it is true on none."""
    return jax.tree.map(lambda x: psum_of_one(jnp.where(here, x, jnp.zeros_like(x)), PIPELINE), tree)


def to_next(tree: Arrays, num_stages: int) -> Arrays:
    """Sends each array to the next stage; the last stage sends to the first."""
    ring = [(s, (s + 1) % num_stages) for s in range(num_stages)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPELINE, ring), tree)


def to_previous(tree: Arrays, num_stages: int) -> Arrays:
    """Sends each array to the previous stage; the first stage sends to the last."""
    ring = [(s, (s - 1) % num_stages) for s in range(num_stages)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPELINE, ring), tree)


def where(condition: jax.Array, chosen: Arrays, otherwise: Arrays) -> Arrays:
    """Returns `chosen` where the condition holds, else `otherwise`, by selection: a product with 0 keeps infinities."""
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), chosen, otherwise)


def add_if(condition: jax.Array, total: Arrays, part: Arrays) -> Arrays:
    """Returns total + part where the condition holds, else `total`; `part` may then hold infinities and NaN."""
    return jax.tree.map(lambda total, part: jnp.where(condition, total + part, total), total, part)


def zeros_like(tree: Arrays) -> Arrays:
    """Returns zeros for a tree of arrays or of abstract arrays."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def layers_of_stage(stage: int, num_stages: int, num_layers: int, num_chunks: int) -> list[range]:
    """Returns the layers that a stage holds, a range for each of its chunks."""
    size = num_layers // (num_stages * num_chunks)
    starts = [(chunk * num_stages + stage) * size for chunk in range(num_chunks)]
    return [range(start, start + size) for start in starts]


CHUNKS = "chunks"


def chunked(layers: Params, num_chunks: int) -> Params:
    """Returns a tree of [L, ...] as [V, L / V, ...]; the same tree where V is 1."""
    if num_chunks == 1:
        return layers
    return jax.tree.map(lambda leaf: leaf.reshape(num_chunks, leaf.shape[0] // num_chunks, *leaf.shape[1:]), layers)


def layer_order_shape(shape: Sequence[int], names: Names) -> tuple[int, ...]:
    """Returns the shape [L, ...] of a leaf, given its shape and logical axes in memory."""
    if CHUNKS not in names:
        return tuple(shape)
    at = names.index(CHUNKS)
    return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])


def layer_order_names(names: Names) -> Names:
    """Returns the logical axes of a leaf [L, ...], given those in memory."""
    return tuple(name for name in names if name != CHUNKS)
