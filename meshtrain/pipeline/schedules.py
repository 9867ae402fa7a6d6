"""Pipeline schedules as plain tables: a row for each clock tick, a cell for each stage. Uses no JAX.

A stage has `num_chunks` chunks of layers. Chunk c of stage s is the *virtual stage* v = c * num_stages + s. A
microbatch passes the virtual stages in order, so after the last stage it returns to the first stage with the next
chunk.

Letters: L layers, S stages, M microbatches, V chunks per stage, K layers in a chunk; s a stage, m a microbatch, c a
chunk, u a unit (a microbatch in one chunk).
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Literal, NamedTuple

from meshtrain.errors import Problem, UserError, refuse
from meshtrain.options import option
from meshtrain.user_functions import FORM, call_user_function, function_problems

Kind = Literal["F", "B"]
KEY = "pipeline.schedule"
MAX_SIZE = 1 << 18  # actions of one kind in a table: building and proving this many takes ten seconds
MAX_STAGES = 1 << 10  # the number of idle cells grows with its square


class Action(NamedTuple):
    """The work of one stage in one row.

    Attributes:
      kind: F for a forward pass, B for a backward pass.
      microbatch: the index of the microbatch, 0 .. num_microbatches - 1.
      chunk: the index of the chunk on the stage, 0 .. num_chunks - 1.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0


Row = tuple[Action | None, ...]


class Schedule(NamedTuple):
    """A table: `rows[r][s]` is the action of stage s in row r (clock tick r), or None if the stage idles."""

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    rows: tuple[Row, ...]

    @property
    def text(self) -> str:
        """The schedule's name, and its numbers of microbatches and chunks, as text."""
        return f"{self.name}, {self.num_microbatches} microbatches, {self.num_chunks} chunks a stage"


def layers_in_chunk(num_layers: int, num_stages: int, num_chunks: int) -> int:
    """Returns the number of layers in a chunk, including padding layers: layers / (stages * chunks), rounded up.

    >>> layers_in_chunk(96, 8, 4), layers_in_chunk(94, 8, 4)
    (3, 3)
    """
    return -(-num_layers // (num_stages * num_chunks))


def spreads_evenly(num_layers: int, num_stages: int, num_chunks: int) -> bool:
    """Returns whether layers are spread over chunks so that the chunks' numbers of layers differ by at most one.

    If not, chunks are filled in order with `layers_in_chunk` layers each. Layers are spread if there are at least as
    many layers as chunks, but filling in order would leave a stage, or the last chunk of every stage, without layers.

    >>> spreads_evenly(7, 4, 1), spreads_evenly(6, 4, 1), spreads_evenly(3, 4, 1)
    (False, True, False)
    """
    return num_layers >= num_stages * num_chunks and leaves_stage_empty(num_layers, num_stages, num_chunks)


def leaves_stage_empty(num_layers: int, num_stages: int, num_chunks: int) -> bool:
    """Returns whether filling chunks in order would leave a stage, or the last chunk of every stage, without layers.

    In this order each chunk gets `layers_in_chunk` layers, until no layer remains.
    """
    in_chunk = layers_in_chunk(num_layers, num_stages, num_chunks)
    num_empty = in_chunk * num_stages * num_chunks - num_layers
    return num_empty >= (in_chunk * num_stages if num_chunks > 1 else in_chunk)


def layers_of_chunks(num_layers: int, num_stages: int, num_chunks: int) -> tuple[range, ...]:
    """Returns the layers of each chunk, with chunk c of stage s at index c S + s, where S is the number of stages.

    Chunks are filled in this order with `layers_in_chunk` layers each, until no layer remains. If `spreads_evenly` is
    true, the numbers of layers in chunks instead differ by at most one.

    >>> [len(layers) for layers in layers_of_chunks(7, 4, 1)], [len(layers) for layers in layers_of_chunks(6, 4, 1)]
    ([2, 2, 2, 1], [2, 2, 1, 1])
    """
    num_all, in_chunk = num_stages * num_chunks, layers_in_chunk(num_layers, num_stages, num_chunks)
    if spreads_evenly(num_layers, num_stages, num_chunks):
        least, rest = divmod(num_layers, num_all)
        ends = [(index + 1) * least + min(index + 1, rest) for index in range(num_all)]
    else:
        ends = [min((index + 1) * in_chunk, num_layers) for index in range(num_all)]
    return tuple(itertools.starmap(range, itertools.pairwise([0, *ends])))


def describe(action: Action | None, num_chunks: int = 1) -> str:
    """Returns the text of an action: "F3", or "F3.1" if stages have several chunks; empty for an idle stage."""
    if action is None:
        return ""
    return f"{action.kind}{action.microbatch}" + (f".{action.chunk}" if num_chunks > 1 else "")


def dependencies(action: Action, stage: int, num_stages: int, num_chunks: int) -> list[tuple[int, Action]]:
    """Returns the (stage, action) pairs that have to finish before `action` starts on `stage`.

    For microbatch m in the virtual stage v = chunk * num_stages + stage: F(m, v) needs F(m, v-1); B(m, v) needs F(m, v)
    and B(m, v+1).
    """
    virtual = action.chunk * num_stages + stage

    def at(kind: Kind, place: int) -> tuple[int, Action]:
        return place % num_stages, Action(kind, action.microbatch, place // num_stages)

    if action.kind == "F":
        return [at("F", virtual - 1)] if virtual > 0 else []
    return [at("F", virtual)] + ([at("B", virtual + 1)] if virtual < num_stages * num_chunks - 1 else [])


def _forward_row(row: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Row:
    """Returns forward row `row`, in which stage s runs unit u = row - s; the stage idles if there is no such unit.

    A unit is one microbatch in one chunk. Microbatches form groups of S, the number of stages, and each group passes
    through all V chunks before the next group starts. Unit u is microbatch (u // (S V)) S + u mod S in chunk (u // S)
    mod V (Narayanan et al. 2021, figure 4).
    """
    cells: list[Action | None] = []
    for stage in range(num_stages):
        unit = row - stage
        microbatch = unit // (num_stages * num_chunks) * num_stages + unit % num_stages
        chunk = unit // num_stages % num_chunks
        cells.append(Action("F", microbatch, chunk) if 0 <= unit < num_chunks * num_microbatches else None)
    return tuple(cells)


def _backward_row(row: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Row:
    """Returns backward row `row`: the forward row with the same index, but with stages and chunks in reverse order.

    So the last stage starts, and each stage starts with its last chunk.
    """
    forward = _forward_row(row, num_stages, num_microbatches, num_chunks)
    return tuple(
        None if action is None else Action("B", action.microbatch, num_chunks - 1 - action.chunk)
        for action in forward[::-1]
    )


def _one_kind_rows(num_stages: int, num_microbatches: int, num_chunks: int) -> tuple[list[Row], list[Row]]:
    """Returns all forward rows and all backward rows: chunks * microbatches + stages - 1 rows of each kind."""
    numbers = num_stages, num_microbatches, num_chunks
    count = num_chunks * num_microbatches + num_stages - 1
    return [_forward_row(row, *numbers) for row in range(count)], [_backward_row(row, *numbers) for row in range(count)]


def _one_chunk(name: str, num_chunks: int) -> None:
    """Raises UserError if `num_chunks` is above 1, because the schedule `name` supports only one chunk per stage."""
    if num_chunks > 1:
        raise UserError(
            Problem(
                "pipeline.num_chunks",
                got=f"{num_chunks} with {KEY}={name}",
                allowed=1,
                nearest="1, or interleaved_1f1b",
                depends_on=[KEY],
            )
        )


def _gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Row]:
    """Returns the rows of gpipe: all forwards, then all backwards (Huang et al. 2019).

    Its bubble fraction is (S-1)/(M+S-1) for M microbatches on S stages, with M microbatches in flight.
    """
    _one_chunk("gpipe", num_chunks)
    forward, backward = _one_kind_rows(num_stages, num_microbatches, num_chunks)
    return forward + backward


def _1f1b(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Row]:
    """Returns the rows of 1F1B: backwards as early as possible (Narayanan et al. 2021).

    Its bubble fraction is that of gpipe, but at most 2 S - 1 - 2 s microbatches are in flight on stage s of S stages.
    """
    _one_chunk("1f1b", num_chunks)
    return _align_rows(num_stages, num_microbatches, num_chunks)


def _interleaved_1f1b(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Row]:
    """Returns the rows of interleaved 1F1B: microbatches pass all stages once per chunk (Narayanan et al. 2021).

    Raises:
      UserError: the number of stages does not divide the number of microbatches.
    """
    if num_microbatches % num_stages:
        legal = num_stages * max(1, round(num_microbatches / num_stages))
        raise UserError(
            Problem(
                "pipeline.num_microbatches",
                got=f"{num_microbatches} with {KEY}=interleaved_1f1b",
                allowed=f"multiples of its {num_stages} stages",
                nearest=legal,
                depends_on=[KEY, "mesh.pipeline"],
            )
        )
    return _align_rows(num_stages, num_microbatches, num_chunks)


def _align_rows(num_stages: int, num_microbatches: int, num_chunks: int) -> list[Row]:
    """Returns the rows of (interleaved) 1F1B: each backward row is as early as its dependencies allow.

    S: stages, M: microbatches, V: chunks per stage. Each row has actions of a single kind. Groups have S microbatches.
    The first S backward rows of a group start in the last virtual stage: the first of them needs forward row V S - 1 of
    the group, and each of the others needs one more forward row. The later backward rows, for earlier chunks, need no
    further forward rows. Each group after the first therefore has S (V - 1) forward rows, S pairs of a forward and a
    backward row, and S (V - 1) backward rows. The bubble fraction is (S-1)/(V M + S-1), with V S + S - 1 - 2 s units (a
    microbatch in one chunk) in flight on stage s, at most V M.
    """
    forward, backward = _one_kind_rows(num_stages, num_microbatches, num_chunks)
    group, rows, done = num_chunks * num_stages, list[Row](), 0
    for index, row in enumerate(backward):
        needed = group + index - index % group + min(index % group, num_stages - 1)
        rows += forward[done:needed] + [row]
        done = max(done, needed)
    return rows


# (stages, microbatches, chunks) -> rows. It raises UserError for numbers without a table.
BUILT_IN: Mapping[str, Callable[[int, int, int], list[Row]]] = {
    "1f1b": _1f1b,
    "gpipe": _gpipe,
    "interleaved_1f1b": _interleaved_1f1b,
}
NAMES = tuple(BUILT_IN)
# Schedules that the planner's search tries -> chunks per stage. gpipe stores more residuals than 1f1b and is no faster.
SEARCHED: Mapping[str, int] = {"1f1b": 1, "interleaved_1f1b": 2}


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """The pipeline schedule; without effect if the mesh's pipeline axis has size 1."""

    schedule: str = option(
        "1f1b", f"order in which stages run microbatches: {', '.join(NAMES)}, or a custom {FORM}", choices=NAMES,
        names="function",
    )  # fmt: skip
    num_microbatches: int = option(
        4, "microbatches of a step's batch, which pass through the stages in turn", minimum=1
    )
    num_chunks: int = option(1, "chunks of layers on each stage (interleaved_1f1b, or a custom schedule)", minimum=1)


def is_own(name: str) -> bool:
    """Returns whether a schedule's name refers to a user's function, as `package.module:function`."""
    return ":" in name


def chosen(options: PipelineOptions, *, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the schedule that the pipeline options select; `check.prove` verifies it, this function does not.

    Raises:
      UserError: the schedule cannot be built, see `build`.
    """
    return build(
        options.schedule, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=options.num_chunks
    )


def build(name: str, *, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Returns the schedule with this name; `check.prove` verifies a user's schedule, this function does not.

    Three microbatches on two stages, a line for each row and a column for each stage:

    >>> schedule = build("1f1b", num_stages=2, num_microbatches=3)
    >>> for row in schedule.rows:
    ...     print("  ".join(describe(action) or "--" for action in row))
    F0  --
    F1  F0
    --  B0
    F2  F1
    B0  B1
    --  F2
    B1  B2
    B2  --

    Args:
      name: one of NAMES, or `package.module:function`, which is imported and called.
      num_stages: size of the mesh's pipeline axis.
      num_microbatches: microbatches in a step.
      num_chunks: chunks of layers on each stage.

    Raises:
      UserError: the name is unknown, the schedule has no table for these numbers, or a user's function cannot be
        imported, raises, or returns no rows.
    """
    lines = function_problems(KEY, name, NAMES)
    counts = {"stages": num_stages, "microbatches": num_microbatches, "chunks": num_chunks}
    lines += [
        Problem("pipeline", got=f"{count} {what}", allowed="at least 1", nearest=1)
        for what, count in counts.items()
        if count < 1
    ]
    if num_stages > MAX_STAGES:
        lines.append(
            Problem("pipeline", got=f"{num_stages} stages", allowed=f"at most {MAX_STAGES}", nearest=MAX_STAGES)
        )
    size = num_stages * num_microbatches * num_chunks
    if not lines and size > MAX_SIZE:
        fix = max(1, MAX_SIZE // (num_stages * num_chunks))
        lines.append(
            Problem(
                "pipeline",
                got=f"{num_stages} stages x {num_microbatches} microbatches x {num_chunks} chunks = {size}",
                allowed=f"at most {MAX_SIZE}",
                nearest=f"{fix} microbatches",
            )
        )
    refuse(lines)
    rows = BUILT_IN[name](*counts.values()) if name in BUILT_IN else _user_rows(name, *counts.values())
    return Schedule(name, num_stages, num_microbatches, num_chunks, tuple(rows))


def _user_rows(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Row]:
    """Calls a user's schedule function and returns its rows.

    Args:
      name: the function, as `package.module:function`.
      num_stages: size of the mesh's pipeline axis.
      num_microbatches: microbatches in a step.
      num_chunks: chunks of layers on each stage.

    Raises:
      UserError: the function cannot be imported, raises an error, or does not return a list of valid rows.
    """
    given = call_user_function(
        KEY,
        name,
        NAMES,
        [num_stages, num_microbatches, num_chunks],
        takes="three numbers",
        gives="a list of rows",
        fix="correct the function, or use other numbers",
        call=f" for {num_stages} stages, {num_microbatches} microbatches and {num_chunks} chunks",
    )
    if wrong := _no_rows(given, num_stages):
        raise UserError(
            Problem(
                KEY,
                got=f"'{name}', which returns {wrong}",
                allowed=(
                    f"a list of rows, each a list with a cell for each of the {num_stages} stages: None, ('F', "
                    "microbatch, chunk) or ('B', microbatch, chunk)"
                ),
                nearest=f"[('F', 0, 0)] + [None] * {num_stages - 1} as the first row",
            )
        )
    return [tuple(None if cell is None else Action(cell[0], *map(int, cell[1:])) for cell in row) for row in given]


def _no_rows(given: Any, num_stages: int) -> str:
    """Returns a text that states why a user function's result is not a list of rows; '' if it is a list of rows.

    Args:
      given: the function's result.
      num_stages: the required length of each row.
    """
    if not isinstance(given, list | tuple):
        return type(given).__name__
    for index, row in enumerate(given):
        if not isinstance(row, list | tuple):
            return f"{type(row).__name__} as row {index}"
        if len(row) != num_stages:
            return f"{len(row)} cells in row {index}"
        for stage, cell in enumerate(row):
            match cell:
                case None | ("F" | "B", Integral()) | ("F" | "B", Integral(), Integral()):
                    continue
            return f"{cell!r} in row {index} on stage {stage}"
    return ""
