"""Which process holds up the others, judged by times that each measures alone.

Processes take every step together, so that a step takes as long as that of the slowest process, everywhere. What a
process does alone tells them apart: its wait for data, its own work before it dispatches a step, and a fixed product
on one of its devices. A process is slow in one of these at a logged step if

    own > (1 + OVER) median      and      lost >= LEAST_SHARE step_seconds

with the median over the other processes, and what it loses a step: own - median; for the product, which stands for all
that its devices compute, (own / median - 1) step_seconds. A process that waits for its devices for LEAST_SHARE of a
step or longer loses nothing by data or host: the devices compute meanwhile.
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping

OVER = 0.2
LEAST_SHARE = 0.05  # of a step: below it a process may take many times as long, and nobody waits
NUM_RUNNING = 3  # logged steps in a row

CAUSES = {
    "data": "waiting for data",
    "host": "its own work before a step is dispatched",
    "device": "what its devices compute (by a product of its own)",
}


@dataclasses.dataclass(frozen=True)
class Times:
    """What a process has measured since the logged step before.

    Attributes:
      step_seconds: mean of a step.
      data_seconds: mean wait of a step for data.
      host_seconds: mean time from the end of the wait for an earlier step to the dispatch of the next, without data.
      device_wait_seconds: mean wait for an earlier step.
      probe_seconds: of the fixed product; None if it was not measured again since the logged step before.
    """

    step_seconds: float
    data_seconds: float
    host_seconds: float
    device_wait_seconds: float
    probe_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Slow:
    """A process that is slow at `NUM_RUNNING` logged steps running.

    Attributes:
      process: its index.
      lost_seconds: {cause: seconds a step that it loses}, of the causes with so many steps running, the largest first.
    """

    process: int
    lost_seconds: Mapping[str, float]

    def values(self) -> dict[str, float | None]:
        """Returns what a row of metrics has of it."""
        lost = {f"slow_process_{cause}_seconds": seconds for cause, seconds in self.lost_seconds.items()}
        return {"slow_process": float(self.process), **lost}

    def line(self) -> str:
        """Returns the line for the terminal."""
        lost = "; ".join(f"{seconds:.3g} s a step with {CAUSES[cause]}" for cause, seconds in self.lost_seconds.items())
        return f"meshtrain: WARNING: process {self.process} is slow: against the median of the others it loses {lost}"


def lost_seconds(times: Mapping[int, Times], probes: Mapping[int, float]) -> dict[tuple[int, str], float]:
    """Returns {(process, cause): seconds a step} for each process that is slow at one logged step.

    Args:
      times: of each process, two at least.
      probes: of each process that has measured one, the seconds of its newest product.
    """
    result = {}
    measured: dict[str, Mapping[int, float]] = {
        "data": {process: own.data_seconds for process, own in times.items()},
        "host": {process: own.host_seconds for process, own in times.items()},
        "device": probes,
    }
    for cause, seconds in measured.items():
        for process, own in seconds.items():
            others = [value for other, value in seconds.items() if other != process]
            if not others or own <= (1 + OVER) * (median := statistics.median(others)):
                continue
            step_seconds = times[process].step_seconds
            if cause != "device" and times[process].device_wait_seconds >= LEAST_SHARE * step_seconds:
                continue
            lost = (own / median - 1) * step_seconds if cause == "device" else own - median
            if lost >= LEAST_SHARE * step_seconds:
                result[process, cause] = lost
    return result


class Judgement:
    """Counts at how many logged steps running each process has been slow."""

    def __init__(self) -> None:
        """Nothing is known at the beginning."""
        self._probes: dict[int, float] = {}
        self._num_running: collections.Counter[tuple[int, str]] = collections.Counter()

    def of(self, times: Mapping[int, Times]) -> Slow | None:
        """Returns the process that loses most, of those that are slow at so many logged steps running.

        Args:
          times: of every process, at the next logged step. A process that has not measured its product again neither
            begins nor ends to be slow by it.
        """
        fresh = {process for process, own in times.items() if own.probe_seconds is not None}
        self._probes |= {process: own.probe_seconds for process, own in times.items() if own.probe_seconds is not None}
        lost = lost_seconds(times, self._probes)
        for process in times:
            for cause in CAUSES:
                if cause == "device" and process not in fresh:
                    continue
                key = process, cause
                self._num_running[key] = self._num_running[key] + 1 if key in lost else 0
        running = {key: seconds for key, seconds in lost.items() if self._num_running[key] >= NUM_RUNNING}
        if not running:
            return None
        (process, _), _ = max(running.items(), key=lambda pair: pair[1])
        own = [(cause, seconds) for (other, cause), seconds in running.items() if other == process]
        return Slow(process, dict(sorted(own, key=lambda pair: -pair[1])))
