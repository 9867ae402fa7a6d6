"""Runs the stages of a pipeline forward only, for evaluation and generation.

M: microbatches, b: sequences in a microbatch, T: tokens per sequence, S: stages, V: chunks per stage.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from meshtrain.models.task import Activations, Batch, LayerSums, Loss, Params, Stages, with_layer_sums
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.stages import MANUAL
from meshtrain.sharding.placement import on_shards
from meshtrain.sharding.rules import PIPELINE
from meshtrain.sharding.trees import Arrays, Specs

Total: TypeAlias = Arrays  # results accumulated over all microbatches: losses, logits or activations
# (total, activations of microbatch m that leave the last stage, m) -> total.
Finish = Callable[[Total, Activations, jax.Array], Total]
Source = Callable[[jax.Array], Activations]  # m -> the activations of microbatch m before stage 0
RunLayers = Callable[[Activations, jax.Array], tuple[Activations, LayerSums]]  # (activations, m) -> (activations, sums)
State = tuple[Activations, Total, LayerSums]  # (a stage input, the total, sums of this stage's layers)


def evaluate(
    stages: Stages, num_chunks: int, mesh: Mesh, specs: Specs, params: Params, batch: Batch, rng: jax.Array
) -> Loss:
    """Returns (loss, weight, metrics) of a batch without dropout or gradients: sums over the batch, float32 scalars.

    Args:
      stages: the model, split into stages.
      num_chunks: chunks per stage, V.
      mesh: the mesh.
      specs: the spec of each parameter, a pytree with the structure of the parameters.
      params: global arrays; the weights of the layers have the leading dims `stages.Stack.shape`.
      batch: entry name -> array [b, M, ...], M microbatches of b sequences.
      rng: a typed key.

    Raises:
      UserError: the result of `Stages.repeated` is not (activations, None) or (activations, (loss, metrics)), or its
        activations differ from its input in structure, shape or dtype.
    """

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> Loss:
        _, outer = ring.split_layers(params)

        def finish(sums: Loss, y: Activations, m: jax.Array) -> Loss:
            part = stages.last(outer, y, ring.microbatch(batch, m), PIPELINE)
            return jax.tree.map(jnp.add, sums, part)

        key = jax.random.wrap_key_data(key_data)
        first = ring.microbatch(batch, jnp.int32(0))
        final = jax.eval_shape(lambda: stages.first(outer, first, key, False, PIPELINE))
        shapes = jax.eval_shape(lambda y: stages.last(outer, y, first, PIPELINE), final)
        initial = ring.zeros_like(shapes)
        sums, layer_sums = forward_only(stages, params, batch, key, num_chunks, finish, initial)
        layer_sums = jax.tree.map(lambda x: jax.lax.psum(x, PIPELINE), layer_sums)
        return with_layer_sums(sums, layer_sums, stages.loss_name)

    return _on_mesh(on_stage, mesh, specs, PartitionSpec())(
        ring.with_cast_layers(stages, params), batch, jax.random.key_data(rng)
    )


def logits(stages: Stages, num_chunks: int, mesh: Mesh, specs: Specs, params: Params, batch: Batch) -> jax.Array:
    """Returns the logits of a batch, [M, b, T, padded vocabulary]: M microbatches of b sequences of T tokens.

    Args:
      stages: the model, split into stages; it has `logits`.
      num_chunks: chunks per stage, V.
      mesh: the mesh.
      specs: the spec of each parameter, a pytree with the structure of the parameters.
      params: global arrays; the weights of the layers have the leading dims `stages.Stack.shape`.
      batch: entry name -> array [b, M, ...], M microbatches of b sequences.

    Raises:
      UserError: the result of `Stages.repeated` is not (activations, None) or (activations, (loss, metrics)), or its
        activations differ from its input in structure, shape or dtype.
    """
    compute = stages.logits
    assert compute is not None

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> jax.Array:
        _, outer = ring.split_layers(params)
        key = jax.random.wrap_key_data(key_data)
        final = jax.eval_shape(lambda: stages.first(outer, ring.microbatch(batch, jnp.int32(0)), key, False, PIPELINE))
        shape = jax.eval_shape(lambda y: compute(outer, y, PIPELINE), final)
        initial = jnp.zeros((ring.num_microbatches(batch), *shape.shape), shape.dtype)
        finish = lambda columns, y, m: columns.at[m].set(compute(outer, y, PIPELINE))  # noqa: E731
        columns: jax.Array = forward_only(stages, params, batch, key, num_chunks, finish, initial)[0]
        return columns

    columns = PartitionSpec(None, None, None, PIPELINE)
    return _on_mesh(on_stage, mesh, specs, columns)(
        ring.with_cast_layers(stages, params), batch, jax.random.key_data(jax.random.key(0))
    )


def _on_mesh(on_stage: Callable[..., Arrays], mesh: Mesh, specs: Specs, out_specs: Specs) -> Callable[..., Arrays]:
    replicated = PartitionSpec()
    return on_shards(mesh, on_stage, (specs, replicated, replicated), out_specs, axes=MANUAL)


def forward_only(
    stages: Stages, params: Params, batch: Batch, rng: jax.Array, num_chunks: int, finish: Finish, initial: Total
) -> tuple[Total, LayerSums]:
    """Runs all microbatches through all stages and saves nothing for a backward pass.

    Each chunk is a pass of M + S - 1 rows (clock ticks), for M microbatches and S stages. In row r stage s runs
    microbatch r - s, or idles if there is no such microbatch.

    Args:
      stages: the model, split into stages.
      params: this stage's shard of the parameters.
      batch: entry name -> array [b, M, ...], M microbatches of b sequences; the same on every stage.
      rng: a typed key.
      num_chunks: chunks per stage, V.
      finish: a function (carry, activations of microbatch m after the last layer, m) -> carry. All stages call it, with
        the same activations.
      initial: the first carry.

    Returns:
      The last carry, and the (loss, metrics) that this stage's layers add, summed over all microbatches; None if the
      layers add no loss and no metrics.

    Raises:
      UserError: the result of `Stages.repeated` is not (activations, None) or (activations, (loss, metrics)), or its
        activations differ from its input in structure, shape or dtype.
    """
    layers, outer = ring.split_layers(params)
    num_stages, num_parts = jax.lax.axis_size(PIPELINE), ring.num_microbatches(batch)

    def embed(m: jax.Array) -> Activations:
        return stages.first(outer, ring.microbatch(batch, m), rng, False, PIPELINE)

    def run_layers(chunk: int, x: Activations, m: jax.Array) -> tuple[Activations, LayerSums]:
        weights = ring.chunk_of(layers, jnp.int32(chunk), num_chunks)
        start = ring.first_layer(chunk, num_stages, stages.num_layers, num_chunks)
        if stages.num_layers % (num_stages * num_chunks):
            end = ring.end_of_layers(chunk, num_stages, stages.num_layers, num_chunks)
            return ring.run_chunk(stages, weights, x, ring.microbatch(batch, m), rng, start, end)
        return ring.run_layers(stages, weights, x, ring.microbatch(batch, m), rng, start, False)

    zero = jnp.zeros((), jnp.int32)
    shapes, sums_shapes = jax.eval_shape(lambda m: run_layers(0, embed(m), m), zero)
    inbox, layer_sums = ring.zeros_like(shapes), ring.zeros_like(sums_shapes)

    def write(between: Activations, y: Activations, m: jax.Array) -> Activations:
        return jax.tree.map(lambda leaf, x: leaf.at[m].set(x), between, y)

    source: Source = embed
    for chunk in range(num_chunks - 1):
        empty = jax.tree.map(lambda x: jnp.zeros((num_parts, *x.shape), x.dtype), shapes)
        run = functools.partial(run_layers, chunk)
        _, between, layer_sums = _one_pass(run, source, write, (inbox, empty, layer_sums), num_parts)
        source = functools.partial(ring.take, between)
    run = functools.partial(run_layers, num_chunks - 1)
    _, carry, layer_sums = _one_pass(run, source, finish, (inbox, initial, layer_sums), num_parts)
    return carry, layer_sums


def _one_pass(run_layers: RunLayers, source: Source, finish: Finish, state: State, num_parts: int) -> State:
    """Runs all microbatches through one chunk of every stage.

    Args:
      run_layers: a function (activations, m) -> (activations, sums) that runs this stage's layers of the chunk on
        microbatch m.
      source: a function m -> the activations of microbatch m before stage 0.
      finish: a function (carry, activations after the last stage, m) -> carry.
      state: the state before the first row: (a stage input of any values, carry, sums of this stage's layers).
      num_parts: the number of microbatches, M.

    Returns:
      The state after M + S - 1 rows (clock ticks), for S stages.
    """
    num_stages, stage = jax.lax.axis_size(PIPELINE), jax.lax.axis_index(PIPELINE)

    def row(state: State, r: jax.Array, finishes: bool) -> tuple[State, None]:
        inbox, carry, layer_sums = state
        x = ring.where(stage == 0, source(jnp.minimum(r, num_parts - 1)), inbox)
        m = r - stage
        y, sums = run_layers(x, jnp.clip(m, 0, num_parts - 1))
        layer_sums = ring.add_if((m >= 0) & (m < num_parts), layer_sums, sums)
        if finishes:
            carry = finish(carry, ring.from_stage(y, stage == num_stages - 1), r - (num_stages - 1))
        return (ring.to_next(y, num_stages), carry, layer_sums), None

    ramp, steady = jnp.arange(num_stages - 1), jnp.arange(num_stages - 1, num_stages - 1 + num_parts)
    state, _ = jax.lax.scan(lambda s, r: row(s, r, False), state, ramp)
    state, _ = jax.lax.scan(lambda s, r: row(s, r, True), state, steady)
    return state
