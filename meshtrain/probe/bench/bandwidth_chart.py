"""Draws a chart of measured collectives: time and bus bandwidth over size for each axis, and the fitted lines."""

from typing import TYPE_CHECKING

from meshtrain.cli.tables import format_bytes
from meshtrain.hardware.links import OPERATIONS, wire_share
from meshtrain.observe.charts import COLOURS
from meshtrain.probe.bench.measurements import SIMULATED
from meshtrain.probe.bench.sweep import Sweep
from meshtrain.probe.bench.timed import Timed

if TYPE_CHECKING:  # imported in functions, because the import takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_INCHES = (5.5, 3.6)
_GREY = "#666666"  # for the seventh operation, the ring


def figure(found: Sweep) -> "Figure":
    """Returns the chart as a matplotlib figure, with a row per axis: times on the left, bus bandwidths on the right.

    Solid lines connect the measurements of an operation, dotted lines show the fitted latency and bandwidth.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.axis for row in found.rows))
    width, height = _PANEL_INCHES
    drawn = Figure(figsize=(2 * width, height * len(names) + 0.6), layout="constrained")
    panels = drawn.subplots(len(names), 2, squeeze=False)
    for axis, (times, speeds) in zip(names, panels, strict=True):
        rows = [row for row in found.rows if row.axis == axis]
        for operation, colour in zip(OPERATIONS, (*COLOURS, _GREY), strict=True):
            own = [row for row in rows if row.operation == operation]
            _lines(found, own, times, speeds, colour)
        times.set_title(f"{axis}: {rows[0].group_size} devices", fontsize=10)
        times.set(ylabel="microseconds", yscale="log")
        speeds.set_title(f"{axis}: bus bandwidth", fontsize=10)
        speeds.set(ylabel="GB/s", yscale="log")
        for panel in (times, speeds):
            panel.set(xscale="log", xlabel="bytes of a device's array")
            ticks = sorted({row.num_bytes for row in rows})[::2]
            panel.set_xticks(ticks, [format_bytes(size) for size in ticks], fontsize=8)
            panel.minorticks_off()
            panel.spines[["top", "right"]].set_visible(False)
    drawn.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    note = f"\n{SIMULATED}" if found.platform == "cpu" else ""
    drawn.suptitle(
        f"collectives on {found.platform}; dotted: latency and bandwidth fitted{note}", fontsize=10, wrap=True
    )
    return drawn


def _lines(found: Sweep, rows: list[Timed], times: "Axes", speeds: "Axes", colour: str) -> None:
    if not rows:
        return
    sizes = [row.num_bytes for row in rows]
    times.plot(sizes, [row.fastest_seconds * 1e6 for row in rows], "o-", color=colour, ms=3, lw=1.2,
               label=rows[0].operation)  # fmt: skip
    speeds.plot(sizes, [row.bus_bytes_per_second / 1e9 for row in rows], "o-", color=colour, ms=3, lw=1.2)
    for one in found.fits:
        if one.link and (one.axis, one.operation) == (rows[0].axis, rows[0].operation):
            sent = [size * wire_share(one.operation, one.link.group_size) for size in sizes]
            seconds = [one.link.seconds(wire_bytes) for wire_bytes in sent]
            times.plot(sizes, [each * 1e6 for each in seconds], ":", color=colour, lw=1.2)
            speeds.plot(sizes, [a / b / 1e9 for a, b in zip(sent, seconds, strict=True)], ":", color=colour, lw=1.2)
