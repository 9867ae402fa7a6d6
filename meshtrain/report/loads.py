"""The load of each expert over the steps of a run, as a still chart: a row for each expert, colours for loads.

E: experts, N: logged steps.
"""

import math
from typing import NamedTuple

import numpy as np

from meshtrain.observe.charts import WIDTH_INCHES, svg
from meshtrain.observe.run_files import OF_EACH
from meshtrain.report.logs import Log

_MOST_COLUMNS = 400  # more would be narrower than what a screen shows


class Loads(NamedTuple):
    """The loads of one metric.

    Attributes:
      steps: int64 [N], increasing.
      values: float64 [E, N], 1 where load is even; not-a-number where a row has none.
    """

    steps: np.ndarray
    values: np.ndarray


def of_experts(log: Log) -> list[Loads]:
    """Returns the loads of each metric that the log has for single experts, none without experts."""
    found = dict[str, dict[int, str]]()
    for name in log.curves:
        if match := OF_EACH.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2])] = name
    loads = []
    for names in found.values():
        curves = [log.curves[names[number]] for number in sorted(names)]
        steps = np.unique(np.concatenate([curve.steps for curve in curves]))
        values = np.full((len(curves), len(steps)), math.nan)
        for row, curve in zip(values, curves, strict=True):
            row[np.searchsorted(steps, curve.steps)] = curve.values
        loads.append(Loads(steps, values))
    return loads


def chart(loads: Loads) -> str:
    """Returns the chart as an element of an HTML page: each column reaches from the logged step before to its own."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_steps, num_experts = len(loads.steps), len(loads.values)
    kept = np.unique(np.linspace(0, num_steps - 1, min(num_steps, _MOST_COLUMNS)).astype(int))
    steps, values = loads.steps[kept], loads.values[:, kept]
    first = max(0, steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1))
    figure = Figure(figsize=(WIDTH_INCHES, min(4.6, 1.0 + 0.2 * num_experts)), layout="constrained")
    axes = figure.add_subplot()
    # As a picture inside the chart: thousands of rectangles would make the page slow.
    most = max(2.0, float(np.nanmax(loads.values)))
    edges = [first, *steps], np.arange(num_experts + 1) - 0.5
    drawn = axes.pcolormesh(*edges, values, vmin=0, vmax=most, rasterized=True)
    axes.set(xlabel="steps", ylabel="expert")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    solids = figure.colorbar(drawn, ax=axes).solids
    assert solids is not None
    solids.set_rasterized(True)
    return svg(figure, "load of each expert")
