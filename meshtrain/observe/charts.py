"""Draws charts as SVG for a page: bars of bytes, memory over step time, lines over the number of devices."""

import dataclasses
import io
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtrain.cli.tables import format_bytes

if TYPE_CHECKING:  # imported in functions, because the import takes half a second
    from matplotlib.figure import Figure

COLOURS = ("#2b6cb0", "#c77700", "#3c8d40", "#b0357f", "#6246a8", "#17807a")
FITS = {True: "#1a7f37", None: "#9a6700", False: "#c0262d"}
EXTRA = "arrays of an extension"
ACTIVATIONS = "activations and temporaries"
PEAK = "peak, by the compiler"
_HELD = ("parameters", "gradients", "optimizer", "batch", ACTIVATIONS, EXTRA, PEAK)
# Bars with these names have the same colours on every page; the peak is grey, since it is not a part of the total.
_OF_HELD = dict(zip(_HELD, (*COLOURS, "#5d6673"), strict=True))
WIDTH_INCHES = 12.1  # the width of the page's text
_BAR_INCHES = 0.27
_LINES_INCHES = (9.0, 3.6)  # size of a line chart in a separate file


def svg(figure: "Figure", what: str) -> str:
    """Returns a figure as an SVG element of an HTML page; its labels are SVG text, not outlines of letters.

    Args:
      figure: a matplotlib figure.
      what: the kind of chart, for screen readers.
    """
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "meshtrain"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # Inside a page the element needs no name spaces, and its style would change all other elements of the page.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    return text.replace("<svg", f'<svg class="still" role="img" aria-label="{what}"', 1)


def bars(rows: Sequence[tuple[str, float]], limit: tuple[str, int] | None, step: int = 1) -> str:
    """Returns a bar chart of bytes as an SVG element, with a vertical line at the limit, if there is a limit.

    Args:
      rows: (label, bytes) of each bar.
      limit: (label, bytes) of the vertical line; None: no line.
      step: the number of adjacent bars with the same colour.
    """
    from matplotlib.figure import Figure

    height = _BAR_INCHES * len(rows) + (0.45 if limit else 0.15)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    axes = figure.add_subplot()
    places, sizes = range(len(rows)), [size for _, size in rows]
    by_place = (COLOURS[number // step % len(COLOURS)] for number in places)
    colours = [
        _OF_HELD[label] if label in _OF_HELD else colour for (label, _), colour in zip(rows, by_place, strict=True)
    ]
    drawn = axes.barh(places, sizes, height=0.7, color=colours)
    axes.bar_label(drawn, [format_bytes(int(size)) for size in sizes], padding=4, fontsize=9)
    axes.set_yticks(places, [_escape(label) for label, _ in rows], fontsize=9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    longest = max([*sizes, float(limit[1]) if limit else 0.0, 1.0])
    axes.set(xlim=(0, longest * 1.14), ylim=(len(rows) - 0.4, -0.6))
    if limit:
        axes.axvline(limit[1], color=FITS[False], linewidth=1.5)
        axes.set_xticks([limit[1]], [_escape(f"{limit[0]} {format_bytes(limit[1])}")], fontsize=9)
    return svg(figure, "bar chart")


def scatter(points: Sequence[tuple[float, float, str, bool | None]], capacity: int | None) -> str:
    """Returns a chart of memory (y axis) over step time (x axis) as an SVG element, with a point per configuration.

    Args:
      points: (seconds of a step, bytes, label, whether the configuration fits in memory) of each point, at least one. A
        point is green if the configuration fits, red if not, amber if this is unknown (None).
      capacity: the bytes that a program can use, drawn as a horizontal line; None if unknown.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, 4.6), layout="constrained")
    axes = figure.add_subplot()
    most_seconds = 1.1 * max(point[0] for point in points)
    most_bytes = 1.1 * max([point[1] for point in points] + [float(capacity or 0)])
    axes.set(xlim=(0, most_seconds), ylim=(0, most_bytes), xlabel="seconds a step, modelled")
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:.3g} s")
    between = 2 ** math.floor(math.log2(max(most_bytes / 3, 1)))  # bytes between ticks
    axes.set_yticks(range(0, int(most_bytes) + 1, between))
    axes.yaxis.set_major_formatter(lambda size, _: format_bytes(int(size)))
    axes.spines[["top", "right"]].set_visible(False)
    if capacity:
        axes.axhline(capacity, color=FITS[False], linestyle="--", linewidth=1.2)
        axes.annotate("capacity", (most_seconds, capacity), (0, 4), textcoords="offset points", ha="right", fontsize=9)
    for seconds, size, label, fits in points:
        axes.plot([seconds], [size], "o", color=FITS[fits])
        side, distance = ("right", -7) if seconds > 0.55 * most_seconds else ("left", 7)
        at, beside = (seconds, size), (distance, 0)
        axes.annotate(_escape(label), at, beside, textcoords="offset points", ha=side, va="center", fontsize=8)
    return svg(figure, "memory against modelled time")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line in a panel of a chart.

    Attributes:
      label: the text of the line in the legend.
      points: (number of devices, value), with increasing numbers of devices.
    """

    label: str
    points: Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel of a chart: lines over the number of devices.

    Attributes:
      title: the text above the panel.
      lines: the lines; lines with the same index have the same colour in all panels.
      is_logarithmic: whether values have a logarithmic scale; otherwise the scale starts at 0.
      ideal: a thin reference line, whose label explains it; None: no reference line.
    """

    title: str
    lines: Sequence[Line]
    is_logarithmic: bool = False
    ideal: Line | None = None


def figure_of(panels: Sequence[Panel], note: str) -> "Figure":
    """Returns a matplotlib figure with panels next to each other.

    Args:
      panels: the panels, at least one.
      note: the text below the panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_LINES_INCHES, layout="constrained")
    for place, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        place.set_title(panel.title, fontsize=10)
        place.set_xscale("log", base=2)
        if panel.is_logarithmic:
            place.set_yscale("log", base=2)
            place.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        place.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        place.set_xlabel("devices", fontsize=9)
        place.tick_params(labelsize=8)
        place.spines[["top", "right"]].set_visible(False)
        if panel.ideal:
            sizes, values = zip(*panel.ideal.points, strict=True)
            place.plot(sizes, values, color="#8a94a0", linewidth=0.9, linestyle="--", label=panel.ideal.label)
        for number, line in enumerate(panel.lines):
            colour = COLOURS[number % len(COLOURS)]
            place.plot(
                [size for size, _ in line.points],
                [value for _, value in line.points],
                color=colour,
                linewidth=1.4 + 1.3 * (len(panel.lines) - 1 - number),  # thicker below, so all are visible
                marker="o",
                markersize=5,
                label=line.label,
            )
        if not panel.is_logarithmic:
            highest = max((value for line in panel.lines for _, value in line.points), default=1.0)
            place.set_ylim(0, 1.08 * highest)
        if panel.lines:
            place.legend(fontsize=8, frameon=False)
    figure.supxlabel(note, fontsize=8)
    return figure


def line_chart(panels: Sequence[Panel], note: str) -> str:
    """Returns a chart with panels next to each other as an SVG element, with the width of the page's text.

    Args:
      panels: the panels, at least one.
      note: the text below the panels.
    """
    drawn = figure_of(panels, note)
    drawn.set_figwidth(WIDTH_INCHES)
    return svg(drawn, "lines over devices")


def picture(panels: Sequence[Panel], note: str, kind: str) -> bytes:
    """Returns a chart with panels next to each other as the bytes of an image file.

    Args:
      panels: the panels, at least one.
      note: the text below the panels.
      kind: the format of the file, `png` or `svg`.
    """
    file = io.BytesIO()
    figure_of(panels, note).savefig(file, format=kind, dpi=150)
    return file.getvalue()


def _escape(text: str) -> str:
    """Escapes dollar signs, since matplotlib would typeset text between two of them as mathematics."""
    return text.replace("$", r"\$")
