"""Initializes JAX: platform, processes, devices, compilation cache. No other module does this.

All of it must happen before the first device query, and no module of the package queries a device at import. `cluster`
determines from the environment whether a process is one of several.
"""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshtrain.errors import Problem, UserError, refuse
from meshtrain.files import is_url
from meshtrain.hardware.accelerators import FRACTION_VARIABLE, FRACTION_VARIABLES, POOL_FRACTION, find
from meshtrain.hardware.compiler_options import CACHE, capture_stderr
from meshtrain.launch import cluster, early_errors, endings, peers
from meshtrain.launch.local_processes import MAX_SIMULATED

NVIDIA = Path("/proc/driver/nvidia")  # created by the kernel driver
_NUM_DEVICES_TO_FILL = 8  # simulated on CPU if a mesh axis is -1
# By default JAX caches only programs that compile for a second; on CPUs, small programs dominate the start-up time.
_CACHE_EVERYTHING = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}


def start(num_devices_needed: int | None, *, is_open: bool = False) -> tuple[list[jax.Device], list[str]]:
    """Initializes JAX and returns the devices of the mesh. May be called again, and after other code has used JAX.

    On CPU the required number of devices is simulated. On GPUs and TPUs the existing devices are used.

    Args:
      num_devices_needed: the number of devices in the mesh, over all processes; None for all devices (8 simulated on
        CPU).
      is_open: whether a mesh axis is -1. Then `num_devices_needed` devices are simulated on CPU; on accelerators all
        devices are used.

    Returns:
      The devices of the mesh in all processes, and lines about them to print (often none).

    Raises:
      UserError: there are too few devices, or, with several processes, too many; the processes cannot connect; or an
        environment variable for their connection is missing or wrong.
    """
    _refuse_flags(os.environ.get("XLA_FLAGS") or "")
    refuse(cluster.platform_problems({"JAX_PLATFORMS": _setting("jax_platforms") or ""}))
    _choose_platform()
    take_memory(_setting("jax_platforms") or "", os.environ)
    how = cluster.processes(os.environ, _setting("jax_platforms") or "")
    if how is not None and "num_processes" not in how:
        _meet(how)  # only JAX can determine the number of processes
        how = {**how, "num_processes": peers.num_connected()}
    # If possible, check before the processes connect: an error in one process must not leave the others waiting.
    num_processes = cluster.full_size(os.environ, how["num_processes"] if how else 1)
    num_devices = devices_each(num_devices_needed, num_processes, is_open)
    if how is not None:
        _meet(how)
    is_given = _setting("jax_num_cpu_devices") >= 1
    if not is_given or (num_devices_needed is not None and not (is_open and num_processes > 1)):
        _simulate(num_devices)
    lines = _keep_compilations()
    all_devices = _devices()
    if is_open and num_devices_needed is not None:
        fills_up = all_devices[0].platform != "cpu" or num_processes > 1
        num_devices_needed = None if fills_up else min(num_devices_needed, len(all_devices))
    devices, about_devices = choose(all_devices, num_devices_needed, jax.process_count())
    return devices, [*lines, *_about_cpu(devices), *about_devices]


def simulate(num_devices: int) -> None:
    """Makes JAX simulate this number of CPU devices; for notebooks and scripts, before any other use of JAX.

    In the first cell::

        import meshtrain
        meshtrain.simulate(8)

    `train` simulates the devices that its mesh needs, but JAX fixes the number at its first use, so a larger mesh that
    is trained later cannot have more devices. A second call of `simulate` with the same number is allowed.

    Args:
      num_devices: the devices of the largest mesh that will be trained on here.

    Raises:
      UserError: JAX has started with another number, or the number is not from 1 to 8192.
    """
    if not 1 <= num_devices <= MAX_SIMULATED:
        fix = min(max(num_devices, 1), MAX_SIMULATED)
        raise UserError(Problem("simulate", got=num_devices, allowed=f"1 to {MAX_SIMULATED} devices", nearest=fix))
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        devices = jax.devices()
        if (len(devices), devices[0].platform) == (num_devices, "cpu"):
            return
        raise UserError(
            Problem(
                "simulate",
                got=f"{num_devices} devices, but JAX has already started with {len(devices)} x {devices[0].platform}",
                allowed="a call before anything uses JAX",
                nearest=f"restart Python, and call simulate({num_devices}) first",
            )
        ) from None


def devices_each(num_devices_needed: int | None, num_processes: int, is_open: bool = False) -> int:
    """Returns the number of CPU devices that each process simulates.

    Args:
      num_devices_needed: the number of devices over all processes; None: 8 devices.
      num_processes: the number of processes that share the devices.
      is_open: whether a mesh axis is -1. Then the division may have a remainder, and the result is rounded down.

    Raises:
      UserError: the devices cannot be divided evenly among the processes.
    """
    if num_devices_needed is None or is_open:
        return max(1, (num_devices_needed or _NUM_DEVICES_TO_FILL) // num_processes)
    each, left = divmod(num_devices_needed, num_processes)
    if left or not each:
        multiple = max(1, round(num_devices_needed / num_processes)) * num_processes
        raise UserError(
            Problem(
                "mesh",
                got=f"{num_devices_needed} devices",
                allowed=f"a multiple of the {num_processes} processes",
                nearest=multiple,
            )
        )
    return each


def choose(
    found: Sequence[jax.Device], num_devices_needed: int | None, num_processes: int
) -> tuple[list[jax.Device], list[str]]:
    """Returns the devices for the mesh, and lines to print: one line if some devices remain unused, else [].

    Args:
      found: the devices of all processes, from `jax.devices()`.
      num_devices_needed: the number of devices in the mesh; None for all devices.
      num_processes: the number of processes.

    Raises:
      UserError: there are too few devices; or, with several processes, not exactly the required number.
    """
    if num_devices_needed is None or num_devices_needed == len(found):
        return list(found), []
    what = f"{found[0].device_kind} {found[0].platform.upper()}" if found[0].platform != "cpu" else "CPU"
    if num_processes > 1:
        raise UserError(
            Problem(
                "mesh",
                got=f"{num_devices_needed} devices",
                allowed=f"exactly the {len(found)} {what} devices of the {num_processes} processes",
                nearest=f"axes whose product is {len(found)}, or one axis of -1",
            )
        )
    if num_devices_needed > len(found):
        fix = f"one axis of -1, or JAX_PLATFORMS=cpu, which simulates {num_devices_needed}"
        if found[0].platform == "cpu":  # JAX was used before, so it is too late to simulate more
            fix = f"restart Python, and before anything uses JAX call meshtrain.simulate({num_devices_needed})"
        raise UserError(
            Problem(
                "mesh",
                got=f"{num_devices_needed} devices",
                allowed=f"at most the {len(found)} available {what} devices",
                nearest=fix,
            )
        )
    return list(found[:num_devices_needed]), [f"the mesh uses the first {num_devices_needed} of {len(found)} devices"]


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # JAX defines its options at run time, so type checkers do not know them


def _devices() -> list[jax.Device]:
    # Plugins of accelerators that this machine does not have print warnings while JAX looks for devices.
    try:
        with capture_stderr() if _setting("jax_platforms") == "cpu" else contextlib.nullcontext():
            return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX raises AssertionError if the only platform has no device
        what = f"JAX cannot start on '{_setting('jax_platforms')}': {str(error) or 'it has no device'}"
        raise UserError(Problem("devices", fault=what, nearest="JAX_PLATFORMS=cpu")) from error


def _choose_platform() -> None:
    """Makes JAX use the CPU if there is no GPU driver and no platform was chosen.

    Otherwise an installed GPU plugin would print tracebacks.
    """
    # Set by the user's JAX_PLATFORMS, or by JAX if it found TPU chips.
    if _setting("jax_platforms"):
        return
    if not nvidia_answers(os.environ) and not Path("/dev/kfd").exists():  # /dev/kfd: AMD's driver
        jax.config.update("jax_platforms", "cpu")


def take_memory(platforms: str, environ: MutableMapping[str, str], proc: Path = NVIDIA) -> None:
    """Makes JAX allocate the fraction of GPU memory that `plan` assumes, unless the user has set a fraction.

    Only GPU models in the hardware table get this fraction. Other GPUs may be small and also drive a display, so they
    keep JAX's default fraction.

    Args:
      platforms: JAX's platforms, separated by commas; empty if JAX chooses.
      environ: the environment of this process, before JAX has started.
      proc: the folder of NVIDIA's driver.
    """
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return
    told = [path.read_text(errors="replace") for path in sorted(proc.glob("gpus/*/information"))]
    models = [match[1] for text in told if (match := re.search(r"^Model:\s*(.*?)\s*$", text, re.MULTILINE))]
    if models and all(map(find, models)) and not any(environ.get(name) for name in FRACTION_VARIABLES):
        environ[FRACTION_VARIABLE] = str(POOL_FRACTION)


def nvidia_answers(environ: Mapping[str, str]) -> bool:
    """Returns whether this machine has an NVIDIA driver with visible GPUs, without loading the driver."""
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if (NVIDIA / "version").exists():
        return True
    # WSL has no such file; its driver can be queried only with this program.
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return False
    try:
        return subprocess.run([program, "-L"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@functools.cache
def _refuse_flags(flags: str) -> None:
    """Checks in a subprocess (0.2 s) that XLA accepts the value of XLA_FLAGS, because unknown flags abort the process.

    Raises:
      UserError: XLA rejects a flag.
    """
    if not flags:
        return
    asks = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    answer = subprocess.run(asks, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    if match := re.search(r"^[EF]\d{4} .*?\] (.*)", answer.stderr, re.MULTILINE):
        raise UserError(
            Problem(
                "XLA_FLAGS", got=flags, allowed=f"flags that XLA accepts ({match[1]})", nearest="leave this flag out"
            )
        )


def _meet(how: cluster.Arguments) -> None:
    """Connects this process to the other processes of the job, unless it is already connected.

    Args:
      how: the arguments for `jax.distributed.initialize`, from `cluster.processes`.

    Raises:
      UserError: JAX cannot connect the processes, or is already in use.
    """
    if jax.distributed.is_initialized():
        return
    if how["cluster_detection_method"] in cluster.WITHOUT_JAX and (meeting := cluster.meeting(os.environ)):
        endings.end_if_told(early_errors.meet(meeting, os.environ), meeting.index)
    try:
        jax.distributed.initialize(**how)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            Problem(
                "processes",
                fault=f"cannot connect: {error}",
                allowed=f"start them before anything uses JAX, each with its {', '.join(cluster.EXPLICIT)}",
            )
        ) from error
    endings.end_together()


def _simulate(num_devices: int) -> None:
    """Sets the number of CPU devices that JAX simulates, unless a larger number is set already or JAX is in use.

    Raises:
      UserError: the number is above 8192, the largest number that JAX can simulate.
    """
    if _setting("jax_num_cpu_devices") >= num_devices:
        return
    if _setting("jax_platforms") == "cpu" and num_devices > MAX_SIMULATED:
        raise UserError(
            Problem(
                "mesh",
                got=f"{num_devices} simulated devices",
                allowed=f"at most {MAX_SIMULATED}",
                nearest=MAX_SIMULATED,
            )
        )
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        return  # JAX is in use: `choose` raises an error if its devices are too few


def _about_cpu(devices: Sequence[jax.Device]) -> list[str]:
    if devices[0].platform != "cpu":
        return []
    where = f"{jax.process_count()} processes" if jax.process_count() > 1 else "this machine's CPU"
    lines = [f"{len(devices)} devices are simulated on {where}"] if len(devices) > 1 else []
    if leaves_gpus(devices):
        lines.append("this machine has an NVIDIA GPU, but this JAX cannot use it: pip install 'meshtrain[cuda12]'")
    return lines


def leaves_gpus(devices: Sequence[jax.Device]) -> bool:
    """Returns whether JAX runs on the CPU although the user did not choose it and there is an NVIDIA GPU."""
    return devices[0].platform == "cpu" and not _setting("jax_platforms") and nvidia_answers(os.environ)


def _keep_compilations() -> list[str]:
    """Enables the persistent compilation cache; returns a line to print if its directory is not writable, else []."""
    if not _setting("jax_enable_compilation_cache"):
        return []
    directory = _setting("jax_compilation_cache_dir") or CACHE
    if not is_url(directory):
        try:
            path = Path(directory).expanduser().absolute()
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                directory = str(path)
        except (OSError, RuntimeError, ValueError) as error:  # no home directory, or an impossible file name
            jax.config.update("jax_compilation_cache_dir", None)
            return [f"compilation cache off: {directory}: {error}; set JAX_COMPILATION_CACHE_DIR to another folder"]
    jax.config.update("jax_compilation_cache_dir", directory)
    for name, value in _CACHE_EVERYTHING.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    return []
