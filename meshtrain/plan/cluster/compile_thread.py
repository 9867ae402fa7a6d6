"""Compiles in a thread, while the terminal shows the elapsed seconds and Ctrl-C ends the program immediately."""

import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from meshtrain.errors import EXIT_INTERRUPTED

Result = TypeVar("Result")
TICK_SECONDS = 0.5


def waiting_for(what: str, work: Callable[[], Result]) -> Result:
    """Returns the result of `work`, or raises its exception; shows the elapsed seconds if stderr is a terminal.

    The work runs in a thread because the compiler does not react to signals. Ctrl-C ends the program without waiting
    for the thread. No output is lost, because the main thread writes all files afterwards.

    Args:
      what: the text before the elapsed seconds, such as `compiling for h100:8x8`.
      work: function without arguments that compiles.
    """
    # A copy of stderr: while the compiler works, stderr itself is captured.
    terminal = os.dup(2) if sys.stderr.isatty() else None
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            while not future.done():
                concurrent.futures.wait([future], TICK_SECONDS)
                if terminal is not None:
                    os.write(terminal, f"\r{what}: {time.perf_counter() - start:.0f} s ".encode())
            return future.result()
        except KeyboardInterrupt:
            leave(terminal)
        finally:
            if terminal is not None:
                os.write(terminal, b"\r\x1b[K")
                os.close(terminal)


def leave(terminal: int | None) -> NoReturn:
    """Ends the process immediately, with the exit code of an interrupt.

    Args:
      terminal: file descriptor of the terminal, which gets a newline; None if stderr is not a terminal.
    """
    if terminal is not None:
        os.write(terminal, b"\n")
    sys.stdout.flush()
    assert threading.current_thread() is threading.main_thread()
    os._exit(EXIT_INTERRUPTED)
