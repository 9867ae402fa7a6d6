"""Handles signals while the program is imported: SIGINT ends it with a documented exit code, without a traceback.

`__main__` calls `begin` before its other imports, so this module imports only the standard library.
"""

import os
import signal
import sys
from types import FrameType
from typing import Any

# The same codes as in `meshtrain.errors`, which would take time to import.
_EXIT_START_AGAIN, _EXIT_INTERRUPTED = 75, 130
SAID = "meshtrain: interrupted: before the first step, so nothing is lost; the same command starts the run again"
_replaced: dict[int, Any] = {}  # signal -> the handler before `begin`


def begin(is_training: bool) -> None:
    """Makes signals end the process until `take_handlers` is called.

    Args:
      is_training: whether the program starts a training run. If true, SIGINT, SIGTERM and SIGHUP print a line and end
        the process with code 75; otherwise SIGINT ends it with code 130.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if is_training and sys.stderr:
            os.write(sys.stderr.fileno(), f"{SAID}\n".encode())
        os._exit(_EXIT_START_AGAIN if is_training else _EXIT_INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_training else (signal.SIGINT,):
        if signal.getsignal(number) is not signal.SIG_IGN:  # keep an ignored signal ignored: nohup ignores SIGHUP
            _replaced[number] = signal.signal(number, end)


def take_handlers() -> dict[int, Any]:
    """Returns {signal: its handler before `begin`}, which the caller restores; empty at the second call."""
    handlers = dict(_replaced)
    _replaced.clear()
    return handlers


def over() -> None:
    """Restores the signal handlers that were set before `begin`."""
    for number, handler in take_handlers().items():
        signal.signal(number, handler)
