"""Starts several processes on this machine, forwards signals to them, and ends all if one of them fails.

Each process gets its index and the coordinator's address through the environment. Its output lines are printed with its
index as prefix. The exit code is the code of the first process that failed. An elastic job may continue with the
remaining processes, and later with all processes again. This module does not import JAX.
"""

import collections
import ctypes
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from meshtrain import errors
from meshtrain.errors import (
    EXIT_FINISHED,
    EXIT_LOST_PEER,
    EXIT_START_AGAIN,
    EXIT_STOPPED_ITSELF,
    EXIT_TOO_FEW,
    EXIT_USER_ERROR,
    Problem,
)
from meshtrain.launch.cluster import FULL
from meshtrain.launch.signals import STOPPING, drop_output, on_terminal, stop_signals

# EXIT_NOT_SAVED is retried: the disk may have space again when the run has repeated its last steps.
NEVER_RETRIED = (EXIT_FINISHED, EXIT_USER_ERROR, EXIT_STOPPED_ITSELF)
MAX_PROCESSES = 256  # above the number of GPUs of any machine; each process takes a third of a GB and two pipes
MAX_SIMULATED = 8192  # devices of a process: JAX needs about four seconds and 1 GB for this number
LOST_SECONDS = "15"  # longest time without a heartbeat: shorter than on a cluster, because no network delays heartbeats
_GRACE_SECONDS = 5.0  # after one process has failed: time for the others to print their errors
_SAVING_SECONDS = 60.0  # after one process has saved and ended: time for the others to do the same
_POLL_SECONDS = 0.05
_NUM_LAST_WORDS = 5
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes to start.

    Attributes:
      command: the arguments of `python`, with which each process is started.
      num_processes: the number of processes to start.
      num_devices: the number of CPU devices that each process simulates; 0: the program decides.
      gpus: the identifier of each process's GPU; empty on CPU.
      min_processes: the minimum number of processes with which the job may continue after a failure; 0: the job is not
        elastic and needs all processes.
      back_seconds: the time for which a failed process is left out of restarts, in seconds.
      full: the number of processes of the complete elastic job; 0 if the job is not elastic.
    """

    command: tuple[str, ...]
    num_processes: int
    num_devices: int = 0
    gpus: tuple[str, ...] = ()
    min_processes: int = 0
    back_seconds: float = 600.0
    full: int = 0


class Workers:
    """Starts all processes of a job, prints their output with prefixes, and waits for their ends.

    Attributes:
      processes: the started processes, by index.
      last_words: the last output lines of each process, by index.
    """

    def __init__(self, job: Job) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        self.processes = [_start(job, index, address) for index in range(job.num_processes)]
        self.last_words: list[collections.deque[str]] = [
            collections.deque(maxlen=_NUM_LAST_WORDS) for _ in self.processes
        ]
        self._threads = [
            threading.Thread(target=_copy, args=(stream, target, index, self.last_words[index]), daemon=True)
            for index, process in enumerate(self.processes)
            for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, number: int) -> None:
        """Sends the signal `number`, such as `signal.SIGTERM`, to every process that is still running."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self, until: float | None = None) -> tuple[int, int]:
        """Waits until all processes have ended; returns (index, exit code) of the first failure, or (0, 0).

        If a process fails, the others get some seconds to end by themselves, and are then killed.

        Args:
          until: the time, by `time.monotonic`, at which all processes get SIGTERM, so that they save and end; None: no
            such time.
        """
        first = None
        while first is None and any(process.poll() is None for process in self.processes):
            first = self._first_failure()
            if until is not None and time.monotonic() >= until:
                self.send(signal.SIGTERM)
                until = None
            time.sleep(_POLL_SECONDS)
        first = first or self._first_failure()
        if first is not None:
            known = self._end(_SAVING_SECONDS if first[1] == EXIT_START_AGAIN else _GRACE_SECONDS)
            # Process 0 ends last, even if its error has ended the others.
            first = known or first if first[1] == EXIT_LOST_PEER else first
        for thread in self._threads:
            thread.join(timeout=_GRACE_SECONDS)
        return first or (0, EXIT_FINISHED)

    def _first_failure(self) -> tuple[int, int] | None:
        codes = [(index, process.poll()) for index, process in enumerate(self.processes)]
        # 128 + the signal's number, the convention of shells.
        failed = [(index, 128 - code if code < 0 else code) for index, code in codes if code]
        # A process that ends because it lost another process is not the first failure.
        return min(failed, key=lambda pair: pair[1] == EXIT_LOST_PEER, default=None)

    def _end(self, patience_seconds: float) -> tuple[int, int] | None:
        """Waits up to `patience_seconds` for all processes to end, then kills the remaining processes.

        Returns:
          (index, exit code) of the first failure among the processes that ended by themselves; None without a failure.
        """
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(_POLL_SECONDS)
        failure = self._first_failure()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        return failure


def run(job: Job, num_restarts: int = 0) -> int:
    """Runs a job to its end, with restarts if they may help, and returns its exit code.

    Args:
      job: the processes to start.
      num_restarts: the maximum number of restarts after failures. There is no restart after a user error, a run that
        stopped itself, or a signal to this process. Two kinds of restarts of an elastic job are not counted: a restart
        with fewer processes because the run did not fit the number of processes, and a restart with all processes when
        they are available again.
    """
    workers: Workers | None = None
    arrived, descriptors = list[int](), on_terminal()
    code = EXIT_START_AGAIN  # if a signal arrives before the first process is started

    def pass_on(number: int, frame: object) -> None:
        arrived.append(number)
        if number == signal.SIGHUP:
            drop_output(descriptors)
        if workers:
            workers.send(number)

    for passed_on in stop_signals():
        signal.signal(passed_on, pass_on)
    left = JobMembers(job)
    while True:
        part = left.part(arrived)
        # Block signals until all processes are started: a process that gets SIGINT twice would end without a save.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            if arrived:
                return code
            workers = Workers(part)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        index, code = workers.wait(left.until)
        if code:
            _say(f"process {index} ended first, with code {code}; its last output:")
            print(*(f"    {line}" for line in workers.last_words[index]), sep="\n", file=sys.stderr, flush=True)
        if code in NEVER_RETRIED or arrived:
            return code
        if code == EXIT_TOO_FEW:
            if not left.one_less():
                return code
        elif left.until is not None and time.monotonic() >= left.until:
            _say("all processes are restarted")
        elif num_restarts == 0:
            return code
        else:
            num_restarts -= 1
            left.failed(index, code)
            _say(f"restarting, at most {num_restarts} more times")


class JobMembers:
    """Chooses the processes for each start: all, or, in an elastic job, the processes that have not failed recently.

    Attributes:
      job: the complete job.
      until: the time, by `time.monotonic`, at which all processes left out of the last start are available again; None
        if no process was left out because of a failure.
    """

    def __init__(self, job: Job) -> None:
        """Makes all processes of the complete job available for the first start."""
        self.job = job
        self.until: float | None = None
        self._back = [0.0] * job.num_processes  # when each process is available again
        self._most = job.num_processes  # the largest number that fits the run
        self._started = list(range(job.num_processes))

    def part(self, arrived: Sequence[int]) -> Job:
        """Returns the job with the processes of the next start; prints the processes that are left out.

        If fewer than `min_processes` processes are available, the function waits until enough are available. A job that
        is not elastic is returned unchanged.

        Args:
          arrived: the signals that this process has received; a signal ends the wait.
        """
        job = self.job
        if not job.min_processes:
            return job
        enough = sorted(self._back)[job.min_processes - 1]
        while (now := time.monotonic()) < enough and not arrived:
            time.sleep(_POLL_SECONDS)
        there = [number for number, back in enumerate(self._back) if back <= now]
        self.until = max(self._back) if len(there) < job.num_processes else None
        self._started = there[: self._most]
        if out := [str(number) for number in range(job.num_processes) if number not in self._started]:
            _say(f"starting {len(self._started)} of {job.num_processes} processes, without {', '.join(out)}")
        gpus = tuple(job.gpus[number] for number in self._started) if job.gpus else ()
        return dataclasses.replace(job, num_processes=len(self._started), gpus=gpus, full=job.num_processes)

    def failed(self, index: int, code: int) -> None:
        """Leaves the process that failed out of the next starts, for `back_seconds`.

        The process is not left out if its exit code shows that another process or a signal caused the failure.

        Args:
          index: the process's index in the last start.
          code: its exit code.
        """
        self._most = self.job.num_processes
        if self.job.min_processes and code not in (EXIT_START_AGAIN, EXIT_LOST_PEER):
            self._back[self._started[index]] = time.monotonic() + self.job.back_seconds

    def one_less(self) -> bool:
        """Makes the next start have one process fewer than the last start, because the run did not fit that number.

        Returns:
          Whether the job may continue with one process fewer. If an elastic job may not, an error is printed.
        """
        tried = len(self._started)
        self._most = tried - 1
        may = self._most >= self.job.min_processes > 0
        if self.job.min_processes and not may:
            least = self.job.min_processes
            _say(
                Problem(
                    "--min-processes",
                    got=f"{least}, but this run fits neither {tried} processes nor more of the remaining processes",
                    allowed="the number in the error above",
                    nearest="that number",
                )
            )
        return may


def environment(job: Job, index: int, address: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables with which a process of the job is started.

    Args:
      job: the processes to start.
      index: the index of the process, from 0.
      address: host:port of the coordinator.
      inherited: the environment of the launcher.
    """
    own = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # otherwise JAX listens on all interfaces
        "JAX_NUM_PROCESSES": str(job.num_processes),
        "JAX_PROCESS_ID": str(index),
        "MESHTRAIN_LOST_SECONDS": inherited.get("MESHTRAIN_LOST_SECONDS") or LOST_SECONDS,
        "PYTHONUNBUFFERED": "1",
    }
    if job.full:
        own[FULL] = str(job.full)
    if job.num_devices:
        own["JAX_NUM_CPU_DEVICES"] = str(job.num_devices)
    if job.gpus:
        own["CUDA_VISIBLE_DEVICES"] = job.gpus[index]
    return {**inherited, **own}


def gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the identifiers of the GPUs that this process may use; empty if JAX_PLATFORMS names no GPU platform.

    Args:
      environ: the environment of this process.
    """
    platforms = environ.get("JAX_PLATFORMS") or "cuda"
    if not {"cuda", "gpu"} & set(platforms.split(",")):
        return ()
    if "CUDA_VISIBLE_DEVICES" in environ:
        return tuple(word for word in environ["CUDA_VISIBLE_DEVICES"].split(",") if word and word != "-1")
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return ()
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False).stdout
    return tuple(str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines())))


def _start(job: Job, index: int, address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *job.command],
        env=environment(job, index, address, os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a Ctrl-C in the terminal reaches only this process, which forwards it once
        preexec_fn=_prepare_child,
    )


def _prepare_child() -> None:
    """Makes the child process end with the launcher, and unblocks signals; runs before the child's program starts."""
    # If the launcher is killed, the kernel kills the child, which would otherwise continue.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _copy(stream: IO[str], target: IO[str], index: int, last_words: collections.deque[str]) -> None:
    """Copies the output lines of a process with its index as prefix; one write per line, so that lines do not mix.

    Args:
      stream: the standard output or error of the process.
      target: the standard output or error of the launcher.
      index: the index of the process.
      last_words: gets each line; it stores only the last lines.
    """
    for line in stream:
        last_words.append(line.rstrip())
        try:
            target.write(f"[{index}] {line.rstrip()}\n")
            target.flush()
        except OSError:
            errors.leave_at_once(errors.lost_output())  # then the kernel also ends the processes


def _say(what: str) -> None:
    print(f"meshtrain: launch: {what}", file=sys.stderr, flush=True)
