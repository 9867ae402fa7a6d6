"""Runs `plan --scaling`: plans many numbers of devices, prints the tables, draws the chart, and writes the page."""

import functools
from collections.abc import Callable, Sequence

from meshtrain.config.schema import Config
from meshtrain.errors import Problem, refusals
from meshtrain.files import JsonObject
from meshtrain.observe.charts import Line, Panel, line_chart, picture
from meshtrain.observe.page import heading, page, preformatted
from meshtrain.plan.cluster.clusters import Cluster
from meshtrain.plan.scheduled_hlo import Work
from meshtrain.plan.timing.streams import Assumptions
from meshtrain.report.scaling import cluster_sizes, scaling, scaling_report
from meshtrain.report.scaling.efficiency import Curve, Row
from meshtrain.report.scaling.scaling import Scaling
from meshtrain.report.scaling.strategies import KINDS

NOTE = "every point is a plan: the program is compiled, its time is modelled"


def problems(sizes: str) -> list[Problem]:
    """Returns an error if the text of `--scaling` is not a valid list of numbers of devices; otherwise []."""
    return refusals(cluster_sizes.read_sizes, sizes)


def print_scaling(
    config: Config, cluster: Cluster, sizes: str, assumptions: Assumptions, *, programs: int, elsewhere: Work | None
) -> Scaling:
    """Plans a configuration on several numbers of devices; prints tables of times and speedups; returns the plans.

    Args:
      config: the configuration to scale; its mesh fits `cluster`.
      cluster: the cluster that defines the kind of devices and hosts.
      sizes: the value of `--scaling`: the numbers of devices, such as `8,16,...,128`.
      assumptions: the assumptions of the time model.
      programs: maximum number of compiled programs.
      elsewhere: the function that `scheduled_hlo.server` returned; it compiles programs in other processes, only up to
        scheduling. None: programs are compiled completely, in this process.
    """
    plan_point = functools.partial(scaling.plan_point, elsewhere=elsewhere)
    wanted = cluster_sizes.read_sizes(sizes)
    found = scaling.scaling(config, cluster, wanted, assumptions, programs=programs, plan_point=plan_point)
    print(f"\n{scaling_report.text(found)}")
    return found


def json_content(found: Scaling) -> JsonObject:
    """Returns the content of the `--json` file as a JSON object."""
    return scaling_report.to_json(found)


def chart(found: Scaling, ending: str) -> bytes:
    """Returns the bytes of the `--chart` file: an image of the panels of `scaling_panels`.

    Args:
      found: the result of the scaling.
      ending: the picture's format, `png` or `svg`.
    """
    return picture(scaling_panels(found), NOTE, ending)


def scaling_panels(found: Scaling) -> list[Panel]:
    """Returns the panels of the chart: speedup with a fixed batch, and efficiency with a growing batch.

    All strategies have the same base, so that their speedups can be compared: the fastest step on the smallest number
    of devices n0 on which any strategy may fit. A point of the speedup is n0 x throughput / throughput of the base.
    """
    strong, weak = ([curve for curve in found.curves if curve.kind == kind] for kind in KINDS)
    panels = []
    if bases := [curve.base for curve in strong if curve.base]:
        first = min(bases, key=lambda row: (row.point.num_devices, row.seconds))
        devices, rate = first.point.num_devices, first.rate
        ideal = Line("proportional", [(size, float(size)) for size in found.sizes if size >= devices])
        lines = _lines(strong, lambda _, row: devices * row.rate / rate)
        panels.append(Panel("strong: speed in equivalent devices", lines, True, ideal))
    if lines := _lines(weak, lambda curve, row: curve.efficiency(row) or 0.0):
        panels.append(Panel("weak: efficiency relative to the base of each strategy", lines))
    return panels


def _lines(curves: Sequence[Curve], value: Callable[[Curve, Row], float]) -> list[Line]:
    """Returns a line for each strategy, with a point for each number of devices on which it may fit.

    Args:
      curves: the strategies.
      value: function of a curve and its row that returns the point's y value.
    """
    lines = [
        Line(one.name, [(row.point.num_devices, value(one, row)) for row in one.rows if row.is_usable])
        for one in curves
    ]
    return [line for line in lines if line.points]


def scaling_page(found: Scaling) -> str:
    """Returns the HTML page of a scaling: the chart, and the tables as text."""
    parts = []
    if panels := scaling_panels(found):
        parts += [heading("Speedup and efficiency"), line_chart(panels, NOTE)]
    parts += [heading("The tables"), preformatted(scaling_report.text(found))]
    return page(f"Scaling on {found.cluster.text.partition(':')[0]}", parts)
