"""Writes files and pictures whose paths are set by flags; each write error is one line about the flag."""

import contextlib
import io
import pathlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshtrain.errors import Problem, UserError
from meshtrain.files import what_is_at, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")  # formats that `write_picture` supports


def unwritable(folder: pathlib.Path, flag: str = "--workdir", example: str = "runs/NAME") -> list[Problem]:
    """Returns an error line if a folder cannot be created or written, else an empty list; leaves no file.

    Args:
      folder: the path of the folder.
      flag: the flag that sets the folder, with which the line starts.
      example: the value of the flag that the line suggests.
    """
    existing = folder.absolute()
    if folder.parts[:1] and folder.parts[0].startswith("~"):
        return [
            Problem(
                flag,
                got=f"'{folder}', a home directory that does not exist",
                allowed="a writable folder",
                nearest=example,
            )
        ]
    while (what := what_is_at(existing)) == "nothing there" and existing != existing.parent:
        existing = existing.parent
    if what != "a folder":
        return [
            Problem(
                flag,
                got=f"'{folder}': '{existing}' is not a folder but {what}",
                allowed="a folder that can be written",
                nearest=example,
            )
        ]
    try:
        # Tries to write: permission bits are not sufficient for root or for a read-only file system.
        with tempfile.TemporaryDirectory(dir=existing, prefix=".meshtrain-"):
            return []
    except OSError as error:
        return [
            Problem(
                flag,
                got=f"'{folder}', which is not writable ({error.strerror})",
                allowed="a folder that can be written",
                nearest=example,
            )
        ]


@contextlib.contextmanager
def writing(flag: str, path: str) -> Iterator[None]:
    """Context manager: raises UserError if the `with` block cannot write the file whose path a flag sets.

    Args:
      flag: the name of the flag, for the error.
      path: the path of the file.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            Problem(
                flag,
                got=f"'{path}', which cannot be written ({error.strerror})",
                allowed="a path on a disk with free space",
                nearest="another folder",
            )
        ) from error


def write(flag: str, path: str, content: str | bytes) -> None:
    """Writes `content` to the file `path`, which a flag sets; a reader sees either the old or the new content.

    Args:
      flag: the name of the flag, for the error.
      path: the path of the file.
      content: the new content.

    Raises:
      UserError: the file cannot be written; `path` is unchanged.
    """
    with writing(flag, path):
        write_whole(path, content)


def write_picture(flag: str, path: str, figure: "Figure", **how: Any) -> None:
    """Writes a figure into a file whose path a flag sets, in the format of the path's ending.

    Args:
      flag: the name of the flag, for the error.
      path: the path of the file, which ends with one of PICTURES.
      figure: a matplotlib figure.
      **how: arguments of `Figure.savefig`.

    Raises:
      UserError: the file cannot be written; `path` is unchanged.
    """
    content = io.BytesIO()
    figure.savefig(content, format=pathlib.Path(path).suffix[1:], **how)
    write(flag, path, content.getvalue())
