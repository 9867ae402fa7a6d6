"""Compiles a proven schedule: assigns buffer slots to rows and merges rows into loops with a common body. Uses no JAX.

How a program runs: a row is one clock tick. In an F row every stage reads a stage input and sends its output to stage s
+ 1. In a B row every stage reads the residuals that the F row of the same microbatch saved, and the cotangent of its
output, and sends the cotangent of its input to stage s - 1. Both directions form a ring. Arriving arrays are written
into a slot at the end of the row.

Each stage has four buffers. They store stage inputs from their arrival to their F row, and residuals from their F row
to their B row. They store outputs of the last layer from their F row to the head, and cotangents from their arrival to
their B row. A row reads before it writes, so an arriving array may reuse a slot that the same row has just read.

All stages compute embedding and head together. The embedding of a microbatch runs at the end of an earlier row, its
backward pass at the start of a later row, so neither waits for the layers of the same row. Both are put into rows with
a head if possible; there is one row with a head for each microbatch.

Table shapes: R rows, S stages; every table is int32 or bool.
"""

import dataclasses
import heapq
import itertools
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshtrain.pipeline.check import prove
from meshtrain.pipeline.schedules import Action, Row, Schedule

Cell: TypeAlias = Any  # a NumPy table; in the executor its JAX scalar for one row and stage


class Cells(NamedTuple):
    """NumPy tables with the action of each cell (a row and a stage), and the buffer slots of the action's arrays.

    Each buffer has an additional slot, the dump slot, whose index is the number of the other slots. Arrays without a
    reader are written there. Idle cells read and write dump slots, with microbatch and chunk 0. In shapes, R is the
    number of rows, and S the number of stages.

    Attributes:
      microbatch: [R, S] int32; the microbatch of the action.
      chunk: [R, S] int32; the chunk of the action.
      active: [R, S] bool; False if the stage idles, so that its results are masked.
      input_slot: [R, S] int32; the slot of the stage input in an F row.
      kept_slot: [R, S] int32; the slot of the chunk's residuals, written in F rows and read in B rows.
      output_slot: [R, S] int32; the slot of the last stage's output in its last chunk, written in F rows and read in B
        rows.
      embed_slot: [R, S] int32; the slot for the microbatch that is embedded at the end of a row; the dump slot on all
        stages except stage 0.
      receive_slot: [R, S] int32; the slot for the activation that arrives at the end of an F row.
      cotangent_slot: [R, S] int32; the slot of the output's cotangent in a B row (dump for the last stage in its last
        chunk, whose cotangent comes from the head).
      receive_cotangent_slot: [R, S] int32; the slot for the cotangent that arrives at the end of a B row.
      embed_microbatch: [R] int32; the microbatch that is embedded at the end of this row, else -1.
      head_microbatch: [R] int32; the microbatch whose loss is computed in this B row, else -1.
      embed_backward_microbatch: [R] int32; the microbatch whose embedding runs its backward pass at the start of this B
        row, with the cotangent that stage 0 computed last in chunk 0; else -1.
    """

    microbatch: Cell
    chunk: Cell
    active: Cell
    input_slot: Cell
    kept_slot: Cell
    output_slot: Cell
    embed_slot: Cell
    receive_slot: Cell
    cotangent_slot: Cell
    receive_cotangent_slot: Cell
    embed_microbatch: Cell
    head_microbatch: Cell
    embed_backward_microbatch: Cell


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A schedule with its buffer slots, ready to run as one SPMD program.

    Attributes:
      schedule: the proven table that this program runs.
      num_slots: slots for stage inputs on each stage, without the dump slot.
      num_kept_slots: slots for residuals of a chunk on each stage, without the dump slot.
      num_output_slots: slots for outputs of the last layer on each stage, without the dump slot.
      num_cotangent_slots: slots for cotangents on each stage, without the dump slot.
      kinds: the kind of each row's actions, `F` (forward) or `B` (backward).
      cells: the action and the slots of each row and stage.
      first_microbatch: the microbatch that is embedded before the first row, into slot 0.
      last_microbatch: the microbatch whose embedding runs its backward pass after the last row.
      reduces_chunks: whether the gradients of a chunk are reduced over data directly after the chunk's last backward
        row (`worth_reducing_early`); otherwise all gradients are reduced after the last row.
    """

    schedule: Schedule
    num_slots: int
    num_kept_slots: int
    num_output_slots: int
    num_cotangent_slots: int
    kinds: tuple[str, ...]
    cells: Cells
    first_microbatch: int
    last_microbatch: int
    reduces_chunks: bool = False


class Signature(NamedTuple):
    """The parts of one compiled row body. Rows of a loop share a body; a row masks the parts that it does not need.

    Attributes:
      kind: `F` for the forward pass of a chunk, `B` for its backward pass.
      embed: whether the body ends with the embedding of a microbatch for a later row.
      head: whether the body computes the loss of a microbatch and the cotangent of the model's output.
      embed_backward: whether the body starts with the backward pass of a microbatch's embedding.
    """

    kind: str
    embed: bool
    head: bool
    embed_backward: bool


# (letters of consecutive rows, how often these rows repeat). F: forward, B: backward, H: backward with the head.
Run = tuple[tuple[str, ...], int]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows that run as one loop.

    Attributes:
      body: the rows and inner loops of one iteration, in order.
      count: the number of iterations.
      reduces: whether each iteration starts to reduce the next chunk's gradients over data; the reduction may overlap
        the rows of the iteration.
    """

    body: tuple["Signature | Segment", ...]
    count: int
    reduces: bool = False


def executable(schedule: Schedule) -> Program:
    """Returns the program of a schedule, with buffer slots and without rows in which all stages idle.

    Each array gets the lowest free slot, so equal tables give equal programs. Buffer sizes are the maximum over stages.

    Raises:
      UserError: the table is invalid, see `check.prove`.
    """
    prove(schedule)
    rows = [row for row in schedule.rows if any(row)]
    shape = len(rows), schedule.num_stages
    filled = [[action or Action("F", 0) for action in row] for row in rows]
    first, last = (0, 0), (schedule.num_stages - 1, schedule.num_chunks - 1)
    heads = _microbatches_at(rows, "B", *last)
    embedded, first_microbatch = _prefetch_rows(_microbatches_at(rows, "F", *first), heads)
    # Time is reversed: the embedding precedes its row, and its backward pass follows its row.
    returned, last_microbatch = _prefetch_rows(_microbatches_at(rows, "B", *first)[::-1], heads[::-1])
    slots = {name: np.full(shape, -1, np.int32) for name in _SLOT_TABLES}
    sizes = _assign_slots(schedule, rows, slots, [first_microbatch, *embedded])
    for name, table in slots.items():
        table[table < 0] = sizes[_SLOT_TABLES[name]]
    return Program(
        schedule=schedule,
        num_slots=sizes[_INPUTS],
        num_kept_slots=sizes[_KEPT],
        num_output_slots=sizes[_OUTPUTS],
        num_cotangent_slots=sizes[_COTANGENTS],
        kinds=tuple(next(action.kind for action in row if action) for row in rows),
        cells=Cells(
            microbatch=np.array([[action.microbatch for action in row] for row in filled], np.int32),
            chunk=np.array([[action.chunk for action in row] for row in filled], np.int32),
            active=np.array([[action is not None for action in row] for row in rows]),
            embed_microbatch=embedded,
            head_microbatch=heads,
            embed_backward_microbatch=returned[::-1],
            **slots,
        ),
        first_microbatch=first_microbatch,
        last_microbatch=last_microbatch,
    )


_INPUTS, _KEPT, _OUTPUTS, _COTANGENTS = _BUFFERS = ("inputs", "kept", "outputs", "cotangents")
# The buffer that the slots of each table belong to.
_SLOT_TABLES = {
    "input_slot": _INPUTS,
    "embed_slot": _INPUTS,
    "receive_slot": _INPUTS,
    "kept_slot": _KEPT,
    "output_slot": _OUTPUTS,
    "cotangent_slot": _COTANGENTS,
    "receive_cotangent_slot": _COTANGENTS,
}


def _microbatches_at(rows: list[Row], kind: str, stage: int, chunk: int) -> np.ndarray:
    """Returns the microbatch that `stage` runs in each of R rows: [R] int32; -1 in rows of another kind or chunk.

    Args:
      rows: the rows (clock ticks) of a schedule.
      kind: `F` for forward rows, `B` for backward rows.
      stage: the index of the stage.
      chunk: the index of the chunk on the stage.
    """
    cells = [row[stage] for row in rows]
    return np.array([a.microbatch if a and (a.kind, a.chunk) == (kind, chunk) else -1 for a in cells], np.int32)


def _prefetch_rows(wanted: np.ndarray, heads: np.ndarray) -> tuple[np.ndarray, int]:
    """Assigns the embedding of each microbatch, which can be computed in advance, to an earlier row.

    If rows p and r read embeddings, and no row between them does, the embedding for row r is computed in one of the
    rows p to r - 1: in the last of them that has a head, or in row p if none has a head. The first microbatch is
    embedded before all rows. If a caller passes the rows in reverse order, the function assigns the backward pass of
    each embedding to a later row.

    Args:
      wanted: [R] int32, for R rows; the microbatch whose embedding a row reads at its start, else -1.
      heads: [R] int32; the microbatch whose loss a row computes, else -1.

    Returns:
      The microbatch to embed in each row, int32 [R], else -1; and the microbatch to embed before the first row.
    """
    rows, prefetched = np.flatnonzero(wanted >= 0), np.full_like(wanted, -1)
    for previous, row in itertools.pairwise(rows):
        with_head = previous + np.flatnonzero(heads[previous:row] >= 0)
        prefetched[with_head[-1] if len(with_head) else previous] = wanted[row]
    return prefetched, int(wanted[rows[0]])


class _Slots:
    """Assigns the arrays of one buffer on one stage to slots; each array gets the lowest free slot.

    Attributes:
      size: the number of slots that the buffer needs so far.
      free: a heap of the slots below `size` that store no array now.
      of: (microbatch, chunk) -> the slot that stores the array of this microbatch in this chunk.
    """

    def __init__(self) -> None:
        self.size, self.free, self.of = 0, list[int](), dict[tuple[int, int], int]()

    def take(self, action: Action) -> int:
        if self.free:
            slot = heapq.heappop(self.free)
        else:
            slot, self.size = self.size, self.size + 1
        assert (action.microbatch, action.chunk) not in self.of
        self.of[action.microbatch, action.chunk] = slot
        return slot

    def leave(self, action: Action) -> int:
        slot = self.of.pop((action.microbatch, action.chunk))
        heapq.heappush(self.free, slot)
        return slot


def _assign_slots(
    schedule: Schedule, rows: list[Row], tables: dict[str, np.ndarray], embedded: list[int]
) -> dict[str, int]:
    """Fills the slot tables and returns the sizes of the buffers: buffer name -> maximum number of slots on a stage.

    Args:
      schedule: the sizes of the table.
      rows: the rows that have an action.
      tables: slot table name -> int32 [rows, stages], filled with -1; entries without a slot stay -1.
      embedded: the index of the microbatch that is embedded before the first row, followed by an entry for each row:
        the index of the microbatch that is embedded at the end of the row, or -1 for no microbatch.
    """
    stages, chunks = schedule.num_stages, schedule.num_chunks
    buffers = {name: [_Slots() for _ in range(stages)] for name in _BUFFERS}
    inputs, kept, outputs, cotangents = buffers.values()
    inputs[0].take(Action("F", embedded[0]))
    for row, cells in enumerate(rows):
        busy = [(stage, action) for stage, action in enumerate(cells) if action]
        for stage, action in busy:
            is_last = (stage, action.chunk) == (stages - 1, chunks - 1)
            if action.kind == "F":
                tables["input_slot"][row, stage] = inputs[stage].leave(action)
            elif not is_last:
                tables["cotangent_slot"][row, stage] = cotangents[stage].leave(action)
            for name, buffer in (("kept_slot", kept), ("output_slot", outputs)):
                if buffer is kept or is_last:
                    slots = buffer[stage]
                    tables[name][row, stage] = slots.take(action) if action.kind == "F" else slots.leave(action)
        for stage, action in busy:
            virtual = action.chunk * stages + stage + (1 if action.kind == "F" else -1)
            if not 0 <= virtual < stages * chunks:
                continue
            arrived, place = action._replace(chunk=virtual // stages), virtual % stages
            if action.kind == "F":
                tables["receive_slot"][row, place] = inputs[place].take(arrived)
            else:
                tables["receive_cotangent_slot"][row, place] = cotangents[place].take(arrived)
        if embedded[row + 1] >= 0:
            tables["embed_slot"][row, 0] = inputs[0].take(Action("F", embedded[row + 1]))
    assert not any(slots.of for of_stages in buffers.values() for slots in of_stages), (
        "all slots are free after the last row"
    )
    return {name: max(slots.size for slots in of_stages) for name, of_stages in buffers.items()}


def chunk_ends(program: Program) -> list[tuple[int, int]]:
    """Returns (row, chunk) for each chunk, sorted by row; the row is the last one with a backward action of the chunk.

    After this row the chunk's gradient sums are complete on all stages.
    """
    is_backward = np.array([kind == "B" for kind in program.kinds])[:, None] & program.cells.active
    last = [
        int(np.flatnonzero((is_backward & (program.cells.chunk == chunk)).any(axis=1))[-1])
        for chunk in range(program.schedule.num_chunks)
    ]
    return sorted((row, chunk) for chunk, row in enumerate(last))


# The minimum share of a step that overlapped reductions must hide: they take memory and compile time.
LEAST_HIDDEN = 0.02


def worth_reducing_early(program: Program, reduction_seconds: float, computing_seconds: float) -> bool:
    """Returns whether to reduce the gradients of each chunk during later rows, instead of all after the last row.

    The last of V chunks has no later rows, so (V - 1) / V of the reduction is hidden. The result is true if the hidden
    time is above `LEAST_HIDDEN` times the computing time, and each chunk except the last is followed by several rows:
    XLA's scheduler does not overlap a collective well with a single row.

    Args:
      program: the program of a schedule.
      reduction_seconds: the time to reduce the gradients of all chunks over data.
      computing_seconds: the computing time of a step.
    """
    rows = [row for row, _ in chunk_ends(program)]
    hidden_seconds = (len(rows) - 1) / len(rows) * reduction_seconds
    have_loops = all(after - before > 1 for before, after in itertools.pairwise(rows))
    return have_loops and hidden_seconds > LEAST_HIDDEN * computing_seconds


def segments(program: Program) -> tuple[Segment, ...]:
    """Returns the rows of a program as loops with common bodies, in order.

    If chunks are reduced separately (`program.reduces_chunks`), the rows are split at the end of each chunk. Each chunk
    has an iteration that reduces its gradients, in the order of `chunk_ends`.
    """
    if not program.reduces_chunks:
        return _loops(program, 0, len(program.kinds))
    starts = [row + 1 for row, _ in chunk_ends(program)]
    result = list(_loops(program, 0, starts[0]))
    for start, stop in itertools.pairwise([*starts, len(program.kinds)]):
        turn = Segment(_loops(program, start, stop), 1, reduces=True)
        if turn.body == result[-1].body and result[-1].reduces:
            turn = dataclasses.replace(turn, count=result.pop().count + 1)
        result.append(turn)
    return tuple(result)


def _loops(program: Program, start: int, stop: int) -> tuple[Segment, ...]:
    """Returns rows start ... stop - 1 as loops, so that compile time does not grow with the number of rows.

    Rows of one loop have the same kind. All of them or none have a head, because the head's matrix products are never
    masked. A body has the embedding or its backward pass if one of its rows needs it; other rows mask it. A loop in
    which most rows would mask the embedding is split in two.

    Returns:
      Segments whose rows, in order, are exactly these rows.
    """
    heads = program.cells.head_microbatch >= 0
    letters = ["F" if kind == "F" else "H" if head else "B" for kind, head in zip(program.kinds, heads, strict=True)]
    letters = letters[start:stop]
    # Two passes: repeats of a row or of a pair of rows, then repeats of groups of such repeats (interleaved schedules).
    runs = [(tuple(body), count) for body, count in _repeats(letters, max_period=2)]
    groups = min((_repeats(some, max_period=len(some)) for some in (runs, _split_ends(runs))), key=_num_bodies)
    result = list[Segment]()
    for group, repeats in groups:
        inner, offset, length = list[Segment](), start, sum(len(run) * times for run, times in group)
        for run, times in group:
            for part in _parts(program, offset, times) if repeats == len(run) == 1 else [times]:
                body = tuple(_signature(program, offset + i, len(run), part, length, repeats) for i in range(len(run)))
                inner.append(Segment(body, part))
                offset += len(run) * part
        start += length * repeats
        result += inner if repeats == 1 else [Segment(tuple(inner), repeats)]
    return tuple(result)


def _signature(program: Program, first: int, step: int, times: int, outer_step: int, outer_times: int) -> Signature:
    """Returns the signature of one compiled body that can run several rows: each part that at least one row needs.

    The parts are the embedding, the head, and the backward pass of the embedding. The rows have the indices first +
    i * step + j * outer_step, for i < times and j < outer_times; all of them are of the same kind.
    """
    rows = [first + i * step + j * outer_step for j in range(outer_times) for i in range(times)]
    flags = program.cells.embed_microbatch, program.cells.head_microbatch, program.cells.embed_backward_microbatch
    embed, head, embed_backward = (bool((flag[rows] >= 0).any()) for flag in flags)
    assert {program.kinds[row] for row in rows} == {program.kinds[first]}
    return Signature(program.kinds[first], embed, head, embed_backward)


def _parts(program: Program, first: int, count: int) -> list[int]:
    """Decides whether consecutive rows run as one loop or as two; returns the number of rows in each loop, in order.

    The rows are `count` rows of one kind, from row `first` on.

    A masked embedding is not free: it sums activations over the stages, twice the bytes that a row sends. So rows at
    the start or end of a loop that need no embedding get a separate loop, if they are the majority and at least as many
    as stages. (This matters if there are as many microbatches as stages: all forward rows before the first head are
    then one loop, instead of a repeated group of short loops.)
    """
    some = slice(first, first + count)
    used = np.flatnonzero(
        (program.cells.embed_microbatch[some] >= 0) | (program.cells.embed_backward_microbatch[some] >= 0)
    )
    if not len(used):
        return [count]
    before, after = int(used[0]), count - 1 - int(used[-1])
    masked, cut = max((before, before), (after, count - after))
    if masked < program.schedule.num_stages or masked <= len(used):
        return [count]
    return [cut, count - cut]


def _split_ends(runs: list[Run]) -> list[Run]:
    """Returns the runs with the first and the last run of each body split, so that more groups of runs repeat.

    A run is a pair (body, count): the rows `body`, repeated `count` times. If the first or last run of a body is longer
    than the shortest run of this body, the part next to the middle gets the length of the shortest run. For example, F
    x 3, (F B) x 4, ... becomes F x 1, F x 2, (F B) x 4, ... if the shortest run of F is F x 2: a group F x 2, (F B) x 4
    may then repeat.
    """
    least = {body: min(count for other, count in runs if other == body) for body, _ in runs}
    first = {body: index for index, (body, _) in reversed(list(enumerate(runs)))}
    last = {body: index for index, (body, _) in enumerate(runs)}
    result = list[Run]()
    for index, (body, count) in enumerate(runs):
        counts = [count]
        if count > least[body] and index == first[body]:
            counts = [count - least[body], least[body]]
        elif count > least[body] and index == last[body]:
            counts = [least[body], count - least[body]]
        result += [(body, part) for part in counts]
    return result


def _num_bodies(groups: list[tuple[list[Run], int]]) -> int:
    """Returns the number of row bodies to compile for a schedule: the rows in the bodies of all runs of all groups.

    Args:
      groups: pairs (runs, number of times that these runs repeat); repetition needs no further bodies.
    """
    return sum(len(body) for group, _ in groups for body, _ in group)


def _repeats(items: list, max_period: int) -> list[tuple[list, int]]:
    """Splits a list into repeated parts, such that all parts together have the fewest rows to compile.

    Uses dynamic programming from the end: best[i] is the cheapest split of items[i:].

    Args:
      items: a letter for each row (equal letters: the same work), or runs (pairs of a body of rows and a count).
      max_period: the maximum number of items in a part.

    Returns:
      Pairs (part, count): all parts, each repeated `count` times, make up the list.
    """
    bodies = [len(item[0]) if isinstance(item, tuple) else 1 for item in items]
    best: list[tuple[int, int, int]] = [(0, 0, 0)] * (len(items) + 1)
    for start in reversed(range(len(items))):
        choices = []
        for period in range(1, min(max_period, len(items) - start) + 1):
            part, cost, end = items[start : start + period], sum(bodies[start : start + period]), start
            while items[end : end + period] == part:
                end += period
                # Several rows that occur once are no loop; if they were one part, the second pass could not match them
                # separately.
                if period == 1 or end - start > period:
                    choices.append((cost + best[end][0], start - end, period))
        cheapest, rows, period = min(choices)
        best[start] = (cheapest, period, -rows // period)
    result, start = list[tuple[list, int]](), 0
    while start < len(items):
        _, period, count = best[start]
        result.append((items[start : start + period], count))
        start += period * count
    return result
