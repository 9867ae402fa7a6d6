"""How much main memory is there for this process: the machine's, the container's, the shell's limit. Imports no JAX."""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/proc/meminfo")
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of a control group: the limit, and what is in use; of version 2, and of version 1 below its folder `memory`.
_FILES = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
_ULIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)


def memory(proc: Path = MEMORY, groups: Path = GROUPS, own: Path = OWN_GROUP) -> tuple[int, int]:
    """Returns the available and all bytes of main memory, within the limits of containers.

    Args:
      proc: the kernel's table of memory.
      groups: the folder of control groups.
      own: the file that names the groups of this process.
    """
    sizes = _sizes(proc)
    limits = [(limit, used) for limit, used in _limits(groups, own) if limit < sizes["MemTotal"]]
    available = min([sizes["MemAvailable"], *(max(0, limit - used) for limit, used in limits)])
    return available, min([sizes["MemTotal"], *(limit for limit, _ in limits)])


def most_bytes(proc: Path = MEMORY, groups: Path = GROUPS, own: Path = OWN_GROUP) -> int | None:
    """Returns the bytes that this process cannot exceed: memory and swap, or a lower limit; None if they are not known.

    Limits are those of containers and of `ulimit -v` and `ulimit -d`.

    Args:
      proc: the kernel's table of memory.
      groups: the folder of control groups.
      own: the file that names the groups of this process.
    """
    sizes = _sizes(proc)
    if "MemTotal" not in sizes:
        return None
    swap = sizes["SwapTotal"] if "SwapTotal" in sizes else 0
    limits = [sizes["MemTotal"], *(limit for limit, _ in _limits(groups, own))]
    shell = [soft for soft, _ in map(resource.getrlimit, _ULIMITS) if soft != resource.RLIM_INFINITY]
    return min([min(limits) + swap, *shell])


def _sizes(proc: Path) -> dict[str, int]:
    """Returns name -> bytes of the kernel's table of memory."""
    return {key: int(size) * 1024 for key, size in re.findall(r"^(\w+):\s+(\d+) kB", _text(proc), re.MULTILINE)}


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use) of the control groups of this process that have a limit, the inner ones first."""
    for folder, limit_file, used_file in _FILES:
        name = re.search(rf"^\d+:{folder}:/(.*)$", _text(own), re.MULTILINE)
        # In a container the folder's root is often the container's group, whatever the name says.
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
