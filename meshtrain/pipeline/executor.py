"""Runs a proven schedule: one SPMD program in which every stage takes its own column of the table, row by row.

A row is work for every stage: those that idle compute on garbage, and what comes of it is dropped by `where`, never by
a multiplication (0 x infinity is not 0). The backward of a row is made here by hand, `jax.vjp` from the kept stage
input, so that nothing but stage inputs outlives a row. Embedding and head are computed by all stages together
(vocabulary parallelism for pipelines, Yeung et al. 2024).

M: microbatches, b: sequences in one, T: tokens a sequence, D: embed dim, S: stages, V: chunks a stage, R: rows,
K: layers in a chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from meshtrain.layout.placement import manual_specs
from meshtrain.layout.replicas import Replicas
from meshtrain.models.task import Batch, Loss, Params, Stages, Sums
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.program import Program, Segment, Signature, segments
from meshtrain.pipeline.stages import PIPELINE

MANUAL = frozenset({PIPELINE})


class Carry(NamedTuple):
    """What lives from row to row on one stage."""

    inputs: jax.Array  # [slots + 1, b, T, D], the last one is for what nobody wants
    cotangents: jax.Array  # [slots + 1, b, T, D], likewise
    sums: tuple[jax.Array, jax.Array, Any]  # loss, weight, metrics
    layers: Any  # float32 gradients of this stage's layers
    outer: Any  # float32 gradients of everything else, of this stage's share where it is split


class Cell(NamedTuple):
    """One row as one stage sees it: int32 scalars, `active` bool."""

    microbatch: jax.Array
    chunk: jax.Array
    active: jax.Array
    input_slot: jax.Array
    embed_slot: jax.Array
    receive_slot: jax.Array
    cotangent_slot: jax.Array
    receive_cotangent_slot: jax.Array
    embed_microbatch: jax.Array
    head_microbatch: jax.Array
    embed_backward_microbatch: jax.Array


def gradients(
    stages: Stages,
    program: Program,
    replicas: Replicas,
    params: Params,
    batch: Batch,
    rng: jax.Array,
    seed: jax.Array | float = 1.0,
) -> Sums:
    """Returns the sums and gradients of a whole batch.

    Args:
      stages: the model, cut.
      program: the schedule, made ready to run.
      replicas: the mesh, where parameters live, and what replicas share; fsdp and tensor are left to the partitioner.
      params: float32; layers in the storage that `stages.py` describes.
      batch: microbatches [b, M, ...].
      rng: a typed key.
      seed: float32 scalar that the gradients come out multiplied by.
    """

    def on_stage(params: Params, batch: Batch, key_data: jax.Array, seed: jax.Array) -> tuple[Any, Params]:
        rows = Rows(stages, program, replicas, params, batch, jax.random.wrap_key_data(key_data), seed)
        carry, row = rows.start(), jnp.zeros((), jnp.int32)
        for segment in segments(program):
            carry, row = run_segment(rows, segment, carry, row)
        return carry.sums, {"layers": carry.layers, **carry.outer}

    together, key_data = replicas.together(on_stage, MANUAL), jax.random.key_data(rng)
    (loss, weight, metrics), found = together(params, batch, key_data, jnp.float32(seed))
    return Sums(loss, weight, metrics, found)


def run_segment(rows: "Rows", segment: Segment, carry: Carry, row: jax.Array) -> tuple[Carry, jax.Array]:
    """Runs `segment.count` rounds of its body from row number `row` on; returns the number of the row after as well."""

    def one_round(state: tuple[Carry, jax.Array], _: None) -> tuple[tuple[Carry, jax.Array], None]:
        carry, row = state
        for child in segment.body:
            if isinstance(child, Segment):
                carry, row = run_segment(rows, child, carry, row)
            else:
                run = rows.forward if child.kind == "F" else rows.backward
                carry, row = run(child, carry, rows.cell(row)), row + 1
        return (carry, row), None

    if segment.count == 1:
        return one_round((carry, row), None)[0]
    return jax.lax.scan(one_round, (carry, row), None, length=segment.count)[0]


class Rows:
    """The two kinds of rows, on one stage."""

    def __init__(
        self,
        stages: Stages,
        program: Program,
        replicas: Replicas,
        params: Params,
        batch: Batch,
        rng: jax.Array,
        seed: jax.Array,
    ) -> None:
        """Keeps what no row changes; `params` and `batch` are this stage's share."""
        self.stages, self.program, self.replicas = stages, program, replicas
        self.batch, self.rng, self.seed = batch, rng, seed
        self.layers, self.outer = ring.split_layers(params)
        self.layer_homes, self.outer_homes = ring.split_layers(replicas.homes)
        self.num_stages, self.num_chunks = program.schedule.num_stages, program.schedule.num_chunks
        self.stage = jax.lax.axis_index(PIPELINE)

    def cell(self, row: jax.Array) -> Cell:
        """Returns this stage's cell of a row. The whole table is a constant, so that rows cost no memory."""
        tables = [getattr(self.program, name).astype(np.int32) for name in Cell._fields]
        shape = self.program.active.shape
        every = np.stack([np.broadcast_to(t.reshape(shape[0], -1), shape) for t in tables], axis=-1)
        entries = ring.take(ring.take(jnp.asarray(every), row), self.stage)
        cell = Cell(*entries)
        return cell._replace(active=cell.active > 0)

    def start(self) -> Carry:
        """Returns empty buffers and zero sums."""
        zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)  # noqa: E731
        x = jax.eval_shape(lambda: self.embed(self.outer, jnp.int32(0)))
        sums = jax.eval_shape(lambda: self.head(self.outer, jnp.zeros(x.shape, x.dtype), jnp.int32(0)))
        return Carry(
            jnp.zeros((self.program.num_slots + 1, *x.shape), x.dtype),
            jnp.zeros((self.program.num_cotangent_slots + 1, *x.shape), x.dtype),
            zeros(sums),
            self.replicas.zeros(self.layers, self.layer_homes),
            self.replicas.zeros(self.outer, self.outer_homes),
        )

    def embed(self, outer: Params, m: jax.Array) -> jax.Array:
        """Returns the activations that enter the first layer, on every stage."""
        return self.stages.first(outer, ring.microbatch(self.batch, m), self.rng, True, PIPELINE)

    def head(self, outer: Params, y: jax.Array, m: jax.Array) -> Loss:
        """Returns the loss of a microbatch from its final activations, on every stage."""
        return self.stages.last(outer, y, ring.microbatch(self.batch, m), PIPELINE)

    def run_layers(self, layers: Params, x: jax.Array, cell: Cell, skipped: jax.Array | int = 0) -> jax.Array:
        """Returns the activations after some layers of the cell's chunk, the first `skipped` of which are left out."""
        start = ring.first_layer(cell.chunk, self.num_stages, self.stages.num_layers, self.num_chunks) + skipped
        return self.stages.repeated(layers, x, ring.microbatch(self.batch, cell.microbatch), self.rng, start, True)

    def run_and_keep(self, layers: Params, x: jax.Array, cell: Cell) -> tuple[jax.Array, Any]:
        """Returns the activations after the cell's chunk, and the backward function of each layer, stacked [K]."""

        def one(x: jax.Array, layer: tuple[jax.Array, Params]) -> tuple[jax.Array, Any]:
            index, weights = layer
            return jax.vjp(lambda weights, x: self.run_layers(weights, x, cell, index), weights, x)

        one_by_one = jax.tree.map(lambda leaf: leaf[:, None], layers)
        return jax.lax.scan(one, x, (jnp.arange(jax.tree.leaves(layers)[0].shape[0]), one_by_one))

    def forward(self, row: Signature, carry: Carry, cell: Cell) -> Carry:
        """Reads a stage input, keeps it, sends the output to the next stage."""
        inputs = carry.inputs
        if row.embed:
            inputs = _write(inputs, self.embed(self.outer, jnp.maximum(cell.embed_microbatch, 0)), cell.embed_slot)
        layers = ring.chunk_of(self.layers, cell.chunk, self.num_chunks)
        y = self.run_layers(layers, _read(inputs, cell.input_slot), cell)
        return carry._replace(inputs=_write(inputs, ring.to_next(y, self.num_stages), cell.receive_slot))

    def backward(self, row: Signature, carry: Carry, cell: Cell) -> Carry:
        """Runs the stage again from its input, then backward; sends the input's cotangent to the previous stage."""
        layers = ring.chunk_of(self.layers, cell.chunk, self.num_chunks)
        y, pulls = self.run_and_keep(layers, _read(carry.inputs, cell.input_slot), cell)
        cotangent = _read(carry.cotangents, cell.cotangent_slot)
        if row.head:
            carry, cotangent = self.head_backward(carry, cell, y, cotangent)
        carry, x_cotangent = self.layers_backward(carry, cell, pulls, cotangent)
        if row.embed_backward:
            carry = self.embed_backward(carry, cell, x_cotangent)
        arrived = ring.to_previous(x_cotangent, self.num_stages)
        return carry._replace(cotangents=_write(carry.cotangents, arrived, cell.receive_cotangent_slot))

    def layers_backward(self, carry: Carry, cell: Cell, pulls: Any, cotangent: jax.Array) -> tuple[Carry, jax.Array]:
        """Adds each layer's gradient where it belongs, last layer first; returns the cotangent of the chunk's input.

        Done layer by layer because gradients of a whole chunk would be a second set of accumulators, written once more.
        """

        def one(sums: tuple[Params, jax.Array], layer: tuple[jax.Array, Any]) -> tuple[tuple[Params, jax.Array], None]:
            (total, cotangent), (index, pull) = sums, layer
            part, cotangent = pull(cotangent)
            part = self.replicas.part(part, self.layer_homes)
            place = (index,) if self.num_chunks == 1 else (cell.chunk, index)
            return (ring.add_at(total, part, place, cell.active), cotangent), None

        num_layers = jax.tree.leaves(self.layers)[0].shape[0 if self.num_chunks == 1 else 1]
        numbered = (jnp.arange(num_layers), pulls)
        (total, cotangent), _ = jax.lax.scan(one, (carry.layers, cotangent), numbered, reverse=True)
        return carry._replace(layers=total), cotangent

    def head_backward(self, carry: Carry, cell: Cell, y: jax.Array, cotangent: jax.Array) -> tuple[Carry, jax.Array]:
        """Adds a microbatch's loss; returns the cotangent of `y` where this is the last stage in its last chunk."""
        wanted, m = cell.head_microbatch >= 0, jnp.maximum(cell.head_microbatch, 0)
        is_last = (self.stage == self.num_stages - 1) & (cell.chunk == self.num_chunks - 1)
        final = ring.from_stage(y, is_last & cell.active)

        def total(outer: Params, final: jax.Array) -> tuple[jax.Array, Any]:
            loss, weight, metrics = self.head(outer, final, m)
            return loss, (loss, weight, metrics)

        _, pull, sums = jax.vjp(total, self.outer, final, has_aux=True)
        outer, final_cotangent = pull(self.seed)
        outer = self.replicas.part(outer, self.outer_homes)
        carry = carry._replace(sums=_add(carry.sums, sums, wanted), outer=_add(carry.outer, outer, wanted))
        return carry, jnp.where(is_last & cell.active, final_cotangent, cotangent)

    def embed_backward(self, carry: Carry, cell: Cell, x_cotangent: jax.Array) -> Carry:
        """Adds the embedding's gradient of the microbatch that has come back to the first stage."""
        wanted, m = cell.embed_backward_microbatch >= 0, jnp.maximum(cell.embed_backward_microbatch, 0)
        is_first = (self.stage == 0) & (cell.chunk == 0)
        _, pull = jax.vjp(lambda outer: self.embed(outer, m), self.outer)
        (outer,) = pull(ring.from_stage(x_cotangent, is_first & cell.active))
        outer = self.replicas.part(outer, self.outer_homes)
        return carry._replace(outer=_add(carry.outer, outer, wanted))


def _read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return ring.take(buffer, slot)


def _write(buffer: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, x, slot, 0, allow_negative_indices=False)


def _add(total: Any, part: Any, wanted: jax.Array) -> Any:
    return jax.tree.map(lambda total, part: jnp.where(wanted, total + part, total), total, part)


def evaluate(
    stages: Stages, num_chunks: int, mesh: Mesh, specs: Any, params: Params, batch: Batch, rng: jax.Array
) -> Loss:
    """Returns the sums of a batch [b, M, ...] without gradients, nothing dropped: (loss, weight, metrics)."""

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> Loss:
        _, outer = ring.split_layers(params)

        def finish(sums: Loss, y: jax.Array, m: jax.Array) -> Loss:
            part = stages.last(outer, y, ring.microbatch(batch, m), PIPELINE)
            return jax.tree.map(jnp.add, sums, part)

        key = jax.random.wrap_key_data(key_data)
        first = ring.microbatch(batch, jnp.int32(0))
        final = jax.eval_shape(lambda: stages.first(outer, first, key, False, PIPELINE))
        shapes = jax.eval_shape(lambda y: stages.last(outer, y, first, PIPELINE), final)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return ring.forward_only(stages, params, batch, key, num_chunks, finish, zeros)

    return _on_mesh(on_stage, mesh, specs, PartitionSpec())(params, batch, jax.random.key_data(rng))


def logits(stages: Stages, num_chunks: int, mesh: Mesh, specs: Any, params: Params, batch: Batch) -> jax.Array:
    """Returns [M, b, T, padded vocabulary] of a batch [b, M, ...]."""
    compute = stages.logits
    assert compute is not None

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> jax.Array:
        _, outer = ring.split_layers(params)
        key = jax.random.wrap_key_data(key_data)
        final = jax.eval_shape(lambda: stages.first(outer, ring.microbatch(batch, jnp.int32(0)), key, False, PIPELINE))
        shape = jax.eval_shape(lambda y: compute(outer, y, PIPELINE), final)
        every = jnp.zeros((ring.num_microbatches(batch), *shape.shape), shape.dtype)
        finish = lambda kept, y, m: kept.at[m].set(compute(outer, y, PIPELINE))  # noqa: E731
        return ring.forward_only(stages, params, batch, key, num_chunks, finish, every)

    columns = PartitionSpec(None, None, None, PIPELINE)
    return _on_mesh(on_stage, mesh, specs, columns)(params, batch, jax.random.key_data(jax.random.key(0)))


def _on_mesh(on_stage: Any, mesh: Mesh, specs: Any, out_specs: Any) -> Any:
    manual, whole = manual_specs(specs, MANUAL), PartitionSpec()
    return jax.shard_map(
        on_stage,
        mesh=mesh,
        in_specs=(manual, whole, whole),
        out_specs=out_specs,
        axis_names=MANUAL,
        check_vma=False,
    )
