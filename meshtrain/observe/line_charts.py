"""Still charts of lines over numbers of devices, drawn by matplotlib: as SVG for a page, or as a file of their own."""

import dataclasses
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtrain.observe.charts import COLOURS, WIDTH_INCHES, svg

if TYPE_CHECKING:  # imported where it is used, because it takes half a second
    from matplotlib.figure import Figure

_WIDTH_INCHES, _HEIGHT_INCHES = 9.0, 3.6


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
      label: of the legend.
      points: (number of devices, value), with rising numbers of devices.
    """

    label: str
    points: Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of a chart.

    Attributes:
      title: above it.
      lines: drawn in the colours of their places, the same in each panel.
      is_logarithmic: whether values are drawn on a logarithmic scale; otherwise they start at 0.
      ideal: a thin line beside the others, with the meaning of its label.
    """

    title: str
    lines: Sequence[Line]
    is_logarithmic: bool = False
    ideal: Line | None = None


def figure_of(panels: Sequence[Panel], note: str) -> "Figure":
    """Returns panels side by side.

    Args:
      panels: at least one.
      note: below them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
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
                linewidth=1.4 + 1.3 * (len(panel.lines) - 1 - number),  # those below stay visible where lines meet
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
    """Returns a chart as an element of an HTML page, as wide as its text; see `figure_of`."""
    drawn = figure_of(panels, note)
    drawn.set_figwidth(WIDTH_INCHES)
    return svg(drawn, "lines over devices")


def picture(panels: Sequence[Panel], note: str, kind: str) -> bytes:
    """Returns a chart as the content of a file; see `figure_of`.

    Args:
      panels: at least one.
      note: below them.
      kind: `png` or `svg`.
    """
    file = io.BytesIO()
    figure_of(panels, note).savefig(file, format=kind, dpi=150)
    return file.getvalue()
