"""Creates the devices of a cluster such as `h100:8x8`, `v5e:16x16`, `2xv5e:16x16` or `cpu:8`, which need not exist.

A file in `targets/` describes each kind of GPU to the compiler. TPUs are known to libtpu by name. CPUs are simulated.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental.topologies import TopologyDescription, get_topology_desc

from meshtrain.errors import Problem, UserError, nearest
from meshtrain.hardware.accelerators import Accelerator, find
from meshtrain.hardware.compiler_options import capture_stderr
from meshtrain.launch import distributed

OLDEST_JAX = (0, 12)  # that plans for GPUs: the compiler options are for this version
GPU_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
TARGETS = Path(__file__).parents[1] / "targets"
GPUS = ("a100", "h100", "h200", "b200")
TPUS = {"v4": "2x2x2", "v5e": "4x4", "v5p": "2x2x2", "v6e": "4x4"}  # device -> an example of a torus
SIZES = dict.fromkeys(GPUS, "8x8") | TPUS | {"cpu": "8"}  # device -> an example of its size
CLUSTER = re.compile(r"(?:(?P<slices>[1-9]\d{0,3})x)?(?P<name>[a-z]\w*):(?P<sizes>\d{1,9}(?:x\d{1,9})*)$")
ALLOWED = f"HOSTSxGPUS of {', '.join(GPUS)}; the torus of {', '.join(TPUS)}, after SLICESx for several slices; cpu:N"


class Name(NamedTuple):
    """A parsed cluster name.

    Attributes:
      device: the kind of device, such as `h100`.
      sizes: (hosts, GPUs per host) for GPUs; the torus of one slice for TPUs; (number of devices,) for CPUs.
      num_slices: number of TPU slices; 1 for other devices.
    """

    device: str
    sizes: tuple[int, ...]
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        """Number of devices in the cluster."""
        return self.num_slices * math.prod(self.sizes)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The devices of a cluster, for which a step is compiled.

    Attributes:
      text: the cluster's name as the user wrote it.
      platform: `cuda`, `tpu` or `cpu`, as `jax.jit(...).lower` accepts it.
      devices: the devices, in the order of the compiler's topology.
      num_hosts: number of hosts.
      accelerator: the published peaks of one device; None for CPUs.
      compute_capability: the compute capability of a GPU, such as (9, 0); None for other devices.
      num_slices: number of TPU slices; 1 for other devices.
    """

    text: str
    platform: str
    devices: Sequence[jax.Device]
    num_hosts: int
    accelerator: Accelerator | None
    compute_capability: tuple[int, int] | None = None
    num_slices: int = 1

    @property
    def devices_each(self) -> int:
        """Number of devices in a group with fast links: a slice if there are several slices, otherwise a host."""
        return len(self.devices) // (self.num_slices if self.num_slices > 1 else self.num_hosts)


def parse(text: str) -> Name:
    """Parses a cluster name such as `h100:8x8`.

    Raises:
      UserError: the name is malformed, its device is unknown, or it has several slices of a device other than a TPU.
    """
    match = CLUSTER.match(text.strip().lower())
    name = match["name"] if match else text.partition(":")[0]
    if not match or name not in SIZES:
        fix = "" if name in SIZES else nearest(name, SIZES).replace("did you mean", "did you mean the device")
        raise UserError(Problem("--cluster", got=f"'{text}'", allowed=ALLOWED, nearest=f"h100:8x8{fix}"))
    sizes = tuple(int(size) for size in match["sizes"].split("x"))
    num_sizes = (1, 2) if name in GPUS else (SIZES[name].count("x") + 1,)
    if 0 in sizes or len(sizes) not in num_sizes:
        raise UserError(Problem("--cluster", got=f"'{text}'", allowed=ALLOWED, nearest=f"{name}:{SIZES[name]}"))
    sizes = (1, *sizes) if name in GPUS and len(sizes) == 1 else sizes
    num_slices = int(match["slices"] or 1)
    if name not in TPUS and num_slices > 1:
        fix = f"{name}:{num_slices * sizes[0]}x{sizes[1]}" if name in GPUS else f"{name}:{num_slices * sizes[0]}"
        raise UserError(Problem("--cluster", got=f"'{text}'", allowed=ALLOWED, nearest=fix))
    return Name(name, sizes, num_slices)


def open_cluster(text: str) -> Cluster:
    """Returns the cluster with this name, including its devices; sets JAX's platform to CPU.

    Args:
      text: the name, such as `h100:8x8`.

    Raises:
      UserError: the name is invalid, a compiler is not installed, or no TPU has this torus.
    """
    name, sizes, num_slices = parse(text)
    # Planning needs no accelerator; a run may be using the accelerator of this machine.
    if jax.config.values["jax_platforms"] != "cpu":
        jax.config.update("jax_platforms", "cpu")
    if name == "cpu":
        with capture_stderr():  # hides long warnings, as in `_describe`
            devices, _ = distributed.start(sizes[0])
        return Cluster(text, "cpu", devices, 1, None)
    if name in GPUS:
        _require_gpu_compiler(text)
        # A GPU topology is written as slices x hosts x GPUs per host.
        if plugin := importlib.util.find_spec("jax_cuda12_plugin"):  # has the runtime that Mosaic's kernels link to
            runtime = Path(str(plugin.origin)).parent / "libmosaic_gpu_runtime.so"
            os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
        target = (TARGETS / f"{name}.txtpb").read_text()
        topology = f"1x{sizes[0]}x{sizes[1]}"
        gpus = _describe(text, partial(get_topology_desc, platform="cuda", target_config=target, topology=topology))
        return Cluster(text, "cuda", gpus, sizes[0], find(gpus[0].device_kind), _capability(target))
    _require(text, "libtpu", "plan-tpu")
    # The compiler opens no chip, so it may share the library with a training run or another plan.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # A v4 has two cores. Training uses them as one device; the compiler reports two devices unless it gets this name.
    kind = {"chip_config_name": "megacore"} if name == "v4" else {}
    slice_name = f"{name}:{'x'.join(map(str, sizes))}"
    described = partial(get_topology_desc, platform="tpu", topology_name=slice_name, num_slices=num_slices, **kind)
    chips = _describe(text, described)
    num_hosts = len({chip.process_index for chip in chips})
    return Cluster(text, "tpu", chips, num_hosts, find(chips[0].device_kind), num_slices=num_slices)


def _describe(text: str, describe: Callable[[], TopologyDescription]) -> Sequence[jax.Device]:
    try:
        with capture_stderr():  # without an accelerator each compiler prints long warnings
            jax.devices()  # loads the plugins here, so that their warnings are captured
            try:
                devices: Sequence[jax.Device] = describe().devices
            except RuntimeError as error:
                if "topology not implemented" not in str(error):
                    raise
                _start_gpu_plugins()
                devices = describe().devices
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            Problem("--cluster", got=f"'{text}', which the compiler rejects: {first}", allowed=ALLOWED)
        ) from error
    assert parse(text).num_devices == len(devices)
    return devices


def _start_gpu_plugins() -> None:
    """Initializes JAX's GPU plugins, which contain the compiler; requires that `jax_platforms` is `cpu`.

    With another value, the plugins would check CUDA libraries that a machine without a GPU lacks, and that compilation
    does not need. So if JAX was used before `jax_platforms` was set to `cpu`, its initialization of the plugins failed
    and is repeated here.
    """
    for name in GPU_PLUGINS:
        if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(name):
            pkgutil.resolve_name(f"{name}:initialize")()


def _capability(target: str) -> tuple[int, int]:
    major = re.search(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", target)
    assert major, target
    return int(major[1]), int(major[2] or 0)


def _require_gpu_compiler(text: str) -> None:
    if jax.__version_info__ < OLDEST_JAX:
        raise UserError(
            Problem(
                "--cluster",
                got=f"'{text}' with jax {jax.__version__}",
                allowed="jax 0.12 or newer, which needs Python 3.12",
                nearest="PYTHON=python3.12 scripts/plan",
            )
        )
    for number in (12, 13):
        package = f"jax-cuda{number}-pjrt"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version == jax.__version__:
            return
        raise UserError(
            Problem(
                "--cluster",
                got=f"'{text}' with {package} {version}",
                allowed="the version of jax",
                nearest=f"pip install {package}=={jax.__version__}",
            )
        )
    _require(text, "jax_plugins.xla_cuda12", "plan-gpu")


def _require(text: str, module: str, extra: str) -> None:
    parent = module.partition(".")[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(module) is None:
        raise UserError(
            Problem(
                "--cluster",
                got=f"'{text}', whose compiler is not installed",
                condition="without it",
                allowed="cpu:N",
                nearest=f"pip install 'meshtrain[{extra}]', or scripts/plan, which installs it",
            )
        )
