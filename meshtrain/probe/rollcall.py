"""What the doctor asks the processes of a job, through `launch.meeting`, or a process that is alone."""

import functools
import time
from collections.abc import Callable
from typing import Any

from meshtrain.launch.meeting import Hub, Member

_NUM_CLOCK_TIMES = 8


class Single:
    """The roll call of a single process."""

    def exchange(self, name: str, value: Any, seconds: float) -> dict[int, Any]:
        """Returns the process' own value."""
        return {0: value}


RollCall = Hub | Member | Single  # all processes exchange the same names


def offsets(hub: Hub, now: Callable[[], float] = time.time) -> dict[int, tuple[float, float]]:
    """Returns process -> (seconds that its clock is ahead, half a round trip); see `clock_offset`."""
    found = {process: clock_offset(functools.partial(hub.ask_clock, process), now) for process in hub.others()}
    return {process: offset for process, offset in found.items() if offset is not None}


def clock_offset(
    ask: Callable[[], float | None], now: Callable[[], float] = time.time, num_times: int = _NUM_CLOCK_TIMES
) -> tuple[float, float] | None:
    """Returns (seconds that another clock is ahead of ours, half the round trip); None if it does not answer.

    The other clock was read at some moment between question and answer, half a round trip from their middle at most.
    The fastest of a few questions says most (Cristian 1989).

    Args:
      ask: returns what the other clock says, in seconds.
      now: what ours says.
      num_times: how often to ask.
    """
    found = []
    for _ in range(num_times):
        sent = now()
        theirs = ask()
        received = now()
        if theirs is None:
            break
        found.append((received - sent, theirs - (sent + received) / 2))
    if not found:
        return None
    trip, offset = min(found)
    return offset, trip / 2
