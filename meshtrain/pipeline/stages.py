"""Operations of one stage on its own shards, inside a manual region over the pipeline axis.

M: microbatches, b: sequences in a microbatch, T: tokens per sequence, D: embed dim, S: stages, V: chunks per stage, K:
layers in a chunk, including padding layers, U: layers in a unit (`Stages.num_together`), L: layers of the model.

Layers are stored as [K S, ...] if V is 1, else as [V, K S, ...], with the dim of size K S sharded over the stages.
Chunk c of stage s has the layers (c S + s) K ... (c S + s) K + K - 1. The order in memory is the layer order, so a leaf
[L, ...] of a checkpoint becomes this shape by a reshape. Further dims may precede these, such as a dim of replicas.

If S V does not divide L, padding layers are stored after the last layer. If this would leave a stage without layers,
layers are spread evenly, and the last layer of some chunks is a padding layer (`schedules.layers_of_chunks`). Weights
of padding layers are zeros, and are not in checkpoints. A stage computes padding layers too, and drops their results,
as in idle rows: activations pass through unchanged, gradients are zeros, and changes of the padding weights by an
optimizer have no effect.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.errors import Problem, UserError, nearest_divisor
from meshtrain.models.metrics import are_metrics, is_scalar
from meshtrain.models.task import LAYERS, Activations, Batch, LayerSums, Params, Stages
from meshtrain.models.vocabulary import psum_of_one
from meshtrain.pipeline.schedules import layers_in_chunk, layers_of_chunks, spreads_evenly
from meshtrain.sharding.param_sharding import Names
from meshtrain.sharding.rules import PIPELINE
from meshtrain.sharding.trees import Arrays, Tree

MANUAL = frozenset({PIPELINE})


def take(tree: Arrays, index: jax.Array, dim: int = 0) -> Arrays:
    """Returns x[index] along dim `dim` of each array in a pytree; the index must not be negative.

    Support for negative indices would make the compiled program twice as long.
    """

    def one(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(one, tree)


def microbatch(batch: Batch, index: jax.Array) -> Batch:
    """Returns microbatch `index`, [b, ...], of a batch [b, M, ...] with M microbatches of b sequences.

    The index may differ between stages; it is clamped to 0 .. M - 1.
    """
    return take(batch, index, dim=1)


def num_microbatches(batch: Batch) -> int:
    """Returns the number of microbatches M in a batch [b, M, ...] (b: sequences in a microbatch)."""
    return int(jax.tree.leaves(batch)[0].shape[1])


def with_cast_layers(stages: Stages, params: Params) -> Params:
    """Returns parameters with the layers cast to their compute dtypes; unchanged if `stages.cast` is None.

    Call this function before the pipeline's manual region. Weights that ZeRO shards are gathered inside this region; if
    they are cast first, they are gathered in the compute dtypes.
    """
    return {**params, "layers": stages.cast(params["layers"])} if stages.cast else params


def split_layers(params: Params) -> tuple[Params, Params]:
    """Returns the parameters of the layers, and a dict of all other parameters."""
    return params["layers"], {name: value for name, value in params.items() if name != "layers"}


def chunk_of(layers: Params, chunk: jax.Array, num_chunks: int) -> Params:
    """Returns the parameters of one chunk of this stage, each leaf [K, ...] for K layers in a chunk.

    Args:
      layers: the parameters of this stage's layers, each leaf [K, ...], or [V, K, ...] if there are several chunks.
      chunk: the index of the chunk on the stage, int32 scalar.
      num_chunks: the number of chunks per stage, V.
    """
    return layers if num_chunks == 1 else take(layers, chunk)


def num_units(stages: Stages, num_stages: int, num_chunks: int) -> int:
    """Returns the number of units in a chunk; a unit is a group of `Stages.num_together` layers, computed in one call.

    Raises:
      UserError: `Stages.num_together` does not divide the layers in a chunk, or a unit would have layers and padding.
    """
    in_chunk, together = layers_in_chunk(stages.num_layers, num_stages, num_chunks), stages.num_together
    common = math.gcd(*map(len, layers_of_chunks(stages.num_layers, num_stages, num_chunks)))
    if common % together:
        raise UserError(
            Problem(
                "stages.num_together",
                got=together,
                allowed=f"a divisor of the {in_chunk} layers of a chunk and of all {stages.num_layers} layers",
                nearest=nearest_divisor(common, together),
            )
        )
    return in_chunk // together


def in_units(layers: Params, num_chunks: int, num_in_unit: int) -> Params:
    """Reshapes the layers of this stage to [V K / U, U, ...]: units of U layers that are computed in one call.

    A unit is a slice of the first dim only, so that products and sums can read and write it in place.

    Args:
      layers: the parameters of the layers, each leaf [K, ...], or [V, K, ...] if there are several chunks.
      num_chunks: the number of chunks per stage, V.
      num_in_unit: the number of layers in a unit, U, a divisor of the K layers in a chunk.
    """
    num_dims = 1 if num_chunks == 1 else 2
    return jax.tree.map(lambda leaf: leaf.reshape(-1, num_in_unit, *leaf.shape[num_dims:]), layers)


def from_units(units: Params, num_chunks: int) -> Params:
    """Reshapes arrays from [units, layers in a unit, ...] to their shape before `in_units`.

    The result is [layers, ...], or [chunks, layers in a chunk, ...] if there are several chunks.
    """
    leading = (-1,) if num_chunks == 1 else (num_chunks, -1)
    return jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[2:]), units)


def flat(units: Params) -> Params:
    """Reshapes arrays from units, [units, layers in a unit, ...], to [layers, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), units)


def run_layers(
    stages: Stages, layers: Params, x: Activations, batch: Batch, rng: jax.Array, start: jax.Array | int, train: bool
) -> tuple[Activations, LayerSums]:
    """Runs consecutive layers with `Stages.repeated`, and checks the result; returns (activations, sums).

    Args:
      stages: the model, split into stages.
      layers: the layers' parameters, each leaf [number of layers, ...].
      x: the activations before the layers.
      batch: a microbatch: entry name -> array [b, ...] of b sequences.
      rng: a typed key.
      start: the index of the first layer in the model.
      train: whether dropout is applied.

    Returns:
      The activations after the layers; and the (loss, metrics) that the layers add, float32, or None.

    Raises:
      UserError: the result is not (activations, None) or (activations, (loss, metrics)) with float32 sums, or its
        activations differ from `x` in structure, shape or dtype.
    """
    allowed = "(activations, None) or (activations, (loss, metrics))"
    output = stages.repeated(layers, x, batch, rng, start, train)
    if not isinstance(output, tuple) or len(output) != 2:
        raise UserError(
            Problem("stages.repeated", got=_text(output), allowed=allowed, nearest="return activations, None")
        )
    y, sums = output
    if _text(y) != _text(x):
        raise UserError(
            Problem(
                "stages.repeated",
                got=f"activations {_text(y)}",
                allowed=f"activations like its input, {_text(x)}",
                nearest="the same structure, shapes and dtypes",
            )
        )
    if not (sums is None or _are_sums(sums)):
        raise UserError(
            Problem(
                "stages.repeated",
                got=f"sums {_text(sums)}",
                allowed=f"{allowed}, a float32 scalar and a dict of float32 metrics",
                nearest="(loss, {})",
            )
        )
    return y, sums


def run_chunk(
    stages: Stages,
    layers: Params,
    x: Activations,
    batch: Batch,
    rng: jax.Array,
    start: jax.Array,
    end: jax.Array | int,
) -> tuple[Activations, LayerSums]:
    """Runs the layers of a chunk without dropout; padding layers of the chunk pass the activations through.

    Layers are computed one by one, so that the result of each padding layer can be dropped. Returns the activations
    after the chunk; and the (loss, metrics) that the layers add, float32, or None.

    Args:
      stages: the model, split into stages.
      layers: the chunk's parameters, each leaf [layers in a chunk, ...].
      x: the activations before the chunk.
      batch: a microbatch: entry name -> array [b, ...] of b sequences.
      rng: a typed key.
      start: the index of the chunk's first layer in the model.
      end: the index in the model at which the chunk's padding layers start; from `end_of_layers`.
    """

    def one(state: tuple[Activations, jax.Array], weights: Params) -> tuple[tuple[Activations, jax.Array], LayerSums]:
        x, index = state
        weights = jax.tree.map(lambda leaf: leaf[None], weights)
        y, sums = run_layers(stages, weights, x, batch, rng, index, False)
        y, sums = pass_by(index < end, x, y, sums)
        return (y, index + 1), sums

    (y, _), sums = jax.lax.scan(one, (x, start), layers)
    return y, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums)


def pass_by(is_layer: jax.Array, x: Activations, y: Activations, sums: LayerSums) -> tuple[Activations, LayerSums]:
    """Returns (y, sums) for a layer of the model; for a padding layer, returns (x, zeros), so that it has no effect.

    Args:
      is_layer: whether the layer is a layer of the model, bool scalar.
      x: the activations before the layer.
      y: the activations after the layer.
      sums: the (loss, metrics) that the layer adds, or None.
    """
    return where(is_layer, (y, sums), (x, zeros_like(sums)))


def _text(tree: Tree) -> str:
    leaf_text = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)  # noqa: E731
    return str(jax.tree.map(leaf_text, tree)).replace("'", "")


def _are_sums(sums: Tree) -> bool:
    is_pair = isinstance(sums, tuple) and len(sums) == 2 and is_scalar(sums[0]) and are_metrics(sums[1])
    return is_pair and all(getattr(leaf, "dtype", None) == jnp.float32 for leaf in jax.tree.leaves(sums))


def add_at(total: Params, part: Params, place: jax.Array, active: jax.Array) -> Params:
    """Returns the gradient sums of this stage plus the gradients of one unit (a group of layers), if `active`.

    Args:
      total: the gradient sums, each leaf [units of this stage, layers in a unit, ...].
      part: the gradients of the unit, each leaf [layers in a unit, ...]; may contain infinities and NaN if `active` is
        false.
      place: index of the unit, int32 scalar.
      active: whether to add the gradients, bool scalar.
    """
    # XLA fuses the addition and the update in place if slice and update have the same shape and use the same
    # instruction as their index. Without the barrier each may get a separate copy of the index's arithmetic.
    place = jax.lax.optimization_barrier(place)

    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        # The part is masked before the addition, so that `total` is read once.
        before = jax.lax.dynamic_index_in_dim(total, place, 0, keepdims=True, allow_negative_indices=False)
        after = before + jnp.where(active, part, 0)[None]
        return jax.lax.dynamic_update_index_in_dim(total, after, place, 0, allow_negative_indices=False)

    return jax.tree.map(add, total, part)


def first_layer(chunk: jax.Array | int, num_stages: int, num_layers: int, num_chunks: int) -> jax.Array:
    """Returns the model-wide index of the first layer of this stage's chunk `chunk`.

    If chunks are filled in order, it is (c S + s) K for chunk c of stage s, with S stages and K layers in a chunk.
    """
    in_chunk, index = layers_in_chunk(num_layers, num_stages, num_chunks), chunk * num_stages + _stage()
    if not spreads_evenly(num_layers, num_stages, num_chunks):
        return index * in_chunk
    return jnp.asarray([layers.start for layers in layers_of_chunks(num_layers, num_stages, num_chunks)])[index]


def end_of_layers(chunk: jax.Array | int, num_stages: int, num_layers: int, num_chunks: int) -> jax.Array | int:
    """Returns the index in the model at which the padding layers of this stage's chunk `chunk` start.

    A layer of the chunk with a smaller index is a layer of the model. If chunks are filled in order, the result is the
    number of layers in the model, because all padding layers come after it. Otherwise it is the index after the last
    layer of this chunk.
    """
    if not spreads_evenly(num_layers, num_stages, num_chunks):
        return num_layers
    ends = jnp.asarray([layers.stop for layers in layers_of_chunks(num_layers, num_stages, num_chunks)])
    return ends[chunk * num_stages + _stage()]


def _stage() -> jax.Array:
    return jax.lax.axis_index(PIPELINE)


def from_stage(tree: Arrays, here: jax.Array) -> Arrays:
    """Broadcasts arrays from one stage to all stages; zeros if `here` is true on no stage.

    Args:
      tree: the arrays of each stage.
      here: bool scalar, true on the stage whose arrays are broadcast.
    """
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
    """Returns `chosen` if the condition is true, else `otherwise`, for each array of a pytree.

    It selects instead of multiplying, because a product with 0 would preserve infinities.
    """
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), chosen, otherwise)


def add_if(condition: jax.Array, total: Arrays, part: Arrays) -> Arrays:
    """Returns `total` + `part` if the condition is true, else `total`; safe even if an unused `part` is inf or NaN."""
    return jax.tree.map(lambda total, part: jnp.where(condition, total + part, total), total, part)


def zeros_like(tree: Arrays) -> Arrays:
    """Returns a pytree of zeros with the shapes and dtypes of a pytree of arrays or abstract arrays."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def layers_of_stage(stage: int, num_stages: int, num_layers: int, num_chunks: int) -> list[range]:
    """Returns the layers of a stage, a range for each of its chunks."""
    return list(layers_of_chunks(num_layers, num_stages, num_chunks)[stage::num_stages])


CHUNKS = "chunks"


@dataclasses.dataclass(frozen=True)
class Stack:
    """The memory layout of a pipeline's stacked layers: L layers on S stages with V chunks of K layers each.

    K includes padding layers: S V K - L of the stored layers are padding, with zeros as weights.
    """

    num_layers: int
    num_stages: int
    num_chunks: int

    @property
    def num_places(self) -> int:
        """The number of layers that are stored, including padding layers: layers in a chunk * stages * chunks."""
        return self.num_stages * self.num_chunks * layers_in_chunk(self.num_layers, self.num_stages, self.num_chunks)

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dims of each weight in memory: [K S], or [V, K S] if each of the S stages has V chunks (V > 1).

        K is the number of layers in a chunk, with padding layers.
        """
        return (self.num_places,) if self.num_chunks == 1 else (self.num_chunks, self.num_places // self.num_chunks)

    @property
    def names(self) -> Names:
        """The logical axes of the dims in `shape`: (layers,), or (chunks, layers)."""
        return (CHUNKS, LAYERS)[-len(self.shape) :]

    @property
    def places_of_layers(self) -> np.ndarray | None:
        """The index in memory, among all stored layers, of each layer of the model: int [num_layers].

        None means that each layer has the same index in memory as in the model, because all padding layers come last.
        """
        arguments = self.num_layers, self.num_stages, self.num_chunks
        if not spreads_evenly(*arguments):
            return None
        size = layers_in_chunk(*arguments)
        places = [index * size + np.arange(len(layers)) for index, layers in enumerate(layers_of_chunks(*arguments))]
        return np.concatenate(places)

    def of_layers(self, layers: Params) -> Params:
        """Reshapes arrays [layers, ...] to their shape in memory, [*shape, ...]; padding layers are zeros."""
        return jax.tree.map(lambda leaf: reshape_stack(leaf, (*self.shape, *leaf.shape[1:]), self), layers)

    def places_shape(self, shape: Sequence[int], names: Names) -> tuple[int, ...]:
        """Returns the shape of a weight with `num_places` layers (including padding) instead of `num_layers`.

        Args:
          shape: the weight's shape without padding layers, such as [num_layers, ...].
          names: the logical axis of each dim of the weight; only the dim `layers` changes.
        """
        is_stack = lambda size, name: name == LAYERS and size == self.num_layers  # noqa: E731
        return tuple(self.num_places if is_stack(*dim) else dim[0] for dim in zip(shape, names, strict=True))

    def places(self, layers: Params) -> Params:
        """Converts a pytree of arrays [num_layers, ...] to abstract arrays with padding layers, [num_places, ...]."""
        place = lambda leaf: jax.ShapeDtypeStruct((self.num_places, *leaf.shape[1:]), leaf.dtype)  # noqa: E731
        return jax.tree.map(place, layers)


def stack_of(stages: Stages | None, num_stages: int, num_chunks: int) -> Stack | None:
    """Returns the memory layout of stacked layers; None for a pipeline of one stage, or a model that has no stages.

    Args:
      stages: the model, split into stages; None if the model cannot be split.
      num_stages: size of the mesh's pipeline axis.
      num_chunks: chunks of layers on each stage.
    """
    return None if stages is None or num_stages == 1 else Stack(stages.num_layers, num_stages, num_chunks)


def reshape_stack(x: jax.Array, shape: Sequence[int], stack: Stack | None) -> jax.Array:
    """Reshapes stacked layers from [.., L, ..] to their shape in memory, padded with zeros, or back (L: layers).

    In memory, `Stack.shape` replaces the dim L.

    Args:
      x: an array [.., L, ..] in layer order, or the same weights in their shape in memory.
      shape: the shape of the result: the other of these two shapes.
      stack: the memory layout of the layers; None if they are not stacked for a pipeline.
    """
    if x.shape == tuple(shape):
        return x
    start = next(dim for dim, (size, other) in enumerate(zip(x.shape, shape, strict=False)) if size != other)
    num_after = min(x.ndim, len(shape)) - start - 1
    in_order = x.reshape(*x.shape[:start], -1, *x.shape[x.ndim - num_after :])
    num_wanted = math.prod(shape[start : len(shape) - num_after])
    places = stack.places_of_layers if stack else None
    if places is not None and in_order.shape[start] > num_wanted:
        return jnp.take(in_order, places, axis=start)
    if places is not None:
        zeros = jnp.zeros((*in_order.shape[:start], num_wanted, *in_order.shape[start + 1 :]), x.dtype)
        return zeros.at[(slice(None),) * start + (places,)].set(in_order).reshape(shape)
    if in_order.shape[start] > num_wanted:
        in_order = jax.lax.slice_in_dim(in_order, 0, num_wanted, axis=start)
    num_empty = num_wanted - in_order.shape[start]
    widths = [(0, num_empty if dim == start else 0) for dim in range(in_order.ndim)]
    return (jnp.pad(in_order, widths) if num_empty else in_order).reshape(shape)


def layer_order_shape(shape: Sequence[int], names: Names, stack: Stack | None) -> tuple[int, ...]:
    """Returns the shape of a leaf in layer order, [.., layers, ..], given its shape and logical axes in memory."""
    if stack is None or LAYERS not in names:
        return tuple(shape)
    end = names.index(LAYERS) + 1
    start = max(0, end - len(stack.shape))
    if (tuple(shape[start:end]), names[start:end]) != (stack.shape, stack.names):
        return tuple(shape)  # layers outside of the pipeline
    return (*shape[:start], stack.num_layers, *shape[end:])


def layer_order_names(names: Names) -> Names:
    """Returns the logical axes of a leaf in layer order, [layers, ...], given its logical axes in memory."""
    return tuple(name for name in names if name != CHUNKS)
