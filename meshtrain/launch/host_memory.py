"""Main memory available to this process: limited by the machine, the container and the shell. Imports no JAX."""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/proc/meminfo")
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files of a control group with its limit and its usage: version 2, and version 1 below the folder `memory`.
_FILES = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
_ULIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)


def memory(proc: Path = MEMORY, groups: Path = GROUPS, own: Path = OWN_GROUP) -> tuple[int, int]:
    """Returns (available bytes, total bytes) of main memory, within the limits of this process's containers.

    Args:
      proc: the kernel's memory table, /proc/meminfo.
      groups: the folder of control groups.
      own: the file that names the control groups of this process.
    """
    sizes = _sizes(proc)
    limits = [(limit, used) for limit, used in _limits(groups, own) if limit < sizes["MemTotal"]]
    available = min([sizes["MemAvailable"], *(max(0, limit - used) for limit, used in limits)])
    return available, min([sizes["MemTotal"], *(limit for limit, _ in limits)])


def most_bytes(proc: Path = MEMORY, groups: Path = GROUPS, own: Path = OWN_GROUP) -> int | None:
    """Returns the maximum number of bytes that this process can use; None if the kernel's memory table has no total.

    It is the size of main memory and swap, or a lower limit of a container, `ulimit -v` or `ulimit -d`.

    Args:
      proc: the kernel's memory table, /proc/meminfo.
      groups: the folder of control groups.
      own: the file that names the control groups of this process.
    """
    sizes = _sizes(proc)
    if "MemTotal" not in sizes:
        return None
    swap = sizes["SwapTotal"] if "SwapTotal" in sizes else 0
    limits = [sizes["MemTotal"], *(limit for limit, _ in _limits(groups, own))]
    shell = [soft for soft, _ in map(resource.getrlimit, _ULIMITS) if soft != resource.RLIM_INFINITY]
    return min([min(limits) + swap, *shell])


def _sizes(proc: Path) -> dict[str, int]:
    """Parses the kernel's memory table, the file `proc`; returns name, such as `MemTotal` -> bytes."""
    return {key: int(size) * 1024 for key, size in re.findall(r"^(\w+):\s+(\d+) kB", _text(proc), re.MULTILINE)}


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, used memory) in bytes for each control group of this process with a limit, inner groups first.

    Args:
      groups: the folder of control groups.
      own: the file that names the control groups of this process.
    """
    for folder, limit_file, used_file in _FILES:
        name = re.search(rf"^\d+:{folder}:/(.*)$", _text(own), re.MULTILINE)
        # In a container the root of the folder is often the container's group, even if the name differs.
        inner = groups / folder / (name[1] if name else "")
        for group in (inner, *inner.parents):
            if not group.is_relative_to(groups):
                break
            limit, used = _text(group / limit_file).strip(), _text(group / used_file).strip()
            if limit.isdecimal() and used.isdecimal():
                yield int(limit), int(used)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
