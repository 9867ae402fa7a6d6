"""Checks the machines of a job before it starts: `python -m meshtrain doctor`, started on each machine like the job.

The doctor has three stages. First, each process checks its own machine without JAX. Second, the processes register at
process 0 over TCP (`launch.rendezvous`) and compare their machines, the errors that the job would raise, and its
configuration. Third, if there are no differences, JAX connects the processes and runs collectives. Process 0 prints the
report. A check that hangs is abandoned after a time limit, and the report names it.
"""

import argparse
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from meshtrain import user_functions
from meshtrain.cli import flags
from meshtrain.errors import Problem, UserError, leave_at_once, refuse, run
from meshtrain.files import Json, JsonObject
from meshtrain.launch import cluster
from meshtrain.launch.cluster import Meeting
from meshtrain.launch.rendezvous import Hub, Member, Said, Unreachable, roll_call
from meshtrain.probe.checks import all_processes, machine_facts, one_machine, report
from meshtrain.probe.checks.report import Finding

_LIMIT_SECONDS = 120.0
_FACT_SECONDS = 60.0  # the time limit for reading one fact of this machine
_END_SECONDS, _POLL_SECONDS = 5.0, 0.05
_NUM_CLOCK_ROUNDS = 8
_Exchange = Callable[[str, Json, float], Said]  # (name, value, seconds) -> process -> value
_Work = Callable[[Callable[[str], None]], JsonObject]  # calls its argument with a part's name before this part


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the arguments that only the doctor has; the arguments of `train` are not included."""
    result = argparse.ArgumentParser(
        prog="python -m meshtrain doctor",
        description=(
            "Checks the machines of a job before it starts. Start it like the job, with the arguments of the job."
        ),
        add_help=False,
    )
    result.add_argument("--gpus", type=int, metavar="N", help="GPUs that each process must have")
    result.add_argument(
        "--processes", type=int, metavar="N", help="number of processes, for clusters where only JAX can determine it"
    )
    result.add_argument(
        "--limit",
        type=float,
        default=_LIMIT_SECONDS,
        metavar="SECONDS",
        help="seconds to wait for other processes, and for each check",
    )
    return result


def main(argv: Sequence[str]) -> int:
    """Runs all checks and prints a line for each; returns exit code 0, or 2 if a job would fail.

    Args:
      argv: the words after the command; the arguments of `train` are allowed, so that both commands can start in the
        same way.

    Raises:
      UserError: all problems of the arguments, or of the environment variables that describe the processes.
    """
    arguments = flags.arguments(argv, parser())
    problems = list(arguments.problems)
    for name in ("gpus", "processes", "limit"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            problems.append(Problem(f"--{name}", got=value, allowed="a number above 0", nearest="leave it out"))
    refuse(problems)
    meeting = cluster.meeting(os.environ, arguments.processes)
    if arguments.processes and arguments.processes != (count := meeting.num_processes if meeting else 1):
        raise UserError(Problem("--processes", got=arguments.processes, allowed=f"the job's {count}", nearest=count))
    before = threading.enumerate()
    code = diagnose(arguments, meeting, os.environ)
    if meeting is None and not set(threading.enumerate()) - set(before):
        return code
    # JAX's shutdown waits for all processes, and one of them may hang. A hanging thread of this process, for example in
    # an import, would abort the process while Python exits.
    leave_at_once(code)


def diagnose(arguments: argparse.Namespace, meeting: Meeting | None, environ: Mapping[str, str]) -> int:
    """Runs all checks and returns the exit code; process 0 prints, or this process if process 0 is unreachable.

    Args:
      arguments: the parsed command line.
      meeting: the address and number of the processes; None for a single process.
      environ: the environment variables of this process.
    """
    result = machine_facts.findings(
        meeting, arguments.workdir, arguments.gpus, environ, min(_FACT_SECONDS, arguments.limit)
    )
    if meeting is None:
        result += _as_job(arguments, lambda name, value, seconds: {0: value}, 1, [])
        return _print_findings(result, {0: socket.gethostname()}, "this machine")
    own, begun = _introduction(result, environ), time.monotonic()
    try:
        call, answers = roll_call(meeting, environ, own, arguments.limit, needs_all=False)
        with call:
            return _compare_reports(arguments, meeting, call, answers, time.monotonic() - begun)
    except Unreachable as reason:
        addresses, _ = machine_facts.resolve_host(meeting)
        result.append(all_processes.unreachable_finding(meeting, reason, one_machine.is_loopback(addresses)))
    hosts = {meeting.index: socket.gethostname()}
    own_findings = [dataclasses.replace(finding, process=meeting.index) for finding in result]
    return _print_findings(own_findings, hosts, report.process_list([meeting.index], hosts))


def _compare_reports(
    arguments: argparse.Namespace, meeting: Meeting, call: Hub | Member, said: Said, seconds: float
) -> int:
    """Compares all processes' reports; every process reaches the same verdict, process 0 prints it.

    If some processes are missing, the checks continue with the processes that have registered.

    Args:
      arguments: the parsed command line.
      meeting: the address and number of the processes.
      call: the connection to all other processes (`Hub`, in process 0) or to process 0 (`Member`).
      said: process -> its report, from `_introduction`.
      seconds: the time that the registration took.

    Returns:
      The exit code, the same in every process.
    """
    hub, count = (call if isinstance(call, Hub) else None), meeting.num_processes
    strangers = [f"process {process} runs another version of meshtrain's doctor"
                 for process, each in said.items() if set(each) != set(said[0])]  # fmt: skip
    said = {process: each for process, each in said.items() if set(each) == set(said[0])}
    hosts = {process: each["host"] for process, each in said.items()}
    theirs = [Finding(**each | {"process": process}) for process, one in said.items() for each in one["found"]]
    if hub:
        hub.stop_listening()
        theirs.append(report.ok("port", f"{meeting.port} is free"))
    theirs += all_processes.check_registration(meeting, hosts, [*(hub.refused if hub else []), *strangers], seconds)
    for check, fix, made in (
        ("versions", "install the same versions on all machines, from one image or one shared folder", report.error),
        ("environment", "set the same value in all processes", report.error),
        ("libraries", "if a job fails, install the same driver and libraries on all machines", report.warning),
    ):
        theirs += all_processes.same(check, {process: each[check] for process, each in said.items()}, fix, made)
    writers = set(said) - {each.process for each in theirs if (each.verdict, each.check) == (report.ERROR, "workdir")}
    files = {process: f".meshtrain-doctor-{said[0]['token']}-{process}" for process in writers}
    with machine_facts.mark_folder(arguments.workdir, files, meeting.index, _FACT_SECONDS) as workdir:
        theirs += _clocks(call.exchange, len(said), arguments.limit)
        looked = call.exchange("seen", machine_facts.look_for_marks(workdir, files), arguments.limit)
    shared = all_processes.shared({process: tuple(each) for process, each in looked.items()}, len(said))
    if len(said) == count and not report.exit_code(each for each in theirs if each.check in ("versions", "software")):
        theirs += _as_job(arguments, call.exchange, count, shared)
    else:
        theirs += [*shared, all_processes.NOT_RUN]
    if hub is None:
        return int(call.exchange("end", None, arguments.limit)[0])
    machines = len(set(hosts.values()))
    here = count if len(said) == count else f"{len(said)} of {count}"
    code = _print_findings(theirs, hosts, f"{here} processes on {machines} machine{'s' * (machines > 1)}")
    hub.exchange("end", code, 0)
    hub.wait_for_the_end(_END_SECONDS)
    return code


def _introduction(found: Sequence[Finding], environ: Mapping[str, str]) -> JsonObject:
    return {
        "host": socket.gethostname(),
        "token": f"{os.getpid()}-{time.time_ns()}",
        "found": [dataclasses.asdict(each) for each in found],
        "versions": machine_facts.software(),
        "environment": all_processes.common_environment(environ),
        "libraries": machine_facts.libraries(environ),
    }


def _clocks(exchange: _Exchange, num_processes: int, limit: float) -> list[Finding]:
    times, offsets = [time.time()], list[dict[int, float]]()
    for number in range(_NUM_CLOCK_ROUNDS):
        offsets.append(exchange(f"clock {number}", time.time(), limit))
        times.append(time.time())
        if len(offsets[-1]) < num_processes:
            break
    return all_processes.clocks(times, offsets)


def _job() -> ModuleType:
    # Imported here, by name: the first stages work without JAX, and check that its installation is complete.
    return user_functions.import_modules("meshtrain.probe.checks.job")[0]


def _as_job(
    arguments: argparse.Namespace, exchange: _Exchange, num_processes: int, shared: Sequence[Finding]
) -> list[Finding]:
    """Returns findings about the job: errors that it would raise, and differences of configuration between processes.

    If there are no errors, also starts JAX in all processes, and returns findings about devices and collectives.

    Args:
      arguments: the parsed command line.
      exchange: a function (name, value, seconds) that sends the value to all processes, waits at most `seconds` for
        their values of this name, and returns process -> value.
      num_processes: the number of processes of the job.
      shared: findings about the workdirs. They are added to the result unless the job saves checkpoints in a bucket,
        where each machine may have another workdir.
    """
    limit = arguments.limit
    own = _within_limit(limit, all_processes.IMPORT, lambda _: _job().compared(arguments))
    answers = exchange("configuration", own, 2 * limit)
    fix = "start all processes with the same command and the same files"
    results = all_processes.blocking_processes(answers, num_processes, limit) or all_processes.same(
        "configuration", answers, fix
    )
    # A job compares the workdirs of its processes, unless its checkpoints are in a bucket.
    before = [*shared] if {"workdir", "refused", "failed", "stuck"} & answers[0].keys() else []
    if report.exit_code(results):
        return [*before, *results, all_processes.NOT_RUN]
    own = _within_limit(limit, "the start of JAX", lambda begin: _job().exercised(arguments, begin))
    answers = exchange("collectives", own, 2 * limit)
    results += all_processes.blocking_processes(answers, num_processes, limit) or _judge(answers, arguments.gpus)
    return before + results


def _within_limit(limit: float, first: str, work: _Work) -> JsonObject:
    """Returns the result of `work`, or a JSON object with one key if `work` has no result.

    The key is `refused` (errors that a run would raise), `failed` (lines of an exception), or `stuck` (number and name
    of the part of the work that exceeded the time limit; the first part has number 1). The work runs in a separate
    thread. If it hangs, the calling thread returns after the time limit, and can inform the other processes.

    Args:
      limit: the time limit of each part of the work, in seconds.
      first: the name of the first part.
      work: the function to run; it reports the start of each further part.
    """
    progress, result = [(time.monotonic(), first)], JsonObject()

    def act() -> None:
        try:
            result.update(work(lambda what: progress.append((time.monotonic(), what))))
        except UserError as failure:
            result["refused"] = list(failure.problems)
        except Exception as failure:  # noqa: BLE001  whatever JAX raises is a finding
            result["failed"] = [f"{type(failure).__name__}: {str(failure) or 'no details'}"]

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < progress[-1][0] + limit:
        thread.join(_POLL_SECONDS)
    return {"stuck": (len(progress), progress[-1][1])} if thread.is_alive() else result


def _judge(said: Said, num_gpus: int | None) -> list[Finding]:
    counts = {process: (int(each["devices"][0]), str(each["devices"][1])) for process, each in said.items()}
    without = [process for process, each in said.items() if each["without_gpus"]]
    results = all_processes.devices(counts, num_gpus, without)
    results += all_processes.collectives(said[0]["times"], said[0]["wrong"])
    pairs: dict[tuple[int, int], list[float]] = {}
    for process, each in said.items():
        for partner, seconds in each["pairs"].items():
            pair = (min(process, int(partner)), max(process, int(partner)))
            # The exchange ends when the slower partner ends.
            pairs[pair] = [max(both) for both in zip(seconds, pairs[pair], strict=True)] if pair in pairs else seconds
    return results + all_processes.slow(pairs)


def _print_findings(found: Sequence[Finding], hosts: Mapping[int, str], what: str) -> int:
    """Prints the findings and returns the exit code.

    Args:
      found: the findings.
      hosts: process -> the name of its machine.
      what: the checked machines or processes, for the last line.
    """
    print("\n".join([*report.lines(found, hosts), report.last_line(found, what)]), flush=True)
    return report.exit_code(found)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
