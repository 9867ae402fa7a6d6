"""Handles SIGTERM, SIGINT and SIGHUP: before the first step they end the program immediately; later a run saves first.

Before the first step there is nothing to save, and after the last step everything is saved. Python runs a signal's
handler between two instructions of the main thread, which may be in a compiler for minutes. A thread notices the signal
at once, through the file descriptor that Python's C handler writes to (`signal.set_wakeup_fd`). This module does not
import JAX, because it is used before JAX is imported.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from meshtrain import errors
from meshtrain.cli import first_signals

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AFTER = "meshtrain: interrupted: after the last step, whose state is saved; the same command completes the run"
_undo: list[Callable[[], None]] = []  # the cleanup functions of open `undone` blocks
_former: dict[int, Any] = {}  # signal -> the handler that this module has replaced
_forking = threading.local()
_end: list[Callable[[], None]] = []  # ends the thread of `stops_at_signals`; at most one entry


def stop_signals() -> list[signal.Signals]:
    """Returns SIGINT, SIGTERM and SIGHUP, which stop a run, without ignored signals (`nohup` ignores SIGHUP)."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def stops_at_signals() -> Iterator[None]:
    """Context manager: SIGINT, SIGTERM and SIGHUP end the process immediately, with exit code 75.

    While a run trains inside the block, `interruptions` replaces this behavior: a signal takes effect after a step.
    """
    _start_thread(first_signals.SAID)
    try:
        yield
    finally:
        over()


def over(taken: Collection[int] = ()) -> None:
    """Ends the effect of `stops_at_signals`: restores the former signal handlers, and ends the thread.

    A second call has no effect.

    Args:
      taken: signals whose handler is not restored: C code (JAX) has installed a handler that Python does not know.
    """
    _end_thread()
    for number in _former.keys() - set(taken):
        signal.signal(number, _former[number])
    _former.clear()


def _handle(numbers: Collection[int], handler: Callable[[int, FrameType | None], object]) -> None:
    for number in numbers:
        _former.setdefault(number, signal.signal(number, handler))
    _former.update(first_signals.take_handlers())


def _start_thread(line: str) -> None:
    """Starts a thread that prints `line` and ends the process when a signal arrives.

    Python sets signal handlers only in the main thread, so in other threads this function does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before, numbers = signal.set_wakeup_fd(writing, warn_on_full_buffer=False), frozenset(stop_signals())
    # An empty Python handler is necessary: without a handler, Python does not write to the file descriptor.
    _handle(numbers, lambda *_: None)
    thread = threading.Thread(target=_wait, args=(reading, numbers, line), daemon=True, name="signals")
    thread.start()

    def end() -> None:
        signal.set_wakeup_fd(before)
        os.write(writing, b"\0")  # no signal has the number 0, which ends the thread
        thread.join()
        for descriptor in (reading, writing):
            os.close(descriptor)

    _end.append(end)


def _end_thread() -> bool:
    """Ends the thread of `_start_thread`; returns whether the thread was running."""
    had_thread = bool(_end)
    while _end:
        _end.pop()()
    return had_thread


@contextlib.contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Context manager: calls the cleanup function `undo` if the block raises or if the process ends inside it.

    The process may end because of a signal, except during the training loop, or because of another process's error.
    """
    _undo.append(undo)
    try:
        yield
    except BaseException:
        undo()
        raise
    finally:
        _undo.remove(undo)


def undo() -> None:
    """Runs the cleanup functions of all open `undone` blocks, the last first; call it before `leave_at_once`."""
    for step_back in reversed(_undo):
        with contextlib.suppress(OSError):
            step_back()


def _wait(reading: int, heeded: frozenset[int], said: str) -> None:
    while number := os.read(reading, 1)[0]:
        if number in heeded:
            undo()
            errors.leave_at_once(errors.EXIT_START_AGAIN, said)


@contextlib.contextmanager
def interruptions(agreed: Callable[[int], bool] | None = None) -> Iterator[Callable[[int], bool]]:
    """Context manager: yields a function step -> whether to save and stop after this step. Call it after each step.

    So signals take effect only between steps. A second SIGINT ends the program immediately. After SIGHUP the terminal
    is closed: its output is discarded, because a failed write would end the run before its save.

    Args:
      agreed: step -> whether all processes stop after this step, from `peers.make_stop`; None for a single process.
    """
    arrived: list[int] = []
    descriptors, is_program = on_terminal(), bool(_end)

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in arrived:
            if is_program:  # a library's callback could ignore an exception
                errors.leave_at_once(errors.EXIT_INTERRUPTED)
            raise KeyboardInterrupt
        if number == signal.SIGHUP:
            drop_output(descriptors)
        arrived.append(number)
        if agreed:
            signal.raise_signal(signal.SIGTERM)

    # With several processes JAX handles SIGTERM: it informs the others, and they agree on a step that none has passed.
    taken = (signal.SIGTERM,) if agreed else ()
    try:
        _handle([number for number in stop_signals() if number not in taken], note)
    except ValueError:  # not the main thread, as in some notebooks: Python forbids handlers here
        yield agreed or (lambda step: False)
        return
    _end_thread()
    try:
        yield agreed or (lambda step: bool(arrived))
    finally:
        if is_program:
            _start_thread(_AFTER)
        else:
            over(taken)


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


# A forked process, for example in a user's data function, gets the previous handlers.
os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)


def on_terminal() -> list[int]:
    """Returns the file descriptors of standard output (1) and standard error (2), without those that are no terminal.

    Call it before SIGHUP arrives, because the terminal is closed afterwards.
    """
    return [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]


def drop_output(descriptors: list[int]) -> None:
    """Redirects these file descriptors to /dev/null: a write to a lost terminal fails and would end the program."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
