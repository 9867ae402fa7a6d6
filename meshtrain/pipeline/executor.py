"""Runs a proven schedule: one SPMD program in which every stage takes its own column of the table, row by row.

A row is work for every stage: those that idle compute on garbage, and what comes of it is dropped by `where`, never by
a multiplication (0 x infinity is not 0). The backward of a row is made here by hand, `jax.vjp` from the kept stage
input, so that nothing but stage inputs outlives a row. Embedding and head are computed by all stages together (vocabulary
parallelism for pipelines, Yeung et al. 2024).

M: microbatches, b: sequences in one, T: tokens a sequence, D: embed dim, S: stages, V: chunks a stage, R: rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

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
    stages: Stages, program: Program, mesh: Mesh, specs: Any, params: Params, batch: Batch, rng: jax.Array
) -> Sums:
    """Returns the sums and gradients of a whole batch.

    Args:
      stages: the model, cut.
      program: the schedule, made ready to run.
      mesh: the mesh; axes other than `pipeline` are left to the partitioner.
      specs: a tree of `PartitionSpec` like `params`.
      params: float32; layers in the storage that `stages.py` describes.
      batch: microbatches [M, b, ...].
      rng: a typed key.
    """

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> tuple[Any, ...]:
        rows = Rows(stages, program, params, batch, jax.random.wrap_key_data(key_data))
        cells, carry, start = rows.cells(), rows.start(), 0
        for segment in segments(program):
            length = num_rows(segment)
            part = jax.tree.map(lambda table, begin=start, end=start + length: table[begin:end], cells)
            carry, start = run_segment(rows, segment, carry, part), start + length
        return (*carry.sums, {"layers": carry.layers, **carry.outer})

    whole = PartitionSpec()
    out_specs = (whole, whole, whole, ring.manual_specs(specs, MANUAL))
    return Sums(*_on_mesh(on_stage, mesh, specs, out_specs)(params, batch, jax.random.key_data(rng)))


def num_rows(node: Signature | Segment) -> int:
    """Returns how many rows a node of the nested loops runs."""
    return node.count * sum(num_rows(child) for child in node.body) if isinstance(node, Segment) else 1


def run_segment(rows: "Rows", segment: Segment, carry: Carry, cells: Cell) -> Carry:
    """Runs `segment.count` rounds of its body; the leading dim of each table in `cells` is its rows."""
    length = num_rows(segment) // segment.count

    def one_round(carry: Carry, cells: Cell) -> tuple[Carry, None]:
        start = 0
        for child in segment.body:
            end = start + num_rows(child)
            if isinstance(child, Segment):
                part = jax.tree.map(lambda table, begin=start, end=end: table[begin:end], cells)
                carry = run_segment(rows, child, carry, part)
            else:
                cell = jax.tree.map(lambda table, row=start: table[row], cells)
                carry = rows.forward(child, carry, cell) if child.kind == "F" else rows.backward(child, carry, cell)
            start = end
        return carry, None

    rounds = jax.tree.map(lambda table: table.reshape(segment.count, length, *table.shape[1:]), cells)
    if segment.count == 1:
        return one_round(carry, jax.tree.map(lambda table: table[0], rounds))[0]
    return jax.lax.scan(one_round, carry, rounds)[0]


class Rows:
    """The two kinds of rows, on one stage."""

    def __init__(self, stages: Stages, program: Program, params: Params, batch: Batch, rng: jax.Array) -> None:
        """Keeps what no row changes; `params` and `batch` are this stage's share."""
        self.stages, self.program, self.batch, self.rng = stages, program, batch, rng
        self.layers, self.outer = ring.split_layers(params)
        self.num_stages, self.num_chunks = program.schedule.num_stages, program.schedule.num_chunks
        self.stage = jax.lax.axis_index(PIPELINE)

    def cells(self) -> Cell:
        """Returns this stage's column of the table, each entry [R]."""
        tables = [jnp.asarray(np.asarray(getattr(self.program, name))) for name in Cell._fields]
        return Cell(*(table[:, self.stage] if table.ndim == 2 else table for table in tables))

    def start(self) -> Carry:
        """Returns empty buffers and zero sums."""
        zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)  # noqa: E731
        x = jax.eval_shape(lambda: self.embed(self.outer, jnp.int32(0)))
        sums = jax.eval_shape(lambda: self.head(self.outer, jnp.zeros(x.shape, x.dtype), jnp.int32(0)))
        return Carry(
            jnp.zeros((self.program.num_slots + 1, *x.shape), x.dtype),
            jnp.zeros((self.program.num_cotangent_slots + 1, *x.shape), x.dtype),
            zeros(sums),
            zeros(self.layers),
            zeros(self.outer),
        )

    def embed(self, outer: Params, m: jax.Array) -> jax.Array:
        """Returns the activations that enter the first layer, on every stage."""
        return self.stages.first(outer, ring.microbatch(self.batch, m), self.rng, True, PIPELINE)

    def head(self, outer: Params, y: jax.Array, m: jax.Array) -> Loss:
        """Returns the loss of a microbatch from its final activations, on every stage."""
        return self.stages.last(outer, y, ring.microbatch(self.batch, m), PIPELINE)

    def run_chunk(self, layers: Params, x: jax.Array, cell: Cell) -> jax.Array:
        """Returns the activations after this stage's layers of the cell's chunk."""
        start = ring.first_layer(cell.chunk, self.num_stages, self.stages.num_layers, self.num_chunks)
        return self.stages.repeated(layers, x, ring.microbatch(self.batch, cell.microbatch), self.rng, start, True)

    def forward(self, row: Signature, carry: Carry, cell: Cell) -> Carry:
        """Reads a stage input, keeps it, sends the output to the next stage."""
        inputs = carry.inputs
        if row.embed:
            inputs = _write(inputs, self.embed(self.outer, jnp.maximum(cell.embed_microbatch, 0)), cell.embed_slot)
        layers = ring.chunk_of(self.layers, cell.chunk, self.num_chunks)
        y = self.run_chunk(layers, _read(inputs, cell.input_slot), cell)
        return carry._replace(inputs=_write(inputs, ring.to_next(y, self.num_stages), cell.receive_slot))

    def backward(self, row: Signature, carry: Carry, cell: Cell) -> Carry:
        """Runs the stage again from its input, then backward; sends the input's cotangent to the previous stage."""
        layers = ring.chunk_of(self.layers, cell.chunk, self.num_chunks)
        x = _read(carry.inputs, cell.input_slot)
        y, pull = jax.vjp(lambda layers, x: self.run_chunk(layers, x, cell), layers, x)
        cotangent = _read(carry.cotangents, cell.cotangent_slot)
        if row.head:
            carry, cotangent = self.head_backward(carry, cell, y, cotangent)
        layer_gradients, x_cotangent = pull(cotangent)
        carry = carry._replace(
            layers=ring.add_to_chunk(carry.layers, layer_gradients, cell.chunk, self.num_chunks, cell.active)
        )
        if row.embed_backward:
            carry = self.embed_backward(carry, cell, x_cotangent)
        arrived = ring.to_previous(x_cotangent, self.num_stages)
        return carry._replace(cotangents=_write(carry.cotangents, arrived, cell.receive_cotangent_slot))

    def head_backward(self, carry: Carry, cell: Cell, y: jax.Array, cotangent: jax.Array) -> tuple[Carry, jax.Array]:
        """Adds a microbatch's loss; returns the cotangent of `y` where this is the last stage in its last chunk."""
        wanted, m = cell.head_microbatch >= 0, jnp.maximum(cell.head_microbatch, 0)
        is_last = (self.stage == self.num_stages - 1) & (cell.chunk == self.num_chunks - 1)
        final = ring.from_stage(y, is_last & cell.active)

        def total(outer: Params, final: jax.Array) -> tuple[jax.Array, Any]:
            loss, weight, metrics = self.head(outer, final, m)
            return loss, (loss, weight, metrics)

        _, pull, sums = jax.vjp(total, self.outer, final, has_aux=True)
        outer, final_cotangent = pull(jnp.ones((), jnp.float32))
        carry = carry._replace(sums=_add(carry.sums, sums, wanted), outer=_add(carry.outer, outer, wanted))
        return carry, jnp.where(is_last & cell.active, final_cotangent, cotangent)

    def embed_backward(self, carry: Carry, cell: Cell, x_cotangent: jax.Array) -> Carry:
        """Adds the embedding's gradient of the microbatch that has come back to the first stage."""
        wanted, m = cell.embed_backward_microbatch >= 0, jnp.maximum(cell.embed_backward_microbatch, 0)
        is_first = (self.stage == 0) & (cell.chunk == 0)
        _, pull = jax.vjp(lambda outer: self.embed(outer, m), self.outer)
        (outer,) = pull(ring.from_stage(x_cotangent, is_first & cell.active))
        return carry._replace(outer=_add(carry.outer, outer, wanted))


def _read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False)


def _write(buffer: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, x, slot, 0)


def _add(total: Any, part: Any, wanted: jax.Array) -> Any:
    return jax.tree.map(lambda total, part: jnp.where(wanted, total + part, total), total, part)


def evaluate(
    stages: Stages, num_chunks: int, mesh: Mesh, specs: Any, params: Params, batch: Batch, rng: jax.Array
) -> Loss:
    """Returns the sums of a batch [M, b, ...] without gradients, nothing dropped: (loss, weight, metrics)."""

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
    """Returns [M, b, T, padded vocabulary] of a batch [M, b, ...]."""
    compute = stages.logits
    assert compute is not None

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> jax.Array:
        _, outer = ring.split_layers(params)
        key = jax.random.wrap_key_data(key_data)
        final = jax.eval_shape(lambda: stages.first(outer, ring.microbatch(batch, jnp.int32(0)), key, False, PIPELINE))
        shape = jax.eval_shape(lambda y: compute(outer, y, PIPELINE), final)
        every = jnp.zeros((jax.tree.leaves(batch)[0].shape[0], *shape.shape), shape.dtype)
        finish = lambda kept, y, m: kept.at[m].set(compute(outer, y, PIPELINE))  # noqa: E731
        return ring.forward_only(stages, params, batch, key, num_chunks, finish, every)

    columns = PartitionSpec(None, None, None, PIPELINE)
    return _on_mesh(on_stage, mesh, specs, columns)(params, batch, jax.random.key_data(jax.random.key(0)))


def _on_mesh(on_stage: Any, mesh: Mesh, specs: Any, out_specs: Any) -> Any:
    manual, whole = ring.manual_specs(specs, MANUAL), PartitionSpec()
    return jax.shard_map(
        on_stage,
        mesh=mesh,
        in_specs=(manual, whole, whole),
        out_specs=out_specs,
        axis_names=MANUAL,
        check_vma=False,
    )
