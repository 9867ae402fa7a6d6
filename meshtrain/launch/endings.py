"""Ends the processes of a job together: all print the error of one process and have its exit code; process 0 ends last.

A process that ends with an error publishes its exit code and lines in JAX's key-value store. A thread in each process
reads the store once a second, so it works even while the process waits in a collective or in the compiler. The store is
in process 0, whose end makes JAX abort the other processes (SIGABRT). So process 0 waits until the other processes have
printed their lines.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator

from meshtrain import errors
from meshtrain.errors import UserError
from meshtrain.files import JsonObject
from meshtrain.launch import peers, signals
from meshtrain.launch.early_errors import CODE, LINES
from meshtrain.launch.rendezvous import Said

POLL_SECONDS = 1.0
_OWN_SECONDS = 0.5  # delay before this process ends because of another: it may raise the same error in the meantime
_PRINTED_SECONDS = 10.0  # how long process 0 waits for the last lines of other processes; a killed process prints none
_KNOWN_SECONDS = 4.0  # how long a process other than 0 waits until all processes have noticed its end
_WAIT_SECONDS = 0.1
_LAST_SECONDS = 0.5  # between the last line of a process and its end, or between the ends of two processes
_HAS_PRINTED = "has_printed"
# Exit codes that a process shares: the others end with the same lines and the same code.
_SHARED = (
    errors.EXIT_USER_ERROR,
    errors.EXIT_LOST_PEER,
    errors.EXIT_TOO_FEW,
    errors.EXIT_NOT_SAVED,
    errors.EXIT_START_AGAIN,
)
# All processes reach these codes independently, and may still have rows to write.
_FOUND_BY_ALL = (errors.EXIT_FINISHED, errors.EXIT_STOPPED_ITSELF)


def end_together() -> None:
    """Starts a thread that ends this process, with the same exit code and lines, if another process ends with an error.

    This process also publishes its own error before it ends. Call it after the processes have connected. It does
    nothing for a single process.
    """
    if peers.num_connected() == 1:
        return
    errors.before_leaving(_say_farewell)
    ends = threading.Event()
    listener = threading.Thread(target=_listen, args=(ends,), daemon=True, name="endings")
    listener.start()

    def stop() -> None:
        # A thread inside JAX's client would abort the process when Python exits.
        ends.set()
        listener.join(_KNOWN_SECONDS)

    atexit.register(stop)


@contextlib.contextmanager
def publish_errors() -> Iterator[None]:
    """Context manager: publishes a UserError of the block to the other processes immediately.

    So the other processes end even if an enclosing block of this process waits for processes or threads.
    """
    try:
        yield
    except UserError as error:
        with contextlib.suppress(RuntimeError):  # raised by JAX if process 0 has ended
            if peers.is_connected() and peers.num_connected() > 1:
                peers.say_ending({CODE: error.code, LINES: errors.error_lines(error), _HAS_PRINTED: False})
        raise


def end_if_told(said: Said, own_number: int) -> None:
    """Ends this process with the lines and exit code of another process that reported an error to the rendezvous.

    Args:
      said: process number -> None, or the exit code and lines of a process that has ended; from `early_errors.meet`.
      own_number: the number of this process.
    """
    if ending := ending_of_others({process: ending for process, ending in said.items() if ending}, own_number):
        _end_with(*ending)


def ending_of_others(endings: dict[int, JsonObject], own_number: int) -> tuple[int, str] | None:
    """Returns the exit code and the error lines with which this process must end, or None to continue.

    Args:
      endings: process number -> the exit code and error lines that the process has published.
      own_number: the number of this process.
    """
    for process, ending in sorted(endings.items()):
        if process == own_number or ending[CODE] in _FOUND_BY_ALL:
            continue
        if ending[CODE] in _SHARED:
            return ending[CODE], ending[LINES]
        last = ending[LINES].splitlines()[-1:] or ["no message"]
        line = f"process {process} has ended with code {ending[CODE]}: {errors.one_line(last[0])}"
        return errors.EXIT_LOST_PEER, f"meshtrain: lost: {line}"
    return None


def _listen(ends: threading.Event) -> None:
    while not ends.wait(POLL_SECONDS):
        with contextlib.suppress(RuntimeError):  # raised by JAX if process 0 has ended
            if ending_of_others(peers.endings(), peers.own_number()) is None or ends.wait(_OWN_SECONDS):
                continue
            if ending := ending_of_others(peers.endings(), peers.own_number()):
                _end_with(*ending)


def _end_with(code: int, lines: str) -> None:
    signals.undo()
    errors.before_leaving(_end_later)
    errors.leave_at_once(code, lines)


def _end_later(code: int, lines: str) -> None:
    """Waits half a second, so that the process with the error ends before this process.

    The order matters because a launcher may leave the process that ended first out of a restarted job. `leave_at_once`
    passes the exit code and the lines, which are not used.
    """
    time.sleep(_LAST_SECONDS)


def _say_farewell(code: int, lines: str) -> None:
    """Publishes the end of this process; waits a few seconds, until all other processes have published their ends too.

    Without the wait, the other processes would end before they print the lines: the end of this process breaks their
    collectives, and the end of process 0 aborts them.

    Args:
      code: the exit code of this process.
      lines: the error lines of this process, which are already printed.
    """
    if not peers.is_connected():
        return
    number = peers.own_number()
    with contextlib.suppress(RuntimeError):  # raised by JAX if process 0 has ended
        peers.say_ending({CODE: code, LINES: lines, _HAS_PRINTED: True})
        deadline = time.monotonic() + (_KNOWN_SECONDS if number else _PRINTED_SECONDS)
        while not _all_have(peers.endings(), needs_lines=number == 0) and time.monotonic() < deadline:
            time.sleep(_WAIT_SECONDS)
        if number == 0:
            time.sleep(_LAST_SECONDS)


def _all_have(endings: dict[int, JsonObject], *, needs_lines: bool) -> bool:
    """Returns whether every connected process has published that it ends.

    Args:
      endings: process number -> published message.
      needs_lines: whether each process must also have printed its error lines.
    """
    have = [ending[_HAS_PRINTED] or not needs_lines for ending in endings.values()]
    return sum(have) == peers.num_connected()
