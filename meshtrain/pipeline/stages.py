"""What a stage of the pipeline does with its own share, inside `jax.shard_map` over the pipeline axis.

M: microbatches, b: sequences in one, T: tokens a sequence, D: embed dim, S: stages, V: chunks a stage, K: layers each.

Layer storage is [V K S, ...] in layer order where V is 1, else [V, K S, ...] with the second dim over the stages: stage
s then holds in chunk c the layers (c S + s) K ... (c S + s) K + K - 1, and layer order is cut, not changed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.models.losses import psum_float32
from meshtrain.models.task import Batch, Params, Stages

PIPELINE = "pipeline"


def take(x: jax.Array, index: jax.Array, dim: int = 0) -> jax.Array:
    """Returns x[index] along a dim. Indices are never negative here, and saying so halves what there is to compile."""
    return jax.lax.dynamic_index_in_dim(x, index, dim, keepdims=False, allow_negative_indices=False)


def microbatch(batch: Batch, index: jax.Array) -> Batch:
    """Returns one of the microbatches in [b, M, ...]; `index` may differ between stages, and is held to 0 .. M - 1."""
    return jax.tree.map(lambda x: take(x, index, dim=1), batch)


def num_microbatches(batch: Batch) -> int:
    """Returns M of a batch [b, M, ...]."""
    return int(jax.tree.leaves(batch)[0].shape[1])


def split_layers(params: Params) -> tuple[Params, Params]:
    """Returns (the layers, everything else)."""
    return params["layers"], {name: value for name, value in params.items() if name != "layers"}


def chunk_of(layers: Params, chunk: jax.Array, num_chunks: int) -> Params:
    """Returns the layers of one chunk of this stage, each leaf [K, ...]."""
    if num_chunks == 1:
        return layers
    return jax.tree.map(lambda leaf: take(leaf, chunk), layers)


def add_at(total: Params, part: Params, place: tuple[jax.Array, ...], active: jax.Array) -> Params:
    """Adds the gradients of one layer, each leaf [1, ...], to the accumulators of all layers of this stage.

    Args:
      total: each leaf [K, ...], or [V, K, ...] where there are chunks.
      part: what is added; left out, whatever is in it, where `active` is false.
      place: index of the layer, or (chunk, index).
      active: bool scalar.
    """

    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        start: tuple[jax.Array | int, ...] = (*place, *(0,) * (total.ndim - len(place)))
        part = part.reshape((1,) * len(place) + total.shape[len(place) :])
        before = jax.lax.dynamic_slice(total, start, part.shape, allow_negative_indices=False)
        after = jnp.where(active, before + part, before)
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


def forward_only(
    stages: Stages, params: Params, batch: Batch, rng: jax.Array, num_chunks: int, finish: Any, initial: Any
) -> Any:
    """Runs all microbatches through all stages without keeping anything for a backward pass.

    Each chunk in turn is a pass of M + S - 1 rows: stage s has microbatch r - s in row r.

    Args:
      stages: the model, cut.
      params: this stage's share.
      batch: [b, M, ...], the same on every stage.
      rng: a typed key.
      num_chunks: V.
      finish: (carry, final activations of microbatch m on every stage, m) -> carry.
      initial: the first carry.

    Returns:
      The last carry.
    """
    layers, outer = split_layers(params)
    num_stages, num_parts = jax.lax.axis_size(PIPELINE), num_microbatches(batch)
    stage = jax.lax.axis_index(PIPELINE)

    def embed(m: jax.Array) -> jax.Array:
        return stages.first(outer, microbatch(batch, m), rng, False, PIPELINE)

    shape = jax.eval_shape(embed, jnp.zeros((), jnp.int32))
    zeros = jnp.zeros(shape.shape, shape.dtype)

    def one_pass(chunk: int, source: Any, finish: Any, carry: Any) -> Any:
        weights = chunk_of(layers, jnp.int32(chunk), num_chunks)
        start = first_layer(chunk, num_stages, stages.num_layers, num_chunks)

        def row(carry: tuple[jax.Array, Any], r: jax.Array, finishes: bool) -> tuple[tuple[jax.Array, Any], None]:
            inbox, result = carry
            x = jnp.where(stage == 0, source(jnp.minimum(r, num_parts - 1)), inbox)
            mine = microbatch(batch, jnp.clip(r - stage, 0, num_parts - 1))
            y = stages.repeated(weights, x, mine, rng, start, False)
            if finishes:
                result = finish(result, from_stage(y, stage == num_stages - 1), r - (num_stages - 1))
            return (to_next(y, num_stages), result), None

        ramp, steady = jnp.arange(num_stages - 1), jnp.arange(num_stages - 1, num_stages - 1 + num_parts)
        carry, _ = jax.lax.scan(lambda c, r: row(c, r, False), (zeros, carry), ramp)
        carry, _ = jax.lax.scan(lambda c, r: row(c, r, True), carry, steady)
        return carry[1]

    source: Any = embed
    for chunk in range(num_chunks - 1):
        between = jnp.zeros((num_parts, *shape.shape), shape.dtype)
        between = one_pass(chunk, source, lambda kept, y, m: kept.at[m].set(y), between)
        source = functools.partial(take, between)
    return one_pass(num_chunks - 1, source, finish, initial)


def layers_of_stage(stage: int, num_stages: int, num_layers: int, num_chunks: int) -> list[range]:
    """Returns the layers that a stage holds, a range for each of its chunks."""
    size = num_layers // (num_stages * num_chunks)
    starts = [(chunk * num_stages + stage) * size for chunk in range(num_chunks)]
    return [range(start, start + size) for start in starts]
