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
    # The new file lies in a folder of its own, which nobody else can name or write. It is opened like any other file,
    # because those of `tempfile` itself are readable by their owner alone.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".meshtrain-", ignore_cleanup_errors=True) as folder:
        new = Path(folder, path.name)
        with new.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # nothing is there, or the file system has no permissions
            new.chmod(path.stat().st_mode & 0o777)
        new.replace(path)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a file by `content`, a text as UTF-8; see `replacing`.

    Raises:
      OSError: it cannot be written; `path` is as before.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
