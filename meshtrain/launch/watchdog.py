"""Prints a reason and ends the process if no step completes in time, or if another process is lost.

Each process has a watchdog, a thread. The watchdog publishes a heartbeat every second and reads the heartbeats of the
others:

    no step for `watchdog_seconds`             prints all stacks and the slowest processes: exit code 4
    no heartbeat of a process for LOST_SECONDS prints the process: exit code 4
"""

import collections
import contextlib
import faulthandler
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import jax

from meshtrain.errors import EXIT_LOST_PEER, Interrupted, Problem, TrainingStopped, UserError, leave_at_once
from meshtrain.launch import peers

LOST_SECONDS = "MESHTRAIN_LOST_SECONDS"  # a variable of the environment: longest time without a heartbeat, in seconds
_DEFAULT_LOST_SECONDS = 60.0
_LEAST_SECONDS = 60.0
_MEDIANS = 10
_PATIENT_SECONDS = 1800.0
_POLL_SECONDS = 1.0
_LAST_SECONDS = 5.0  # how long the end of the block waits until the last heartbeat is sent
_ADVICE = "start the job again to resume from the last checkpoint"
_ABSENT_SECONDS = 10.0  # between two checks: a longer time means that this process was stopped (SIGSTOP, suspend)
_NUM_STEPS_REMEMBERED = 64
_NO_SIGN = "0 none"  # placeholder before the first heartbeat; it starts with the step


class Watchdog:
    """Ends the process if a step takes too long or another process is lost; checks once a second in its `with` block.

    Call `completed` after each step, and enclose evaluations and saves in `longer_limit`.
    """

    def __init__(
        self,
        limit_seconds: float,
        *,
        now: Callable[[], float] = time.monotonic,
        lost_seconds: float | None = None,
        num_processes: int | None = None,
    ) -> None:
        """Creates a watchdog; its threads start with the `with` block.

        Args:
          limit_seconds: the longest time between two steps; 0: ten times the median step, at least 60 s.
          now: () -> a monotonic time in seconds.
          lost_seconds: the longest time without a heartbeat of a process; None: MESHTRAIN_LOST_SECONDS, or 60 s.
          num_processes: the number of processes; None: the number that JAX reports.

        Raises:
          UserError: MESHTRAIN_LOST_SECONDS is not a number of seconds.
        """
        self._limit_seconds = limit_seconds
        self._now = now
        self._lost_seconds = lost_seconds or _lost_seconds_of_environment()
        self._durations: collections.deque[float] = collections.deque(maxlen=_NUM_STEPS_REMEMBERED)
        self._step = 0
        self._is_starting = True  # until the first step has completed: compiling may take any time
        self._has_longer_limit = False
        self._last_seconds = now()
        self._signs: dict[int, tuple[str, float]] = {}
        self._answered_seconds = self._looked_seconds = now()
        self._num_processes = peers.count() if num_processes is None else num_processes
        self._heartbeats = threading.Thread(target=self._exchange, daemon=True, name="heartbeats")
        self._is_over, self._is_finished = threading.Event(), False

    def __enter__(self) -> Self:
        self._last_seconds = self._answered_seconds = self._looked_seconds = self._now()
        self._signs = dict.fromkeys(range(self._num_processes), (_NO_SIGN, self._last_seconds))
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        if self._num_processes > 1:
            self._heartbeats.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After another error, which may affect only this process, the others should notice the missing heartbeats.
        self._is_finished = isinstance(error, Interrupted | TrainingStopped | None)
        self._is_over.set()
        if isinstance(error, jax.errors.JaxRuntimeError) and self._num_processes > 1:
            # A collective failed because another process has died; a regular exit would wait for that process.
            leave_at_once(
                EXIT_LOST_PEER, f"meshtrain: lost: a process has ended: {str(error).splitlines()[0]}; {_ADVICE}"
            )
        if self._num_processes > 1:
            # A heartbeat queries JAX for this process's index. While Python exits, JAX would start its backend for it.
            self._heartbeats.join(_LAST_SECONDS)

    def completed(self, step: int, seconds: float | None) -> None:
        """Records that a step has completed, which restarts the time limit for the next step.

        Args:
          step: the number of the step.
          seconds: the duration of the step; None for a step that is not typical, such as the first, which may compile.
        """
        self._step, self._last_seconds, self._is_starting = step, self._now(), False
        if seconds is not None:
            self._durations.append(seconds)

    @contextlib.contextmanager
    def longer_limit(self) -> Iterator[None]:
        """Context manager: raises the time limit to half an hour for an evaluation or a save, including compilation."""
        before, self._has_longer_limit = self._has_longer_limit, True
        try:
            yield
        finally:
            self._last_seconds, self._has_longer_limit = self._now(), before

    def limit_seconds(self) -> float:
        """Returns the current time limit for a step, in seconds; infinite until the first step has completed."""
        if self._is_starting:
            return math.inf
        if self._has_longer_limit:
            return max(_PATIENT_SECONDS, self._limit_seconds)
        if self._limit_seconds:
            return self._limit_seconds
        return max(_LEAST_SECONDS, _MEDIANS * statistics.median(self._durations or [0.0]))

    def lost(self) -> dict[int, float]:
        """Returns {process number: seconds since its last heartbeat} for the processes that count as lost.

        A process is lost if it has sent no heartbeat for longer than `lost_seconds`. If process 0 does not answer, the
        result contains only process 0, because it stores all heartbeats.
        """
        now = self._now()
        if self._num_processes == 1:
            return {}
        if now - self._answered_seconds > self._lost_seconds:
            return {0: now - self._answered_seconds}  # process 0 stores all heartbeats and does not answer
        silent = {process: now - seen for process, (sign, seen) in self._signs.items() if sign != peers.FINISHED}
        return {process: seconds for process, seconds in silent.items() if seconds > self._lost_seconds}

    def note(self, signs: Mapping[int, str]) -> None:
        """Records `signs`, {process number: newest heartbeat}, and the current time for each changed heartbeat."""
        self._answered_seconds = self._now()
        for process, sign in signs.items():
            if process not in self._signs or self._signs[process][0] != sign:
                self._signs[process] = (sign, self._answered_seconds)

    def look(self) -> str:
        """Returns the reason why this process must end (a lost process, or no completed step), or an empty string."""
        self._discount_own_absence()
        if lost := self.lost():
            process, seconds = min(lost.items())
            return f"process {process} has sent no heartbeat for {seconds:.0f} s"
        waited = self._now() - self._last_seconds
        if waited <= self.limit_seconds():
            return ""
        return (
            f"no step for {waited:.0f} s after step {self._step} (allowed: {self.limit_seconds():.0f}){self._behind()}"
        )

    def _discount_own_absence(self) -> None:
        # A process that was stopped for a while saw no heartbeats and could not complete a step.
        now = self._now()
        absent, self._looked_seconds = now - self._looked_seconds, now
        if absent > _ABSENT_SECONDS:
            self._last_seconds += absent
            self._answered_seconds += absent
            self._signs = {process: (sign, seen + absent) for process, (sign, seen) in self._signs.items()}

    def _behind(self) -> str:
        steps = {process: int(sign.split()[0]) for process, (sign, _) in self._signs.items() if sign != peers.FINISHED}
        if not steps:
            return ""
        least = min(steps.values())
        names = ", ".join(str(process) for process, step in sorted(steps.items()) if step == least)
        return f"; furthest behind, at step {least}: process {names}"

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            if reason := self.look():
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                leave_at_once(EXIT_LOST_PEER, f"meshtrain: hang: {reason}; {_ADVICE}")

    def _exchange(self) -> None:
        # In a separate thread: these calls block if process 0 does, and `_watch` must notice that.
        while not self._is_over.wait(_POLL_SECONDS):
            with contextlib.suppress(RuntimeError):  # raised by JAX if process 0 has ended
                peers.beat(self._step)
                self.note(peers.signs_of_life())
        with contextlib.suppress(RuntimeError):
            if self._is_finished:
                peers.say_finished()


def _lost_seconds_of_environment() -> float:
    text = os.environ.get(LOST_SECONDS) or str(_DEFAULT_LOST_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(
            Problem(
                LOST_SECONDS,
                got=f"'{text}'",
                allowed="a number of seconds above 0",
                nearest=f"{_DEFAULT_LOST_SECONDS:g}",
            )
        )
    return seconds
