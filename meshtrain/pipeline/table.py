"""A schedule as a CSV file: one line a row, one column a stage, cells like `F3` or `F3.1`. No JAX.

    F0,
    F1,F0
    ,B0
    B0,B1

A cell is a kind (F forward, B backward, W weight gradient), a microbatch, and after a dot the chunk (0 without a dot).
A stage idles in an empty cell. Every line has a cell for each stage. `python -m meshtrain pipeline --csv` prints any
schedule in this form.
"""

import csv
import os
import re

from meshtrain.pipeline.schedules import Action, PipelineOptions, Row, Schedule, build, describe
from meshtrain.words.errors import UserError
from meshtrain.words.paths import what_is_at

_CSV = "allowed: a CSV file in UTF-8; nearest: what python -m meshtrain pipeline --csv prints"
_WHY = {"nothing there": "No such file or directory", "a folder": "Is a directory"}
_MOST_BYTES = 1 << 23
CELL = re.compile(r"([FBW])([0-9]{1,9})(?:\.([0-9]{1,9}))?")


def chosen(options: PipelineOptions, *, num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the table of a configuration: its CSV file, or else the schedule it names.

    Raises:
      UserError: the file is unreadable, malformed, or made for other numbers; or the schedule has no table for them.
    """
    if not options.table:
        return build(
            options.schedule, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=options.num_chunks
        )
    schedule = read_table(options.table)
    pairs = [
        ("mesh.pipeline", num_stages, schedule.num_stages, "stages"),
        ("pipeline.num_microbatches", num_microbatches, schedule.num_microbatches, "microbatches"),
        ("pipeline.num_chunks", options.num_chunks, schedule.num_chunks, "chunks"),
    ]
    lines = [
        f"{name}: got {got}; allowed: {has}, because the table {options.table} has {has} {what}; nearest: {has}"
        for name, got, has, what in pairs
        if got != has
    ]
    if lines:
        raise UserError(*lines)
    return schedule


def unread(options: PipelineOptions, num_stages: int) -> list[str]:
    """Returns one line if a table would not be read, or is given together with a schedule, else none.

    Args:
      options: the configuration's `pipeline`.
      num_stages: `mesh.pipeline`; -1 where it is not known yet.
    """
    if not options.table:
        return []
    default = PipelineOptions().schedule
    if options.schedule != default:
        return [
            f"pipeline.table: got '{options.table}' with pipeline.schedule={options.schedule}; allowed: one of them; "
            f"nearest: pipeline.schedule={default}, the default, beside a table"
        ]
    if num_stages == 1:
        return [
            f"pipeline.table: got '{options.table}' with mesh.pipeline=1, where no schedule runs; allowed: '', or the "
            "table's number of stages; nearest: leave it out"
        ]
    return []


def read_table(path: str) -> Schedule:
    """Returns the table in a CSV file, not proven (see `check.prove`).

    Raises:
      UserError: the file cannot be read, is empty, or is malformed; the line names line and column, counted from 1.
    """
    try:
        if (what := what_is_at(path)) != "a file":
            raise OSError(None, _WHY[what] if what in _WHY else what)  # not opened, because reading a pipe would block
        if os.stat(path).st_size > _MOST_BYTES:
            raise OSError(None, f"{os.stat(path).st_size} bytes are more than the {_MOST_BYTES} of a large table")
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = [(number, cells) for number, cells in enumerate(csv.reader(file, strict=True), start=1) if cells]
    except OSError as error:
        raise UserError(f"pipeline.table: got '{path}'; cannot read it: {error.strerror or error}; {_CSV}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"pipeline.table: got '{path}'; it is no CSV: {error}; {_CSV}") from error
    rows = [_row(path, number, cells, len(lines[0][1])) for number, cells in lines]
    actions = [action for row in rows for action in row if action]
    if not actions:
        raise UserError(
            f"pipeline.table: got '{path}' without any action; allowed: one line a row, one cell a stage, like F0; "
            "nearest: what python -m meshtrain pipeline --csv prints"
        )
    return Schedule(
        name=path,
        num_stages=len(rows[0]),
        num_microbatches=1 + max(action.microbatch for action in actions),
        num_chunks=1 + max(action.chunk for action in actions),
        rows=tuple(rows),
    )


def _row(path: str, number: int, cells: list[str], num_stages: int) -> Row:
    """Returns one line's actions, or raises UserError naming line and column."""
    if len(cells) != num_stages:
        raise UserError(
            f"pipeline.table: {path} line {number}: got {len(cells)} columns; allowed: {num_stages}, one for each "
            f"stage, as in the first line; nearest: {num_stages - len(cells):+d} cells"
        )
    row = list[Action | None]()
    for column, cell in enumerate(cells, start=1):
        match = CELL.fullmatch(cell.strip())
        if cell.strip() and not match:
            raise UserError(
                f"pipeline.table: {path} line {number} column {column}: got '{cell.strip()}'; allowed: F, B or W with "
                "a microbatch, as F3, or with a chunk, as F3.1; nearest: an empty cell, for idle"
            )
        row.append(Action(match[1], int(match[2]), int(match[3] or 0)) if match else None)  # type: ignore[arg-type]
    return tuple(row)


def format_table(schedule: Schedule) -> str:
    """Returns a schedule as the text of a CSV file that `read_table` reads."""
    return "".join(",".join(describe(action, schedule.num_chunks) for action in row) + "\n" for row in schedule.rows)
