"""Captures what C++ code (compilers, device plugins) writes to standard error."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# The line with which a compiler announces that it aborts the process: it has to reach the terminal before that.
FATAL = re.compile(r"[FE]\d{4} .*Check fail|F\d{4} ")


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Captures file descriptor 2 during the block; the list that it yields holds the lines once the block has ended.

    A line that matches FATAL, and every line after it, is also written to the terminal at once.
    """
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    reader = threading.Thread(target=_read, args=(reading, kept, lines), daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)  # closes the last end for writing, so that the reader sees the end of the file
        reader.join()
        os.close(kept)


def _read(reading: int, kept: int, lines: list[str]) -> None:
    is_fatal = False
    with os.fdopen(reading, errors="replace") as stream:
        for line in stream:
            lines.append(line.rstrip("\n"))
            is_fatal = is_fatal or bool(FATAL.match(line))
            if is_fatal:
                os.write(kept, line.encode())
