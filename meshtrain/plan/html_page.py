"""Writes a plan, search or scaling as one self-contained HTML page: charts as SVG, and the text of the report."""

import html
from collections.abc import Callable, Sequence

from meshtrain.observe.charts import ACTIVATIONS, PEAK, RESIDUAL, Line, Panel, bars, line_chart, scatter
from meshtrain.observe.page import as_it_stands, heading, page
from meshtrain.plan import text_report
from meshtrain.plan.planner import Plan
from meshtrain.plan.scaling import scaling_report
from meshtrain.plan.scaling.efficiency import Curve, Row
from meshtrain.plan.scaling.scaling import Scaling
from meshtrain.plan.scaling.strategies import KINDS
from meshtrain.plan.search import ranking

NOTE = "every point is a plan: the program is compiled, its time is modelled"
CLASSES = {True: "fits", False: "not", None: "unclear"}


def plan_page(plan: Plan) -> str:
    """Returns the page of a plan."""
    memory, stats = plan.memory, plan.memory.compiler
    held = [
        ("parameters", memory.state.parameters),
        ("gradients", memory.state.gradients),
        ("optimizer", memory.state.moments),
        ("batch", memory.batch_bytes),
        *([(RESIDUAL, memory.state.residual)] if memory.state.residual else []),
        (ACTIVATIONS, memory.activations_bytes or 0),
    ]
    charts = [f'<p class="{CLASSES[memory.fits]}"><b>{html.escape(text_report.verdict(plan))}</b></p>']
    limit = ("capacity", memory.capacity_bytes) if memory.capacity_bytes else None
    if stats:
        held.append((PEAK, stats.peak_bytes))
    charts += [heading("Memory of a device"), bars([(name, float(size)) for name, size in held], limit)]
    if plan.traffic:
        rows = [(f"{row.axis}, {row.kind}", row.wire_bytes) for row in plan.traffic]
        charts += [heading("On the wire, a step and device"), bars(rows, None)]
        least = [
            pair
            for axis, size in plan.minimum.items()
            for pair in ((f"{axis}, sent", text_report.sent_along(plan, axis)), (f"{axis}, least", size))
        ]
        charts += [heading("Beside the least that each axis has to send"), bars(least, None, step=2)]
    charts += [heading("The whole report"), as_it_stands(text_report.text(plan))]
    return page(f"Plan for {plan.cluster.text}", charts)


def search_page(found: ranking.Found) -> str:
    """Returns the page of a search: memory against modelled time, and the table."""
    points = [
        (plan.timing.step_seconds, plan.memory.compiler.peak_bytes, ranking.describe(one), plan.memory.fits)
        for one, plan in found.ranked
        if plan.timing and plan.memory.compiler
    ]
    capacity = found.ranked[0][1].memory.capacity_bytes if found.ranked else None
    parts = []
    if points:
        parts += [heading("Memory against modelled time"), scatter(points, capacity)]
    parts += [heading("The table"), as_it_stands(ranking.text(found))]
    return page(f"Search on {found.cluster.text}", parts)


def scaling_panels(found: Scaling) -> list[Panel]:
    """Returns the panels of a scaling's chart: speedup with a fixed batch, and efficiency with a growing batch.

    The speedup is relative to the smallest number of devices on which any strategy may fit, and counted in devices, so
    that strategies can be compared.
    """
    strong, weak = ([curve for curve in found.curves if curve.kind == kind] for kind in KINDS)
    panels = []
    if bases := [curve.base for curve in strong if curve.base]:
        first = min(bases, key=lambda row: (row.point.num_devices, row.seconds))
        devices, rate = first.point.num_devices, first.rate
        ideal = Line("in proportion", [(size, float(size)) for size in found.sizes if size >= devices])
        lines = _lines(strong, lambda _, row: devices * row.rate / rate)
        panels.append(Panel("strong: devices' worth of speed", lines, True, ideal))
    if lines := _lines(weak, lambda curve, row: curve.efficiency(row) or 0.0):
        panels.append(Panel("weak: efficiency against each way's base", lines))
    return panels


def _lines(curves: Sequence[Curve], value: Callable[[Curve, Row], float]) -> list[Line]:
    """Returns a line for each strategy, with its values for the numbers of devices on which it may fit."""
    lines = [
        Line(one.name, [(row.point.num_devices, value(one, row)) for row in one.rows if row.is_usable])
        for one in curves
    ]
    return [line for line in lines if line.points]


def scaling_page(found: Scaling) -> str:
    """Returns the page of a scaling: its chart and its tables."""
    parts = []
    if panels := scaling_panels(found):
        parts += [heading("Speedup and efficiency"), line_chart(panels, NOTE)]
    parts += [heading("The tables"), as_it_stands(scaling_report.text(found))]
    return page(f"Scaling on {found.cluster.text.partition(':')[0]}", parts)
