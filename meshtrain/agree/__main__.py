"""Verifies that a task computes the same numbers on every mesh: compares meshes with one device, array by array.

python -m meshtrain agree --config=my.py [--mesh data=2,tensor=2 ...] [--record=FILE | --against=FILE] [--json=FILE]
"""

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence

import jax

from meshtrain.agree import comparison, covering, record, report, sides
from meshtrain.agree.comparison import Excess, Figure, Key
from meshtrain.agree.covering import Case, Shape
from meshtrain.agree.record import Record
from meshtrain.cli import output_files
from meshtrain.cli.flags import flatten
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.config.smaller import problems_of
from meshtrain.config.tasks import abstract_task, abstract_weights, find
from meshtrain.data.dataset import Dataset
from meshtrain.errors import Problem, UserError, first_line, refuse, run, unknown
from meshtrain.files import target_problems
from meshtrain.hardware.compiler_options import capture_stderr
from meshtrain.launch import distributed, peers
from meshtrain.launch.early_errors import tell_before_meeting
from meshtrain.launch.local_processes import MAX_SIMULATED
from meshtrain.run.dataset import open_data, with_steps
from meshtrain.sharding.mesh import mesh_shape
from meshtrain.sharding.rules import AXES

NUM_STEPS = 3
MOST_PARAMETERS = 100_000_000  # on simulated devices, which share one memory: a replica's state takes 12 bytes each


def main(argv: Sequence[str]) -> int:
    """Compares sides with the reference; prints a row for each side. Returns 0 if all sides agree, else 1.

    Raises:
      UserError: an argument, the configuration or a record is wrong, or the task draws its own random numbers.
    """
    tell_before_meeting(os.environ)
    config, arguments = parse(argv, _flags())
    shapes = _checked(config, arguments)
    devices, notes = distributed.start(max(map(_size, shapes)) if shapes else None)
    if peers.count() > 1 and not arguments.against:
        allowed = "a record of one device, written by a single process"
        raise UserError(Problem("--against", got="nothing", allowed=allowed, nearest="--record=one.npz in one process"))
    named = set(arguments.overrides)
    config, cuts = covering.cut(config, named, max(map(_size, shapes)) if shapes else len(devices), shapes)
    refuse(_size_problems(config) if devices[0].platform == "cpu" else [])
    dataset = open_data(config, abstract_task(config))
    if config.num_epochs:
        config, _ = with_steps(config, dataset)
    printer = report.Printer(notes=notes, cuts=cuts, prints=peers.is_main_process())
    reference = _reference(config, arguments, devices, dataset)
    if arguments.record:
        record.write(arguments.record, reference)
        printer.line(f"record       {arguments.record}: one device, {arguments.steps} steps")
        return 0
    cases = _cases(config, arguments, shapes, devices, printer)
    if ":" in config.task and not arguments.against:
        _refuse_own_randomness(config, reference, devices, dataset)
    printer.header(reference.rounding, reference.unit)
    compare = _Comparison(reference, devices, dataset, arguments.steps)
    rows = [_row(one, compare, printer) for one in cases]
    if arguments.json and peers.is_main_process():
        output_files.write("--json", arguments.json, report.certificate(reference, rows, cuts))
    return printer.verdict(rows)


def _flags() -> argparse.ArgumentParser:
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain agree",
        description="Verifies that a task computes the same numbers on every mesh as on one device: weights, losses, "
        "gradients, steps, evaluation.\nExit code 0: all sides agree; 1: a side differs; 2: a wrong argument.",
        add_help=False,
    )
    extra.add_argument(
        "--mesh",
        metavar="AXIS=SIZE,...",
        action="append",
        default=[],
        help="a mesh to compare with one device; may be repeated (default: the configured mesh, and meshes of 8 "
        "devices that combine each pair of axes)",
    )
    extra.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps (default: %(default)s)")
    extra.add_argument("--record", metavar="FILE", default="", help="write the results of one device (.npz), and stop")
    extra.add_argument("--against", metavar="FILE", default="", help="compare with this record instead of one device")
    extra.add_argument("--json", metavar="FILE", default="", help="also write a certificate")
    return extra


def _checked(config: Config, arguments: argparse.Namespace) -> list[Shape]:
    """Returns the meshes that `--mesh` names, as axis -> size.

    Raises:
      UserError: one line for each wrong argument, and for each option that changes numbers with the number of replicas.
    """
    problems = list[Problem]()
    shapes = [_shape_of(text, problems) for text in arguments.mesh]
    if not 1 <= arguments.steps <= config.num_steps:
        allowed = f"1 to {config.num_steps}, the configuration's num_steps"
        nearest = min(max(arguments.steps, 1), config.num_steps)
        problems.append(Problem("--steps", got=arguments.steps, allowed=allowed, nearest=f"--steps={nearest}"))
    if arguments.record:
        for flag in ("against", "mesh"):
            if getattr(arguments, flag):
                got = f"'{arguments.record}' together with --{flag}"
                problems.append(
                    Problem("--record", got=got, allowed=f"--record or --{flag}, not both", nearest=f"without --{flag}")
                )
        problems += target_problems("--record", arguments.record, "one.npz", (record.ENDING,))
    if arguments.json:
        problems += target_problems("--json", arguments.json, "agree.json", (".json",))
    for key, value in (("reduction.name", "sum"), ("local_steps.period", 0)):
        given = flatten(dataclasses.asdict(config))[key]
        if given != value:
            got = f"{given}, with which the numbers depend on the number of replicas"
            problems.append(Problem(key, got=got, allowed=value, nearest=f"--config.{key}={value}"))
    refuse(problems)
    return shapes


def _shape_of(text: str, problems: list[Problem]) -> Shape:
    """Returns the mesh of a text such as `data=2,tensor=2`; adds a problem for each wrong part."""
    shape = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES:
            problems.append(unknown("--mesh", axis, AXES, "--mesh=data=8"))
        elif not (size.isdecimal() and 1 <= int(size) <= MAX_SIMULATED):
            allowed = "AXIS=SIZE,... with sizes of at least 1"
            problems.append(Problem("--mesh", got=f"'{part}'", allowed=allowed, nearest=f"--mesh={axis}=2"))
        else:
            shape[axis] = int(size)
    return shape


def _size(shape: Shape) -> int:
    return math.prod(shape.values())


def _size_problems(config: Config) -> list[Problem]:
    """Returns a problem if the weights, after all cuts, are too large for devices that share one memory, else []."""
    _, params, _ = abstract_weights(config, find(config.task), on_one_device=True)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    if count <= MOST_PARAMETERS:
        return []
    allowed = f"at most {MOST_PARAMETERS:,} on simulated devices"
    got = f"{count:,} parameters, after the cuts"
    return [Problem("model", got=got, allowed=allowed, nearest="smaller widths on the command line")]


def _reference(
    config: Config, arguments: argparse.Namespace, devices: Sequence[jax.Device], dataset: Dataset
) -> Record:
    """Returns the reference: the record of `--against`, or the results of one device, which runs now.

    Raises:
      UserError: the record is damaged, or another configuration or other data made it.
    """
    one = covering.one_device(config)
    facts = record.about(one.config, dataset, arguments.steps)
    unit = sides.unit_of(config)
    read = record.read(arguments.against) if arguments.against else None
    if read:
        record.refuse_other(arguments.against, read.about, facts)
        if unit <= read.unit or peers.count() > 1:
            return read
    programs = sides.programs(one.config, one.shape, devices)
    side = sides.run(programs, dataset, arguments.steps)
    rounding = comparison.figures(sides.run(programs, dataset, arguments.steps, nudges=True), side)
    # If the record has a wider compute dtype than this configuration, the yardstick of this configuration counts.
    return dataclasses.replace(read, rounding=rounding, unit=unit) if read else Record(side, rounding, unit, facts)


def _cases(
    config: Config,
    arguments: argparse.Namespace,
    shapes: Sequence[Shape],
    devices: Sequence[jax.Device],
    printer: "report.Printer",
) -> list[Case]:
    """Returns the sides to run.

    With `--mesh`, these meshes; with `--against`, one device and the configured mesh; else a covering set.

    Raises:
      UserError: the configuration does not fit a mesh of `--mesh`.
    """
    if shapes:
        refuse([problem for shape in shapes for problem in problems_of(covering.case(config, shape).config, shape)])
        return [covering.case(config, shape) for shape in shapes]
    shape = mesh_shape(config.mesh, len(devices), simulated=devices[0].platform == "cpu")
    fits = _size(shape) <= len(devices) and not problems_of(covering.case(config, shape).config, shape)
    if not fits:
        printer.line(f"not run      the configured mesh, {_size(shape)} devices; --mesh runs a smaller one")
    if arguments.against:
        one = [covering.one_device(config)] if peers.count() == 1 else []
        return one + ([covering.case(config, shape)] if fits and _size(shape) > 1 else [])
    chosen = covering.covering(config, len(devices), shape if fits else None, all_devices=peers.count() > 1)
    sizes = f"{len(devices)} and {len(devices) // 2}" if peers.count() == 1 else f"{len(devices)}"
    printer.line(f"meshes       {len(chosen.cases)} of {chosen.num_legal} allowed meshes of {sizes} devices")
    printer.line(f"not covered  {', '.join(chosen.missing) or 'nothing'}")
    return chosen.cases


def _refuse_own_randomness(config: Config, reference: Record, devices: Sequence[jax.Device], dataset: Dataset) -> None:
    """Runs one device again, from new calls of the task function.

    Raises:
      UserError: the second run has other numbers, so the task draws random numbers that do not follow from its keys.
    """
    one = covering.one_device(config)
    again = sides.run(sides.programs(one.config, one.shape, devices), dataset, 0)
    first = dataclasses.replace(reference.side, losses=(), norms=(), final={})
    first = dataclasses.replace(first, batches={name: first.batches[name] for name in again.batches})
    if excess := comparison.beyond(comparison.figures(again, first), reference.rounding, reference.unit):
        kind, where = excess[0].key
        raise UserError(
            Problem(
                "task",
                got=f"'{config.task}', whose {kind} ({where}) differ between two runs on one device",
                allowed="random numbers that follow from the keys of init and loss",
                nearest="jax.random with the argument rng",
            )
        )


class _Comparison:
    """Runs sides and compares them with the reference. A side that runs twice is computed once."""

    def __init__(self, reference: Record, devices: Sequence[jax.Device], dataset: Dataset, num_steps: int) -> None:
        self.reference, self._devices, self._dataset, self._num_steps = reference, devices, dataset, num_steps
        self._known = dict[str, tuple[Mapping[Key, Figure], list[Excess], str]]()

    def __call__(self, one: Case) -> tuple[Mapping[Key, Figure], list[Excess], str]:
        """Returns the figures of a side, the differences above their bounds, and the error if the side does not run."""
        if one.name not in self._known:
            self._known[one.name] = self._compare(one)
        return self._known[one.name]

    def _compare(self, one: Case) -> tuple[Mapping[Key, Figure], list[Excess], str]:
        error, found = "", dict[Key, Figure]()
        with capture_stderr() as messages:  # XLA prints long stacks for programs that it cannot compile
            try:
                programs = sides.programs(one.config, one.shape, self._devices)
                side = sides.run(programs, self._dataset, self._num_steps)
                found = comparison.figures(side, self.reference.side)
            except Exception as raised:  # a user's task may raise anything on a mesh
                if peers.count() > 1:
                    raise  # the other processes wait in a collective
                error = f"{type(raised).__name__}: {first_line(raised)}"
        for message in [] if error else messages:
            print(message, file=sys.stderr)
        found = _largest(found)
        reference = self.reference
        excess = comparison.beyond(found, reference.rounding, reference.unit, exact=reference.is_exact)
        return found, excess, error


def _largest(found: Mapping[Key, Figure]) -> dict[Key, Figure]:
    """Returns the largest figures of all processes: each process compares the shards on its own devices."""
    own = [[*key, *figure] for key, figure in found.items()]
    result = dict[Key, Figure]()
    for process in peers.gather_values("agree", own):
        for kind, where, *numbers in process:
            figure = Figure(*numbers)
            if (kind, where) not in result or figure.error > result[kind, where].error:
                result[kind, where] = figure
    return result


def _row(one: Case, compare: _Comparison, printer: "report.Printer") -> "report.Row":
    """Compares one side, and prints its row; if it differs, also compares its axes one at a time."""
    found, excess, error = compare(one)
    reference = compare.reference
    row = report.Row(one, found, excess, error, zeros=comparison.zero_gradients(reference.rounding, reference.unit))
    printer.row(row, reference.rounding)
    if row.agrees:
        return row
    # Several processes cannot run a part: a mesh with a single axis has devices of some processes only.
    single = covering.single_axes(one) if peers.count() == 1 else []
    parts = {part.name: report.Row(part, *compare(part)).verdict for part in single}
    printer.parts(parts)
    return dataclasses.replace(row, parts=parts)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
