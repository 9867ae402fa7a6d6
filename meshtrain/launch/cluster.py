"""Determines from the environment, without JAX, whether this process is one of several, and how they connect.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID   set by a launcher or by the user
    MESHTRAIN_FULL_PROCESSES                                     number of processes if all machines of the job run
    variables of Slurm, Open MPI, Kubernetes and Cloud TPU       read by JAX if there are several processes

`processes` returns JAX's arguments to connect them, and `meeting` returns the address.
"""

import dataclasses
import importlib.metadata
import importlib.util
import re
import socket
from collections.abc import Callable, Mapping
from typing import TypedDict

from meshtrain.errors import Problem, UserError, unknown

PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
_OWN_PLUGINS = ("xla_cuda", "xla_rocm")  # prefixes of the entry points of JAX's own packages
EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FULL = "MESHTRAIN_FULL_PROCESSES"
WITHOUT_JAX = ("deactivate", "slurm", "ompi")  # JAX's detection methods for which the environment has the address
_BY_HAND = f"each process with its {', '.join(EXPLICIT)}"
# JAX's default ports (jax/_src/clusters): one of the last 4096 ports, derived from the job's number.
_NUM_PORTS = 4096
_FIRST_PORT = 65535 - _NUM_PORTS + 1
_KUBERNETES_PORT = 55527
_RANGES = re.compile(r"|\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")  # the text inside brackets of Slurm's node lists
_MOST = 2**32  # exclusive limit of the numbers that schedulers set


def platform_problems(environ: Mapping[str, str]) -> list[Problem]:
    """Returns an error line for each unknown name in JAX_PLATFORMS; [] if an installed package adds platforms to JAX.

    Args:
      environ: the environment of this process.
    """
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if any(not plugin.name.startswith(_OWN_PLUGINS) for plugin in plugins):
        return []
    names = [name for name in (environ.get("JAX_PLATFORMS") or "").split(",") if name]
    return [unknown("JAX_PLATFORMS", name, PLATFORMS, "JAX_PLATFORMS=cpu") for name in names if name not in PLATFORMS]


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The address where the processes of a job connect, their number, and the index of this process.

    Attributes:
      address: host:port of process 0.
      num_processes: the number of processes.
      index: the index of this process.
      num_hosts: the number of machines; None if the environment does not state it.
      names: the machine of each process, by index; empty if the environment does not state them.
    """

    address: str
    num_processes: int
    index: int
    num_hosts: int | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UserError if the address is not host:port."""
        if not _is_address(self.address):
            allowed = "host:port, from 1 to 65535, in JAX_COORDINATOR_ADDRESS and JAX_COORDINATOR_BIND_ADDRESS"
            raise UserError(Problem("processes", got=self.address, allowed=allowed, nearest="localhost:9901"))

    @property
    def host(self) -> str:
        """The name or IP address of process 0's machine."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port on which process 0 listens."""
        return int(self.address.rpartition(":")[2])


class Arguments(TypedDict, total=False):
    """Arguments of `jax.distributed.initialize`; JAX determines the missing arguments."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int]
    cluster_detection_method: str


def processes(environ: Mapping[str, str], platforms: str) -> Arguments | None:
    """Returns the arguments for `jax.distributed.initialize`, or None for a single process.

    Reads only the environment, so that a machine outside a cluster neither waits for a network nor fails. The result
    contains `num_processes` if the environment states it.

    Args:
      environ: the environment of this process.
      platforms: JAX's platforms as chosen by the user or by JAX, such as `cpu` or `tpu,cpu`; empty if not chosen.

    Raises:
      UserError: a variable is missing or not a number; or Open MPI without an address to connect to.
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
    # In Google's Kubernetes, TPU pods get the addresses from variables; their job is one slice.
    is_pod = "KUBERNETES_SERVICE_HOST" in environ and "TPU_WORKER_HOSTNAMES" not in environ
    if is_pod and "JOB_COMPLETION_INDEX" in environ and _is_installed("kubernetes"):
        return {"cluster_detection_method": "k8s"}
    return _cloud_tpu(environ, platforms)


def full_size(environ: Mapping[str, str], num_processes: int) -> int:
    """Returns the number of processes of the complete job, with no machine missing; at least the current number.

    Args:
      environ: the environment of this process.
      num_processes: the current number of processes; the result if MESHTRAIN_FULL_PROCESSES is not set.

    Raises:
      UserError: MESHTRAIN_FULL_PROCESSES is not a number, or is below `num_processes`.
    """
    if not environ.get(FULL):
        return num_processes
    [full] = _numbers(environ, **{FULL: _MOST})
    if full < num_processes:
        raise UserError(
            Problem(FULL, got=full, allowed=f"at least the {num_processes} processes", nearest=num_processes)
        )
    return full


def meeting(
    environ: Mapping[str, str], num_processes: int | None = None, full_name: Callable[[], str] = socket.getfqdn
) -> Meeting | None:
    """Returns the coordinator address that JAX would use, the number of processes and this process's index.

    Returns None for a single process.

    Args:
      environ: the environment of this process.
      num_processes: the number of processes, used if the environment does not state it; None if unknown.
      full_name: a function that returns this machine's name with its domain.

    Raises:
      UserError: a variable is missing or wrong, or only JAX can determine the address or the number of processes.
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
    raise UserError(
        Problem(
            "processes",
            got=f"{method}, where only JAX can determine the other processes",
            allowed=wanted,
            nearest=wanted,
        )
    )


def hosts_of(text: str) -> list[str]:
    """Returns the host names in a node list of Slurm.

    >>> hosts_of("node[1-2,007],login")
    ['node1', 'node2', 'node007', 'login']

    Raises:
      UserError: the text between brackets is not a list of numbers and ranges.
    """
    result = []
    for prefix, inside, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", text):
        if not _RANGES.fullmatch(inside):
            raise UserError(
                Problem("SLURM_STEP_NODELIST", got=text, allowed="names such as node[1-4,7]", nearest=_BY_HAND)
            )
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
    # JAX will read all of these variables.
    below = {"SLURM_PROCID": num_processes, "SLURM_LOCALID": num_processes, "SLURM_NTASKS": _MOST}
    index, _, _, job = _numbers(environ, **below, SLURM_JOB_ID=_MOST)
    if not address:
        # Like JAX, which ignores the text after the brackets.
        prefix, number = re.match(r"([^,\[]*)(?:\[([^,\-]*))?", listed).groups(default="")  # type: ignore[union-attr]
        address = f"{prefix}{number}:{_FIRST_PORT + job % _NUM_PORTS}"
    # Assumes that consecutive tasks share a host, the default distribution of srun.
    even = len(hosts) == num_hosts and num_processes % num_hosts == 0
    names = tuple(hosts[i * num_hosts // num_processes] for i in range(num_processes)) if even else ()
    return Meeting(address, num_processes, index, num_hosts, names)


def _in_kubernetes(environ: Mapping[str, str], address: str | None, num_processes: int, full_name: str) -> Meeting:
    # The pods of an Indexed Job are named JOB-0, JOB-1, ..., and their domain is the name of the service.
    [index] = _numbers(environ, JOB_COMPLETION_INDEX=num_processes)
    own, _, domain = full_name.partition(".")
    job = own.removesuffix(f"-{index}")
    names = tuple(f"{job}-{i}" for i in range(num_processes))
    service = domain.partition(".")[0]
    address = address or f"{names[0]}{f'.{service}' if service else ''}:{_KUBERNETES_PORT}"
    return Meeting(address, num_processes, index, num_processes, names)


def _address_of_open_mpi(environ: Mapping[str, str]) -> str:
    """Returns the address that JAX derives from Open MPI's URI, `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    uri = environ["OMPI_MCA_orte_hnp_uri"]
    match = re.match(r"(\d{1,12})\..*?(?:tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]])", uri)
    if match is None:
        raise UserError(
            Problem("OMPI_MCA_orte_hnp_uri", got=uri, allowed="NUMBER.0;tcp://ADDRESS:PORT", nearest=_BY_HAND)
        )
    return f"{match[2] or match[3]}:{_FIRST_PORT + int(match[1]) // _NUM_PORTS % _NUM_PORTS}"


def _count(environ: Mapping[str, str], name: str) -> int:
    return _numbers(environ, **{name: _MOST})[0] if environ.get(name) else 1


def _numbers(environ: Mapping[str, str], **below: int) -> list[int]:
    """Returns the values of the environment variables in `below`, which must contain whole numbers, in their order.

    Args:
      environ: the environment of this process.
      below: name of a variable -> the exclusive upper limit of its value.

    Raises:
      UserError: one line for each variable that is missing, not a whole number, or not below its limit.
    """
    texts = {name: environ.get(name) or "nothing" for name in below}
    wrong = [name for name, value in texts.items() if not (_is_whole(value) and int(value) < below[name])]
    if wrong:
        allowed = {name: f"a number below {below[name]}, set by the scheduler" for name in wrong}
        raise UserError(*(Problem(name, got=texts[name], allowed=allowed[name], nearest=_BY_HAND) for name in wrong))
    return [int(value) for value in texts.values()]


def _is_whole(text: str) -> bool:
    return text.isdecimal() and len(text) <= 12  # Python does not convert thousands of digits


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
            Problem(
                "processes",
                got=got,
                allowed=(
                    "an address host:port with a port from 1 to 65535, a number of processes, and an index below "
                    "this number"
                ),
                nearest="localhost:9901, 2 and 0",
            )
        )
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        "cluster_detection_method": "deactivate",
    }


def _scheduler(environ: Mapping[str, str], method: str, num_tasks: int, one_on_each_host: bool) -> Arguments:
    arguments: Arguments = {"cluster_detection_method": method, "num_processes": num_tasks}
    # JAX gives process i of a host only the i-th device. This is wrong if a process is the only one on its host, and if
    # the scheduler shows each process only its device. An empty list means: all visible devices.
    bound = "CUDA_VISIBLE_DEVICES" in environ and "," not in environ["CUDA_VISIBLE_DEVICES"]
    if (one_on_each_host or bound) and "JAX_LOCAL_DEVICE_IDS" not in environ:
        arguments["local_device_ids"] = []
    return arguments


def _open_mpi(environ: Mapping[str, str]) -> str:
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return "ompi"
    if _is_installed("mpi4py"):  # from version 5 on, Open MPI's environment contains no address
        return "mpi4py"
    raise UserError(
        Problem(
            "processes",
            got=f"{environ['OMPI_COMM_WORLD_SIZE']} from Open MPI without a coordinator address",
            allowed=f"pip install mpi4py, or {_BY_HAND}",
        )
    )


def _cloud_tpu(environ: Mapping[str, str], platforms: str) -> Arguments | None:
    if "tpu" not in platforms:
        return None
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts or _count(environ, "MEGASCALE_NUM_SLICES") > 1:
        return {"cluster_detection_method": "gketpu" if hosts else "gcetpu"}
    # Elsewhere in the cloud only the metadata server knows the other hosts. JAX sets this variable if there are no
    # chips, and single-host images set it, too.
    return {"cluster_detection_method": "gcetpu"} if not hosts and "TPU_SKIP_MDS_QUERY" not in environ else None


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
