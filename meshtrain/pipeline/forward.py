"""Evaluation and generation through the stages of a pipeline: forward passes alone.

M: microbatches, b: sequences in one, T: tokens a sequence, S: stages, V: chunks a stage.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from meshtrain.layout.placement import on_shards
from meshtrain.models.task import Batch, Loss, Params, Stages
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.stages import MANUAL, PIPELINE


def evaluate(
    stages: Stages, num_chunks: int, mesh: Mesh, specs: Any, params: Params, batch: Batch, rng: jax.Array
) -> Loss:
    """Returns the sums of a batch [b, M, ...] without gradients, nothing dropped: (loss, weight, metrics)."""

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> Loss:
        _, outer = ring.split_layers(stages, params)

        def finish(sums: Loss, y: jax.Array, m: jax.Array) -> Loss:
            part = stages.last(outer, y, ring.microbatch(batch, m), PIPELINE)
            return jax.tree.map(jnp.add, sums, part)

        key = jax.random.wrap_key_data(key_data)
        first = ring.microbatch(batch, jnp.int32(0))
        final = jax.eval_shape(lambda: stages.first(outer, first, key, False, PIPELINE))
        shapes = jax.eval_shape(lambda y: stages.last(outer, y, first, PIPELINE), final)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return forward_only(stages, params, batch, key, num_chunks, finish, zeros)

    return _on_mesh(on_stage, mesh, specs, PartitionSpec())(params, batch, jax.random.key_data(rng))


def logits(stages: Stages, num_chunks: int, mesh: Mesh, specs: Any, params: Params, batch: Batch) -> jax.Array:
    """Returns [M, b, T, padded vocabulary] of a batch [b, M, ...]."""
    compute = stages.logits
    assert compute is not None

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> jax.Array:
        _, outer = ring.split_layers(stages, params)
        key = jax.random.wrap_key_data(key_data)
        final = jax.eval_shape(lambda: stages.first(outer, ring.microbatch(batch, jnp.int32(0)), key, False, PIPELINE))
        shape = jax.eval_shape(lambda y: compute(outer, y, PIPELINE), final)
        every = jnp.zeros((ring.num_microbatches(batch), *shape.shape), shape.dtype)
        finish = lambda kept, y, m: kept.at[m].set(compute(outer, y, PIPELINE))  # noqa: E731
        return forward_only(stages, params, batch, key, num_chunks, finish, every)

    columns = PartitionSpec(None, None, None, PIPELINE)
    return _on_mesh(on_stage, mesh, specs, columns)(params, batch, jax.random.key_data(jax.random.key(0)))


def _on_mesh(on_stage: Any, mesh: Mesh, specs: Any, out_specs: Any) -> Any:
    whole = PartitionSpec()
    return on_shards(mesh, on_stage, (specs, whole, whole), out_specs, axes=MANUAL)


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
    layers, outer = ring.split_layers(stages, params)
    num_stages, num_parts = jax.lax.axis_size(PIPELINE), ring.num_microbatches(batch)
    stage = jax.lax.axis_index(PIPELINE)

    def embed(m: jax.Array) -> jax.Array:
        return stages.first(outer, ring.microbatch(batch, m), rng, False, PIPELINE)

    shape = jax.eval_shape(embed, jnp.zeros((), jnp.int32))
    zeros = jnp.zeros(shape.shape, shape.dtype)

    def one_pass(chunk: int, source: Any, finish: Any, carry: Any) -> Any:
        weights = ring.chunk_of(layers, jnp.int32(chunk), num_chunks)
        start = ring.first_layer(chunk, num_stages, stages.num_layers, num_chunks)

        def row(carry: tuple[jax.Array, Any], r: jax.Array, finishes: bool) -> tuple[tuple[jax.Array, Any], None]:
            inbox, result = carry
            x = jnp.where(stage == 0, source(jnp.minimum(r, num_parts - 1)), inbox)
            mine = ring.microbatch(batch, jnp.clip(r - stage, 0, num_parts - 1))
            y = stages.repeated(weights, x, mine, rng, start, False)
            if finishes:
                result = finish(result, ring.from_stage(y, stage == num_stages - 1), r - (num_stages - 1))
            return (ring.to_next(y, num_stages), result), None

        ramp, steady = jnp.arange(num_stages - 1), jnp.arange(num_stages - 1, num_stages - 1 + num_parts)
        carry, _ = jax.lax.scan(lambda c, r: row(c, r, False), (zeros, carry), ramp)
        carry, _ = jax.lax.scan(lambda c, r: row(c, r, True), carry, steady)
        return carry[1]

    source: Any = embed
    for chunk in range(num_chunks - 1):
        between = jnp.zeros((num_parts, *shape.shape), shape.dtype)
        between = one_pass(chunk, source, lambda kept, y, m: kept.at[m].set(y), between)
        source = functools.partial(ring.take, between)
    return one_pass(num_chunks - 1, source, finish, initial)
