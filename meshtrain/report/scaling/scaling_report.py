"""Reports a scaling as tables for people, and as JSON for programs. All seconds are modelled."""

from collections.abc import Sequence

from meshtrain.cli.tables import align, format_bytes
from meshtrain.config.smaller import arguments, to_mesh
from meshtrain.files import JsonObject
from meshtrain.plan.text_report import VERDICTS
from meshtrain.report.scaling.efficiency import Curve, Row
from meshtrain.report.scaling.scaling import Scaling
from meshtrain.report.scaling.strategies import STRONG, Point
from meshtrain.sharding.rules import sizes_text

HEADER = ("way", "devices", "mesh", "microbatches", "step", "speedup", "efficiency", "serial", "computing", "idle",
          "waiting for links", "latency", "peak", "memory")  # fmt: skip
ALIGN = "<><>>>>>>><>><"
SHOWN = 0.0005  # share of a step; smaller shares would be 0.0% in the table
SHORT = {True: "fits", None: "close", False: "too much"}
WHAT = {
    STRONG: "strong scaling: the batch stays {batch:,} examples a step",
    "weak": "weak scaling: the batch grows with the devices, {each:.4g} examples each (at least one for each part)",
}


def text(found: Scaling) -> str:
    """Returns the complete report of a scaling as text."""
    parts = [_title(found)]
    for kind, what in WHAT.items():
        curves = [curve for curve in found.curves if curve.kind == kind]
        batch, basis = found.basis.config.batch_size, found.basis
        rows = [_cells(curve, row) for curve in curves for row in curve.rows if row.spent]
        if rows:
            parts += [what.format(batch=batch, each=batch / basis.num_devices), align(rows, HEADER, ALIGN)]
        if lines := [line for curve in curves for line in _without_time(curve)]:
            parts.append("\n".join(lines))
    return "\n\n".join([*parts, _amdahl(found.curves), _assumptions_text(found)])


def _title(found: Scaling) -> str:
    task, sizes = found.basis.weights.task, found.sizes
    at = ", ".join(f"{size:,}" for size in found.searched) or "no number of devices"
    return "\n".join(
        [
            f"scaling      {found.cluster.devices[0].device_kind}, {sizes[0]:,} to {sizes[-1]:,} devices, "
            f"{'slices' if found.cluster.num_slices > 1 else 'hosts'} of {found.basis.devices_each}",
            f"model        {task.num_parameters or found.basis.weights.num_parameters:,} parameters",
            f"compiled     {found.num_compiled} programs; searches found configurations that may fit on {at}",
        ]
    )


def mesh_of(point: Point) -> str:
    """Returns the axes larger than 1 as text, such as `data 8 x fsdp 8`, and other options that the search has set."""
    mesh = sizes_text(point.shape) or "one device"
    options = point.way.options
    rest = [str(options[key]) for key in ("remat.policy", "pipeline.schedule") if key in options]
    rest += [f"zero {options['zero.level']}"] if "zero.level" in options else []
    return ", ".join([mesh, *rest])


def _cells(curve: Curve, row: Row) -> tuple[str, ...]:
    spent, point = row.spent, row.point
    assert spent is not None
    speedup, efficiency, serial = curve.speedup(row), curve.efficiency(row), curve.serial_share(row)
    waits = [
        f"{axes} {_share(seconds, row)}" for axes, seconds in spent.waiting.items() if seconds > SHOWN * row.seconds
    ]
    return (
        curve.name,
        f"{point.num_devices:,}",
        mesh_of(point),
        f"{point.num_microbatches:,} of {point.microbatch}",
        f"{row.seconds:.3g} s",
        "-" if speedup is None else f"{speedup:.3g}",
        "-" if efficiency is None else f"{efficiency:.1%}",
        "-" if serial is None else f"{serial:.3%}",
        _share(spent.computing, row),
        _share(spent.idle, row) if spent.idle else "-",
        ", ".join(waits) or "-",
        _share(spent.latency, row),
        format_bytes(row.peak_bytes or 0),
        SHORT[row.fits],
    )


def _share(seconds: float, row: Row) -> str:
    return f"{seconds / row.seconds:.1%}"


def _without_time(curve: Curve) -> list[str]:
    """Returns a line of text for each range of numbers of devices that have no modelled time for the same reason."""
    lines: list[tuple[list[int], str]] = []
    for row in curve.rows:
        if row.spent is None:
            if lines and _group_problems(lines[-1][1]) == _group_problems(row.problem):
                lines[-1][0].append(row.point.num_devices)
            else:
                lines.append(([row.point.num_devices], row.problem))
    return [f"{curve.name} on {_range(sizes)} devices: {problem}" for sizes, problem in lines]


def _group_problems(problem: str) -> str:
    return "".join(letter for letter in problem if not letter.isdigit())[:24]


def _range(sizes: Sequence[int]) -> str:
    return f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"


def _amdahl(curves: Sequence[Curve]) -> str:
    rows = []
    for curve in curves:
        share, base = curve.serial_share(*curve.rows), curve.base
        if share is None or base is None:
            continue
        limit = f"{base.point.num_devices / share:,.0f} devices" if share > 0 else "none seen"
        rows.append((curve.name, f"{base.point.num_devices:,}", f"{share:.4%}", limit))
    if not rows:
        return "Amdahl's law: no strategy fits on two numbers of devices"
    table = align(rows, ("way", "base", "serial share", "limit of the speedup"), "<>>>")
    return f"Amdahl's law, fitted to strong scaling (devices of the base, share of its step)\n\n{table}"


def _assumptions_text(found: Scaling) -> str:
    lines = []
    for (axes, kind), link in found.links.items():
        measured = "as measured" if link else "as assumed, because no measurement is similar"
        lines.append(f"links of {kind} along {axes}: {measured}")
    lines.append("no step was measured; the model ignores network congestion and slow devices")
    return "\n".join(f"  assumed: {line}" for line in [*_of_model(found), *lines])


def _of_model(found: Scaling) -> list[str]:
    accelerator = found.cluster.accelerator
    assert accelerator is not None
    return found.assumptions.lines(accelerator, found.cluster.num_slices)


def to_json(found: Scaling) -> JsonObject:
    """Returns a scaling as a JSON object; numbers are in seconds, bytes and shares, and null means unknown."""
    return {
        "cluster": found.cluster.text,
        "device_kind": found.cluster.devices[0].device_kind,
        "sizes": list(found.sizes),
        "batch_size": found.basis.config.batch_size,
        "configured_devices": found.basis.num_devices,
        "searched": list(found.searched),
        "num_compiled": found.num_compiled,
        "assumptions": _of_model(found),
        "links": [
            {"axis": axes, "kind": kind, "is_measured": link is not None} for (axes, kind), link in found.links.items()
        ],
        "curves": [
            {
                "way": curve.name,
                "kind": curve.kind,
                "base_devices": curve.base and curve.base.point.num_devices,
                "serial_share": curve.serial_share(*curve.rows),
                "rows": [_row_json(curve, row) for row in curve.rows],
            }
            for curve in found.curves
        ],
    }


def _row_json(curve: Curve, row: Row) -> JsonObject:
    point, spent = row.point, row.spent
    run: JsonObject = {"mesh": None, "arguments": None}
    if point.config is not None:
        run = {"mesh": point.shape, "arguments": arguments(to_mesh(point.shape) | point.way.options)}
    return {
        "num_devices": point.num_devices,
        "batch_size": point.batch_size,
        "microbatch": point.microbatch,
        "num_microbatches": point.num_microbatches,
        **run,
        "problem": row.problem or None,
        "step_seconds": row.seconds if spent else None,
        "examples_per_second": row.rate if spent else None,
        "speedup": curve.speedup(row),
        "efficiency": curve.efficiency(row),
        "serial_share": curve.serial_share(row),
        "computing_seconds": spent and spent.computing,
        "idle_seconds": spent and spent.idle,
        "waiting_seconds": spent and dict(spent.waiting),
        "latency_seconds": spent and spent.latency,
        "peak_bytes": row.peak_bytes,
        "fits": row.fits,
        "verdict": VERDICTS[row.fits] if spent else None,
    }
