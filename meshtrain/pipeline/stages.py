"""What a stage of the pipeline does with its own share, inside `jax.shard_map` over the pipeline axis.

M: microbatches, b: sequences in one, T: tokens a sequence, D: embed dim, S: stages, V: chunks a stage, K: layers each.

Layer storage is [V K S, ...] in layer order where V is 1, else [V, K S, ...] with the second dim over the stages: stage
s then holds in chunk c the layers (c S + s) K ... (c S + s) K + K - 1, and layer order is cut, not changed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.models.losses import psum_float32
from meshtrain.models.task import Batch, Params, Stages

PIPELINE = "pipeline"
MANUAL = frozenset({PIPELINE})


def take(x: jax.Array, index: jax.Array, dim: int = 0) -> jax.Array:
    """Returns x[index] along a dim. Indices are never negative here, and saying so halves what there is to compile."""
    return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False, allow_negative_indices=False)


def microbatch(batch: Batch, index: jax.Array) -> Batch:
    """Returns one of the microbatches in [b, M, ...]; `index` may differ between stages, and is held to 0 .. M - 1."""
    return jax.tree.map(lambda x: take(x, index, dim=1), batch)


def num_microbatches(batch: Batch) -> int:
    """Returns M of a batch [b, M, ...]."""
    return int(jax.tree.leaves(batch)[0].shape[1])


def split_layers(stages: Stages, params: Params) -> tuple[Params, Params]:
    """Returns (the layers as they meet activations, everything else)."""
    layers, outer = params["layers"], {name: value for name, value in params.items() if name != "layers"}
    return stages.cast(layers) if stages.cast else layers, outer


def chunk_of(layers: Params, chunk: jax.Array, num_chunks: int) -> Params:
    """Returns the layers of one chunk of this stage, each leaf [K, ...]."""
    if num_chunks == 1:
        return layers
    return jax.tree.map(lambda leaf: take(leaf, chunk), layers)


def place(chunk: jax.Array, index: jax.Array, num_chunks: int) -> tuple[jax.Array, ...]:
    """Returns where one of this stage's layers is stored, in the leading dims."""
    return (index,) if num_chunks == 1 else (chunk, index)


def layer_at(layers: Params, place: tuple[jax.Array, ...]) -> Params:
    """Returns the weights of one layer, each leaf [1, ...], read where they lie: a whole chunk would be a copy."""

    def one(leaf: jax.Array) -> jax.Array:
        start, sizes = _slice_at(leaf, place)
        return jax.lax.dynamic_slice(leaf, start, sizes, allow_negative_indices=False).reshape(sizes[len(place) - 1 :])

    return jax.tree.map(one, layers)


def _slice_at(leaf: jax.Array, place: tuple[jax.Array, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    trailing = leaf.shape[len(place) :]
    return (*place, *(0 for _ in trailing)), (*(1 for _ in place), *trailing)


def keeping_no_weights(pull: Callable[..., Any], weights: Params) -> Callable[..., Any]:
    """Returns a backward pass, as `jax.vjp` returns one, that is given the weights as well: (weights, cotangent) -> ...

    What it would have kept of them is left out: a loop that stacks backward passes would copy the weights otherwise.
    """
    own, leaves, tree = jax.tree.leaves(weights), jax.tree.leaves(pull), jax.tree.structure(pull)
    places = [next((i for i, one in enumerate(own) if one is leaf), None) for leaf in leaves]

    def run(kept: list[jax.Array], weights: Params, cotangent: jax.Array) -> Any:
        own, rest = jax.tree.leaves(weights), iter(kept)
        whole = [next(rest) if place is None else own[place] for place in places]
        return jax.tree.unflatten(tree, whole)(cotangent)

    return jax.tree_util.Partial(run, [leaf for leaf, place in zip(leaves, places, strict=True) if place is None])


def add_at(total: Params, part: Params, place: tuple[jax.Array, ...], active: jax.Array) -> Params:
    """Adds the gradients of one layer, each leaf [1, ...], to the accumulators of all layers of this stage.

    Args:
      total: each leaf [K, ...], or [V, K, ...] where there are chunks.
      part: what is added; left out, whatever is in it, where `active` is false.
      place: index of the layer, or (chunk, index).
      active: bool scalar.
    """

    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        start, sizes = _slice_at(total, place)
        before, part = jax.lax.dynamic_slice(total, start, sizes, allow_negative_indices=False), part.reshape(sizes)
        # Selected before it is added, so that `total` is read once.
        after = before + jnp.where(active, part, 0)
        return jax.lax.dynamic_update_slice(total, after, start, allow_negative_indices=False)

    return jax.tree.map(add, total, part)


def first_layer(chunk: jax.Array | int, num_stages: int, num_layers: int, num_chunks: int) -> jax.Array:
    """Returns the index in the whole model of the first layer of this stage's chunk: (c S + s) K."""
    layers_in_chunk = num_layers // (num_stages * num_chunks)
    return (chunk * num_stages + jax.lax.axis_index(PIPELINE)) * layers_in_chunk


def from_stage(x: jax.Array, here: jax.Array) -> jax.Array:
    """Hands to all stages the `x` of the one where `here` is true; zeros where it is true nowhere."""
    return psum_float32(jnp.where(here, x, jnp.zeros_like(x)), PIPELINE)


def to_next(x: jax.Array, num_stages: int) -> jax.Array:
    """Sends to the following stage, the last one to the first."""
    return jax.lax.ppermute(x, PIPELINE, [(s, (s + 1) % num_stages) for s in range(num_stages)])


def to_previous(x: jax.Array, num_stages: int) -> jax.Array:
    """Sends to the stage before, the first one to the last."""
    return jax.lax.ppermute(x, PIPELINE, [(s, (s - 1) % num_stages) for s in range(num_stages)])


def layers_of_stage(stage: int, num_stages: int, num_layers: int, num_chunks: int) -> list[range]:
    """Returns the layers that a stage holds, a range for each of its chunks."""
    size = num_layers // (num_stages * num_chunks)
    starts = [(chunk * num_stages + stage) * size for chunk in range(num_chunks)]
    return [range(start, start + size) for start in starts]
