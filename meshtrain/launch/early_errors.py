"""Shares errors that occur before the processes of a job connect: the failing process reports to the rendezvous.

The rendezvous is a TCP connection through process 0. Without the report, the other processes would wait for a process
that has ended. This module does not import JAX, which may be the cause of the error.
"""

import contextlib
import threading
from collections.abc import Mapping

from meshtrain import errors
from meshtrain.errors import UserError
from meshtrain.files import JsonObject
from meshtrain.launch import cluster, rendezvous
from meshtrain.launch.cluster import Meeting
from meshtrain.launch.rendezvous import Said, Unreachable

CODE, LINES = "code", "lines"  # keys of the message about the end of a process
TELL_SECONDS = 20.0  # how long to wait for the other processes to register
_TOLD = (errors.EXIT_USER_ERROR, errors.EXIT_TOO_FEW, errors.EXIT_BUG)  # codes that are reported
_meetings: list[Meeting] = []  # where to report an error; empty for a single process, or after `meet` was called


def tell_before_meeting(environ: Mapping[str, str]) -> None:
    """Registers a function that reports an error of this process to the other processes of its job.

    It is called if an error ends this process before `meet` is called. Nothing is registered for a single process, or
    for a job whose address only JAX can determine.

    Args:
      environ: the environment of this process.
    """
    with contextlib.suppress(UserError):  # a wrong variable: JAX's start will report it
        if meeting := cluster.meeting(environ):
            _meetings[:] = [meeting]
            errors.before_leaving(lambda code, lines: _tell(environ, {CODE: code, LINES: lines}))


def meet(meeting: Meeting, environ: Mapping[str, str]) -> Said:
    """Waits until all processes of the job have registered; raises the errors of `rendezvous.meet`.

    Later errors of this process are not reported by the function that `tell_before_meeting` has registered.

    Args:
      meeting: the address of process 0, the number of processes, and the number of this process.
      environ: the environment of this process.

    Returns:
      Process number -> None, or the exit code and lines of a process that has ended with an error.
    """
    _meetings.clear()
    return rendezvous.meet(meeting, environ)


def _tell(environ: Mapping[str, str], ending: JsonObject) -> None:
    """Reports the end of this process to the other processes.

    Does nothing after `meet` was called, or if the exit code is not in `_TOLD`. Otherwise waits at most 20 s until the
    other processes have registered at the rendezvous.

    Args:
      environ: the environment of this process.
      ending: the exit code and the error lines of this process, which are already printed.
    """
    if not _meetings or ending[CODE] not in _TOLD:
        return
    meeting = _meetings.pop()

    def tell() -> None:
        with contextlib.suppress(Unreachable, UserError, OSError):  # these errors would hide the error of this process
            rendezvous.tell(meeting, environ, ending, TELL_SECONDS)

    # In a thread, because process 0 answers only after all processes have registered, and DNS may take minutes.
    thread = threading.Thread(target=tell, daemon=True, name="early error")
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        thread.join(TELL_SECONDS)
