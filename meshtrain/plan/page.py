"""A plan or a search as one self-contained HTML page: charts as SVG, and the text of the report."""

import html
from collections.abc import Sequence

from meshtrain.plan import report, search
from meshtrain.plan.planner import Plan
from meshtrain.words.tables import format_bytes

STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#1d2733;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}pre{background:#f4f6f8;padding:1rem;overflow:auto;font-size:12px}
svg{max-width:100%;height:auto}text{font:12px system-ui,sans-serif;fill:#1d2733}.fits{color:#1a7f37}.not{color:#c0262d}
.unclear{color:#9a6700}"""
COLOURS = ("#2b6cb0", "#c77700", "#3c8d40", "#b0357f", "#6246a8", "#17807a")
CLASSES = {True: "fits", False: "not", None: "unclear"}
WIDTH, LABEL, BAR = 900, 230, 26


def plan_page(plan: Plan) -> str:
    """Returns the page of a plan."""
    memory, stats = plan.memory, plan.memory.compiler
    held = [
        ("parameters", memory.parameters_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("gradients", memory.gradients_bytes),
        ("activations and temporaries", memory.activations_bytes or 0),
        ("batch", memory.batch_bytes),
    ]
    charts = [f'<p class="{CLASSES[memory.fits]}"><b>{_safe(report.verdict(plan))}</b></p>']
    limit = ("capacity", memory.capacity_bytes) if memory.capacity_bytes else None
    if stats:
        held.append(("peak, by the compiler", stats.peak_bytes))
    charts += ["<h2>Memory of a device</h2>", bars([(name, float(size)) for name, size in held], limit)]
    if plan.traffic:
        rows = [(f"{row.axis}, {row.kind}", row.wire_bytes) for row in plan.traffic]
        charts += ["<h2>On the wire, a step and device</h2>", bars(rows, None)]
        least = [
            pair
            for axis, size in plan.minimum.items()
            for pair in ((f"{axis}, sent", report.sent_along(plan, axis)), (f"{axis}, least", size))
        ]
        charts += ["<h2>Beside the least that each axis has to send</h2>", bars(least, None, step=2)]
    charts += ["<h2>The whole report</h2>", f"<pre>{_safe(report.text(plan))}</pre>"]
    return _page(f"Plan for {plan.cluster.text}", charts)


def search_page(found: search.Found) -> str:
    """Returns the page of a search: memory against modelled time, and the table."""
    points = [
        (plan.timing.step_seconds, plan.memory.compiler.peak_bytes, search.describe(one), plan.memory.fits)
        for one, plan in found.ranked
        if plan.timing and plan.memory.compiler
    ]
    capacity = found.ranked[0][1].memory.capacity_bytes if found.ranked else None
    parts = []
    if points:
        parts += ["<h2>Memory against modelled time</h2>", scatter(points, capacity)]
    parts += ["<h2>The table</h2>", f"<pre>{_safe(search.text(found))}</pre>"]
    return _page(f"Search on {found.cluster.text}", parts)


def _safe(text: str) -> str:
    return html.escape(text)


def _page(title: str, parts: Sequence[str]) -> str:
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{_safe(title)}</title>'
    body = "\n".join(parts)
    return f"{head}\n<style>{STYLE}</style>\n<h1>{_safe(title)}</h1>\n{body}\n</html>\n"


def bars(rows: Sequence[tuple[str, float]], limit: tuple[str, int] | None, step: int = 1) -> str:
    """Returns a chart of bytes, a bar for each row, and a line at the limit, if any.

    Args:
      rows: (label, bytes).
      limit: (label, bytes).
      step: how many neighbouring bars share a colour.
    """
    longest = max([size for _, size in rows] + ([float(limit[1])] if limit else []) + [1.0])
    scale = (WIDTH - LABEL - 110) / longest
    height = BAR * len(rows) + 30
    lines = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="bar chart">']
    for number, (label, size) in enumerate(rows):
        y, colour = BAR * number + 8, COLOURS[number // step % len(COLOURS)]
        lines.append(f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{_safe(label)}</text>')
        lines.append(f'<rect x="{LABEL}" y="{y}" width="{size * scale:.1f}" height="18" fill="{colour}"/>')
        lines.append(f'<text x="{LABEL + size * scale + 6:.1f}" y="{y + 14}">{format_bytes(int(size))}</text>')
    if limit:
        x = LABEL + limit[1] * scale
        bottom = BAR * len(rows) + 6
        lines.append(f'<path d="M{x:.1f} 2V{bottom}" stroke="#c0262d" stroke-width="2"/>')
        label = f"{limit[0]} {format_bytes(limit[1])}"
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{_safe(label)}</text>')
    return "\n".join([*lines, "</svg>"])


def scatter(points: Sequence[tuple[float, float, str, bool | None]], capacity: int | None) -> str:
    """Returns a chart of (seconds, bytes, label, fits): time to the right, memory upwards."""
    height, left, bottom = 460, 90, 410
    most_seconds = 1.1 * max(point[0] for point in points)
    most_bytes = 1.1 * max([point[1] for point in points] + [float(capacity or 0)])
    colours = {True: "#1a7f37", None: "#9a6700", False: "#c0262d"}
    lines = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="memory against modelled time">']
    lines.append(f'<path d="M{left} 10V{bottom}H{WIDTH - 10}" fill="none" stroke="#1d2733"/>')
    for part in range(5):
        x = left + (WIDTH - 110 - left) * part / 4
        y = bottom - (bottom - 20) * part / 4
        seconds = most_seconds * (x - left) / (WIDTH - 20 - left)
        lines.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{seconds:.3g} s</text>')
        lines.append(
            f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{format_bytes(int(most_bytes * part / 4))}</text>'
        )
    lines.append(f'<text x="{WIDTH / 2}" y="{bottom + 40}" text-anchor="middle">seconds a step, modelled</text>')
    if capacity:
        y = bottom - (bottom - 20) * capacity / most_bytes
        lines.append(f'<path d="M{left} {y:.1f}H{WIDTH - 10}" stroke="#c0262d" stroke-dasharray="6 4"/>')
        lines.append(f'<text x="{WIDTH - 12}" y="{y - 5:.1f}" text-anchor="end">capacity</text>')
    for seconds, size, label, fits in points:
        x = left + (WIDTH - 20 - left) * seconds / most_seconds
        y = bottom - (bottom - 20) * size / most_bytes
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colours[fits]}"><title>{_safe(label)}</title></circle>'
        )
        anchor, at = ("end", x - 9) if x > WIDTH * 0.6 else ("start", x + 9)
        lines.append(f'<text x="{at:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{_safe(label)}</text>')
    return "\n".join([*lines, "</svg>"])
