"""Writes a page about runs: python -m meshtrain report RUN [RUN ...] --html=FILE."""

import dataclasses
import html
import importlib.util
import sys
from collections.abc import Sequence
from fractions import Fraction

from meshtrain.cli import flags, output_files
from meshtrain.errors import Problem, UserError, refuse, run
from meshtrain.files import target_problems
from meshtrain.observe.charts import svg
from meshtrain.observe.mesh_picture import mesh_figure
from meshtrain.observe.page import WIDE, heading
from meshtrain.options import Options
from meshtrain.pipeline.chart import figure
from meshtrain.pipeline.check import Costs
from meshtrain.pipeline.schedules import PipelineOptions, Schedule, chosen, is_own
from meshtrain.report.runs import Run, open_runs
from meshtrain.report.sections import group_runs, mesh_shape, run_page
from meshtrain.sharding.rules import AXES, PIPELINE

ENDINGS = (".html", ".htm")  # no file of a run has these endings, so none can be overwritten
NO_PLOTLY = Problem(
    "plotly", fault="not installed", allowed="the extra 'report'", nearest="pip install 'meshtrain[report]'"
)
NO_PAGE = Problem("--html", got="nothing", allowed="a file's name", nearest="--html=report.html")
MOST_ACTIONS = 2000  # maximum in a chart of a schedule: with more actions, cells are too small to read
# Time of a microbatch on a stage in charts. A backward pass recomputes the forward pass, and its gradients take twice
# the forward pass's time.
FORWARD, BACKWARD = Fraction(1), Fraction(3)


def main(argv: Sequence[str]) -> int:
    """Writes the HTML page of `meshtrain report`; returns exit code 0.

    Args:
      argv: the command-line arguments, without the program's name.

    Raises:
      UserError: an argument is wrong, a folder has no run, a file cannot be written, or Plotly is missing.
    """
    parser = flags.Parser(
        prog="python -m meshtrain report",
        description="Writes one HTML page about runs: curves, differences, memory, mesh, schedule, samples.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a run's folder, such as runs/3d")
    parser.add_argument(
        "--html", metavar="FILE", default="", help="the page to write; it contains everything that it needs"
    )
    arguments = parser.parse_args(argv)
    of_page = target_problems("--html", arguments.html, "report.html", ENDINGS) if arguments.html else [NO_PAGE]
    problems = of_page if importlib.util.find_spec("plotly") else [*of_page, NO_PLOTLY]
    runs, others = open_runs(arguments.runs)
    refuse([*others, *problems])
    # JSON can contain half a surrogate pair, which UTF-8 cannot encode; it is replaced by a character reference.
    page = run_page(runs, [*meshes(runs), *schedules(runs)]).encode("utf-8", "xmlcharrefreplace")
    output_files.write("--html", arguments.html, page)
    print(f"written      {arguments.html} ({len(page) / 1e6:.1f} MB)")
    return 0


def meshes(runs: Sequence[Run]) -> list[str]:
    """Returns HTML elements with a picture of each different mesh of the runs; [] if no run has recorded its mesh."""
    parts = []
    for names, shape in group_runs(runs, _mesh_of_run):
        parts += [heading(names, 3)] * (len(runs) > 1)
        parts.append(WIDE.format(svg(mesh_figure(dict(shape)), "picture of the mesh")))
    return [heading("Mesh"), *parts] if parts else []


def _mesh_of_run(one: Run) -> tuple[tuple[str, int], ...] | None:
    """Returns (axis, size) for each axis in `AXES` of a run's mesh; None if the mesh is unknown or has other axes.

    An axis that the mesh lacks, because an older version of this package wrote the run, has size 1.
    """
    shape = mesh_shape(one)
    if shape is None or not set(shape) <= set(AXES):
        return None
    return tuple((dict.fromkeys(AXES, 1) | shape).items())


def schedules(runs: Sequence[Run]) -> list[str]:
    """Returns HTML elements with a chart of each different pipeline schedule; [] if no run has a pipeline."""
    parts = []
    for names, schedule in group_runs(runs, _schedule):
        parts += [heading(names, 3)] * (len(runs) > 1)
        sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
        what = f"{html.escape(schedule.name)}: {sizes}"
        if is_own(schedule.name):
            parts.append(f"<p>{what}, a custom function, which a report does not run</p>")
        elif not schedule.rows:
            parts.append(f"<p>{what}, too many to draw here</p>")
        else:
            costs = Costs(FORWARD / schedule.num_chunks, BACKWARD / schedule.num_chunks)
            parts.append(WIDE.format(svg(figure(schedule, costs), "chart of the schedule")))
    return [heading("Schedule"), *parts] if parts else []


def _schedule(one: Run) -> Schedule | None:
    """Returns the pipeline schedule of a run's configuration; None without a pipeline, or if the schedule is unknown.

    The returned schedule has no clock ticks in two cases: a user's function defines them, which a report does not
    import; or there are too many to draw, and computing them would take seconds.
    """
    shape = mesh_shape(one)
    if shape is None or PIPELINE not in shape or shape[PIPELINE] == 1:
        return None
    options = _options(one, "pipeline", PipelineOptions())
    parts = one.config["accumulation_steps"] if "accumulation_steps" in one.config else 1
    num_parts = parts if isinstance(parts, int) else 1
    num_stages, num_microbatches = shape[PIPELINE], num_parts * options.num_microbatches
    num_actions = 2 * num_stages * num_microbatches * options.num_chunks
    # A user's function is not imported, because the run may come from another user.
    if is_own(options.schedule) or num_actions > MOST_ACTIONS:
        return Schedule(options.schedule, num_stages, num_microbatches, options.num_chunks, rows=())
    try:
        return chosen(options, num_stages=num_stages, num_microbatches=num_microbatches)
    except UserError:
        return None  # a schedule that this version does not have


def _options(one: Run, group: str, default: Options) -> Options:
    """Returns an option group of a run's configuration; values of a wrong type are replaced by their defaults.

    Args:
      one: the run.
      group: the group's key in the configuration, such as `pipeline`.
      default: the group's dataclass with its default values.
    """
    given = one.config[group] if group in one.config else {}
    names = {field.name for field in dataclasses.fields(default)}
    known = {name: value for name, value in given.items() if name in names} if isinstance(given, dict) else {}
    values, _ = flags.collect(flags.schema(default), known, {})
    return flags.construct(default, values)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
