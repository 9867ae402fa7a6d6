"""Prints and draws a schedule: `python -m meshtrain pipeline --schedule=1f1b --stages=4 --microbatches=8`."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from fractions import Fraction

from meshtrain.pipeline.chart import as_text, write_picture
from meshtrain.pipeline.check import Costs, bubble_fraction, peak_in_flight, prove, run_freely, run_in_step
from meshtrain.pipeline.schedules import NAMES, Schedule, build, problems
from meshtrain.pipeline.table import format_table, read_table
from meshtrain.words import flags
from meshtrain.words.errors import UserError, run
from meshtrain.words.paths import target_problems

DEFAULT = "1f1b"


def _parser() -> argparse.ArgumentParser:
    parser = flags.Parser(
        prog="python -m meshtrain pipeline", description="Prints and draws a pipeline schedule.", allow_abbrev=False
    )
    parser.add_argument("--schedule", help=f"one of {', '.join(NAMES)}")
    parser.add_argument(
        "--table", metavar="FILE", help="a CSV file with your own table, instead of --schedule, --stages, ..."
    )
    parser.add_argument("--stages", type=int, help="size of the mesh's pipeline axis (default 4)")
    parser.add_argument("--microbatches", type=int, help="parts of a step's batch (default 8)")
    parser.add_argument("--chunks", type=int, help="chunks of layers on each stage (default 1)")
    parser.add_argument("--forward", type=_time, default=Fraction(1), help="time of one chunk's forward (default 1)")
    parser.add_argument(
        "--backward",
        type=_time,
        default=Fraction(3),
        help="time of one chunk's backward (default 3: the recomputed forward, and 2 for its gradients)",
    )
    parser.add_argument(
        "--transfer", type=_time_or_zero, default=Fraction(0), help="time from one stage to the next (default 0)"
    )
    parser.add_argument("--in-step", action="store_true", help="draw stages that move row by row instead of freely")
    parser.add_argument("--columns", type=int, default=120, help="longest line of the text chart (default 120)")
    parser.add_argument("--out", metavar="FILE.png", help="also draw the chart into this file")
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--json", action="store_true", help="print the table and its numbers as JSON instead of the chart"
    )
    output.add_argument("--csv", action="store_true", help="print the table as CSV instead of the chart")
    return parser


def _time(text: str) -> Fraction:
    """Returns a time exactly as written: 0.1 is one tenth."""
    return _number(text, least=1e-9)


def _time_or_zero(text: str) -> Fraction:
    return _number(text, least=0)


def _number(text: str, least: float) -> Fraction:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= 1e9:
        near = 1e9 if value > 1e9 else 1
        raise argparse.ArgumentTypeError(f"got '{text}'; allowed: a number from {least:g} to 1e9; nearest: {near:g}")
    # Fraction would compute every digit of 1e-999999999, which is 0 as a float.
    return Fraction(text) if value else Fraction(0)


def _numbers(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the arguments of `build` besides the name; a flag that was not given has its default."""
    given = {
        "num_stages": arguments.stages,
        "num_microbatches": arguments.microbatches,
        "num_chunks": arguments.chunks,
    }
    defaults = {"num_stages": 4, "num_microbatches": 8, "num_chunks": 1}
    return {name: default if given[name] is None else given[name] for name, default in defaults.items()}


def _problems(arguments: argparse.Namespace) -> list[str]:
    """Returns one line for each flag that is wrong, alone or with the others."""
    if arguments.table is None:
        lines = problems(arguments.schedule or DEFAULT, **_numbers(arguments))
    else:
        lines = [
            f"--{name}: got it together with --table; allowed: one of them (a table has its own); nearest: leave it out"
            for name in ("schedule", "stages", "microbatches", "chunks")
            if getattr(arguments, name) is not None
        ]
    if arguments.columns < 20:
        lines.append(f"--columns: got {arguments.columns}; allowed: at least 20; nearest: 20")
    if arguments.out is not None:
        lines += target_problems("--out", arguments.out, "schedule.png")
    return lines


def _schedule(arguments: argparse.Namespace) -> Schedule:
    """Returns the table that the flags name, proven."""
    if arguments.table is None:
        schedule = build(arguments.schedule or DEFAULT, **_numbers(arguments))
    else:
        schedule = read_table(arguments.table)
    prove(schedule)
    return schedule


def _as_json(schedule: Schedule, costs: Costs) -> str:
    free, step = (
        bubble_fraction(timeline(schedule, costs), schedule.num_stages) for timeline in (run_freely, run_in_step)
    )
    numbers = {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": schedule.num_chunks,
        "bubble_fraction": float(free),
        "bubble_fraction_in_step": float(step),
        "peak_in_flight": peak_in_flight(schedule),
        "rows": schedule.rows,
    }
    return json.dumps(numbers) + "\n"


def main(argv: Sequence[str]) -> None:
    """Reads the flags, proves the table, and prints it.

    Raises:
      UserError: a wrong flag or table, or a file that cannot be written.
    """
    arguments = _parser().parse_args(argv)
    if lines := _problems(arguments):
        raise UserError(*lines)
    schedule = _schedule(arguments)
    costs = Costs(arguments.forward, arguments.backward, arguments.transfer)
    if arguments.out is not None:
        write_picture(schedule, costs, arguments.out, in_step=arguments.in_step)
    if arguments.json:
        sys.stdout.write(_as_json(schedule, costs))
    elif arguments.csv:
        sys.stdout.write(format_table(schedule))
    else:
        sys.stdout.write(as_text(schedule, costs, in_step=arguments.in_step, max_columns=arguments.columns))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
