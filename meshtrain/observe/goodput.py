"""Goodput: the share of a run's wall time, from its very beginning and over all restarts, that went into its steps."""

import time
from collections.abc import Callable


class Goodput:
    """Adds up the seconds of steps whose results the run has kept."""

    def __init__(
        self, begun_seconds: float, useful_seconds: float = 0.0, *, now: Callable[[], float] = time.time
    ) -> None:
        """Starts where an earlier process stopped.

        Args:
          begun_seconds: when the run was begun, since the epoch.
          useful_seconds: what the steps up to the one resumed from took.
          now: the time in seconds since the epoch.
        """
        self._begun_seconds = begun_seconds
        self._useful_seconds = useful_seconds
        self._now = now

    def add(self, seconds: float) -> None:
        """Counts a step. The first of a process, which compiles, counts nothing."""
        self._useful_seconds += seconds

    def values(self) -> dict[str, float]:
        """Returns `useful_seconds` and `goodput` (0 to 1) as they are now."""
        passed = self._now() - self._begun_seconds
        share = min(1.0, self._useful_seconds / passed) if passed > 0 else 0.0
        return {"useful_seconds": self._useful_seconds, "goodput": share}
