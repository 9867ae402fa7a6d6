"""Builds the page about runs: a table, their curves, their differences, memory, and samples."""

import collections
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from meshtrain.cli.flags import flatten
from meshtrain.cli.tables import format_bytes
from meshtrain.observe.charts import ACTIVATIONS, EXTRA, PEAK, bars
from meshtrain.observe.page import fold, heading, page, preformatted, table
from meshtrain.observe.run_files import EPOCHS, EVALUATED
from meshtrain.report import loads
from meshtrain.report.curves import figure, metrics
from meshtrain.report.runs import Run
from meshtrain.sharding.rules import sizes_text

CURVES = "curves"  # id of the HTML element with the curves
_HELD = {"parameters": "parameters", "gradients": "gradients", "moments": "optimizer", "batch": "batch"}
_ABSENT = "-"
MOST_DEVICES = 1 << 18  # a mesh with more devices is not plausible
_T = TypeVar("_T")


def run_page(runs: Sequence[Run], pictures: Sequence[str]) -> str:
    """Returns the HTML page about some runs.

    Args:
      runs: the runs; at least one.
      pictures: HTML elements with the runs' meshes and schedules.

    Raises:
      ModuleNotFoundError: Plotly is not installed.
    """
    parts = [table(*_overview(runs)), heading("Curves"), *_curves(runs)]
    drawn = [
        part for run in runs for load in loads.of_experts(run.log) for part in (heading(run.name, 3), loads.chart(load))
    ]
    if drawn:
        parts += [heading("Load of each expert relative to the mean, averaged over layers"), *drawn]
    for run in runs:
        parts += [part for norms in loads.of_layers(run.log)
                  for part in (heading(f"{run.name}: {norms.what}", 3), loads.chart(norms))]  # fmt: skip
    if rows := _sources(runs):
        parts += [heading("Sources of data"), table(rows, ["run", "source", "epochs", "drawn"])]
    parts += [heading("Configuration"), *_configurations(runs)]
    if memory := _memory(runs):
        parts += [heading("Memory of a device"), *memory]
    parts += pictures
    for run in (run for run in runs if run.texts):
        parts += [heading(f"Prompts at evaluations of {run.name}"), table(run.texts, ["step", "prompt", "text"], ">")]
    samples = [part for run in runs if run.sample for part in (heading(run.name, 3), preformatted(run.sample))]
    if samples:
        parts += [heading("Samples, generated at the end"), *samples]
    return page(", ".join(run.name for run in runs), parts)


def _overview(runs: Sequence[Run]) -> tuple[list[list[str]], list[str]]:
    """Returns (rows of cells, header) of the table with one row for each run."""
    header = ["run", "task", "mesh", "steps", "loss", "last evaluation", "best loss", "throughput", "goodput", "hours"]
    cells = []
    for run in runs:
        curves, log = run.log.curves, run.log
        last_step = max(int(curve.steps[-1]) for curve in curves.values())
        best, evaluations = "", [name for name in metrics([log]) if name.startswith(EVALUATED)]
        if "eval_loss" in curves:
            evaluated = curves["eval_loss"]
            index = int(np.nanargmin(evaluated.values))
            best = f"{evaluated.values[index]:.4f} at step {evaluated.steps[index]}"
        steps, useful = (_last(run, name) for name in ("timed_steps", "useful_seconds"))
        rate = steps * log.units_per_step / useful if steps and useful and log.unit else None
        goodput = _last(run, "goodput")
        hours = log.clock.values[-1] / 3600 if len(log.clock.values) else None
        cells.append(
            [
                run.name,
                _text_of(run.config["task"]) if "task" in run.config else "",
                mesh_text(run),
                f"{last_step:,}" + (f" of {run.config['num_steps']:,}" if _is_count(run.config, "num_steps") else ""),
                f"{loss:.4f}" if (loss := _last(run, "loss")) is not None else "",
                ", ".join(f"{name.removeprefix(EVALUATED)} {_last(run, name):.4f}" for name in evaluations),
                best,
                f"{rate:,.0f} {log.unit}/s" if rate else "",
                f"{goodput:.1%}" if goodput is not None else "",
                f"{hours:.2f}" if hours is not None else "",
            ]
        )
    return cells, header


def _sources(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a table row for each data source of each run with a mixture: run, source, epochs, and units drawn."""
    rows = []
    for run in runs:
        for name in (name.removeprefix(EPOCHS) for name in run.log.curves if name.startswith(EPOCHS)):
            epochs, units = _last(run, EPOCHS + name), _last(run, f"{run.log.unit}/{name}")
            rows.append([run.name, name, f"{epochs or 0:.2f}", f"{units or 0:,.0f} {run.log.unit}"])
    return rows


def _last(run: Run, metric: str) -> float | None:
    """Returns the last logged value of a metric, skipping NaN; None if the run has not logged the metric."""
    if metric not in run.log.curves:
        return None
    values = run.log.curves[metric].values
    return float(values[~np.isnan(values)][-1])


def _is_count(values: Mapping[str, object], name: str) -> bool:
    value = values[name] if name in values else None
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def mesh_shape(run: Run) -> dict[str, int] | None:
    """Returns axis -> size of the mesh that a run used; None if its folder does not record a valid mesh."""
    for values in (run.device, run.config):
        mesh = values["mesh"] if "mesh" in values else None
        if isinstance(mesh, dict) and mesh and all(_is_count(mesh, axis) and mesh[axis] for axis in mesh):
            return dict(mesh) if math.prod(mesh.values()) <= MOST_DEVICES else None
    return None


def mesh_text(run: Run) -> str:
    """Returns a run's mesh as text, with the kind of device if it is known; '' if the mesh is unknown."""
    shape = mesh_shape(run)
    if shape is None:
        return ""
    sizes = sizes_text(shape) or "1 device"
    return f"{sizes} ({_text_of(run.device['device'])})" if "device" in run.device else sizes


def _curves(runs: Sequence[Run]) -> list[str]:
    """Returns two HTML elements: Plotly's script, and the figure with the curves of the runs."""
    from plotly.io import to_html
    from plotly.offline import get_plotlyjs

    drawn = to_html(
        figure({run.name: run.log for run in runs}),
        config={"displaylogo": False, "displayModeBar": False, "responsive": True},
        include_plotlyjs=False,
        full_html=False,
        validate=False,
        default_height="auto",
        div_id=CURVES,
    )
    return [f"<script>{get_plotlyjs()}</script>", drawn]


def _configurations(runs: Sequence[Run]) -> list[str]:
    parts = []
    if len(runs) > 1:
        rows = differences([run.config for run in runs])
        names = [run.name for run in runs]
        parts.append(table(rows, ["field", *names]) if rows else "<p>The configurations are the same.</p>")
    for run in runs:
        parts.append(fold(f"all of {run.name}", preformatted(json.dumps(run.config, indent=2))))
    return parts


def differences(configs: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Returns a row for each key that differs between configurations: the dotted key, and the value in each of them.

    A configuration without the key has the value `-`. Usually `-` counts as a different value. If the configurations
    have different tasks, it does not count, because a missing key may be an option of another task.

    >>> differences([{"seed": 1, "mesh": {"data": 2}}, {"seed": 1, "mesh": {"data": 4}, "task": "decoder"}])
    [['mesh.data', '2', '4'], ['task', '-', 'decoder']]

    Args:
      configs: nested objects as in config.json.
    """
    flat = [flatten(config) for config in configs]
    has_tasks = len({_text_of(one["task"]) for one in flat if "task" in one}) > 1
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [[key, *(_text_of(one[key]) if key in one else _ABSENT for one in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:]) - ({_ABSENT} if has_tasks else set())) > 1]


def _text_of(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def group_runs(runs: Sequence[Run], what: Callable[[Run], _T | None]) -> list[tuple[str, _T]]:
    """Returns (names of the runs, value) for each different value of a function of runs.

    Args:
      runs: the runs.
      what: function that returns a value of a run; runs with None are skipped.
    """
    groups = dict[_T, list[str]]()
    for run in runs:
        if (value := what(run)) is not None:
            groups.setdefault(value, []).append(run.name)
    return [(", ".join(names), value) for value, names in groups.items()]


def _memory(runs: Sequence[Run]) -> list[str]:
    parts = []
    for names, (held, on_host_bytes) in group_runs(runs, _memory_parts):
        parts += [heading(names, 3)] * (len(runs) > 1)
        parts.append(bars(held, None))
        if on_host_bytes:
            text = html.escape(f"{format_bytes(on_host_bytes)} of moments in host memory")
            parts.append(f"<p>{text}</p>")
    return parts


def _memory_parts(run: Run) -> tuple[tuple[tuple[str, float], ...], int] | None:
    """Returns ((label, bytes) of each part of a device's memory, bytes of moments on the host); None if unknown."""
    counts = {name.removesuffix("_bytes"): run.device[name] for name in run.device if _is_count(run.device, name)}
    found = collections.Counter[str](counts)  # a Counter returns 0 for missing parts
    if not set(_HELD) <= set(found):
        return None
    held = {label: found[name] for name, label in _HELD.items()}
    if found["extra"]:
        held[EXTRA] = found["extra"]
    if {"temporary", "peak"} <= set(found):
        held |= {ACTIVATIONS: max(0, found["temporary"] - found["gradients"]), PEAK: found["peak"]}
    parts = tuple((label, float(num_bytes)) for label, num_bytes in held.items())
    return parts, found["on_host"]
