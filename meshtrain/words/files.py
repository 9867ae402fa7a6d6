"""Files that are replaced whole: a reader sees the content before or after, never a part of it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file beside `path`, which takes its place when the block ends; an error in the block leaves `path`.

    The content is on the disk before the file gets its name, so that a power cut leaves the old file or the new one.
    A link at `path` is replaced, and the file that it leads to stays as it is.

    Args:
      path: the file to replace, whose permissions stay, or to make; its folder exists.

    Raises:
      OSError: the content cannot be written; `path` is as before.
    """
    path = Path(path)
    # Mode x follows and overwrites nothing; files that `tempfile` itself opens are readable by their owner alone.
    new = Path(tempfile.mktemp(dir=path.parent, prefix=f"{path.name}."))
    with new.open("xb") as file:
        try:
            with contextlib.suppress(OSError):  # nothing is there, or the file system has no permissions
                new.chmod(path.stat().st_mode & 0o777)
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
