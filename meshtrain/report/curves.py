"""Draws the curves of several runs as one Plotly figure, with a panel for each metric.

The x axis shows steps, trained units (tokens or images, see `Task.unit`) or time, as chosen by buttons.

N: points of a curve.
"""

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from meshtrain.files import JsonObject
from meshtrain.observe import charts
from meshtrain.observe.run_files import EVALUATED, IMPLIED, is_of_one
from meshtrain.report.logs import Curve, Log

# Maximum on the page, over all curves: a point takes about 45 bytes, in addition to 4.8 MB of Plotly's script.
MOST_POINTS = 48_000
MOST_POINTS_A_CURVE = 4_000
FEWEST_POINTS_A_CURVE = 30
COLOURS = (*charts.COLOURS, "#c0392b", "#8a7a12")
PANEL_PIXELS, TOP_PIXELS, BOTTOM_PIXELS = 250, 124, 50
TITLE_PIXELS, TITLE_CHARACTERS = 38, 40  # of a panel's title: the height of two lines, and the length of a line
COLUMNS = 3
FONT = {"family": "system-ui, sans-serif", "size": 12, "color": "#1d2733"}
# Titles are above the panels: at the side, a title would cover the tick labels, or be longer than the panel's height.
ABOVE = {"x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False}
FEW = 40  # points; shorter curves are also drawn as dots, because a line through a single point is invisible

# The first and the last panels; panels for metrics of a task are between them.
_FIRST = ("loss", "eval_loss")
_LAST = (
    "learning_rate",
    "grad_norm",
    "loss_scale",
    "skipped_steps",
    "goodput",
    "mfu",
    "step_seconds",
    "data_share",
    "save_blocking_seconds",
)
# These metrics get no panel: other curves imply them, or they have only one point for each start of the program.
_LEFT_OUT = (*IMPLIED, "model_flops_per_second", "first_step_seconds", "restore_seconds")
_IF_ANY = ("skipped_steps", "left_out_tokens")  # get a panel if not all zero, as they are in most runs
_IF_SEVERAL = ("save_blocking_seconds",)  # get a panel if there are several points; most runs save only once
_IF_CHANGED = ("processes",)  # get a panel if the number differs between starts of the program
_TITLES = {
    "grad_norm": "gradient norm",
    "mfu": "MFU",
    "step_seconds": "seconds a step",
    "data_share": "share waiting for data",
    "save_blocking_seconds": "seconds that a save blocks training",
    "expert_parts": "most parts into which a device splits its expert rows",
    "expert_load": "largest load of an expert / mean load",
    "router_entropy": "entropy of routers, nats",
}


def title(metric: str) -> str:
    """Returns the title of a metric's panel, such as `gradient norm` for `grad_norm`."""
    if metric in _TITLES:
        return _TITLES[metric]
    if metric.startswith(EVALUATED):
        return f"evaluation {title(metric.removeprefix(EVALUATED))}"
    if metric.endswith("_per_second"):
        return f"throughput, {metric.removesuffix('_per_second').replace('_', ' ')}/s"
    return metric.replace("_", " ")


def metrics(logs: Sequence[Log]) -> list[str]:
    """Returns the metrics of these logs that get a panel, in the order of the panels on the page."""
    units = dict.fromkeys(log.unit for log in logs)
    found = dict.fromkeys(
        name
        for log in logs
        for name, curve in log.curves.items()
        if name not in _LEFT_OUT
        and name.partition("/")[0] not in units
        and not is_of_one(name)
        and (name not in _IF_ANY or np.nanmax(curve.values) > 0)
        and (name not in _IF_SEVERAL or len(curve.steps) > 1)
        and (name not in _IF_CHANGED or np.ptp(curve.values) > 0)
    )
    rates = tuple(f"{unit}_per_second" for unit in units)
    first, last = ([name for name in group if name in found] for group in (_FIRST, (*_LAST[:4], *rates, *_LAST[4:])))
    return [*first, *(name for name in found if name not in (*first, *last)), *last]


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """Returns the indices of at most `most` points to draw, increasing, including the smallest and the largest value.

    The points are split into buckets of adjacent points. Each bucket keeps its first, last, smallest and largest point,
    and its first NaN. The first four are the points of M4 (Jugel et al. 2014): with one bucket per pixel column, a line
    chart looks the same as with all points.

    Args:
      values: the values of a curve, float64 [N] for N points; NaN for a gap in the curve.
      most: the maximum number of points; at least 5.
    """
    num_points = len(values)
    if num_points <= most:
        return np.arange(num_points)
    size = -(-num_points // (most // 5))
    num_buckets = -(-num_points // size)
    padded = np.full(num_buckets * size, math.nan)
    padded[:num_points] = values
    buckets, starts = padded.reshape(num_buckets, size), size * np.arange(num_buckets)
    gaps = np.isnan(buckets)
    gaps[-1, num_points - starts[-1] :] = False  # the padding
    of_each = [
        starts,
        np.minimum(starts + size, num_points) - 1,
        starts + np.where(np.isnan(buckets), np.inf, buckets).argmin(axis=1),
        starts + np.where(np.isnan(buckets), -np.inf, buckets).argmax(axis=1),
        (starts + gaps.argmax(axis=1))[gaps.any(axis=1)],
    ]
    return np.unique(np.concatenate(of_each))


Column: TypeAlias = Sequence[float | None]  # a number for each point of a curve; None if it is unknown
# The x values of a curve: steps, units (such as tokens) since the start, seconds.
Place: TypeAlias = tuple[Column, Column, Column]


def figure(runs: Mapping[str, Log]) -> JsonObject:
    """Returns a Plotly figure of the curves of some runs: `data`, with a trace for each run and metric, and `layout`.

    Each run is one entry of the legend, which shows and hides the run in all panels. Panels zoom together.

    Args:
      runs: name of a run -> its log; at least one run.
    """
    panels = metrics(list(runs.values()))
    curves = [
        (number, name, log, metric, log.curves[metric])
        for metric in panels
        for number, (name, log) in enumerate(runs.items())
        if metric in log.curves
    ]
    most = max(FEWEST_POINTS_A_CURVE, min(MOST_POINTS_A_CURVE, MOST_POINTS // max(len(curves), 1)))
    traces, places, named = [], [], set[str]()
    for number, name, log, metric, curve in curves:
        kept = thin(curve.values, most)
        steps = curve.steps[kept]
        places.append((steps.tolist(), _round(log.units_at(steps), 15), _round(log.seconds_at(steps))))
        traces.append(_trace(name, COLOURS[number % len(COLOURS)], panels.index(metric), places[-1][0], kept, curve))
        traces[-1]["showlegend"] = name not in named
        named.add(name)
    units = dict.fromkeys(log.unit for log in runs.values() if log.unit)
    layout = _layout(panels, places, " or ".join(units))
    for axis in {trace["yaxis"] for trace in traces}:
        values = {value for trace in traces if trace["yaxis"] == axis for value in trace["y"]} - {None}
        if len(values) == 1:  # for a constant, Plotly would label ticks around it
            layout[axis.replace("y", "yaxis")] |= {"tickvals": [*values], "ticktext": [f"{max(values):,.7g}"]}
    return {"data": traces, "layout": layout}


def _suffix(panel: int) -> str:
    """Returns the suffix that Plotly appends to the names of a panel's axes: '' for panel 0, `2` for panel 1, ..."""
    return str(panel + 1) if panel else ""


def _trace(name: str, colour: str, panel: int, steps: Sequence[int], kept: np.ndarray, curve: Curve) -> JsonObject:
    suffix = _suffix(panel)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(kept) <= FEW else "lines",
        "name": html.escape(name),  # Plotly interprets some HTML tags
        "legendgroup": name,
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour, "size": 5},
        "x": steps,
        "y": _round(curve.values[kept]),
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "hovertemplate": "%{y:.6g}",
    }


def _round(values: np.ndarray, digits: int = 7) -> list[float | int | None]:
    """Returns numbers for JSON: rounded, integers as int, and NaN as None. Metrics are float32, which has 7 digits.

    Args:
      values: float64, one dim.
      digits: number of significant digits.
    """
    numbers = (None if math.isnan(value) else float(f"{value:.{digits}g}") for value in values.tolist())
    return [int(value) if value is not None and value.is_integer() else value for value in numbers]


def _layout(panels: Sequence[str], places: Sequence[Place], units: str) -> JsonObject:
    num_rows = max(1, -(-len(panels) // COLUMNS))
    inner_pixels = num_rows * PANEL_PIXELS
    layout: JsonObject = {
        "height": inner_pixels + TOP_PIXELS + BOTTOM_PIXELS,
        "margin": {"t": TOP_PIXELS, "b": BOTTOM_PIXELS, "l": 60, "r": 20},
        "grid": {"rows": num_rows, "columns": COLUMNS, "pattern": "independent", "xgap": 0.2, "ygap": 0.3},
        "hovermode": "x unified",
        "template": {"layout": {"font": FONT, "annotationdefaults": ABOVE}},
        "legend": {"orientation": "h", "x": 0, "y": 1 + TITLE_PIXELS / inner_pixels, "yanchor": "bottom"},
        "annotations": [],
    }
    for number, metric in enumerate(panels):
        suffix = _suffix(number)
        shared = {"gridcolor": "#e3e7ec", "zerolinecolor": "#c6ccd4", "linecolor": "#8c95a3"}
        text = {"title": {"text": "steps"}} if number >= len(panels) - COLUMNS else {}
        layout[f"xaxis{suffix}"] = shared | text | ({"matches": "x"} if number else {})
        # Numbers up to five digits, such as 65,536, are not abbreviated to powers.
        layout[f"yaxis{suffix}"] = shared | {"exponentformat": "power", "minexponent": 5, "separatethousands": True}
        lines = textwrap.wrap(title(metric), TITLE_CHARACTERS, max_lines=2, placeholder=" ...")
        place = {"xref": f"x{suffix} domain", "yref": f"y{suffix} domain"}
        layout["annotations"].append(place | {"text": "<br>".join(html.escape(line) for line in lines)})
    layout["updatemenus"] = _buttons(panels, places, units, inner_pixels)
    return layout


def _buttons(panels: Sequence[str], places: Sequence[Place], units: str, inner_pixels: int) -> list[JsonObject]:
    """Returns the buttons above the panels: they choose the x axis of all curves, and the scale of the losses.

    Args:
      panels: the metric of each panel.
      places: (steps, units, seconds) of each curve: its x values for each of the three choices of the x axis.
      units: the name of the units that a run counts, such as `tokens`; '' if no log states it.
      inner_pixels: the height of all panels together.
    """
    suffixes = [_suffix(number) for number in range(len(panels))]
    over = []
    for index, (label, text) in enumerate((("steps", "steps"), (units, units), ("time", "seconds since the start"))):
        if all(value is None for place in places for value in place[index]):
            continue  # no run has logged it
        axes: JsonObject = {f"xaxis{suffix}.title.text": text for suffix in suffixes[-COLUMNS:]}
        axes |= {f"xaxis{suffix}.autorange": True for suffix in suffixes}
        x = {"x": [place[index] for place in places]}
        over.append({"label": html.escape(label), "method": "update", "args": [x, axes]})
    losses = [suffix for suffix, metric in zip(suffixes, panels, strict=True) if metric.endswith("loss")]
    scales = []
    for kind, scale in (("linear", "linear"), ("logarithmic", "log")):
        change: JsonObject = {f"yaxis{suffix}.type": scale for suffix in losses}
        change |= {f"yaxis{suffix}.autorange": True for suffix in losses}
        scales.append({"label": f"loss: {kind}", "method": "relayout", "args": [change]})
    top = 1 + (TOP_PIXELS - 8) / inner_pixels
    place = {"type": "buttons", "direction": "right", "y": top, "yanchor": "top", "showactive": True}
    menus = [place | {"x": 0, "xanchor": "left", "buttons": over}]
    return menus + ([place | {"x": 0.42, "xanchor": "left", "buttons": scales}] if losses else [])
