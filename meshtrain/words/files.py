"""Files that are replaced whole: a reader sees the content before or after, never a part of it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file beside `path`, which takes its place when the block ends; an error in the block leaves `path`.

    The content is on the disk before the file gets its name, so that a power cut leaves the old file or the new one.

    Args:
      path: the file to replace or to make; its folder exists.

    Raises:
      OSError: the content cannot be written; `path` is as before.
    """
    path = Path(path)
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a file by `content`, a text as UTF-8; see `replacing`.

    Raises:
      OSError: it cannot be written; `path` is as before.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
