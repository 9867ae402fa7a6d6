"""Signals before the first step: there is nothing to save yet, so the program prints a line and ends at once.

Python runs a signal's handler between two lines of the main thread, which may be minutes inside a compiler. A thread
learns of the signal at once, through the file descriptor that Python's C handler writes to (`signal.set_wakeup_fd`).
This module imports no JAX, because it is used before JAX is imported.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from meshtrain.words.errors import EXIT_START_AGAIN

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAID = b"meshtrain: interrupted: before the first step, so nothing is lost; the same command starts again\n"
_undo: list[Callable[[], None]] = []
_end: list[Callable[[Collection[int]], None]] = []  # ends the open block of `stops_at_signals`, at most one


def heeded() -> list[signal.Signals]:
    """Returns the signals that stop a run: all but those that the parent process ignores, as nohup does SIGHUP."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def stops_at_signals() -> Iterator[None]:
    """Makes SIGINT, SIGTERM and SIGHUP end the process with code 75, until the block ends or `over` is called."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers in the main thread only
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    terminal = os.dup(2)  # stderr itself may be captured
    # A handler in Python, though it has nothing to do: without one, nothing is written to the file descriptor.
    handlers: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in heeded()}
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=_wait, args=(reading, terminal, frozenset(handlers)), daemon=True, name="starting")
    thread.start()

    def end(taken: Collection[int]) -> None:
        signal.set_wakeup_fd(before)
        for number in handlers.keys() - set(taken):
            signal.signal(number, handlers[number])
        os.write(writing, b"\0")  # no signal has this number: the thread ends
        thread.join()
        for descriptor in (reading, writing, terminal):
            os.close(descriptor)

    _end.append(end)
    try:
        yield
    finally:
        over()


def over(taken: Collection[int] = ()) -> None:
    """Restores the handlers before the steps begin, whose progress has to be saved. It may be called again.

    Args:
      taken: signals for which C code has installed a handler meanwhile; Python does not know it, and leaves it.
    """
    while _end:
        _end.pop()(taken)


@contextlib.contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Calls `undo` if the block raises, or if a signal ends the program within it before the first step."""
    _undo.append(undo)
    try:
        yield
    except BaseException:
        undo()
        raise
    finally:
        _undo.remove(undo)


def _wait(reading: int, terminal: int, heeded: frozenset[int]) -> None:
    while number := os.read(reading, 1)[0]:
        if number in heeded:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(terminal, _SAID)
            for undo in reversed(_undo):
                with contextlib.suppress(OSError):
                    undo()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(EXIT_START_AGAIN)
