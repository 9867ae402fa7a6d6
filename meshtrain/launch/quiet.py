"""What compilers write to standard error, kept from the terminal and given to whoever wants to read it."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# How a compiler says that it is about to abort the process: nobody could tell what it said afterwards.
FATAL = re.compile(r"[FE]\d{4} .*Check fail|F\d{4} ")


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Keeps what C++ writes to standard error from the terminal, and gives its lines once the block is over.

    What announces that the process is about to be aborted is passed on at once, with all that follows it.
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
        os.dup2(kept, 2)  # the last end for writing: the reader sees the end of the file
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
