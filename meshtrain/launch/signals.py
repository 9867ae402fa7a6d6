"""SIGTERM, SIGINT and SIGHUP: before the first step they end the program at once, between steps a run saves first.

Before the first step there is nothing to save yet. Python runs a signal's handler between two lines of the main thread,
which may be minutes inside a compiler. A thread learns of the signal at once, through the file descriptor that Python's
C handler writes to (`signal.set_wakeup_fd`). This module imports no JAX, because it is used before JAX is imported.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from meshtrain.errors import EXIT_START_AGAIN

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAID = b"meshtrain: interrupted: before the first step, so nothing is lost; the same command starts again\n"
_undo: list[Callable[[], None]] = []
_former: dict[int, Any] = {}  # signal -> the handler that one of this module stands in place of
_forking = threading.local()
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
    _former.update(handlers)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=_wait, args=(reading, terminal, frozenset(handlers)), daemon=True, name="starting")
    thread.start()

    def end(taken: Collection[int]) -> None:
        signal.set_wakeup_fd(before)
        for number in handlers.keys() - set(taken):
            signal.signal(number, handlers[number])
        _former.clear()
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


@contextlib.contextmanager
def interruptions(agreed: Callable[[int], bool] | None = None) -> Iterator[Callable[[int], bool]]:
    """Yields a function that returns whether to save and stop. Call it once after each step, with the step's number.

    Signals thus take effect between steps only. A second SIGINT ends the program at once. After SIGHUP the terminal is
    gone: output to it is dropped, because a failed write would end the run before its save.

    Args:
      agreed: step -> whether all processes stop after it; None for a single process.
    """
    arrived: list[int] = []
    # With several processes JAX handles SIGTERM: it tells the others, and they agree on a step that none has passed.
    over((signal.SIGTERM,) if agreed else ())
    descriptors = on_terminal()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in arrived:
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            drop_output(descriptors)
        arrived.append(number)
        if agreed:
            signal.raise_signal(signal.SIGTERM)

    numbers = [number for number in heeded() if not (agreed and number == signal.SIGTERM)]
    try:
        before: dict[int, Any] = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not the main thread, as in some notebooks: Python allows no handlers here
        yield agreed or (lambda step: False)
        return
    _former.update(before)
    try:
        yield agreed or (lambda step: bool(arrived))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _former.clear()


def _block() -> None:
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


def _forget() -> None:
    if _end:
        signal.set_wakeup_fd(-1)
    for number, handler in _former.items():
        signal.signal(number, handler)
    _unblock()


# A forked process, such as one of a user's data function, gets the former handlers: its signals are its own.
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)


def on_terminal() -> list[int]:
    """Returns which of the file descriptors of standard output and error are a terminal. Call it before SIGHUP."""
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def drop_output(descriptors: list[int]) -> None:
    """Redirects these file descriptors to /dev/null: writing to a lost terminal fails and would end the program."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
