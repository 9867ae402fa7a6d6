"""Draws static charts over steps, as coloured rows: the load of each expert, or the norms of each layer.

E: experts, or layers and other parameters, N: logged steps.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.observe.charts import WIDTH_INCHES, svg
from meshtrain.observe.run_files import OF_EACH, OF_LAYER
from meshtrain.report.logs import Log

_MOST_COLUMNS = 400  # more columns would be narrower than a pixel
_MOST_LABELS = 20


class Loads(NamedTuple):
    """The data of one chart: the loads of experts in one metric, or the norms of layers.

    E: experts, or layers and other parameters, N: logged steps.

    Attributes:
      steps: int64 [N], increasing.
      values: float64 [E, N], loads relative to the mean load, or norms; NaN if nothing was logged at a step.
      names: names of the layers and other parameters, [E]; empty for experts.
      what: the title of the chart.
    """

    steps: np.ndarray
    values: np.ndarray
    names: Sequence[str] = ()
    what: str = "load of each expert"


def of_experts(log: Log) -> list[Loads]:
    """Returns the chart data of each metric that is logged for single experts; [] without experts."""
    found = dict[str, dict[int, str]]()
    for name in log.curves:
        if match := OF_EACH.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2])] = name
    return [Loads(*_align(log, [names[number] for number in sorted(names)])) for names in found.values()]


def of_layers(log: Log) -> list[Loads]:
    """Returns the chart data of the norms of gradients, weights and updates for each layer; [] if not logged.

    Parameters outside of the layers, such as embeddings, have rows as well. Values that are not positive become NaN,
    since the colours have a logarithmic scale.
    """
    groups = dict[str, dict[str, str]]()
    for name in log.curves:
        if match := OF_LAYER.fullmatch(name):
            groups.setdefault(match[1], {})[name] = match[2]
    found = []
    for what, names in groups.items():
        steps, values = _align(log, list(names))
        if np.any(values > 0):
            positive = np.where(values > 0, values, math.nan)
            found.append(Loads(steps, positive, list(names.values()), f"{what.replace('_', ' ')} of each layer"))
    return found


def _align(log: Log, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the N steps at which any of E metrics was logged, int64 [N], and the metrics' values, float64 [E, N].

    A value is NaN if the metric was not logged at the step.

    Args:
      log: the log of a run.
      names: the names of the E metrics.
    """
    curves = [log.curves[name] for name in names]
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    values = np.full((len(curves), len(steps)), math.nan)
    for row, curve in zip(values, curves, strict=True):
        row[np.searchsorted(steps, curve.steps)] = curve.values
    return steps, values


def chart(loads: Loads) -> str:
    """Returns the chart as an HTML element; the column of a step extends from the previous logged step to this step."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_steps, num_experts = len(loads.steps), len(loads.values)
    kept = np.unique(np.linspace(0, num_steps - 1, min(num_steps, _MOST_COLUMNS)).astype(int))
    steps, values = loads.steps[kept], loads.values[:, kept]
    first = max(0, steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1))
    figure = Figure(figsize=(WIDTH_INCHES, min(4.6, 1.0 + 0.2 * num_experts)), layout="constrained")
    axes = figure.add_subplot()
    # Rasterized: thousands of SVG rectangles would make the page slow.
    least, most = (float(found(loads.values)) for found in (np.nanmin, np.nanmax))
    edges = [first, *steps], np.arange(num_experts + 1) - 0.5
    scale = LogNorm(least, most) if loads.names else Normalize(0, max(2.0, most))
    drawn = axes.pcolormesh(*edges, values, norm=scale, rasterized=True)
    axes.set(xlabel="steps", ylabel="layer" if loads.names else "expert")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if loads.names:
        labelled = range(0, num_experts, -(-num_experts // _MOST_LABELS))
        axes.set_yticks(labelled, [loads.names[row] for row in labelled], fontsize=8)
    solids = figure.colorbar(drawn, ax=axes).solids
    assert solids is not None
    solids.set_rasterized(True)
    return svg(figure, loads.what)
