"""Measured links: latency and bandwidth of each collective along each mesh axis, in a file; bytes sent in a ring.

Imports no JAX.

`meshtrain bench-collectives --json=FILE` writes the file, and `meshtrain plan --links=FILE` reads it:

    {"platform": "NVIDIA H100 80GB HBM3",
     "links": [{"axis": "data", "operation": "all-reduce", "group_size": 8, "num_hosts": 2,
                "latency_seconds": 3.1e-05, "bytes_per_second": 4.2e+10}, ...]}

A collective takes latency_seconds + wire bytes / bytes_per_second. Wire bytes are the bytes that one device sends, as
counted by `plan/hlo/collectives.py`, so bytes_per_second is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md). Other
keys of the file are ignored.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Sequence

from meshtrain.errors import Problem, Problems, UserError, is_finite, refuse
from meshtrain.files import Json, JsonObject, expand_user, what_is_at
from meshtrain.hardware.accelerators import find as find_accelerator

# XLA's names. The ring is an all-reduce written with permutes; it does not occur in compiled steps.
RING = "ring-all-reduce"
OPERATIONS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast", RING
)  # fmt: skip
ALLOWED = "a file written by `meshtrain bench-collectives --json=FILE`"
_NEAREST = "measure again, or leave --links out"


def wire_share(operation: str, group_size: int) -> float:
    """Returns the bytes that one device sends, relative to the bytes of the larger of its input and output.

    The formulas are for a ring (Patarasuk and Yuan 2009), and define bus bandwidth as nccl-tests does
    (doc/PERFORMANCE.md).

    Args:
      operation: the name of a collective, such as "all-reduce": one of `OPERATIONS`.
      group_size: the number of devices in the ring, at least 2.
    """
    if operation in ("collective-permute", "collective-broadcast"):
        return 1.0
    return (2.0 if operation in ("all-reduce", RING) else 1.0) * (group_size - 1) / group_size


@dataclasses.dataclass(frozen=True)
class Link:
    """The measured speed of one operation along one mesh axis.

    Attributes:
      axis: an axis of the measured mesh.
      operation: an element of `OPERATIONS`.
      group_size: the number of devices along the axis.
      num_hosts: the number of hosts over which these devices are distributed.
      latency_seconds: the time of a collective without bytes.
      bytes_per_second: the rate at which one device sends in a collective so large that latency is negligible.
    """

    axis: str
    operation: str
    group_size: int
    num_hosts: int
    latency_seconds: float
    bytes_per_second: float

    def seconds(self, wire_bytes: float) -> float:
        """Returns the time in seconds of a collective in which each device sends `wire_bytes` bytes."""
        return self.latency_seconds + wire_bytes / self.bytes_per_second


@dataclasses.dataclass(frozen=True)
class Links:
    """The measured links of a cluster.

    Attributes:
      platform: the value of `jax.Device.device_kind` for the cluster's devices.
      links: the measurements, at most one for each axis, operation, group size and number of hosts.
    """

    platform: str
    links: tuple[Link, ...]


def link_for(links: Links, axis: str, operation: str, group_size: int, num_hosts: int) -> Link | None:
    """Returns the measured link for a collective, or None if no comparable link was measured.

    A comparable link has the same axis and operation, and its group uses the network in the same way: inside one host,
    or with the same number of devices on each of several hosts. The comparable link with the nearest group size is
    adapted to `group_size`: its bandwidth stays, and its latency (except of a permute) grows with log2 of the group
    size, as in the plan's model.

    Args:
      links: the measured links.
      axis: an axis of the mesh.
      operation: an element of `OPERATIONS`.
      group_size: the number of devices of the group, at least 2.
      num_hosts: the number of hosts over which these devices are distributed.
    """
    found = [
        link
        for link in links.links
        if (link.axis, link.operation) == (axis, operation)
        and (link.num_hosts > 1) == (num_hosts > 1)
        and (num_hosts == 1 or link.group_size * num_hosts == group_size * link.num_hosts)
    ]
    if not found:
        return None
    closest = min(found, key=lambda link: abs(math.log2(link.group_size / group_size)))
    # In a permute each device sends once, independent of the group's size.
    growth = 1.0 if operation == "collective-permute" else math.log2(group_size) / math.log2(closest.group_size)
    latency = closest.latency_seconds * growth
    return dataclasses.replace(closest, group_size=group_size, num_hosts=num_hosts, latency_seconds=latency)


def to_json(links: Links) -> JsonObject:
    """Returns the links as the JSON content of a file; callers may add more keys, which `read` ignores."""
    return {"platform": links.platform, "links": [dataclasses.asdict(link) for link in links.links]}


def read(path: str) -> Links:
    """Returns the links in a file.

    Args:
      path: the path of the file, as the user wrote it.

    Raises:
      UserError: the file is missing, invalid or without links; one line for each problem, at most ten.
    """
    place = expand_user(path)
    if (what := what_is_at(place)) != "a file":
        raise UserError(
            Problem("--links", got=f"'{path}', which is not a file but {what}", allowed=ALLOWED, nearest=_NEAREST)
        )
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        text = Problem("--links", got=f"'{path}', which is not JSON ({error})", allowed=ALLOWED, nearest=_NEAREST)
        raise UserError(text) from error
    problems = Problems()
    platform, listed = _top(path, content, problems)
    links = []
    for number, entry in enumerate(listed):
        lines = _entry_problems(f"--links: '{path}', links[{number}]", entry)
        problems.add(*lines)
        if not lines:
            links.append(Link(**{field.name: entry[field.name] for field in dataclasses.fields(Link)}))
        if problems.is_enough():
            break
    counts = collections.Counter((link.axis, link.operation, link.group_size, link.num_hosts) for link in links)
    for axis, operation, *_ in (key for key, count in counts.items() if count > 1):
        problems.add(
            Problem("--links", fault=f"'{path}' has {operation} on {axis} twice", allowed="once", nearest=_NEAREST)
        )
    refuse(problems.lines())
    return Links(platform, tuple(links))


def refuse_other_platform(path: str, links: Links, device_kind: str) -> None:
    """Checks that links were measured on the planned devices. All names of the same accelerator are equivalent.

    Args:
      path: the path of the file, for the error.
      links: the measured links.
      device_kind: `jax.Device.device_kind` of the planned devices.

    Raises:
      UserError: the links were measured on other devices.
    """
    measured_on = find_accelerator(links.platform)
    if links.platform == device_kind or (measured_on and measured_on is find_accelerator(device_kind)):
        return
    raise UserError(
        Problem(
            "--links",
            got=f"'{path}', measured on '{links.platform}', for a plan on '{device_kind}'",
            allowed=f"links measured on '{device_kind}'",
            nearest="leave --links out",
        )
    )


def _top(path: str, content: Json, problems: Problems) -> tuple[str, Sequence[Json]]:
    """Returns the platform and the list of links in a file's content.

    Args:
      path: the path of the file, for errors.
      content: the parsed JSON of the file.
      problems: the list to which errors are added: a missing key, a wrong type, or an empty list. If the list of links
        has an error, an empty list is returned instead.
    """
    keys = ("platform", "links")
    missing = [key for key in keys if not (isinstance(content, dict) and key in content)]
    if missing:
        problems.add(
            Problem("--links", fault=f"'{path}' has no {' and no '.join(missing)}", allowed=ALLOWED, nearest=_NEAREST)
        )
        return "", ()
    platform, listed = (content[key] for key in keys)
    if not (isinstance(platform, str) and platform):
        problems.add(
            Problem(
                f"--links: '{path}', platform",
                got=f"{platform!r}",
                allowed="a device kind as JAX names it",
                nearest=_NEAREST,
            )
        )
    if not isinstance(listed, list):
        problems.add(Problem(f"--links: '{path}', links", got=f"{listed!r}", allowed="a list", nearest=_NEAREST))
        return "", ()
    if not listed:
        text = "no latency or bandwidth could be fitted, because the machine was busy"
        problems.add(
            Problem(
                "--links",
                fault=f"'{path}' has no links: {text}",
                allowed="at least one",
                nearest="measure again while the machine is idle",
            )
        )
    return str(platform), listed


def _entry_problems(where: str, entry: Json) -> list[Problem]:
    names = [field.name for field in dataclasses.fields(Link)]
    missing = [name for name in names if not (isinstance(entry, dict) and name in entry)]
    if missing:
        return [Problem(None, fault=f"{where} has no {', '.join(missing)}", allowed=", ".join(names), nearest=_NEAREST)]
    size = entry["group_size"]
    checks = {
        "axis": (isinstance(entry["axis"], str) and entry["axis"] != "", "the name of a mesh axis"),
        "operation": (entry["operation"] in OPERATIONS, ", ".join(OPERATIONS)),
        "group_size": (type(size) is int and size >= 2, "an integer, at least 2"),
        "num_hosts": (
            type(entry["num_hosts"]) is type(size) is int and 1 <= entry["num_hosts"] <= size,
            "an integer from 1 to group_size",
        ),
        "latency_seconds": (is_finite(entry["latency_seconds"]) and entry["latency_seconds"] >= 0, "at least 0"),
        "bytes_per_second": (is_finite(entry["bytes_per_second"]) and entry["bytes_per_second"] > 0, "more than 0"),
    }
    return [
        Problem(f"{where}.{name}", got=f"{entry[name]!r}", allowed=allowed, nearest=_NEAREST)
        for name, (is_right, allowed) in checks.items()
        if not is_right
    ]
