"""Prints and draws a schedule: `python -m meshtrain pipeline --schedule=1f1b --stages=4 --microbatches=8`."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from fractions import Fraction

from meshtrain import user_functions
from meshtrain.cli import flags, output_files
from meshtrain.errors import Problem, UserError, refuse, run
from meshtrain.files import target_problems
from meshtrain.pipeline.chart import as_text, figure
from meshtrain.pipeline.check import Costs, bubbles, peak_in_flight, prove
from meshtrain.pipeline.schedules import NAMES, PipelineOptions, Schedule, build


def _parser() -> argparse.ArgumentParser:
    parser = flags.Parser(
        prog="python -m meshtrain pipeline", description="Prints and draws a pipeline schedule.", allow_abbrev=False
    )
    default, choices = PipelineOptions().schedule, f"{', '.join(NAMES)}, or a custom {user_functions.FORM}"
    parser.add_argument("--schedule", default=default, help=f"{choices} (default {default})")
    parser.add_argument("--stages", type=int, default=4, help="size of the mesh's pipeline axis (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches in a step's batch (default 8)")
    parser.add_argument("--chunks", type=int, default=1, help="chunks of layers on each stage (default 1)")
    parser.add_argument("--forward", default="1", help="duration of one chunk's forward pass (default 1)")
    parser.add_argument(
        "--backward",
        default="3",
        help="duration of one chunk's backward pass (default 3: 1 to recompute forward, 2 for gradients)",
    )
    parser.add_argument("--transfer", default="0", help="duration of a transfer to the next stage (default 0)")
    parser.add_argument(
        "--in-step",
        action="store_true",
        help="draw stages that run in lock step, one clock tick after another, instead of freely",
    )
    parser.add_argument("--columns", type=int, default=120, help="longest line of the text chart (default 120)")
    parser.add_argument("--out", metavar="FILE.png", help="also draw the chart into this file")
    parser.add_argument(
        "--json", action="store_true", help="print the schedule and its figures as JSON, without the chart"
    )
    return parser


def _time(flag: str, text: str, least: float) -> Fraction:
    """Parses the duration in a flag as an exact fraction, so that 0.1 is one tenth.

    Args:
      flag: the flag's name, for the error.
      text: the flag's value.
      least: the smallest allowed duration.

    Raises:
      UserError: the text is not a number from `least` to 1e9.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= 1e9:
        allowed, fix = f"a number from {least:g} to 1e9", 1e9 if value > 1e9 else 1
        raise UserError(Problem(flag, got=f"'{text}'", allowed=allowed, nearest=f"{fix:g}"))
    # Fraction would compute every digit of 1e-999999999, which is 0 as a float.
    return Fraction(text) if value else Fraction(0)


def _costs(arguments: argparse.Namespace) -> Costs:
    """Returns the durations in the flags `--forward`, `--backward` and `--transfer`.

    Raises:
      UserError: one line for each of these flags whose value is not a valid duration.
    """
    durations: list[Fraction] = []
    problems = list[Problem]()
    for flag, text, least in (
        ("--forward", arguments.forward, 1e-9),
        ("--backward", arguments.backward, 1e-9),
        ("--transfer", arguments.transfer, 0.0),
    ):
        try:
            durations.append(_time(flag, text, least=least))
        except UserError as error:
            problems += error.problems
    refuse(problems)
    return Costs(*durations)


def _as_json(schedule: Schedule, costs: Costs) -> str:
    free, step = bubbles(schedule, costs)
    numbers = {
        "schedule": schedule.name,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "num_chunks": schedule.num_chunks,
        "bubble_fraction": free,
        "bubble_fraction_in_step": step,
        "peak_in_flight": peak_in_flight(schedule),
        "rows": schedule.rows,
    }
    return json.dumps(numbers) + "\n"


def main(argv: Sequence[str]) -> None:
    """Reads the flags, proves the schedule, and prints it; with `--out`, also draws it into a file.

    Raises:
      UserError: a flag or the schedule is invalid, or a file cannot be written.
    """
    arguments, problems = _parser().parse_args(argv), list[Problem]()
    try:
        costs = _costs(arguments)
    except UserError as error:
        problems += error.problems
    try:
        schedule = build(
            arguments.schedule,
            num_stages=arguments.stages,
            num_microbatches=arguments.microbatches,
            num_chunks=arguments.chunks,
        )
        prove(schedule)
    except UserError as error:
        problems += error.problems
    if arguments.columns < 20:
        problems.append(Problem("--columns", got=arguments.columns, allowed="at least 20", nearest=20))
    if arguments.out is not None:
        problems += target_problems("--out", arguments.out, "schedule.png", output_files.PICTURES)
    refuse(problems)
    if arguments.out is not None:
        drawn = figure(schedule, costs, in_step=arguments.in_step)
        output_files.write_picture("--out", arguments.out, drawn, dpi=150, facecolor="white")
    if arguments.json:
        sys.stdout.write(_as_json(schedule, costs))
    else:
        sys.stdout.write(as_text(schedule, costs, in_step=arguments.in_step, max_columns=arguments.columns))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
