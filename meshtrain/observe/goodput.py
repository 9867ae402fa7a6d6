"""Goodput: the share of a run's wall time, from its first start and over all restarts, that its steps took."""

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Done:
    """What earlier processes of a run have logged.

    Attributes:
      useful_seconds: the sum over its timed steps, up to the one resumed from.
      timed_steps: the number of these steps.
      passed_seconds: from the run's beginning to its last logged row, 0 if nothing was logged.
    """

    useful_seconds: float = 0.0
    timed_steps: int = 0
    passed_seconds: float = 0.0


class Goodput:
    """Adds up the durations of the steps that are part of the run: steps that a restart repeats count once."""

    def __init__(
        self,
        begun_seconds: float,
        done: Done | None = None,
        *,
        num_processes: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts where an earlier process stopped.

        Args:
          begun_seconds: when the run's first process began, on the clock `now`; may be negative.
          done: what earlier processes logged.
          num_processes: of this start; the run may have had another number of them before.
          now: a monotonic time in seconds, because the system's clock may be set back during a run.
        """
        done = done or Done()
        self._begun_seconds = begun_seconds
        self._useful_seconds, self._timed_steps = done.useful_seconds, done.timed_steps
        self._num_processes = num_processes
        self._now = now

    def add(self, seconds: float) -> None:
        """Counts a step. The first of a process, which compiles, is passed as 0 seconds and not counted."""
        self._useful_seconds += seconds
        self._timed_steps += seconds > 0

    def values(self) -> dict[str, float]:
        """Returns `useful_seconds`, `timed_steps` and `goodput` (0 to 1) as they are now; of several, `processes`."""
        passed = self._now() - self._begun_seconds
        share = min(1.0, self._useful_seconds / passed) if passed > 0 else 0.0
        values = {"useful_seconds": self._useful_seconds, "timed_steps": self._timed_steps, "goodput": share}
        return values | ({"processes": self._num_processes} if self._num_processes > 1 else {})
