"""Whether this process is one of several, and where they meet, read from the environment without JAX.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID   set by a launcher, or by hand
    MESHTRAIN_FULL_PROCESSES                                     how many there are with all machines of the job
    Slurm's, Open MPI's, Kubernetes', Cloud TPU's own variables   read by JAX, where there are several processes

`processes` says how JAX is to connect them, and `meeting` where it will.
"""

import dataclasses
import importlib.metadata
import importlib.util
import re
import socket
from collections.abc import Callable, Mapping
from typing import TypedDict

from meshtrain.errors import UserError, unknown

PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
_OWN_PLUGINS = ("xla_cuda", "xla_rocm")  # entry points of JAX's own packages begin so
EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FULL = "MESHTRAIN_FULL_PROCESSES"
WITHOUT_JAX = ("deactivate", "slurm", "ompi")  # ways to meet whose address the environment says
_BY_HAND = f"each process with its {', '.join(EXPLICIT)}"
# Where JAX meets if nobody names a port: jax/_src/clusters, a port of the last 4096 by the number of the job.
_NUM_PORTS = 4096
_FIRST_PORT = 65535 - _NUM_PORTS + 1
_KUBERNETES_PORT = 55527
_RANGES = re.compile(r"|\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")  # between the brackets of Slurm's lists
_MOST = 2**32  # of the numbers that schedulers count with


def platform_problems(environ: Mapping[str, str]) -> list[str]:
    """Returns one line for each unknown name in JAX_PLATFORMS; none if a package adds platforms to JAX.

    Args:
      environ: of this process.
    """
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if any(not plugin.name.startswith(_OWN_PLUGINS) for plugin in plugins):
        return []
    names = [name for name in (environ.get("JAX_PLATFORMS") or "").split(",") if name]
    return [unknown("JAX_PLATFORMS", name, PLATFORMS, "JAX_PLATFORMS=cpu") for name in names if name not in PLATFORMS]


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where the processes of a job meet.

    Attributes:
      address: host:port of process 0.
      num_processes: how many there are.
      index: of this one.
      num_hosts: on how many machines they run; None where the environment does not say.
      names: the machine of each process, by index; empty where the environment does not say.
    """

    address: str
    num_processes: int
    index: int
    num_hosts: int | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UserError where the address is not host:port."""
        if not _is_address(self.address):
            allowed = "host:port, from 1 to 65535, in JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_BIND_ADDRESS"
            raise UserError(f"processes: got {self.address}; allowed: {allowed}; nearest: localhost:9901")

    @property
    def host(self) -> str:
        """The name or number of process 0's machine."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port at which process 0 listens."""
        return int(self.address.rpartition(":")[2])


class Arguments(TypedDict, total=False):
    """The arguments of `jax.distributed.initialize` that are given; it finds out the others."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int]
    cluster_detection_method: str


def processes(environ: Mapping[str, str], platforms: str) -> Arguments | None:
    """Returns the arguments for `jax.distributed.initialize`, or None where this process is alone.

    It reads only the environment, so that a machine outside a cluster neither waits for a network nor fails.
    `num_processes` is among the arguments wherever the environment says it.

    Args:
      environ: of this process.
      platforms: JAX's platforms as the user or JAX chose them, such as `cpu` or `tpu,cpu`; empty: not chosen.

    Raises:
      UserError: a variable that is read is missing or no number; Open MPI without an address to connect to.
    """
    if "JAX_NUM_PROCESSES" in environ or "JAX_PROCESS_ID" in environ:
        return _explicit(environ)
    num_tasks = _count(environ, "SLURM_STEP_NUM_TASKS")
    if num_tasks > 1 and "SLURM_STEP_NODELIST" in environ:
        one_on_each_host = num_tasks == _count(environ, "SLURM_STEP_NUM_NODES")
        return _scheduler(environ, "slurm", num_tasks, one_on_each_host)
    num_tasks = _count(environ, "OMPI_COMM_WORLD_SIZE")
    if num_tasks > 1:
        one_on_each_host = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        return _scheduler(environ, _open_mpi(environ), num_tasks, one_on_each_host)
    # Google's Kubernetes tells pods with TPUs where they meet. A job is one slice of theirs.
    is_pod = "KUBERNETES_SERVICE_HOST" in environ and "TPU_WORKER_HOSTNAMES" not in environ
    if is_pod and "JOB_COMPLETION_INDEX" in environ and _installed("kubernetes"):
        return {"cluster_detection_method": "k8s"}
    return _cloud_tpu(environ, platforms)


def full_size(environ: Mapping[str, str], num_processes: int) -> int:
    """Returns how many processes the job has with all of its machines: at least those that there are.

    Args:
      environ: of this process.
      num_processes: that there are; they are all, where the environment does not say it.

    Raises:
      UserError: the variable is no number, or below `num_processes`.
    """
    if not environ.get(FULL):
        return num_processes
    [full] = _numbers(environ, **{FULL: _MOST})
    if full < num_processes:
        raise UserError(
            f"{FULL}: got {full}; allowed: at least the {num_processes} processes; nearest: {num_processes}"
        )
    return full


def meeting(
    environ: Mapping[str, str], num_processes: int | None = None, full_name: Callable[[], str] = socket.getfqdn
) -> Meeting | None:
    """Returns where the processes meet, as JAX finds it, or None where this process is alone.

    Args:
      environ: of this process.
      num_processes: how many there are, where the environment does not say it; None: not known.
      full_name: asks for this machine's name with its domain.

    Raises:
      UserError: see `processes`; or only JAX can find the address or the number of processes.
    """
    how = processes(environ, environ.get("JAX_PLATFORMS") or "")
    if how is None:
        return None
    method = how["cluster_detection_method"]
    if method == "deactivate":
        return Meeting(how["coordinator_address"], how["num_processes"], how["process_id"])
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    if method == "slurm":
        return _in_slurm(environ, address, how["num_processes"])
    if method == "ompi":
        count = how["num_processes"]
        index, _ = _numbers(environ, OMPI_COMM_WORLD_RANK=count, OMPI_COMM_WORLD_LOCAL_RANK=count)
        return Meeting(address or _address_of_open_mpi(environ), count, index)
    if method == "k8s" and num_processes:
        return _in_kubernetes(environ, address, num_processes, full_name())
    wanted = "--processes=N" if method == "k8s" else _BY_HAND
    raise UserError(f"processes: got {method}, where only JAX knows the others; allowed: {wanted}; nearest: that")


def hosts_of(text: str) -> list[str]:
    """Returns the hosts of a list of Slurm's.

    >>> hosts_of("node[1-2,007],login")
    ['node1', 'node2', 'node007', 'login']

    Raises:
      UserError: something else than numbers stands between brackets.
    """
    result = []
    for prefix, inside, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", text):
        if not _RANGES.fullmatch(inside):
            raise UserError(f"SLURM_STEP_NODELIST: got {text}; allowed: names such as node[1-4,7]; nearest: {_BY_HAND}")
        for part in inside.split(","):
            first, _, last = part.partition("-")
            last = last or first
            numbers = range(int(first), int(last) + 1) if first else [None]
            result += [
                prefix + suffix if number is None else f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers
            ]
    return result


def _in_slurm(environ: Mapping[str, str], address: str | None, num_processes: int) -> Meeting:
    listed = environ["SLURM_STEP_NODELIST"]
    hosts, num_hosts = hosts_of(listed), _count(environ, "SLURM_STEP_NUM_NODES")
    # JAX reads all of these, once the processes meet.
    below = {"SLURM_PROCID": num_processes, "SLURM_LOCALID": num_processes, "SLURM_NTASKS": _MOST}
    index, _, _, job = _numbers(environ, **below, SLURM_JOB_ID=_MOST)
    if not address:
        # As JAX reads the list: what follows the brackets does not count.
        prefix, number = re.match(r"([^,\[]*)(?:\[([^,\-]*))?", listed).groups(default="")  # type: ignore[union-attr]
        address = f"{prefix}{number}:{_FIRST_PORT + job % _NUM_PORTS}"
    # Consecutive tasks share a host, which is how srun fills them unless it is told otherwise.
    even = len(hosts) == num_hosts and num_processes % num_hosts == 0
    names = tuple(hosts[i * num_hosts // num_processes] for i in range(num_processes)) if even else ()
    return Meeting(address, num_processes, index, num_hosts, names)


def _in_kubernetes(environ: Mapping[str, str], address: str | None, num_processes: int, full_name: str) -> Meeting:
    # The pods of an Indexed Job are JOB-0, JOB-1, ..., and the service gives them its name as their domain.
    [index] = _numbers(environ, JOB_COMPLETION_INDEX=num_processes)
    own, _, domain = full_name.partition(".")
    job = own.removesuffix(f"-{index}")
    names = tuple(f"{job}-{i}" for i in range(num_processes))
    service = domain.partition(".")[0]
    address = address or f"{names[0]}{f'.{service}' if service else ''}:{_KUBERNETES_PORT}"
    return Meeting(address, num_processes, index, num_processes, names)


def _address_of_open_mpi(environ: Mapping[str, str]) -> str:
    """Returns the address that JAX takes from an URI such as `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    uri = environ["OMPI_MCA_orte_hnp_uri"]
    match = re.match(r"(\d{1,12})\..*?(?:tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]])", uri)
    if match is None:
        raise UserError(f"OMPI_MCA_orte_hnp_uri: got {uri}; allowed: NUMBER.0;tcp://ADDRESS:PORT; nearest: {_BY_HAND}")
    return f"{match[2] or match[3]}:{_FIRST_PORT + int(match[1]) // _NUM_PORTS % _NUM_PORTS}"


def _count(environ: Mapping[str, str], name: str) -> int:
    return _numbers(environ, **{name: _MOST})[0] if environ.get(name) else 1


def _numbers(environ: Mapping[str, str], **below: int) -> list[int]:
    """Returns the numbers that variables hold, each below its limit.

    Raises:
      UserError: a line for each that is missing, no whole number, or not below its limit.
    """
    texts = {name: environ.get(name) or "nothing" for name in below}
    wrong = [name for name, value in texts.items() if not (_is_whole(value) and int(value) < below[name])]
    if wrong:
        lines = (f"{name}: got {texts[name]}; allowed: a number below {below[name]}" for name in wrong)
        raise UserError(*(f"{line}, as the scheduler sets it; nearest: {_BY_HAND}" for line in lines))
    return [int(value) for value in texts.values()]


def _is_whole(text: str) -> bool:
    return text.isdecimal() and len(text) <= 12  # Python reads no number of thousands of digits


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and _is_whole(port) and 0 < int(port) < 2**16


def _explicit(environ: Mapping[str, str]) -> Arguments | None:
    address, count, index = (environ.get(name) or "" for name in EXPLICIT)
    if count == "1":
        return None
    if not (_is_address(address) and _is_whole(count) and _is_whole(index) and int(index) < int(count)):
        got = ", ".join(f"{name}={environ.get(name) or '(not set)'}" for name in EXPLICIT)
        raise UserError(
            f"processes: got {got}; allowed: host:port with a port from 1 to 65535, a number, and a number from 0 to "
            "one less; nearest: localhost:9901, 2 and 0"
        )
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        "cluster_detection_method": "deactivate",
    }


def _scheduler(environ: Mapping[str, str], method: str, num_tasks: int, one_on_each_host: bool) -> Arguments:
    arguments: Arguments = {"cluster_detection_method": method, "num_processes": num_tasks}
    # JAX gives process i of a host only the i-th device, which is wrong where a process is alone on its host, and
    # where the scheduler already shows each process its own device and no other. An empty list means: all it sees.
    bound = "CUDA_VISIBLE_DEVICES" in environ and "," not in environ["CUDA_VISIBLE_DEVICES"]
    if (one_on_each_host or bound) and "JAX_LOCAL_DEVICE_IDS" not in environ:
        arguments["local_device_ids"] = []
    return arguments


def _open_mpi(environ: Mapping[str, str]) -> str:
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return "ompi"
    if _installed("mpi4py"):  # from version 5 on, Open MPI's environment names no address to meet at
        return "mpi4py"
    raise UserError(
        f"processes: got {environ['OMPI_COMM_WORLD_SIZE']} from Open MPI without an address to meet at; "
        f"allowed: pip install mpi4py, or {_BY_HAND}"
    )


def _cloud_tpu(environ: Mapping[str, str], platforms: str) -> Arguments | None:
    if "tpu" not in platforms:
        return None
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts or _count(environ, "MEGASCALE_NUM_SLICES") > 1:
        return {"cluster_detection_method": "gketpu" if hosts else "gcetpu"}
    # Elsewhere in the cloud only the metadata server knows the other hosts. JAX itself sets this variable where there
    # are no chips, and so do single-host images.
    return {"cluster_detection_method": "gcetpu"} if not hosts and "TPU_SKIP_MDS_QUERY" not in environ else None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
