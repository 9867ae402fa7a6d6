"""Reads the facts about this machine that the doctor's checks judge. Imports no JAX; each read has a time limit."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from meshtrain.cli import output_files
from meshtrain.files import expand_user, hash_of_sources, is_url
from meshtrain.hardware.compiler_options import CACHE
from meshtrain.launch import cluster
from meshtrain.launch.cluster import Meeting
from meshtrain.launch.host_memory import memory
from meshtrain.launch.rendezvous import retry
from meshtrain.probe.checks import one_machine
from meshtrain.probe.checks.report import Finding, error

_PACKAGE = Path(__file__).parents[2]
_WRITTEN_BYTES = 2**24
_LOOK_SECONDS, _POLL_SECONDS = 5.0, 0.05
_NET = Path("/sys/class/net")
_UP, _LOOPBACK = 0x1, 0x8  # bits of an interface's flags, linux/if.h
_ALSO_INSTALLED = ("jax-cuda", "libtpu", "nvidia-nccl", "nvidia-cudnn")  # prefixes of distribution names
_T = TypeVar("_T")


def installed_versions() -> dict[str, str | None]:
    """Returns package name -> installed version; None for a missing package that meshtrain requires."""
    result = {name: _version(name) for name in ("meshtrain", *_requirements("meshtrain"), "jaxlib")}
    others = ((each.name, each.version) for each in importlib.metadata.distributions())
    return result | {name: version for name, version in others if name.startswith(_ALSO_INSTALLED)}


def software() -> dict[str, str]:
    """Returns the versions of all software that must be equal in every process, and a hash of meshtrain's source."""
    return {
        "python": platform.python_version(),
        "meshtrain's source": hash_of_sources(_PACKAGE),
        **{name: version for name, version in installed_versions().items() if version},
    }


def libraries(environ: Mapping[str, str], version: Path = Path("/proc/driver/nvidia/version")) -> dict[str, str]:
    """Returns name -> value of the NVIDIA driver's version and of the environment variables with library paths.

    Processes may have different values, but a difference is rarely intended, so the doctor warns of it.

    Args:
      environ: the environment variables of this process.
      version: the file in which NVIDIA's driver states its version.
    """
    driver = re.search(r"Kernel Module\D*([\d.]+)", _text(version))
    paths = {name: environ[name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if environ.get(name)}
    return {**({"NVIDIA driver": driver[1]} if driver else {}), **paths}


def findings(
    meeting: Meeting | None, workdir: Path, num_gpus: int | None, environ: Mapping[str, str], limit: float
) -> list[Finding]:
    """Runs all checks of this machine and returns their findings.

    Args:
      meeting: the address and number of the processes; None for a single process.
      workdir: the workdir of the job.
      num_gpus: the number of GPUs that this process should have; None: the scheduler's number, if it is known.
      environ: the environment variables of this process.
      limit: the time limit for reading one fact, in seconds.
    """
    versions = installed_versions()
    results = [one_machine.software(versions, platform.python_version())]
    num_hosts = 1
    if meeting:
        silent = (list[str](), f"no answer in {limit:.0f} s")
        addresses, failure = within(limit, lambda: resolve_host(meeting, limit / 2), silent)
        results += [one_machine.coordinator(meeting, addresses, failure), one_machine.proxy(meeting, environ)]
        num_hosts = meeting.num_hosts or (1 if one_machine.is_loopback(addresses) else meeting.num_processes)
    results += [error("platform", problem, "") for problem in cluster.platform_problems(environ)]
    listed, failure = gpus(environ, limit)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    expected = _slurm_gpus(environ) if num_gpus is None else num_gpus
    if {"cuda", "gpu", ""} & set((environ.get("JAX_PLATFORMS") or "").split(",")) or num_gpus is not None:
        results.append(one_machine.gpus(listed, failure, visible, expected, versions))
    results.append(one_machine.interface(environ.get("NCCL_SOCKET_IFNAME") or "", interfaces(), num_hosts))
    folders = {"workdir": workdir}
    if not is_url(cache := environ.get("JAX_COMPILATION_CACHE_DIR") or CACHE):
        folders["cache"] = expand_user(cache)
    for what, path in folders.items():
        dead = error(
            what,
            f"{path}: no answer in {limit:.0f} s",
            "use a file system that answers; check whether its server is running",
        )
        results += within(limit, functools.partial(_folder, what, path), [dead])
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    results += [
        one_machine.memory(*memory()),
        one_machine.memory_fraction(environ, len(listed)),
        one_machine.shared_memory(_size_of(Path("/dev/shm")), len(listed)),
        one_machine.check_locked_memory(
            None if locked == resource.RLIM_INFINITY else locked, any(Path("/sys/class/infiniband").glob("*"))
        ),
    ]
    return results


def within(seconds: float, read: Callable[[], _T], otherwise: _T) -> _T:
    """Returns the result of `read`, or `otherwise` if `read` raises OSError or takes longer than `seconds`.

    A dead disk or name server may block `read`. It then continues in its thread, which does not prevent the program
    from ending.
    """
    result: list[_T] = []

    def act() -> None:
        with contextlib.suppress(OSError):
            result.append(read())

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else otherwise


def resolve_host(meeting: Meeting, seconds: float = 0.0) -> tuple[list[str], str]:
    """Resolves the host name of process 0; returns (IP addresses, "") or ([], the reason of the failure).

    Args:
      meeting: the address and number of the processes.
      seconds: how long to retry, because the name of a pod that has just started may not be known yet; 0: no retry.
    """
    try:
        found = retry(lambda: socket.getaddrinfo(meeting.host, meeting.port, proto=socket.IPPROTO_TCP), seconds)
        return sorted({str(each[4][0]) for each in found}), ""
    except OSError as failure:
        return [], str(failure.strerror)


def gpus(environ: Mapping[str, str], limit: float) -> tuple[list[str], str]:
    """Lists the GPUs of this machine with `nvidia-smi -L`.

    Args:
      environ: the environment variables of this process.
      limit: the time limit of the program, in seconds.

    Returns:
      The identifier of each GPU, and ""; or an empty list and the reason of the failure. Without the program
      `nvidia-smi`, the list and the reason are empty.
    """
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return [], ""
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return [], f"no answer in {limit:.0f} s"
    except OSError as failure:
        return [], str(failure)
    if done.returncode and "No devices" not in done.stdout + done.stderr:
        return [], (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
    return re.findall(r"^GPU \d+: .*\(UUID: ([^)]+)\)", done.stdout, re.MULTILINE), ""


def interfaces(net: Path = _NET) -> dict[str, tuple[bool, bool]]:
    """Returns the network interfaces of this machine: name -> (whether it is up, whether it is loopback).

    Args:
      net: the folder in which Linux describes each interface.
    """
    result = {}
    for path in sorted(net.iterdir()) if net.is_dir() else ():
        if text := _text(path / "flags").strip():  # /sys/class/net/bonding_masters is a file, not an interface
            flags = int(text, 16)
            is_down = _text(path / "operstate").strip() in ("down", "lowerlayerdown")
            result[path.name] = (bool(flags & _UP) and not is_down, bool(flags & _LOOPBACK))
    return result


def existing(path: Path) -> Path:
    """Returns `path` if this folder exists, else its nearest existing parent, because the doctor creates no folders."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())


@contextlib.contextmanager
def mark_folder(workdir: Path, files: Mapping[int, str], process: int, limit: float) -> Iterator[Path]:
    """Creates a test file of this process in the workdir, or in its nearest existing parent, during the block.

    Yields the folder of the file. The file is deleted after the block.

    Args:
      workdir: the workdir of the job.
      files: process -> the name of its test file. If this process has no entry, no file is created.
      process: the index of this process.
      limit: the time limit of each file operation, in seconds.
    """
    folder = within(limit, lambda: existing(workdir), workdir)
    if process in files:
        within(limit, lambda: (folder / files[process]).touch(), None)
    try:
        yield folder
    finally:
        if process in files:
            within(limit, lambda: (folder / files[process]).unlink(missing_ok=True), None)


def look_for_marks(folder: Path, files: Mapping[int, str]) -> tuple[str, list[int], float]:
    """Waits up to 5 s until the test files of all processes are visible in a folder.

    Args:
      folder: the folder, from `mark_folder`.
      files: process -> the name of its test file.

    Returns:
      The folder, the processes whose file is still missing, and the seconds that the search took.
    """
    start, seen = time.monotonic(), set[int]()

    def look() -> None:
        seen.update(process for process, file in files.items() if (folder / file).exists())

    while len(seen) < len(files) and time.monotonic() < start + _LOOK_SECONDS:
        within(_LOOK_SECONDS, look, None)
        time.sleep(_POLL_SECONDS)
    return str(folder), sorted(files.keys() - seen), time.monotonic() - start


def write(path: Path) -> tuple[float, str]:
    """Writes 16 MiB to the disk of a folder; returns (seconds, ""), or (0, the reason of the failure)."""
    try:
        start = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=existing(path), prefix=".meshtrain-doctor-") as file:
            file.write(b"\1" * _WRITTEN_BYTES)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - start, ""
    except OSError as failure:
        return 0.0, failure.strerror or str(failure)


def _folder(what: str, path: Path) -> list[Finding]:
    refused = output_files.unwritable(path) if what == "workdir" else []  # the same check as the job's
    if refused:
        return [error(what, line, "") for line in refused]
    seconds, failure = write(path)
    folder = existing(path)
    results = [one_machine.folder(what, str(folder), seconds, failure)]
    if what == "workdir" and not failure:
        free = os.statvfs(folder)
        # Some network file systems report 0 for both, since they have no inodes.
        num_files = free.f_favail if free.f_files else -1
        results.append(one_machine.disk(str(folder), free.f_bavail * free.f_frsize, num_files))
    return results


def _requirements(distribution: str) -> Sequence[str]:
    try:
        listed = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", line)[0] for line in listed if "extra ==" not in line]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _slurm_gpus(environ: Mapping[str, str]) -> int | None:
    """Returns the number of GPUs that Slurm allocates on this machine; None if unknown, or with several processes."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or ""
    count = environ.get("SLURM_GPUS_ON_NODE") or ""
    return int(count) if re.fullmatch(r"1(\(x\d+\))?", tasks) and count.isdecimal() else None


def _size_of(path: Path) -> int:
    try:
        free = os.statvfs(path)
    except OSError:
        return 0
    return free.f_blocks * free.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
