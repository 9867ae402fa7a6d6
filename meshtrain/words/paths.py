"""Paths as users write them. Asking about one never fails, and never opens what could keep a reader waiting."""

import os
import stat
from pathlib import Path

from meshtrain.words.errors import UserError


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns the path with `~` and `~name` replaced; as it is where there is no such home."""
    return Path(os.path.expanduser(path))


def what_is_at(path: str | os.PathLike[str]) -> str:
    """Returns in words what stands at a path: `a file`, `a folder`, `nothing there`, or why that cannot be told.

    Not Path.is_file and its kin: before Python 3.14 they raise where a name is too long, and they take a loop of links
    for an empty place.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a link that leads nowhere" if os.path.islink(path) else "nothing there"
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    except ValueError:
        return "a name that no file can have"
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    kind = stat.S_IFMT(mode)
    return kinds[kind] if kind in kinds else "a device"


def refuse_target(flag: str, path: str, example: str) -> None:
    """Looks before the work whether its result can be written.

    Args:
      flag: that names the file.
      path: of the file, there or not.
      example: a name that would do.

    Raises:
      UserError: its folder is not there, or something other than a file stands there.
    """
    folder = Path(path).absolute().parent
    if what_is_at(folder) != "a folder":
        raise UserError(
            f"{flag}: got '{path}', whose folder does not exist; allowed: a file in one that does; nearest: {example}"
        )
    what = what_is_at(path)
    if what not in ("a file", "nothing there"):
        raise UserError(f"{flag}: got '{path}', {what}; allowed: a file's name; nearest: {example}")
    if not os.access(path if what == "a file" else folder, os.W_OK):
        raise UserError(
            f"{flag}: got '{path}', which this user may not write; allowed: a file that can be written; "
            f"nearest: {example}"
        )


def is_utf8(text: str) -> bool:
    """Returns whether a text can be written to a file: not so a name whose bytes were no UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
