"""Waiting for the compiler: the terminal shows that it works, and Ctrl-C is heard at once."""

import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from meshtrain.words.errors import EXIT_INTERRUPTED

Result = TypeVar("Result")
TICK_SECONDS = 0.5


def waiting_for(what: str, work: Callable[[], Result]) -> Result:
    """Returns what `work` returns; meanwhile, on a terminal, standard error says for how long it has been at it.

    The work runs in a thread of its own, since the compiler does not listen to signals; an interrupt ends the program
    without waiting for it. Nothing is left behind: what is written is written by the main thread, at the end.
    """
    # The compiler's own lines are kept from standard error while it works, ours are not.
    terminal = os.dup(2) if sys.stderr.isatty() else None
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            while True:
                try:
                    return future.result(timeout=TICK_SECONDS)
                except concurrent.futures.TimeoutError:
                    if future.done():  # the work itself timed out
                        raise
                if terminal is not None:
                    os.write(terminal, f"\r{what}: {time.perf_counter() - start:.0f} s ".encode())
        except KeyboardInterrupt:
            leave(terminal)
        finally:
            if terminal is not None:
                os.write(terminal, b"\r\x1b[K")
                os.close(terminal)


def leave(terminal: int | None) -> NoReturn:
    """Ends the process at once, with the exit code of an interrupt."""
    if terminal is not None:
        os.write(terminal, b"\n")
    sys.stdout.flush()
    assert threading.current_thread() is threading.main_thread()
    os._exit(EXIT_INTERRUPTED)
