"""Errors before the processes of a job connect: the process with the error tells the others at the rendezvous.

Otherwise they would wait for a process that has ended. This module imports no JAX, which may be the cause of the error.
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

CODE, LINES = "code", "lines"  # keys of the end of a process that others are told
TELL_SECONDS = 20.0  # in which the others may come
_TOLD = (errors.EXIT_USER_ERROR, errors.EXIT_TOO_FEW, errors.EXIT_BUG)  # a signal ends a process at once
_meetings: list[Meeting] = []  # where an error is told: none for a single process, or after the rendezvous has begun


def tell_before_meeting(environ: Mapping[str, str]) -> None:
    """Makes an error that ends this process reach the others of its job, until `meet` begins.

    A single process is not affected, nor a job whose rendezvous only JAX knows.

    Args:
      environ: of this process.
    """
    with contextlib.suppress(UserError):  # a wrong variable: the start itself reports it
        if meeting := cluster.meeting(environ):
            _meetings[:] = [meeting]
            errors.before_leaving(lambda code, lines: _tell(environ, {CODE: code, LINES: lines}))


def meet(meeting: Meeting, environ: Mapping[str, str]) -> Said:
    """Waits for the others as `rendezvous.meet` does; an error of this process is no longer told there."""
    _meetings.clear()
    return rendezvous.meet(meeting, environ)


def _tell(environ: Mapping[str, str], ending: JsonObject) -> None:
    """Tells the others how this process ends, whose lines are printed; waits for them, but not longer than 20 s."""
    if not _meetings or ending[CODE] not in _TOLD:
        return
    meeting = _meetings.pop()

    def tell() -> None:
        with contextlib.suppress(Unreachable, UserError, OSError):  # they would hide the error of this process
            rendezvous.tell(meeting, environ, ending, TELL_SECONDS)

    # In a thread, because process 0 answers only when all have come, and name servers may take minutes.
    thread = threading.Thread(target=tell, daemon=True, name="early error")
    thread.start()
    with contextlib.suppress(KeyboardInterrupt):
        thread.join(TELL_SECONDS)
