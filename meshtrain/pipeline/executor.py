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

from meshtrain.layout.replicas import Replicas
from meshtrain.layout.trees import select
from meshtrain.models.task import Batch, Loss, Params, Stages, Sums
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.program import Program, Segment, Signature, segments
from meshtrain.pipeline.stages import MANUAL, PIPELINE


class Carry(NamedTuple):
    """What lives from row to row on one stage."""

    inputs: jax.Array  # [slots + 1, b, T, D], the last one is for what nobody wants
    cotangents: jax.Array  # [slots + 1, b, T, D], likewise
    leaving: jax.Array  # [b, T, D], the last cotangent that came out of the model's first layer; zeros on other stages
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
        carry = rows.embed_backward(carry, jnp.int32(program.last_microbatch))
        return carry.sums, select({"layers": carry.layers, **carry.outer}, replicas.trained)[0]

    compute, key_data = replicas.data_parallel(on_stage, MANUAL), jax.random.key_data(rng)
    (loss, weight, metrics), found = compute(params, batch, key_data, jnp.float32(seed))
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
        self.layers, self.outer = ring.split_layers(stages, params)
        self.layer_homes = replicas.homes["layers"]
        self.outer_homes = {name: replicas.homes[name] for name in self.outer}
        self.num_stages, self.num_chunks = program.schedule.num_stages, program.schedule.num_chunks
        self.stage = jax.lax.axis_index(PIPELINE)
        self.indices = jnp.arange(stages.num_layers // (self.num_stages * self.num_chunks))

    def cell(self, row: jax.Array) -> Cell:
        """Returns this stage's cell of a row. The whole table is a constant, so that rows cost no memory."""
        tables = [getattr(self.program, name).astype(np.int32) for name in Cell._fields]
        shape = self.program.active.shape
        every = np.stack([np.broadcast_to(t.reshape(shape[0], -1), shape) for t in tables], axis=-1)
        entries = ring.take(ring.take(jnp.asarray(every), row), self.stage)
        cell = Cell(*entries)
        return cell._replace(active=cell.active > 0)

    def start(self) -> Carry:
        """Returns empty buffers but for the first microbatch, and zero sums."""
        zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)  # noqa: E731
        x = self.embed(self.outer, jnp.int32(self.program.first_microbatch))
        return Carry(
            jnp.zeros((self.program.num_slots + 1, *x.shape), x.dtype).at[0].set(x),
            jnp.zeros((self.program.num_cotangent_slots + 1, *x.shape), x.dtype),
            jnp.zeros_like(x),
            zeros(jax.eval_shape(self.head, self.outer, x, jnp.int32(0))),
            self.replicas.zeros(self.layers, self.layer_homes),
            self.replicas.zeros(self.outer, self.outer_homes),
        )

    def embed(self, outer: Params, m: jax.Array) -> jax.Array:
        """Returns the activations that enter the first layer, on every stage."""
        return self.stages.first(outer, ring.microbatch(self.batch, m), self.rng, True, PIPELINE)

    def head(self, outer: Params, y: jax.Array, m: jax.Array) -> Loss:
        """Returns the loss of a microbatch from its final activations, on every stage."""
        return self.stages.last(outer, y, ring.microbatch(self.batch, m), PIPELINE)

    def layer(self, cell: Cell, index: jax.Array) -> Params:
        """Returns the weights of one layer of the cell's chunk, each leaf [1, ...]."""
        return ring.layer_at(self.layers, ring.place(cell.chunk, index, self.num_chunks))

    def run_layers(self, weights: Params, x: jax.Array, cell: Cell, index: jax.Array | int) -> jax.Array:
        """Returns the activations after some layers of the cell's chunk, from `index` on."""
        start = ring.first_layer(cell.chunk, self.num_stages, self.stages.num_layers, self.num_chunks) + index
        return self.stages.repeated(weights, x, ring.microbatch(self.batch, cell.microbatch), self.rng, start, True)

    def run_and_keep(self, x: jax.Array, cell: Cell) -> tuple[jax.Array, Any]:
        """Returns the activations after the cell's chunk, and the backward function of each layer, stacked [K]."""

        def one(x: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
            weights = self.layer(cell, index)
            y, pull = jax.vjp(lambda weights, x: self.run_layers(weights, x, cell, index), weights, x)
            return y, ring.keeping_no_weights(pull, weights)

        return jax.lax.scan(one, x, self.indices)

    def forward(self, row: Signature, carry: Carry, cell: Cell) -> Carry:
        """Reads a stage input, keeps it, sends the output to the next stage."""

        def one(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return self.run_layers(self.layer(cell, index), x, cell, index), None

        x = _read(carry.inputs, cell.input_slot)
        # Where a stage has one chunk its layers lie together, and the model's own loop reads them: less to compile.
        y = self.run_layers(self.layers, x, cell, 0) if self.num_chunks == 1 else jax.lax.scan(one, x, self.indices)[0]
        inputs = _write(carry.inputs, ring.to_next(y, self.num_stages), cell.receive_slot)
        return self.embed_next(row, carry._replace(inputs=inputs), cell)

    def backward(self, row: Signature, carry: Carry, cell: Cell) -> Carry:
        """Runs the stage again from its input, then backward; sends the input's cotangent to the previous stage."""
        if row.embed_backward:
            carry = self.embed_backward(carry, cell.embed_backward_microbatch)
        y, pulls = self.run_and_keep(_read(carry.inputs, cell.input_slot), cell)
        cotangent = _read(carry.cotangents, cell.cotangent_slot)
        if row.head:
            carry, cotangent = self.head_backward(carry, cell, y, cotangent)
        carry, x_cotangent = self.layers_backward(carry, cell, pulls, cotangent)
        is_first = (self.stage == 0) & (cell.chunk == 0) & cell.active
        leaving = jnp.where(is_first, x_cotangent, carry.leaving)
        arrived = ring.to_previous(x_cotangent, self.num_stages)
        cotangents = _write(carry.cotangents, arrived, cell.receive_cotangent_slot)
        return self.embed_next(row, carry._replace(cotangents=cotangents, leaving=leaving), cell)

    def layers_backward(self, carry: Carry, cell: Cell, pulls: Any, cotangent: jax.Array) -> tuple[Carry, jax.Array]:
        """Adds each layer's gradient where it belongs, last layer first; returns the cotangent of the chunk's input.

        Done layer by layer because gradients of a whole chunk would be a second set of accumulators, written once more.
        """

        def one(sums: tuple[Params, jax.Array], layer: tuple[Any, Any]) -> tuple[tuple[Params, jax.Array], None]:
            (total, cotangent), (index, pull) = sums, layer
            part, cotangent = pull(self.layer(cell, index), cotangent)
            part = self.replicas.part(part, self.layer_homes)
            place = ring.place(cell.chunk, index, self.num_chunks)
            return (ring.add_at(total, part, place, cell.active), cotangent), None

        (total, cotangent), _ = jax.lax.scan(one, (carry.layers, cotangent), (self.indices, pulls), reverse=True)
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

    def embed_next(self, row: Signature, carry: Carry, cell: Cell) -> Carry:
        """Embeds the microbatch that stage 0 is to have next, in rows that can."""
        if not row.embed:
            return carry
        x = self.embed(self.outer, jnp.maximum(cell.embed_microbatch, 0))
        return carry._replace(inputs=_write(carry.inputs, x, cell.embed_slot))

    def embed_backward(self, carry: Carry, m: jax.Array) -> Carry:
        """Adds the embedding's gradient of microbatch `m`, which has come back to the first stage; of none below 0."""
        _, pull = jax.vjp(lambda outer: self.embed(outer, jnp.maximum(m, 0)), self.outer)
        (outer,) = pull(ring.from_stage(carry.leaving, self.stage == 0))
        return carry._replace(outer=_add(carry.outer, self.replicas.part(outer, self.outer_homes), m >= 0))


def _read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return ring.take(buffer, slot)


def _write(buffer: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, x, slot, 0, allow_negative_indices=False)


def _add(total: Any, part: Any, wanted: jax.Array) -> Any:
    return jax.tree.map(lambda total, part: jnp.where(wanted, total + part, total), total, part)
