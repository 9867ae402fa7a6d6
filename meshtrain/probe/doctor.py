"""Checks the machines of a job before it starts: `python -m meshtrain doctor`, started as the job will be, on each.

In two stages. Alone, each process checks its own machine without JAX. Together, the processes register at process 0
over TCP (`rollcall`), compare themselves, and only then let JAX connect them and run collectives. Process 0 prints.
Whatever hangs is given up after a limit, and named.
"""

import argparse
import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain.launch import cluster
from meshtrain.launch.cluster import Meeting
from meshtrain.launch.meeting import Hub, Member, Unreachable
from meshtrain.probe import alone, findings, machine, together
from meshtrain.probe.findings import Finding
from meshtrain.probe.rollcall import RollCall, Single, offsets
from meshtrain.words import flags, named
from meshtrain.words.errors import EXIT_USER_ERROR, UserError, leave_at_once, run
from meshtrain.words.paths import expanded, is_url

_LIMIT_SECONDS = 120.0
_FACT_SECONDS = 60.0  # to read one fact of this machine
_LOOK_SECONDS = 5.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05
_CACHE = "~/.cache/meshtrain/jax"


def parser() -> argparse.ArgumentParser:
    """Returns the command's own arguments."""
    found = argparse.ArgumentParser(
        prog="python -m meshtrain doctor",
        description="Checks the machines of a job before it starts. Start it as the job, with the job's arguments.",
        add_help=False,
    )
    found.add_argument("--gpus", type=int, metavar="N", help="GPUs that each process has to have")
    found.add_argument("--processes", type=int, metavar="N", help="processes of the job, where only JAX could ask")
    found.add_argument(
        "--limit", type=float, default=_LIMIT_SECONDS, metavar="SECONDS", help="to wait for others, and for each part"
    )
    return found


def main(argv: Sequence[str]) -> int:
    """Runs all checks, prints a line for each, and returns 0, or 2 if a job would fail.

    Args:
      argv: the words after the command; those of `train` are allowed, so that both can be started alike.

    Raises:
      UserError: all problems of the arguments, or of the description of the processes.
    """
    arguments = flags.arguments(argv, parser())
    problems = list(arguments.problems)
    for name in ("gpus", "processes", "limit"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"--{name}: got {value}; allowed: a number above 0; nearest: leave it out")
    if problems:
        raise UserError(*problems)
    meeting = cluster.meeting(os.environ, arguments.processes)
    if arguments.processes and arguments.processes != (count := meeting.num_processes if meeting else 1):
        raise UserError(f"--processes: got {arguments.processes}; allowed: the job's {count}; nearest: {count}")
    folders = {"workdir": _existing(arguments.workdir)}
    if not is_url(cache := os.environ.get("JAX_COMPILATION_CACHE_DIR") or _CACHE):
        folders["cache"] = _existing(expanded(cache))
    limit = min(_FACT_SECONDS, arguments.limit)
    found = machine.findings(meeting, folders, arguments.gpus, os.environ, limit)
    if meeting is None:
        found += _examined(arguments, Single(), 1)
        return _shown(found, {0: socket.gethostname()}, "this machine")
    if meeting.index == 0:
        code = _lead(arguments, meeting, found, folders["workdir"])
    else:
        code = _follow(arguments, meeting, found, folders["workdir"])
    # JAX's own farewell waits for all processes, of which one may be stuck.
    leave_at_once(code)


def _lead(arguments: argparse.Namespace, meeting: Meeting, found: list[Finding], workdir: Path) -> int:
    """Is process 0: it waits for the others, judges what all have said, and prints."""
    limit = arguments.limit
    try:
        hub = Hub(meeting, os.environ)
    except OSError as failure:
        found = [*found, alone.port(meeting, failure.strerror or str(failure))]
        return _shown(found, {0: socket.gethostname()}, "process 0")
    own = _introduction(found) | {"token": f"{os.getpid()}-{time.time_ns()}"}
    said = hub.exchange("hello", own, limit)
    hub.stop_listening()
    for process in [process for process, each in said.items() if process and set(each) != set(own) - {"token"}]:
        hub.refused.append(f"process {process} runs another version of meshtrain's doctor")
        del said[process]
    hosts = {process: each["host"] for process, each in said.items()}
    found = [Finding(**each | {"process": process}) for process, one in said.items() for each in one["found"]]
    found += [alone.port(meeting), *together.registered(meeting, hosts, hub.refused, limit)]
    fix = "install the same on all machines, from one image or one shared folder"
    found += together.same("versions", {process: each["software"] for process, each in said.items()}, fix)
    fix = "set it in all processes alike"
    found += together.same("environment", {process: each["environment"] for process, each in said.items()}, fix)
    fix = "the same driver and libraries on all machines, if a job fails"
    libraries = {process: each["libraries"] for process, each in said.items()}
    found += together.same("libraries", libraries, fix, findings.warning)
    found += together.clocks(offsets(hub))
    looked = _looked(hub, workdir, own["token"], meeting, limit)
    found += together.shared({process: tuple(each) for process, each in looked.items()}, len(said))
    goes_on = len(said) == meeting.num_processes and not any(
        each.verdict == findings.ERROR and each.check in ("registered", "versions", "software") for each in found
    )
    hub.exchange("collectives", goes_on, limit)
    if goes_on:
        found += _examined(arguments, hub, meeting.num_processes, hub.ended)
    else:
        found.append(findings.warning("collectives", "not run", "mend the errors, and start the doctor again"))
    machines = len(set(hosts.values()))
    count = meeting.num_processes if len(said) == meeting.num_processes else f"{len(said)} of {meeting.num_processes}"
    what = f"{count} processes on {machines} machine{'s' * (machines > 1)}"
    code = _shown(found, hosts, what)
    hub.exchange("end", code, 0)
    hub.wait_for_the_end(_END_SECONDS)
    return code


def _follow(arguments: argparse.Namespace, meeting: Meeting, found: list[Finding], workdir: Path) -> int:
    """Is another process than 0: it reports to that one, and prints only if it cannot."""
    limit = arguments.limit
    try:
        member = Member(meeting, limit)
        hello = member.exchange("hello", _introduction(found), limit)
        _looked(member, workdir, hello[0]["token"], meeting, limit)
        if member.exchange("collectives", None, limit)[0]:
            _examined(arguments, member, meeting.num_processes)
        return int(member.exchange("end", None, limit)[0])
    except Unreachable as reason:
        addresses, _ = machine.resolved(meeting)
        found = [*found, together.unreachable(meeting, str(reason), alone.is_loopback(addresses))]
        hosts = {meeting.index: socket.gethostname()}
        _shown(findings.of_process(found, meeting.index), hosts, findings.named([meeting.index], hosts))
        return EXIT_USER_ERROR


def _introduction(found: Sequence[Finding]) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "found": [dataclasses.asdict(each) for each in found],
        "software": machine.software(),
        "environment": together.compared(os.environ),
        "libraries": machine.libraries(os.environ),
    }


def _looked(call: RollCall, workdir: Path, name: str, meeting: Meeting, limit: float) -> dict[int, Any]:
    """Returns process -> (its folder, the processes whose file it has read there, seconds until it had read the last).

    Args:
      call: to the other processes.
      workdir: of this process.
      name: which no other job has.
      meeting: where the processes meet.
      limit: seconds to wait for the others.
    """
    own = workdir / f".meshtrain-doctor-{name}-{meeting.index}"

    def write() -> bool:
        with contextlib.suppress(OSError):
            return own.write_text(name) > 0
        return False

    try:
        # Of a process that cannot write here, another check has said so.
        did = call.exchange("written", machine.within(_FACT_SECONDS, write, False), limit)
        writers = sorted(process for process, has_written in did.items() if has_written)
        start, seen = time.monotonic(), set[int]()

        def look() -> None:
            for process in writers:
                with contextlib.suppress(OSError):
                    if (workdir / f".meshtrain-doctor-{name}-{process}").read_text() == name:
                        seen.add(process)

        while len(seen) < len(writers) and time.monotonic() < start + _LOOK_SECONDS:
            machine.within(_LOOK_SECONDS, look, None)
            time.sleep(_POLL_SECONDS)
        missing = [process for process in writers if process not in seen]
        return call.exchange("seen", (str(workdir), missing, time.monotonic() - start), limit)
    finally:
        machine.within(_FACT_SECONDS, lambda: own.unlink(missing_ok=True), None)


def _examined(
    arguments: argparse.Namespace, call: RollCall, num_processes: int, ended: Callable[[], Sequence[int]] = list
) -> list[Finding]:
    """Returns the findings of what needs JAX, of all processes.

    JAX runs in a thread, so that this one can give up and tell the others.
    """
    progress, result, limit = [(time.monotonic(), "the import of JAX")], dict[str, Any](), arguments.limit

    def work() -> None:
        try:
            # Imported here, by name: the first stage needs no JAX, and finds out whether it is whole.
            options = None
            if arguments.config is not None or any(key.startswith("mesh.") for key in arguments.overrides):
                options = named.modules("meshtrain.probe.chosen")[0].mesh_options(arguments)
            [exercise] = named.modules("meshtrain.probe.exercise")
            result.update(exercise.exercised(options, lambda what: progress.append((time.monotonic(), what))))
        except UserError as failure:
            result["refused"] = list(failure.problems)
        except Exception as failure:  # noqa: BLE001  whatever JAX raises is a finding
            result["failed"] = [f"{type(failure).__name__}: {str(failure) or 'no more is said'}"]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < progress[-1][0] + limit:
        thread.join(_POLL_SECONDS)
    own = dict(result) if not thread.is_alive() else {"stuck": (len(progress), progress[-1][1])}
    said = call.exchange("collectives ran", own, 2 * limit)
    missing = sorted(set(range(num_processes)) - set(said) | set(ended()))
    return _judged(said, missing, arguments)


def _judged(said: Mapping[int, Any], missing: Sequence[int], arguments: argparse.Namespace) -> list[Finding]:
    waiting = {process: (each["stuck"][0], each["stuck"][1]) for process, each in said.items() if "stuck" in each}
    found = together.stuck(waiting, missing, arguments.limit)
    found += together.failures({process: each["refused"] for process, each in said.items() if "refused" in each}, "")
    failed = {process: each["failed"] for process, each in said.items() if "failed" in each}
    found += together.failures(failed, "try the same on that machine alone")
    whole = {process: each for process, each in said.items() if "devices" in each}
    if len(whole) < len(said) or missing:
        return found
    counts = {process: (int(each["devices"][0]), str(each["devices"][1])) for process, each in whole.items()}
    without = [process for process, each in whole.items() if each["without_gpus"]]
    found += together.devices(counts, arguments.gpus, without)
    found += together.collectives(whole[0]["times"], whole[0]["wrong"])
    pairs: dict[tuple[int, int], list[float]] = {}
    for process, each in whole.items():
        for partner, seconds in each["pairs"].items():
            pair = (min(process, int(partner)), max(process, int(partner)))
            # The exchange has ended when both have.
            pairs[pair] = [max(both) for both in zip(seconds, pairs[pair], strict=True)] if pair in pairs else seconds
    return found + together.slow(pairs)


def _shown(found: Sequence[Finding], hosts: Mapping[int, str], what: str) -> int:
    """Prints the findings and returns the exit code."""
    for line in findings.lines(found, hosts):
        print(line)
    print(findings.last_line(found, what), flush=True)
    return findings.exit_code(found)


def _existing(path: Path) -> Path:
    """Returns the folder, or the nearest one above it that is there: the doctor makes none."""
    path = path.absolute()
    return path if path.is_dir() or path == path.parent else _existing(path.parent)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
