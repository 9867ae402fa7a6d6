"""Checks that compare all processes. Each is a pure function of the processes' reports; none imports JAX.

A test can plant a fault by calling a check with modified facts or times.
"""

import collections
import statistics
from collections.abc import Callable, Mapping, Sequence

from meshtrain.files import Json
from meshtrain.launch.cluster import Meeting
from meshtrain.launch.rendezvous import Occupied, Refused, Unreachable
from meshtrain.probe.checks.report import Finding, error, ok, process_list, warning

_CLOCK_SECONDS = 1.0
_SLOW = 2.0  # a process is slow above this multiple of the median: hosts of one kind differ by less
_VISIBLE_SECONDS = 1.0
# Prefixes of variables that JAX, XLA and NCCL read, and variables that may differ between processes.
_COMPARED = ("NCCL_", "XLA_FLAGS", "JAX_", "LIBTPU_INIT_ARGS", "CUDA_DEVICE_ORDER")
_OWN = (
    "JAX_PROCESS_ID",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_LOCAL_DEVICE_IDS",
    "JAX_COMPILATION_CACHE_DIR",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_HOSTID",
)


NOT_RUN = warning("collectives", "not run", "correct the errors, then run doctor again")
_START_ONCE = "start each process once, with its own number"


def check_registration(
    meeting: Meeting, hosts: Mapping[int, str], refused: Sequence[str], seconds: float
) -> list[Finding]:
    """Returns an error for each rejected process, and one that lists the processes that did not register at process 0.

    If all processes have registered and none was rejected, the result is one `ok` finding.

    Args:
      meeting: the address and number of the processes.
      hosts: process -> the name of its machine, for the processes that have registered.
      refused: an error line for each process that was rejected.
      seconds: how long process 0 has waited.
    """
    results = [error("registered", line, _START_ONCE) for line in refused]
    missing = sorted(set(range(meeting.num_processes)) - set(hosts))
    if missing:
        names = {process: meeting.names[process] for process in missing} if meeting.names else {}
        seen = f"{process_list(missing, names)} of {meeting.num_processes} did not register in {seconds:.0f} s"
        fix = f"read the output of this process on its machine; check whether this machine can reach {meeting.address}"
        return [*results, error("registered", seen, fix)]
    machines = len(set(hosts.values()))
    return results or [ok("registered", f"all {len(hosts)} processes, on {machines} machine{'s' * (machines > 1)}")]


def unreachable_finding(meeting: Meeting, reason: Unreachable, is_this_machine: bool) -> Finding:
    """Returns the error of a process that cannot register at process 0, or of process 0 if it cannot listen.

    Args:
      meeting: the address and number of the processes.
      reason: why the process could not register or listen.
      is_this_machine: whether the address of process 0 resolves to the machine of this process.
    """
    if isinstance(reason, Refused):
        return error("registered", str(reason), _START_ONCE)
    if isinstance(reason, Occupied):
        fix = "end the program that uses this port (ss -ltnp shows it), or set another port in JAX_COORDINATOR_ADDRESS"
        fix = f"{fix}; if another process 0 uses the port, give this process its own JAX_PROCESS_ID"
        return error("port", f"{meeting.port}: {reason}", fix)
    if is_this_machine:
        seen = f"{reason}, and this address belongs to this machine"
        return error("port", seen, "use the network address of process 0's machine")
    fix = (
        f"is process 0 running at {meeting.host}? open port {meeting.port} in the firewall, and the ports that NCCL "
        "uses"
    )
    return error("port", str(reason), fix)


def same(
    check: str,
    facts: Mapping[int, Mapping[str, str]],
    fix: str,
    made: Callable[[str, str, str, int], Finding] = error,
) -> list[Finding]:
    """Returns a finding for each value of a process that differs from the value in most processes.

    If all values are the same, the result is one `ok` finding; [] if there is only one process, or no value.

    Args:
      check: the name of the check.
      facts: process -> (name of a value -> the value as text).
      fix: the advice if values differ.
      made: the function that creates the finding about a difference: `error` or `warning`.
    """
    results = []
    names = sorted({name for own in facts.values() for name in own})
    for name in names:
        values = {process: own[name] if name in own else "not set" for process, own in facts.items()}
        most, _ = collections.Counter(values.values()).most_common(1)[0]
        other = next(process for process, value in values.items() if value == most)
        for process, value in values.items():
            if value != most:
                seen = f"{name} is {value}, but {most} in process {other}"
                results.append(made(check, seen, fix, process))
    return results or [ok(check, f"the same {len(names)} values in all processes")] * (len(facts) > 1 and bool(names))


def common_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that must be the same in every process."""
    return {name: value for name, value in environ.items() if name.startswith(_COMPARED) and name not in _OWN}


def clocks(times: Sequence[float], said: Sequence[Mapping[int, float]]) -> list[Finding]:
    """Returns a warning for each process whose clock differs from the clock of process 0 by more than a second.

    If no clock differs, the result is one `ok` finding; [] if there are no other processes, or fewer than two rounds.

    In each round every process sends its clock. A process reads its clock between the end of the previous round and the
    end of its own round. The fastest round is the most precise (Cristian 1989).

    Args:
      times: process 0's clock in seconds, before the first round and after each round.
      said: for each round, process -> its clock in seconds.
    """
    rounds = list(zip(times, said[1:], times[2:], strict=False))
    if not rounds:
        return []
    begun, last, ended = min(rounds, key=lambda one: one[2] - one[0])
    middle, uncertain = (begun + ended) / 2, (ended - begun) / 2
    offsets = {process: theirs - middle for process, theirs in last.items() if process}
    results = []
    for process, offset in offsets.items():
        if abs(offset) - uncertain > _CLOCK_SECONDS:
            where = "ahead of" if offset > 0 else "behind"
            seen = f"its clock is {abs(offset):.1f} s {where} process 0's"
            results.append(warning("clock", seen, "start chrony or ntpd on its machine", process))
    if results or not offsets:
        return results
    most = max(map(abs, offsets.values())) + uncertain
    return [ok("clock", f"at most {1e3 * most:.1f} ms difference")]


def shared(seen: Mapping[int, tuple[str, Sequence[int], float]], num_processes: int) -> list[Finding]:
    """Returns an error for each process that does not see all files of the other processes in the workdir.

    If every process sees all files, the result is one `ok` finding, or a warning if a process waited long; [] for a
    single process.

    Args:
      seen: process -> (its workdir, the processes whose file was missing in it, the seconds that the process waited).
      num_processes: the number of registered processes.
    """
    results = []
    for process, (folder, missing, _) in seen.items():
        if others := [other for other in missing if other != process and other in seen]:
            what = (
                f"{folder} does not contain the file of {process_list(others, {})}: it is not the same folder on "
                "all machines"
            )
            fix = "use a workdir on a file system that all machines mount"
            results.append(error("shared", what, fix, process))
    slowest = max((seconds for _, _, seconds in seen.values()), default=0.0)
    if results or num_processes == 1 or not seen:
        return results
    folder = seen[min(seen)][0]
    if slowest > _VISIBLE_SECONDS:
        what = f"files of other processes are visible in {folder} only after {slowest:.1f} s"
        return [warning("shared", what, "mount it with shorter caching of attributes (NFS: actimeo=1)")]
    return [ok("shared", f"{folder}: each of {num_processes} processes sees the files of all processes")]


def devices(counts: Mapping[int, tuple[int, str]], num_gpus: int | None, without: Sequence[int]) -> list[Finding]:
    """Returns an error for each process in which JAX sees an unexpected number or kind of devices.

    If there is no error, the result is one `ok` finding. The expected kind is the most common kind.

    Args:
      counts: process -> (the number of its local devices, their kind).
      num_gpus: the expected number of GPUs of each process; None: the most common number.
      without: processes in which JAX runs on the CPU although their machine has GPUs.
    """
    results = []
    for process in without:
        fix = "pip install 'meshtrain[cuda12]', and a driver that is new enough for this CUDA version"
        results.append(error("devices", "JAX computes on the CPU, although there are GPUs", fix, process))
    (most, kind), _ = collections.Counter(counts.values()).most_common(1)[0]
    wanted = most if num_gpus is None else num_gpus
    for process, (count, own) in counts.items():
        if (count, own) != (wanted, kind) and process not in without:
            seen = f"JAX sees {count} x {own}, but {wanted} x {kind} are expected"
            fix = "check nvidia-smi, CUDA_VISIBLE_DEVICES and JAX_LOCAL_DEVICE_IDS on its machine"
            results.append(error("devices", seen, fix, process))
    return results or [ok("devices", f"{most} x {kind} in each process")]


IMPORT = "the import of JAX"  # in this part of the checks no process waits for another


def blocking_processes(said: Mapping[int, Mapping[str, Json]], num_processes: int, limit: float) -> list[Finding]:
    """Returns errors about the processes for which the other processes wait; [] if no process failed or is stuck.

    These are the processes with an error or without a report. If there are none, these are the processes that are
    stuck in the earliest part of the work; processes that are stuck in a later part wait for them.

    Args:
      said: process -> the JSON object of its results. If it has no results, the object has a single key: `refused`
        (errors that a run would raise), `failed` (lines of an exception), or `stuck` (index and name of the part of
        the work that did not end).
      num_processes: the number of processes of the job; a process without a report has ended or is stopped.
      limit: the time limit of each part, in seconds.
    """
    fix = "run doctor on only this machine"
    results = [error("job", line, "", process) for process, one in said.items() if "refused" in one
             for line in one["refused"]]  # fmt: skip
    results += [error("collectives", line, fix, process) for process, one in said.items() if "failed" in one
              for line in one["failed"]]  # fmt: skip
    gone, see = "it has ended or does not answer", "read its output, and dmesg on its machine"
    results += [error("collectives", gone, see, process) for process in range(num_processes) if process not in said]
    waiting = {process: one["stuck"] for process, one in said.items() if "stuck" in one}
    if results or not waiting:
        return results
    first = min(number for number, _ in waiting.values())
    for process, (number, what) in waiting.items():
        if number == first:
            others = "; other processes wait for it" if any(other > first for other, _ in waiting.values()) else ""
            fix = "NCCL_DEBUG=INFO shows which process it cannot reach; open the ports between all machines"
            if what == IMPORT:
                fix = f"--limit={2 * limit:g} or more, or a faster disk for Python's packages"
            results.append(error("collectives", f"{what} has not ended in {limit:.0f} s{others}", fix, process))
    return results


def collectives(times: Mapping[str, tuple[int, float]], wrong: Sequence[str]) -> list[Finding]:
    """Returns an error for each line in `wrong`; without such lines, one `ok` finding with the times.

    Args:
      times: axis -> (number of devices along the axis, seconds of an all-reduce of 1 MiB).
      wrong: an error line for each process with a wrong result; the line names the process.
    """
    fix = "remove this machine from the job: a link or a device corrupts data"
    results = [error("values", line, fix) for line in wrong]
    parts = [f"{axis} of {size} in {1e3 * seconds:.2f} ms" for axis, (size, seconds) in times.items()]
    return results or [ok("values", f"all-reduces of 1 MiB are right: {', '.join(parts) or 'none, with one device'}")]


def slow(pairs: Mapping[tuple[int, int], Sequence[float]]) -> list[Finding]:
    """Returns a warning for each process that exchanges data slowly with every partner; else one `ok` finding.

    A ring shows only its slowest link. In pairs, a healthy process is fast with at least one partner, and a slow
    process with none, so each process is judged by its fastest pair. A process is slow if it takes more than twice the
    median of all processes, and the difference exceeds the spread of its times. So a short load of a machine is not
    reported.

    Args:
      pairs: (process, process) -> the seconds of an exchange in each round; with a single pair, a slow process cannot
        be distinguished from its partner.
    """
    best: dict[int, Sequence[float]] = {}
    for pair, seconds in pairs.items():
        for process in pair:
            if process not in best or min(seconds) < min(best[process]):
                best[process] = seconds
    if not best:
        return []
    median = statistics.median(min(seconds) for seconds in best.values())
    results = []
    for process, seconds in sorted(best.items()):
        fastest, spread = min(seconds), statistics.median(seconds) - min(seconds)
        if fastest > _SLOW * median and fastest - median > spread:
            seen = (
                f"at least {1e3 * fastest:.2f} ms to exchange 1 MiB with another process; the median is "
                f"{1e3 * median:.2f} ms"
            )
            fix = "check its network adapter and cable (ibstat, ethtool), or remove the machine from the job"
            results.append(warning("slow", seen, fix, process))
    only = "; one pair does not show which of the two is slow" if len(pairs) == 1 else ""
    return results or [ok("slow", f"no process: {1e3 * median:.2f} ms to exchange 1 MiB in pairs{only}")]
