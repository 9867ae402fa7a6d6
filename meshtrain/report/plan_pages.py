"""Writes a plan or a search as one self-contained HTML page: charts as SVG, and the text of the report."""

import html

from meshtrain.observe.charts import ACTIVATIONS, EXTRA, PEAK, bars, scatter
from meshtrain.observe.page import heading, page, preformatted
from meshtrain.plan import text_report
from meshtrain.plan.planner import Plan
from meshtrain.plan.search import ranking

CLASSES = {True: "fits", False: "not", None: "unclear"}


def plan_page(plan: Plan) -> str:
    """Returns the HTML page of a plan: memory, traffic and its minimum as charts, and the text of the report."""
    memory, stats = plan.memory, plan.memory.compiler
    held = [
        ("parameters", memory.state.parameters),
        ("gradients", memory.state.gradients),
        ("optimizer", memory.state.moments),
        ("batch", memory.batch_bytes),
        *([(EXTRA, memory.state.extra)] if memory.state.extra else []),
        (ACTIVATIONS, memory.activations_bytes or 0),
    ]
    charts = [f'<p class="{CLASSES[memory.fits]}"><b>{html.escape(text_report.verdict(plan))}</b></p>']
    limit = ("capacity", memory.capacity_bytes) if memory.capacity_bytes else None
    if stats:
        held.append((PEAK, stats.peak_bytes))
    charts += [heading("Memory of a device"), bars([(name, float(size)) for name, size in held], limit)]
    if plan.traffic:
        rows = [(f"{row.axis}, {row.kind}", row.wire_bytes) for row in plan.traffic]
        charts += [heading("Sent by a device in a step"), bars(rows, None)]
        least = [
            pair
            for axis, size in plan.minimum.items()
            for pair in ((f"{axis}, sent", text_report.sent_along(plan, axis)), (f"{axis}, least", size))
        ]
        charts += [heading("Compared with the minimum of each axis"), bars(least, None, step=2)]
    charts += [heading("The complete report"), preformatted(text_report.text(plan))]
    return page(f"Plan for {plan.cluster.text}", charts)


def search_page(found: ranking.Found) -> str:
    """Returns the HTML page of a search: a chart of memory against modelled time, and the table as text."""
    points = [
        (plan.timing.step_seconds, plan.memory.compiler.peak_bytes, ranking.describe(one), plan.memory.fits)
        for one, plan in found.ranked
        if plan.timing and plan.memory.compiler
    ]
    capacity = found.ranked[0][1].memory.capacity_bytes if found.ranked else None
    parts = []
    if points:
        parts += [heading("Memory against modelled time"), scatter(points, capacity)]
    parts += [heading("The table"), preformatted(ranking.text(found))]
    return page(f"Search on {found.cluster.text}", parts)
