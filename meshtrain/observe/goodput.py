"""Goodput: the share of a run's wall time, from its first start and over all restarts, spent in useful steps."""

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Done:
    """The goodput that earlier processes of a run have logged.

    Attributes:
      useful_seconds: the total duration of timed steps, up to the step from which the run resumed.
      timed_steps: the number of these steps.
      passed_seconds: the time from the run's start to its last logged row, 0 if nothing was logged.
    """

    useful_seconds: float = 0.0
    timed_steps: int = 0
    passed_seconds: float = 0.0


class Goodput:
    """Sums the durations of the steps of a run; a step that is repeated after a restart counts once."""

    def __init__(
        self,
        begun_seconds: float,
        done: Done | None = None,
        *,
        num_processes: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continues from the values of earlier processes.

        Args:
          begun_seconds: the time at which the run's first process started, on the clock `now`; may be negative.
          done: the values that earlier processes logged; None for a new run.
          num_processes: the number of processes of this start; earlier starts may have had another number.
          now: a function that returns a monotonic time in seconds, because the system's clock may be set back during a
            run.
        """
        done = done or Done()
        self._begun_seconds = begun_seconds
        self._useful_seconds, self._timed_steps = done.useful_seconds, done.timed_steps
        self._num_processes = num_processes
        self._now = now

    def add(self, seconds: float) -> None:
        """Adds the duration of a step.

        Pass 0 seconds for the first step of a process, which includes compilation; this step is not counted.
        """
        self._useful_seconds += seconds
        self._timed_steps += seconds > 0

    def values(self) -> dict[str, float]:
        """Returns the entries of a metrics row: `useful_seconds`, `timed_steps` and `goodput` (0 to 1).

        With several processes there is also the entry `processes`, their number.
        """
        passed = self._now() - self._begun_seconds
        share = min(1.0, self._useful_seconds / passed) if passed > 0 else 0.0
        values = {"useful_seconds": self._useful_seconds, "timed_steps": self._timed_steps, "goodput": share}
        return values | ({"processes": self._num_processes} if self._num_processes > 1 else {})
