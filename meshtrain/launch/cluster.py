"""Whether this process is one of several, and where they meet, read from the environment without JAX.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID   set by a launcher, or by hand
    Slurm's, Open MPI's, Kubernetes', Cloud TPU's own variables   read by JAX, where there are several processes

`processes` says how JAX is to connect them, and `meeting` where it will.
"""

import dataclasses
import importlib.util
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

from meshtrain.words.errors import UserError

EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Where JAX meets if nobody names a port: jax/_src/clusters, a port of the last 4096 by the number of the job.
_NUM_PORTS = 4096
_FIRST_PORT = 65535 - _NUM_PORTS + 1
_KUBERNETES_PORT = 55527


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

    @property
    def host(self) -> str:
        """The name or number of process 0's machine."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port at which process 0 listens."""
        return int(self.address.rpartition(":")[2])


def processes(environ: Mapping[str, str], platforms: str) -> dict[str, Any] | None:
    """Returns the arguments for `jax.distributed.initialize`, or None where this process is alone.

    It reads only the environment, so that a machine outside a cluster neither waits for a network nor fails.
    `num_processes` is among the arguments wherever the environment says it.

    Args:
      environ: of this process.
      platforms: JAX's platforms as the user or JAX chose them, such as `cpu` or `tpu,cpu`; empty: not chosen.

    Raises:
      UserError: some of the three JAX variables are missing or not numbers; Open MPI without an address to connect to.
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
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ and _installed("kubernetes"):
        return {"cluster_detection_method": "k8s"}
    return _cloud_tpu(environ, platforms)


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
        return Meeting(
            address or _address_of_open_mpi(environ["OMPI_MCA_orte_hnp_uri"]),
            how["num_processes"],
            int(environ["OMPI_COMM_WORLD_RANK"]),
        )
    if method == "k8s" and num_processes:
        return _in_kubernetes(environ, address, num_processes, full_name())
    wanted = "--processes=N" if method == "k8s" else f"each process with its {', '.join(EXPLICIT)}"
    raise UserError(f"processes: got {method}, where only JAX knows the others; allowed: {wanted}; nearest: that")


def hosts_of(text: str) -> list[str]:
    """Returns the hosts of a list of Slurm's.

    >>> hosts_of("node[1-2,007],login")
    ['node1', 'node2', 'node007', 'login']
    """
    found = []
    for prefix, inside, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", text):
        for part in inside.split(","):
            first, _, last = part.partition("-")
            last = last or first
            numbers = range(int(first), int(last) + 1) if first else [None]
            found += [
                prefix + suffix if number is None else f"{prefix}{number:0{len(first)}d}{suffix}" for number in numbers
            ]
    return found


def _in_slurm(environ: Mapping[str, str], address: str | None, num_processes: int) -> Meeting:
    listed = environ["SLURM_STEP_NODELIST"]
    hosts, num_hosts = hosts_of(listed), _count(environ, "SLURM_STEP_NUM_NODES")
    if not address:
        # As JAX reads the list: what follows the brackets does not count.
        prefix, number = re.match(r"([^,\[]*)(?:\[([^,\-]*))?", listed).groups(default="")  # type: ignore[union-attr]
        address = f"{prefix}{number}:{_FIRST_PORT + int(environ['SLURM_JOB_ID']) % _NUM_PORTS}"
    # Consecutive tasks share a host, which is how srun fills them unless it is told otherwise.
    even = len(hosts) == num_hosts and num_processes % num_hosts == 0
    names = tuple(hosts[i * num_hosts // num_processes] for i in range(num_processes)) if even else ()
    return Meeting(address, num_processes, int(environ["SLURM_PROCID"]), num_hosts, names)


def _in_kubernetes(environ: Mapping[str, str], address: str | None, num_processes: int, full_name: str) -> Meeting:
    # The pods of an Indexed Job are JOB-0, JOB-1, ..., and the service gives them its name as their domain.
    index = int(environ["JOB_COMPLETION_INDEX"])
    own, _, domain = full_name.partition(".")
    job = own.removesuffix(f"-{index}")
    names = tuple(f"{job}-{i}" for i in range(num_processes))
    service = domain.partition(".")[0]
    address = address or f"{names[0]}{f'.{service}' if service else ''}:{_KUBERNETES_PORT}"
    return Meeting(address, num_processes, index, num_processes, names)


def _address_of_open_mpi(uri: str) -> str:
    """Returns the address that JAX takes from an URI such as `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    port = _FIRST_PORT + int(uri.partition(".")[0]) // _NUM_PORTS % _NUM_PORTS
    found = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", uri)
    if found is None:
        raise UserError(f"processes: got '{uri}' from Open MPI; allowed: an address; nearest: {', '.join(EXPLICIT)}")
    return f"{found[1] or found[2]}:{port}"


def _count(environ: Mapping[str, str], name: str) -> int:
    return int(environ.get(name) or "1")  # without the variable there is one


def _explicit(environ: Mapping[str, str]) -> dict[str, Any] | None:
    address, count, index = (environ.get(name) or "" for name in EXPLICIT)
    if count == "1":
        return None
    if not (":" in address and count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        got = ", ".join(f"{name}={environ.get(name) or '(not set)'}" for name in EXPLICIT)
        raise UserError(f"processes: got {got}; allowed: host:port, a number, and a number from 0 to one less")
    return {
        "coordinator_address": address,
        "num_processes": int(count),
        "process_id": int(index),
        "cluster_detection_method": "deactivate",
    }


def _scheduler(environ: Mapping[str, str], method: str, num_tasks: int, one_on_each_host: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {"cluster_detection_method": method, "num_processes": num_tasks}
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
        f"allowed: pip install mpi4py, or each process with its {', '.join(EXPLICIT)}"
    )


def _cloud_tpu(environ: Mapping[str, str], platforms: str) -> dict[str, Any] | None:
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
