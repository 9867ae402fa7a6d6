"""Runs a pipeline schedule as one SPMD program: in each row of its table, every stage runs the action in its column.

A row is a clock tick. A stage that idles in a row computes as well, on the values in its dump slots (additional slots
for unused arrays); `jnp.where` drops the results (a product with 0 would keep infinities). A forward row saves the
residuals of its layers, as selected by the model, in a slot from which the backward row reads
them (`pullback.py`).
All stages compute embedding and head together (vocabulary parallelism for pipelines, Yeung et al. 2024). Activations
may be any pytree of arrays.

M: microbatches, b: sequences in a microbatch, T: tokens per sequence, D: embed dim, S: stages, V: chunks per stage, R:
rows, K: layers in a chunk, U: layers in a unit (`Stages.num_together`).
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.models.task import Activations, Batch, LayerSums, Loss, Params, Stages, Sums, with_layer_sums
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.program import Cells, Program, Segment, Signature, chunk_ends, segments
from meshtrain.pipeline.pullback import SplitLayer, floating, with_float0
from meshtrain.pipeline.stages import MANUAL
from meshtrain.sharding.gradients import GradientSync, Reduced
from meshtrain.sharding.param_sharding import ParamShardings
from meshtrain.sharding.rules import PIPELINE
from meshtrain.sharding.trees import Arrays, merge, select

# The index of a unit among the units of this stage: a traced int32 scalar, or a NumPy constant.
Place: TypeAlias = jax.Array | np.int32


class Carry(NamedTuple):
    """The arrays that one stage carries from one row (clock tick) of the schedule to the next."""

    inputs: Activations  # stage inputs, [slots + 1, b, ...] such as [slots + 1, b, T, D]; the last is the dump slot
    kept: list[jax.Array]  # saved residuals of units, each [(slots + 1) K / U, ...]; the last K / U are the dump slot
    outputs: Activations  # outputs of the last layer, until the head reads them; shapes like inputs
    cotangents: Activations  # cotangents of outputs (floating leaves), until their backward row, [slots + 1, b, ...]
    leaving: Activations  # latest cotangent of the first layer's input, floating leaves; zeros on all stages except 0
    sums: Loss  # loss, weight, metrics of the head; the same on every stage
    layer_sums: LayerSums  # (loss, metrics) that this stage's layers add; None if layers add nothing
    layers: Params  # float32 gradient sums of this stage's trained layers
    outer: Params  # float32 gradient sums of all other trained parameters; this stage's shard if sharded
    reduced: Arrays  # `ReducedChunks`; None if chunks are not reduced separately


def gradients(
    stages: Stages,
    program: Program,
    replicas: GradientSync,
    params: Params,
    batch: Batch,
    rng: jax.Array,
    seed: jax.Array | float = 1.0,
) -> Sums:
    """Returns the loss, weight and metrics of a batch, and the gradients of all trained parameters.

    Args:
      stages: the model, split into stages.
      program: the schedule with its buffer slots.
      replicas: the mesh, the shardings of parameters, which parameters are trained, and how gradients are reduced over
        data; all other axes are left to the partitioner.
      params: parameters, float32; the weights of the layers have the leading dims `stages.Stack.shape`.
      batch: entry name -> array [b, M, ...], M microbatches of b sequences.
      rng: a typed key.
      seed: the cotangent of the loss, a float32 scalar: gradients are multiplied by it.

    Raises:
      UserError: the result of `Stages.repeated` is not (activations, None) or (activations, (loss, metrics)); its
        activations differ from its input in structure, shape or dtype; `Stages.num_together` does not divide the number
        of layers in a chunk; or a residual that depends on activations is in host memory.
    """

    def on_stage(params: Params, batch: Batch, key_data: jax.Array, seed: jax.Array) -> tuple[Loss, Params]:
        rows = Rows(stages, program, replicas, params, batch, jax.random.wrap_key_data(key_data), seed)
        carry, row = rows.start(), jnp.zeros((), jnp.int32)
        for segment in segments(program):
            carry, row = run_segment(rows, segment, carry, row)
        carry = rows.embed_backward(carry, jnp.int32(program.last_microbatch))
        layer_sums = jax.tree.map(lambda x: jax.lax.psum(x, PIPELINE), carry.layer_sums)
        units = rows.reduction.finished(carry.layers, carry.reduced) if rows.reduction else carry.layers
        layers = ring.from_units(units, rows.num_chunks)
        if rows.reduction:
            layers = jax.tree.map(Reduced, layers)
        return with_layer_sums(carry.sums, layer_sums, stages.loss_name), {"layers": layers, **carry.outer}

    compute, key_data = replicas.data_parallel(on_stage, MANUAL), jax.random.key_data(rng)
    (loss, weight, metrics), reduced = compute(
        ring.with_cast_layers(stages, params), batch, key_data, jnp.float32(seed)
    )
    return Sums(loss, weight, metrics, reduced)


def run_segment(rows: "Rows", segment: Segment, carry: Carry, row: jax.Array) -> tuple[Carry, jax.Array]:
    """Runs all iterations of a segment; returns the carry after them, and the index of the row after the segment.

    Args:
      rows: runs single rows.
      segment: rows (clock ticks) that run as one loop; it may contain other segments.
      carry: the stage's arrays before the segment.
      row: index of the segment's first row, int32 scalar.
    """

    def one_round(state: tuple[Carry, jax.Array], _: None) -> tuple[tuple[Carry, jax.Array], None]:
        carry, row = state
        reduction = rows.reduction if segment.reduces else None
        if reduction:
            layers, parts, place = reduction.begin(carry.layers, carry.reduced)
            carry = carry._replace(layers=layers)
        for child in segment.body:
            if isinstance(child, Segment):
                carry, row = run_segment(rows, child, carry, row)
            else:
                run = rows.forward if child.kind == "F" else rows.backward
                carry, row = run(child, carry, rows.cell(row)), row + 1
        if reduction:
            layers, reduced = reduction.end(carry.layers, carry.reduced, parts, place)
            carry = carry._replace(layers=layers, reduced=reduced)
        return (carry, row), None

    if segment.count == 1:
        return one_round((carry, row), None)[0]
    return jax.lax.scan(one_round, (carry, row), None, length=segment.count)[0]


class ReducedChunks(NamedTuple):
    """The chunks whose gradients have been reduced over data so far: their number, and this replica's shards.

    A gradient that is reduced without being scattered (every gradient at ZeRO level 0) is not stored here: it replaces
    this replica's sum in `Carry.layers`. Chunks are reduced in the order of `chunk_ends`. The letters in shapes: V
    chunks per stage, K layers in a chunk, U layers in a unit.
    """

    scattered: Params  # float32 [V K / U, U, ...], this replica's shards; None for gradients that are not scattered
    num_chunks: jax.Array  # number of chunks reduced so far, int32 scalar


class ChunkReduction:
    """Reduces the gradients of each chunk over data as soon as they are complete, while the stages run later rows.

    Call `begin` before these later rows, and `end` after them. A stage finishes its chunks one after the other, S (the
    number of stages) rows apart, and idles or works on other chunks meanwhile. So the reductions of all chunks except
    the last can overlap rows, unlike a single reduction after the last row.
    """

    def __init__(self, program: Program, replicas: GradientSync, stored: ParamShardings, num_units: int) -> None:
        """Computes the order in which chunks are reduced.

        Args:
          program: the schedule as a program.
          replicas: how gradients are reduced over data.
          stored: `ParamSharding` of each trained weight of the layers.
          num_units: the number of units in a chunk; a unit is a group of layers that are computed in one call.
        """
        self.replicas, self.stored, self.num_units = replicas, stored, num_units
        self.chunks = np.array([chunk for _, chunk in chunk_ends(program)], np.int32)
        self.is_scattered = jax.tree.map(lambda weight: weight.is_scattered, stored)

    def start(self, units: Params) -> ReducedChunks:
        """Returns the `ReducedChunks` before the first reduction: zeros as gradients, and 0 reduced chunks.

        Args:
          units: the trained weights of this stage's layers, each leaf [units of the stage, layers in a unit, ...].
        """
        scattered, stored = select(units, self.is_scattered)[0], select(self.stored, self.is_scattered)[0]
        return ReducedChunks(jax.tree.map(self.replicas.reduced_zeros, scattered, stored), jnp.int32(0))

    def begin(self, layers: Params, reduced: ReducedChunks) -> tuple[Params, Params, jax.Array]:
        """Starts to reduce the gradients of the next chunk over data.

        Args:
          layers: the gradient sums of this replica over microbatches, [units of the stage, layers in a unit, ...]. The
            sums of the chunk are complete.
          reduced: the chunks that are already reduced; only their number is read, which determines the next chunk.

        Returns:
          `layers`, to be used in place of the argument; the reduced gradients of the chunk, [units of the chunk, layers
          in a unit, ...]; and the index of the chunk's first unit, int32 scalar.
        """
        place = ring.take(jnp.asarray(self.chunks), reduced.num_chunks) * self.num_units
        part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, place, self.num_units), layers)
        sent = jax.tree.map(lambda leaf: leaf.astype(self.replicas.wire_dtype), part)
        # Later rows add to other chunks in place. If the slices were not computed before, XLA would copy all sums.
        layers, part = jax.lax.optimization_barrier((layers, sent))
        return layers, self.replicas.reduced_layers(part, self.stored), place

    def end(
        self, layers: Params, reduced: ReducedChunks, parts: Params, place: jax.Array
    ) -> tuple[Params, ReducedChunks]:
        """Writes the reduced gradients of a chunk into `layers` and `reduced`; returns the new (layers, reduced).

        Args:
          layers: the gradient sums of this replica, [units of the stage, layers in a unit, ...]. A reduced gradient
            that is not scattered replaces the chunk's sum in this array.
          reduced: the chunks that are already reduced. A scattered gradient is written into the array of its weight.
          parts: the reduced gradients of the chunk, from `begin`.
          place: the index of the chunk's first unit, from `begin`.
        """
        # A barrier here would make XLA's scheduler end the collective before the overlapping rows.
        scattered, replicated = select(parts, self.is_scattered)
        with_sums, without = select(layers, self.is_scattered)

        def put(leaf: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, part.astype(leaf.dtype), place, 0)

        after = ReducedChunks(jax.tree.map(put, reduced.scattered, scattered), reduced.num_chunks + 1)
        return merge(with_sums, jax.tree.map(put, without, replicated)), after

    def finished(self, layers: Params, reduced: ReducedChunks) -> Params:
        """Returns a pytree with the reduced gradient of each weight, [units of the stage, layers in a unit, ...].

        Call it after the reduction of the last chunk. A scattered gradient comes from `reduced`; any other gradient
        comes from `layers`, where `end` has replaced this replica's sums by reduced gradients.

        Args:
          layers: the first result of the last call of `end`.
          reduced: the second result of the last call of `end`.
        """
        return merge(reduced.scattered, select(layers, self.is_scattered)[1])


class Rows:
    """Runs the rows (clock ticks) of a schedule on one stage: `forward` a forward row, `backward` a backward row."""

    def __init__(
        self,
        stages: Stages,
        program: Program,
        replicas: GradientSync,
        params: Params,
        batch: Batch,
        rng: jax.Array,
        seed: jax.Array,
    ) -> None:
        """Prepares the values that are the same in all rows (clock ticks) of the schedule, and traces the layers.

        Args:
          stages: the model, split into stages.
          program: the schedule with its buffer slots.
          replicas: the shardings of parameters, and how gradients are reduced over data.
          params: the shards of the parameters on this stage.
          batch: entry name -> array [b, M, ...], M microbatches of b sequences; this device's shard along the manual
            axes.
          rng: a typed key.
          seed: the cotangent of the loss, float32 scalar.
        """
        self.stages, self.program, self.replicas = stages, program, replicas
        self.batch, self.rng, self.seed = batch, rng, seed
        layers, self.outer = ring.split_layers(params)
        mask = jax.tree.map(lambda _: True, params) if replicas.trained is None else replicas.trained
        self.layer_mask = mask["layers"]
        self.trained_outer, self.frozen_outer = select(self.outer, {name: mask[name] for name in self.outer})
        self.stored_layers = replicas.trained_stored["layers"]
        self.stored_outer = {name: replicas.trained_stored[name] for name in self.outer}
        self.num_stages, self.num_chunks = program.schedule.num_stages, program.schedule.num_chunks
        self.stage = jax.lax.axis_index(PIPELINE)
        self.num_units = ring.num_units(stages, self.num_stages, self.num_chunks)
        self.has_empty = stages.num_layers % (self.num_stages * self.num_chunks) != 0
        self.units = ring.in_units(layers, self.num_chunks, stages.num_together)
        self.first_input = self.embed(self.outer, jnp.int32(program.first_microbatch))
        zero = jnp.int32(0)
        weights = ring.take(self.units, zero)
        self.unit = SplitLayer(self.run_layers, weights, self.first_input, (zero, zero, zero), self.layer_mask)
        self.reduction = None
        if program.reduces_chunks:
            self.reduction = ChunkReduction(program, replicas, self.stored_layers, self.num_units)

    def cell(self, row: jax.Array) -> Cells:
        """Returns the entries of all tables of `Cells` for this stage and row `row`, as scalars.

        The tables of all rows and stages are stacked into one constant of the compiled program.
        """
        tables, shape = self.program.cells, self.program.cells.active.shape
        columns = [np.broadcast_to(table.astype(np.int32).reshape(shape[0], -1), shape) for table in tables]
        entries = ring.take(ring.take(jnp.asarray(np.stack(columns, axis=-1)), row), self.stage)
        cell = Cells(*entries)
        return cell._replace(active=cell.active > 0)

    def start(self) -> Carry:
        """Returns the carry before the first row: zeros, except for the embedded first microbatch.

        The embedding of the first microbatch is in slot 0 of `Carry.inputs`.
        """
        x, program = self.first_input, self.program
        cotangent = ring.zeros_like(floating(x))
        buffer = lambda tree, size: jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), tree)  # noqa: E731
        trained = select(self.units, self.layer_mask)[0]
        return Carry(
            inputs=jax.tree.map(lambda zeros, x: zeros.at[0].set(x), buffer(x, program.num_slots + 1), x),
            kept=buffer(self.unit.kept, (program.num_kept_slots + 1) * self.num_units),
            outputs=buffer(x, program.num_output_slots + 1),
            cotangents=buffer(cotangent, program.num_cotangent_slots + 1),
            leaving=cotangent,
            sums=ring.zeros_like(jax.eval_shape(self.head, self.outer, x, jnp.int32(0))),
            layer_sums=ring.zeros_like(self.unit.sums),
            layers=self.replicas.zeros(trained, self.stored_layers),
            outer=self.replicas.zeros(self.trained_outer, self.stored_outer),
            reduced=self.reduction.start(trained) if self.reduction else None,
        )

    def embed(self, outer: Params, m: jax.Array) -> Activations:
        """Returns the embedding of microbatch `m`, the activations before the first layer, on every stage.

        Args:
          outer: the parameters except those of the layers.
          m: the index of the microbatch, int32 scalar.
        """
        return self.stages.first(outer, ring.microbatch(self.batch, m), self.rng, True, PIPELINE)

    def head(self, outer: Params, y: Activations, m: jax.Array) -> Loss:
        """Returns (loss, weight, metrics) of microbatch `m`, on every stage.

        Args:
          outer: the parameters except those of the layers.
          y: the activations after the last layer.
          m: the index of the microbatch, int32 scalar.
        """
        return self.stages.last(outer, y, ring.microbatch(self.batch, m), PIPELINE)

    def run_layers(
        self, weights: Params, x: Activations, given: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[Activations, LayerSums]:
        """Runs a unit of layers; returns the activations after it, and the layers' auxiliary (loss, metrics) or None.

        A unit is a group of layers that are computed in one call.

        Args:
          weights: the parameters of the unit's layers, each leaf [layers in a unit, ...].
          x: the activations before the unit.
          given: int32 scalars: the microbatch, the index of the unit's first layer in the model, and the index of the
            unit on this stage.
        """
        m, start, place = given
        if self.stages.with_stack:
            weights = self.stages.with_stack(weights, ring.flat(self.units), place * self.stages.num_together)
        return ring.run_layers(self.stages, weights, x, ring.microbatch(self.batch, m), self.rng, start, True)

    def given(self, cell: Cells, place: jax.Array) -> tuple[jax.Array, jax.Array, Place]:
        """Returns int32 scalars for `run_layers`: (microbatch, index of the unit's first layer in the model, `place`).

        Args:
          cell: the action of this stage, whose microbatch and chunk are read.
          place: the index of a unit (a group of layers) of this chunk among all units of the stage.
        """
        first = ring.first_layer(cell.chunk, self.num_stages, self.stages.num_layers, self.num_chunks)
        return cell.microbatch, first + (place - cell.chunk * self.num_units) * self.stages.num_together, place

    def is_layer(self, cell: Cells, given: tuple[jax.Array, jax.Array, Place]) -> jax.Array:
        """Returns whether a unit (a group of layers) has layers of the model, not padding layers; bool scalar.

        Args:
          cell: the action of this stage, whose chunk contains the unit.
          given: the result of the method `given` for the unit; only the index of its first layer is read.
        """
        return given[1] < ring.end_of_layers(cell.chunk, self.num_stages, self.stages.num_layers, self.num_chunks)

    def first_place(self, cell: Cells) -> Place:
        """Returns the index, among this stage's units, of the first unit of the chunk that this stage runs in a row.

        A unit is a group of layers that are computed in one call. If stages have one chunk, this index is a constant.
        Then XLA knows which slice each iteration of a loop reads, and a matrix product may read the weights in place.
        """
        return np.int32(0) if self.num_chunks == 1 else cell.chunk * self.num_units

    def forward(self, row: Signature, carry: Carry, cell: Cells) -> Carry:
        """Runs a forward row: reads a stage input, saves the layers' residuals, sends the output to the next stage.

        Args:
          row: states whether the compiled row ends with the embedding of a microbatch.
          carry: the stage's arrays before the row.
          cell: the action of this stage, and its buffer slots.
        """

        def one(state: Arrays, _: None) -> tuple[Arrays, LayerSums]:
            x, kept, place, slot = state
            given = self.given(cell, place)
            y, sums, residuals = self.unit.forward(ring.take(self.units, place), x, given)
            if self.has_empty:
                y, sums = ring.pass_by(self.is_layer(cell, given), x, y, sums)
            return (y, _write(kept, residuals, slot), place + 1, slot + 1), sums

        x = ring.take(carry.inputs, cell.input_slot)
        start = x, carry.kept, self.first_place(cell), cell.kept_slot * self.num_units
        (y, kept, _, _), sums = jax.lax.scan(one, start, None, length=self.num_units)
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        carry = carry._replace(
            inputs=_write(carry.inputs, ring.to_next(y, self.num_stages), cell.receive_slot),
            kept=kept,
            outputs=_write(carry.outputs, y, cell.output_slot),
            layer_sums=ring.add_if(cell.active, carry.layer_sums, sums),
        )
        return self.embed_next(row, carry, cell)

    def backward(self, row: Signature, carry: Carry, cell: Cells) -> Carry:
        """Runs a backward row: computes the stage's backward pass from saved residuals.

        Sends the cotangent of the stage's input to the previous stage.

        Args:
          row: states whether the compiled row contains the head, an embedding, or the backward pass of an embedding.
          carry: the stage's arrays before the row.
          cell: the action of this stage, and its buffer slots.
        """
        if row.embed_backward:
            carry = self.embed_backward(carry, cell.embed_backward_microbatch)
        cotangent = ring.take(carry.cotangents, cell.cotangent_slot)
        if row.head:
            carry, cotangent = self.head_backward(carry, cell, ring.take(carry.outputs, cell.output_slot), cotangent)
        carry, x_cotangent = self.layers_backward(carry, cell, cotangent)
        is_first = (self.stage == 0) & (cell.chunk == 0) & cell.active
        leaving = ring.where(is_first, x_cotangent, carry.leaving)
        arrived = ring.to_previous(x_cotangent, self.num_stages)
        cotangents = _write(carry.cotangents, arrived, cell.receive_cotangent_slot)
        return self.embed_next(row, carry._replace(cotangents=cotangents, leaving=leaving), cell)

    def layers_backward(self, carry: Carry, cell: Cells, cotangent: Activations) -> tuple[Carry, Activations]:
        """Runs the backward pass of a chunk's layers, and adds their gradients to the gradient sums in the carry.

        The loop runs over the units of the chunk; a unit is a group of layers that are computed in one call. Each
        unit's gradients are added immediately, because the gradients of a complete chunk would take as much memory as
        the gradient sums of this chunk.

        Args:
          carry: the stage's arrays, with the gradient sums.
          cell: the action of this stage, and its buffer slots.
          cotangent: the cotangent of the chunk's output.

        Returns:
          The carry with the new sums, and the cotangent of the chunk's input.
        """

        def one(state: Arrays, _: None) -> tuple[Arrays, None]:
            total, cotangent, place, sum_place, slot = state
            weights, given = ring.take(self.units, place), self.given(cell, place)
            part, before = self.unit.backward(ring.take(carry.kept, slot), weights, given, cotangent, self.seed)
            part, active = self.replicas.part(part, self.stored_layers), cell.active
            if self.has_empty:
                is_layer = self.is_layer(cell, given)
                before, active = ring.where(is_layer, before, cotangent), active & is_layer
            added_at = sum_place
            if self.reduction:
                # The additions wait for the cotangent, so XLA runs them while the chunk's last cotangent is sent. On a
                # fast network, overlapping them with the layer's own transfers would hide more (modelled).
                before, added_at = jax.lax.optimization_barrier((before, sum_place))
            total = ring.add_at(total, part, added_at, active)
            return (total, before, place - 1, sum_place - 1, slot - 1), None

        # All indices are carried, because each kernel would recompute an index computed in the loop's body. The index
        # of the sums is never a constant: XLA would evaluate the barrier in `add_at`, and fails (jax 0.12.0.1).
        last = self.num_units - 1
        firsts = self.first_place(cell), cell.chunk * self.num_units, cell.kept_slot * self.num_units
        start = carry.layers, cotangent, *(first + last for first in firsts)
        (total, cotangent, _, _, _), _ = jax.lax.scan(one, start, None, length=self.num_units)
        return carry._replace(layers=total), cotangent

    def head_backward(
        self, carry: Carry, cell: Cells, y: Activations, cotangent: Activations
    ) -> tuple[Carry, Activations]:
        """Adds the loss of the row's microbatch and the head's gradients to the carry.

        Args:
          carry: the stage's arrays, with the sums.
          cell: the action of this stage. `cell.head_microbatch` is the row's microbatch; if negative, nothing is added.
          y: the saved output of the last layer, which is read on the last stage only.
          cotangent: the cotangent of the stage's output.

        Returns:
          The carry; and on the last stage, in its last chunk, the cotangent of the model's output, else `cotangent`.
        """
        wanted, m = cell.head_microbatch >= 0, jnp.maximum(cell.head_microbatch, 0)
        is_last = (self.stage == self.num_stages - 1) & (cell.chunk == self.num_chunks - 1) & cell.active
        final = ring.from_stage(y, is_last)

        def total(trained: Params, final: Activations) -> tuple[jax.Array, Loss]:
            loss, weight, metrics = self.head(merge(trained, self.frozen_outer), final, m)
            return loss, (loss, weight, metrics)

        _, pull, sums = jax.vjp(total, self.trained_outer, final, has_aux=True)
        outer, final_cotangent = pull(self.seed)
        outer = self.replicas.part(outer, self.stored_outer)
        carry = carry._replace(
            sums=ring.add_if(wanted, carry.sums, sums), outer=ring.add_if(wanted, carry.outer, outer)
        )
        return carry, ring.where(is_last, floating(final_cotangent), cotangent)

    def embed_next(self, row: Signature, carry: Carry, cell: Cells) -> Carry:
        """Embeds a microbatch that stage 0 reads in a later row; writes the embedding to a slot of `Carry.inputs`.

        Args:
          row: states whether the compiled row has an embedding; if not, the carry is returned unchanged.
          carry: the stage's arrays.
          cell: the action of this stage, with the microbatch to embed and the slot.
        """
        if not row.embed:
            return carry
        x = self.embed(self.outer, jnp.maximum(cell.embed_microbatch, 0))
        return carry._replace(inputs=_write(carry.inputs, x, cell.embed_slot))

    def embed_backward(self, carry: Carry, m: jax.Array) -> Carry:
        """Runs the backward pass of microbatch `m`'s embedding, and adds its gradients to `Carry.outer`.

        Args:
          carry: the stage's arrays; `leaving` on stage 0 is the cotangent of the embedding.
          m: the index of the microbatch, int32 scalar; if negative, nothing is added.
        """
        embed = lambda trained: self.embed(merge(trained, self.frozen_outer), jnp.maximum(m, 0))  # noqa: E731
        x, pull = jax.vjp(embed, self.trained_outer)
        (outer,) = pull(with_float0(ring.from_stage(carry.leaving, self.stage == 0), x))
        return carry._replace(outer=ring.add_if(m >= 0, carry.outer, self.replicas.part(outer, self.stored_outer)))


def _write(buffer: Arrays, tree: Arrays, slot: jax.Array) -> Arrays:
    write = lambda leaf, x: jax.lax.dynamic_update_index_in_dim(leaf, x, slot, 0, allow_negative_indices=False)  # noqa: E731
    return jax.tree.map(write, buffer, tree)
