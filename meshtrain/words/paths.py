"""Paths as users write them. These functions raise no OSError, and open no pipe, which would block."""

import os
import stat
from pathlib import Path

from meshtrain.words.errors import UserError


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns the path with `~` and `~name` expanded; unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def what_is_at(path: str | os.PathLike[str]) -> str:
    """Returns in words what is at a path: `a file`, `a folder`, `nothing there`, or the operating system's error.

    Path.is_file and Path.exists raise for a name that is too long before Python 3.14, and return False for a loop of
    links.

    >>> what_is_at("/"), what_is_at("/no/such/path")
    ('a folder', 'nothing there')
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


def target_problems(flag: str, path: str, example: str) -> list[str]:
    """Returns one line if a file cannot be written, else none; it is asked before the work begins.

    The folder does not exist, the path is no file, or this user may not write it.

    Args:
      flag: the argument that names the file, for the error.
      path: the file; it need not exist.
      example: a legal name, for the error.
    """
    if not path:
        return [f"{flag}: got ''; allowed: a file's name; nearest: {example}"]
    folder = Path(path).absolute().parent
    if what_is_at(folder) != "a folder":
        allowed = "allowed: a file in one that does"
        return [f"{flag}: got '{path}', whose folder does not exist; {allowed}; nearest: {example}"]
    what = what_is_at(path)
    if what not in ("a file", "nothing there"):
        return [f"{flag}: got '{path}', {what}; allowed: a file's name; nearest: {example}"]
    # Of the effective user, whose rights the process has, where the system can tell.
    effective = os.access in os.supports_effective_ids
    if not os.access(path if what == "a file" else folder, os.W_OK, effective_ids=effective):
        allowed = "allowed: a file that can be written"
        return [f"{flag}: got '{path}', which this user may not write; {allowed}; nearest: {example}"]
    return []


def refuse_target(flag: str, path: str, example: str) -> None:
    """Checks, before the work begins, that a file can be written; see `target_problems`.

    Raises:
      UserError: it cannot.
    """
    if lines := target_problems(flag, path, example):
        raise UserError(*lines)


def is_utf8(text: str) -> bool:
    """Returns whether a text can be encoded as UTF-8. Python decodes other bytes of a file name as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
