"""Checks of a single machine, before any processes connect. Each is a pure function of facts; none imports JAX.

`machine_facts` reads the facts. A test can plant a fault by calling a check with modified facts.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence

from meshtrain.cli.tables import format_bytes
from meshtrain.hardware.accelerators import FRACTION_VARIABLES, POOL_FRACTION
from meshtrain.launch.cluster import Meeting
from meshtrain.probe.checks.report import Finding, error, ok, warning

LEAST_BYTES = 2**30  # minimum of free disk and of free memory, for a small checkpoint and for the program
_LEAST_SHARED_BYTES = 2**28
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# Variables of gRPC, which JAX's processes use to connect.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXIES = ("no_grpc_proxy", "no_proxy")


def software(installed: Mapping[str, str | None], python: str) -> Finding:
    """Returns an error if a requirement of meshtrain is missing, or if the versions of JAX's packages do not match.

    Otherwise returns an `ok` finding.

    Args:
      installed: package -> its version; None if the package is missing.
      python: the version of Python.
    """
    missing = [name for name, version in installed.items() if version is None and name not in _PLUGINS]
    if missing:
        return error(
            "software", f"{', '.join(missing)} is not installed", "also run pip install meshtrain on this machine"
        )
    jax, jaxlib = installed["jax"] or "", installed["jaxlib"] or ""
    if _numbers(jaxlib) > _numbers(jax):
        return error("software", f"jaxlib {jaxlib} is newer than jax {jax}", f"pip install jax=={jaxlib}")
    for name in _PLUGINS:
        if (version := installed.get(name)) and version != jaxlib:
            seen = f"{name} {version} does not fit jaxlib {jaxlib}: JAX would run without GPUs"
            return error("software", seen, f"pip install {name}=={jaxlib}")
    return ok("software", f"Python {python}, jax {jax}, meshtrain {installed['meshtrain']}")


def coordinator(meeting: Meeting, addresses: Sequence[str], failure: str = "") -> Finding:
    """Returns an error if the host name of process 0 does not resolve, or not to an address that other machines reach.

    If the job has several machines, a loopback address is an error, but in process 0 only a warning. Otherwise the
    result is an `ok` finding.

    Args:
      meeting: the address and number of the processes.
      addresses: the IP addresses to which the name resolves on this machine.
      failure: the reason why the name does not resolve; empty if it does.
    """
    if failure:
        return error(
            "coordinator",
            f"{meeting.host}: {failure}",
            "use an IP address instead of the name, or correct the DNS entry",
        )
    seen = f"{meeting.address} is {', '.join(addresses)}"
    if not is_loopback(addresses) or not meeting.num_hosts or meeting.num_hosts == 1:
        return ok("coordinator", seen)
    fix = "use its address in the network; /etc/hosts may map the name to 127.0.1.1, as on Debian"
    if meeting.index == 0:
        return warning(
            "coordinator",
            f"{seen}, which only this machine can reach, although {meeting.num_hosts} machines have to connect to it",
            fix,
        )
    return error("coordinator", f"{seen}: this machine, but process 0 is on another machine", fix)


def is_loopback(addresses: Sequence[str]) -> bool:
    """Returns whether all of these IP addresses are loopback addresses; False for an empty list."""
    return bool(addresses) and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in addresses)


def proxy(meeting: Meeting, environ: Mapping[str, str]) -> Finding:
    """Returns a warning if gRPC would use a proxy to reach process 0, and would hang; otherwise an `ok` finding."""
    used = [name for name in _PROXIES if environ.get(name)]
    excepted = [word.strip().lstrip(".") for name in _NO_PROXIES for word in (environ.get(name) or "").split(",")]
    if not used or any(word and (word == "*" or f".{meeting.host}".endswith(f".{word}")) for word in excepted):
        return ok("proxy", "none")
    return warning("proxy", f"{used[0]} is set, and gRPC uses it to reach {meeting.host}", f"no_proxy={meeting.host}")


def gpus(
    listed: Sequence[str], failure: str, visible: str | None, expected: int | None, installed: Mapping[str, str | None]
) -> Finding:
    """Returns an error if nvidia-smi fails, or if the GPUs that JAX will see are invalid, unusable or not `expected`.

    Otherwise returns an `ok` finding.

    Args:
      listed: the identifiers of all GPUs of the machine, by number, as printed by `nvidia-smi -L`.
      failure: the reason why nvidia-smi failed; empty if it succeeded or is not installed.
      visible: the value of CUDA_VISIBLE_DEVICES; None if it is not set.
      expected: the number of GPUs that this process should have; None: the number is not checked.
      installed: package -> its version; None if the package is missing.
    """
    if failure:
        return error(
            "GPUs", f"nvidia-smi -L: {failure}", "restart the driver or the machine, or remove the machine from the job"
        )
    words = list(range(len(listed))) if visible is None else _until_invalid(visible)
    for word in words:
        if isinstance(word, int) and word >= len(listed):
            seen = f"CUDA_VISIBLE_DEVICES={visible}, but this process has {len(listed)} GPUs, counted from 0"
            return error("GPUs", seen, "let the scheduler set CUDA_VISIBLE_DEVICES")
        if isinstance(word, str) and not word.startswith("MIG-") and not any(each.startswith(word) for each in listed):
            return error(
                "GPUs", f"CUDA_VISIBLE_DEVICES has {word}, which is not a GPU", "use identifiers from nvidia-smi -L"
            )
    if expected is not None and len(words) != expected:
        shown = "" if visible is None else f" by CUDA_VISIBLE_DEVICES={visible}"
        fix = "remove the machine from the job, or request all of its GPUs from the scheduler (dmesg names a lost GPU)"
        return error("GPUs", f"{len(words)} of {len(listed)} visible{shown}, {expected} expected", fix)
    if words and not any(installed.get(name) for name in _PLUGINS):
        return error("GPUs", f"{len(words)} visible, but this JAX cannot use them", "pip install 'meshtrain[cuda12]'")
    return ok("GPUs", f"{len(words)} visible")


def _until_invalid(visible: str) -> list[int | str]:
    """Returns the identifiers of CUDA_VISIBLE_DEVICES up to the first -1, as CUDA reads them."""
    words = [word.strip() for word in visible.split(",")]
    words = words[: words.index("-1")] if "-1" in words else words
    return [int(word) if word.isdecimal() else word for word in words if word]


def interface(wanted: str, interfaces: Mapping[str, tuple[bool, bool]], num_hosts: int) -> Finding:
    """Returns an error if NCCL would find no usable network interface; otherwise an `ok` finding.

    An interface is usable if it is up; a loopback interface only if the job has one machine. NCCL_SOCKET_IFNAME lists
    prefixes of names; after `^` the prefixes to exclude, after `=` complete names (NCCL's user guide).

    Args:
      wanted: the value of NCCL_SOCKET_IFNAME; empty if it is not set.
      interfaces: name -> (whether it is up, whether it is a loopback interface).
      num_hosts: the number of machines of the job.
    """
    others = sorted(name for name, (is_up, is_loop) in interfaces.items() if is_up and not is_loop)
    fix = f"NCCL_SOCKET_IFNAME={others[0]}" if others else "start a network interface"
    if not wanted:
        # Without the variable, NCCL uses loopback only if there is no other interface.
        if others or num_hosts == 1:
            return ok("interface", f"{', '.join(others) or 'loopback only'}; NCCL_SOCKET_IFNAME is not set")
        return error("interface", f"only loopback is up, for {num_hosts} machines", fix)
    taken = _matching(wanted, interfaces)
    if not taken:
        seen = f"NCCL_SOCKET_IFNAME={wanted} matches none of the interfaces {', '.join(sorted(interfaces))}"
        return error("interface", seen, fix)
    up = [name for name in taken if interfaces[name][0]]
    if not up:
        return error("interface", f"NCCL_SOCKET_IFNAME={wanted}: {', '.join(taken)} is down", fix)
    loops = [name for name in up if interfaces[name][1]]
    if loops and num_hosts > 1:
        fix = f"NCCL_SOCKET_IFNAME={wanted},{loops[0]}" if wanted.startswith("^") else fix
        return error(
            "interface", f"NCCL_SOCKET_IFNAME={wanted} selects {loops[0]}, which does not reach other machines", fix
        )
    return ok("interface", f"NCCL_SOCKET_IFNAME={wanted} selects {', '.join(up)}")


def _matching(wanted: str, names: Mapping[str, object]) -> list[str]:
    is_not = wanted.startswith("^")
    rest = wanted.removeprefix("^")
    is_whole = rest.startswith("=")
    words = [word.partition(":")[0].strip() for word in rest.removeprefix("=").split(",")]

    def matches(name: str) -> bool:
        return any(name == word if is_whole else name.startswith(word) for word in words if word)

    return sorted(name for name in names if matches(name) != is_not)


def folder(what: str, path: str, seconds: float, failure: str = "") -> Finding:
    """Returns an `ok` finding if a folder is writable; otherwise an error or a warning.

    A workdir that is not writable is an error. For the compilation cache it is only a warning, because a run without a
    cache only starts more slowly.

    Args:
      what: the use of the folder, `workdir` or `cache`.
      path: the path of the folder.
      seconds: the time to write 16 MiB to the disk of the folder.
      failure: the reason why the folder cannot be written; empty if it can.
    """
    if not failure:
        return ok(what, f"{path}: 16 MiB in {seconds:.2f} s")
    if what == "cache":
        return warning(what, f"{path}: {failure}: each start compiles again", "JAX_COMPILATION_CACHE_DIR=DIR")
    return error(what, f"{path}: {failure}", "use a folder that every process can write, or free some space in it")


def disk(path: str, free_bytes: int, free_files: int) -> Finding:
    """Returns an error if the disk of a folder has less than 1 GiB free, or no free files; otherwise an `ok` finding.

    Args:
      path: the path of the folder.
      free_bytes: the number of bytes that this user may still write.
      free_files: the number of files that may still be created; negative if the file system has no such limit.
    """
    if free_bytes < LEAST_BYTES:
        return error("disk", f"{path} has {format_bytes(free_bytes)} left", "free some space, or use another workdir")
    if free_files == 0:
        return error(
            "disk", f"{path} has space, but no file can be created in it", "delete files: its inodes are used up"
        )
    return ok("disk", f"{path} has {format_bytes(free_bytes)} left")


def memory(available_bytes: int, total_bytes: int) -> Finding:
    """Returns an error if the machine or the container has less than 1 GiB of free memory; else an `ok` finding."""
    seen = f"{format_bytes(available_bytes)} of {format_bytes(total_bytes)} available"
    if available_bytes < LEAST_BYTES:
        return error("memory", seen, "end other programs on this machine, or request more memory")
    return ok("memory", seen)


def memory_fraction(environ: Mapping[str, str], num_gpus: int) -> Finding:
    """Checks the environment variables that set the fraction of GPU memory that JAX allocates.

    Returns an error if JAX rejects them, a warning if the fraction is not `POOL_FRACTION`, which plans assume, and
    otherwise an `ok` finding.
    """
    name = next((name for name in FRACTION_VARIABLES if environ.get(name)), "")
    if not num_gpus or not name:
        return ok("memory fraction", "train sets it" if num_gpus else "not needed without GPUs")
    seen, fix = f"{name}={environ[name]}", f"{name}={POOL_FRACTION}, or leave it out: train sets it"
    others = [other for other in FRACTION_VARIABLES if other != name and environ.get(other)]
    try:
        share = float(environ[name])
    except ValueError:
        return error("memory fraction", f"{seen}, which JAX rejects: it is not a number", fix)
    if others:
        return error("memory fraction", f"{seen} and {others[0]}, which JAX rejects together", f"leave {name} out")
    if share != POOL_FRACTION:
        return warning("memory fraction", f"{seen}: plan assumes {POOL_FRACTION} for its verdict", fix)
    return ok("memory fraction", seen)


def shared_memory(total_bytes: int, num_gpus: int) -> Finding:
    """Returns a warning if /dev/shm is too small for NCCL to connect several GPUs; otherwise an `ok` finding."""
    seen = f"/dev/shm has {format_bytes(total_bytes)}"
    if num_gpus > 1 and total_bytes < _LEAST_SHARED_BYTES:
        return warning(
            "shared memory", f"{seen}, for {num_gpus} GPUs", "docker run --shm-size=1g, or a volume at /dev/shm"
        )
    return ok("shared memory", seen)


def check_locked_memory(limit_bytes: int | None, has_infiniband: bool) -> Finding:
    """Returns a warning if locked memory, which InfiniBand needs for its buffers, is limited; else an `ok` finding.

    Without InfiniBand adapters, the result is always `ok`.

    Args:
      limit_bytes: the limit of this process in bytes; None: no limit.
      has_infiniband: whether the machine has InfiniBand adapters.
    """
    if limit_bytes is None or not has_infiniband:
        return ok("locked memory", "no limit" if limit_bytes is None else "not needed without InfiniBand")
    return warning("locked memory", f"at most {format_bytes(limit_bytes)}, with InfiniBand", "ulimit -l unlimited")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version.partition("+")[0])[:3])
