"""Suppresses what Orbax prints on the terminal besides raising it: needless warnings, and stacks of failed saves.

`CheckpointManager.wait_until_finished` raises the error of a failed save, and we print one line for it. Before that,
each of Orbax's threads logs the error with a stack. Writes still in flight then find their event loop closed:
TensorStore prints a traceback for each, and asyncio one for each task whose result is never retrieved.
"""

import functools
import logging
import sys
from pathlib import Path


@functools.cache
def silence() -> None:
    """Suppresses these lines from now on; everything else is printed as before."""
    logging.getLogger("absl").addFilter(_is_worth_a_line)
    logging.getLogger("asyncio").addFilter(_is_task_of_others)
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if not _came_too_late(unraisable):
            report(unraisable)

    sys.unraisablehook = report_others


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    is_raised = record.exc_info is not None and record.exc_info[0] is not None
    is_reported = is_raised or "Metadata file: %s" in str(record.msg)  # a damaged file: by its checksum
    return (record.levelno >= logging.ERROR and not is_reported) or "orbax" not in Path(record.pathname).parts


def _is_task_of_others(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not ("exception was never retrieved" in text and "orbax" in text)


def _came_too_late(unraisable: "sys.UnraisableHookArgs") -> bool:
    """Returns whether C++ called a closed event loop: the outermost frame is asyncio's own."""
    error, traceback = unraisable.exc_value, unraisable.exc_traceback
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return is_closed and traceback is not None and traceback.tb_frame.f_code.co_name == "call_soon_threadsafe"
