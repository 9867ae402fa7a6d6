"""Formats the measurements of collectives as text for people, and as JSON for programs and `plan --links`."""

from meshtrain.cli.tables import align, format_bytes
from meshtrain.files import JsonObject
from meshtrain.hardware.links import Link, Links, to_json
from meshtrain.probe.bench.sweep import Sweep
from meshtrain.probe.bench.timed import Timed

SIMULATED = (
    "these devices are simulated: the times measure copies in one memory, waiting threads and other work of "
    "this machine, not a network"
)
_MEASURED = ("axis", "operation", "group_size", "num_bytes", "wire_bytes", "fastest_seconds", "spread",
             "algorithm_bytes_per_second", "bus_bytes_per_second")  # fmt: skip


def text(found: Sweep) -> str:
    """Returns tables of all measurements and of the fits, and notes about skipped, unfitted or wrong measurements."""
    header = ("axis", "operation", "devices", "bytes", "us", "spread", "algorithm GB/s", "bus GB/s", "value")
    fitted = ("axis", "operation", "devices", "hosts", "latency us", "GB/s", "error")
    fits = [_fit_row(one.link, one.error) for one in found.fits if one.link]
    parts = [align([_row(row) for row in found.rows], header, "<<>>>>>><")]
    parts += [align(fits, fitted, "<<>>>>>")] if fits else []
    lines = _skipped_rows(found)
    lines += [f"not fitted   {one.operation} on {one.axis}: {one.why_not}" for one in found.fits if one.why_not]
    lines += [f"WRONG        {line}" for row in found.rows for line in row.wrong]
    lines += [f"note         {SIMULATED}"] if found.platform == "cpu" else []
    return "\n\n".join([*parts, "\n".join(lines)])


def _skipped_rows(found: Sweep) -> list[str]:
    lines = []
    for one in found.fits:
        count = sum((row.axis, row.operation) == (one.axis, one.operation) for row in found.rows)
        if count < len(found.sizes):
            first = format_bytes(found.sizes[count])
            which = f"{one.operation} on {one.axis} from {first} on"
            lines.append(f"skipped      {which}: it would take longer than --limit")
    return lines


def _row(row: Timed) -> tuple[str, ...]:
    return (
        row.axis,
        row.operation,
        str(row.group_size),
        format_bytes(row.num_bytes),
        f"{row.fastest_seconds * 1e6:.1f}",
        f"{row.spread:.2f}",
        f"{row.algorithm_bytes_per_second / 1e9:.3g}",
        f"{row.bus_bytes_per_second / 1e9:.3g}",
        "WRONG" if row.wrong else "right",
    )


def _fit_row(link: Link, error: float) -> tuple[str, ...]:
    return (
        link.axis,
        link.operation,
        str(link.group_size),
        str(link.num_hosts),
        f"{link.latency_seconds * 1e6:.1f}",
        f"{link.bytes_per_second / 1e9:.3g}",
        f"{error:.0%}",
    )


def json_of(found: Sweep) -> JsonObject:
    """Returns the content of a file for `plan --links`: the fitted links, and all measurements."""
    links = Links(found.platform, tuple(one.link for one in found.fits if one.link))
    return {
        **to_json(links),
        "mesh": found.shape,
        "num_processes": found.num_processes,
        "num_hosts": found.num_hosts,
        "not_fitted": [
            {"axis": one.axis, "operation": one.operation, "why_not": one.why_not} for one in found.fits if one.why_not
        ],
        "measurements": [
            {**{name: getattr(row, name) for name in _MEASURED}, "seconds": list(row.seconds), "wrong": list(row.wrong)}
            for row in found.rows
        ],
    }
