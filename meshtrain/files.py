"""Paths as users write them, JSON that others may have written, and files that are replaced atomically.

A reader of a replaced file sees either the old or the new content, never a part. Functions that inspect paths raise no
OSError, and do not open pipes, which would block.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from meshtrain.errors import Problem

_MOST_LEVELS = 100  # levels of nested objects and lists
_TOO_DEEP = f"nested deeper than {_MOST_LEVELS} levels"

Json: TypeAlias = Any  # a JSON value: an object, a list, a text, a number, a bool or None
JsonObject: TypeAlias = dict[str, Json]  # a JSON object


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends; after an error in the block, `path` is unchanged.

    The content is on the disk before the file gets its name, so that a power failure leaves the old or the new file. A
    link at `path` is replaced, and its target is unchanged.

    Args:
      path: the file to replace or to create, in an existing folder. A new file gets the permissions of the old file.

    Raises:
      OSError: the content cannot be written; `path` is unchanged.
    """
    path = Path(path)
    # Mode x neither follows links nor overwrites; files opened by `tempfile` would be readable only by their owner.
    new = Path(tempfile.mktemp(dir=path.parent, prefix=f"{path.name}."))
    with new.open("xb") as file:
        try:
            with contextlib.suppress(OSError):  # the file does not exist, or the file system has no permissions
                new.chmod(path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a file by `content` atomically; text is encoded as UTF-8.

    Raises:
      OSError: the file cannot be written; `path` is unchanged.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_json(text: str | bytes) -> Json:
    """Parses JSON; whole numbers beyond float64, which would overflow later, become infinite.

    Raises:
      ValueError: the text is not JSON in UTF-8, or is nested deeper than 100 levels.
    """
    try:
        # `json.loads` would decode bytes with lone surrogates.
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        content = json.loads(text, parse_int=_integer)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    level = [content]
    for _ in range(_MOST_LEVELS):
        level = [one for outer in level for one in _inner(outer)]
        if not level:
            break
    if level:
        raise ValueError(_TOO_DEEP)
    return content


def _inner(value: Json) -> list[Json]:
    """Returns the elements of a JSON object or list that are objects or lists; [] for any other value."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in values if isinstance(one, dict | list)]


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= sys.float_info.max_10_exp else float(digits)


# The option, or the command and its argument -> the URL schemes that it supports; none without an entry.
READ: Mapping[str, Sequence[str]] = dict.fromkeys(
    (
        *("checkpoint.directory", "init_from", "data.path", "data.validation_path", "prepare --path"),
        *("evaluate --workdir", "generate --workdir", "hf --workdir", "verify DIR"),
    ),
    ("gs",),
)
_MOUNTS = {"s3": "s3fs BUCKET /mnt/BUCKET, then the path in that folder"}  # scheme -> how to mount its files

_SCHEME = re.compile(r"\s*([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


_LFS = b"version https://git-lfs"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)")
_OWN_FOLDERS = ("runs", "models", "configs", "data")  # names of local folders that may not exist yet


def download_command(name: str) -> str:
    """Returns a command that downloads `OWNER/NAME` from Hugging Face, as the fix in an error; '' for other paths.

    If a folder OWNER exists, the result is '': the path is probably a mistyped local path.

    >>> download_command("Qwen/Qwen3-0.6B")
    '`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`, then models/Qwen3-0.6B'
    """
    match = _HUB_NAME.fullmatch(name)
    if not match or match[1] in _OWN_FOLDERS or what_is_at(match[1]) != "nothing there":
        return ""
    return f"`hf download {name} --local-dir models/{match[2]}`, then models/{match[2]}"


def snapshot_of(folder: str | os.PathLike[str]) -> str:
    """Returns the newest snapshot folder in a cache folder `models--OWNER--NAME` of huggingface_hub; '' for none."""
    at = expand_user(folder) / "snapshots"
    if what_is_at(at) != "a folder":
        return ""
    with contextlib.suppress(OSError):
        found = [path for path in at.iterdir() if what_is_at(path / "config.json") == "a file"]
        return str(max(found, key=lambda path: path.stat().st_mtime_ns, default=""))
    return ""


def pointer_problem(path: str | os.PathLike[str]) -> Problem | None:
    """Returns a problem if a file is a Git LFS pointer instead of its content; None for any other file."""
    if what_is_at(path) != "a file":
        return None
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            folder = shlex.quote(str(Path(path).parent))
            return Problem(
                path,
                got="a Git LFS pointer",
                allowed="the file's content",
                nearest=f"git -C {folder} lfs pull",
            )
    return None


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Returns the path with `~` and `~USER` expanded; unchanged if the user is unknown or the name is impossible."""
    with contextlib.suppress(ValueError):
        return Path(os.path.expanduser(path))
    return Path(path)


def real(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path with links and `..` resolved; unchanged if it is an impossible file name."""
    with contextlib.suppress(ValueError):
        return os.path.realpath(path)
    return str(path)


def identities(path: str | os.PathLike[str]) -> set[str | tuple[int, int]]:
    """Returns the set of a file's identities: its resolved path, and (device, inode); for a URL, only the URL.

    Two paths refer to the same file (through `..`, a link, a hard link or a mount) if their sets overlap. The inode is
    not sufficient, because some mounted file systems assign different inodes to two paths of one file.
    """
    if is_url(str(path)):
        return {str(path)}
    found: set[str | tuple[int, int]] = {real(path)}
    with contextlib.suppress(OSError, ValueError):  # the file does not exist, or the name is impossible
        about = os.stat(path)
        found.add((about.st_dev, about.st_ino))
    return found


def is_url(path: str) -> bool:
    """Returns whether a path starts like a URL; the operating system would interpret it as a folder such as `gs:`."""
    return _SCHEME.match(path) is not None


def url_problems(key: str, path: str, command: str = "") -> list[Problem]:
    """Returns an error line if a path is a URL with a scheme that its option does not support, else [].

    Args:
      key: the dotted key of the option, or a flag or argument of `command`.
      path: one path, or several separated by commas.
      command: the command with this argument; '' for an option.

    >>> url_problems("--workdir", "gs://bucket/run")
    ["--workdir: got 'gs://bucket/run', a URL; allowed: a path on this machine; nearest: mount or copy it"]
    """
    schemes = [match[0].removesuffix("://") for one in path.split(",") if (match := _SCHEME.match(one))]
    place = f"{command} {key}".strip()
    read = READ[place] if place in READ else ()
    if all(scheme in read for scheme in schemes):
        return []
    mounts = [_MOUNTS[scheme] for scheme in schemes if scheme in _MOUNTS]
    fix = mounts[0] if mounts else "mount or copy it"
    allowed = ", ".join(["a path on this machine", *(f"{scheme}://" for scheme in read)])
    return [Problem(key, got=f"'{path}', a URL", allowed=allowed, nearest=fix)]


def what_is_at(path: str | os.PathLike[str]) -> str:
    """Returns the kind of a path as text: `a file`, `a folder`, `nothing there`, or the operating system's error.

    Before Python 3.14, Path.is_file and Path.exists raise for a name that is too long, and return False for a loop of
    links.

    >>> what_is_at("/"), what_is_at("/no/such/path")
    ('a folder', 'nothing there')
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "a broken link" if os.path.islink(path) else "nothing there"
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    except ValueError:
        return "an impossible file name"
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    kind = stat.S_IFMT(mode)
    return kinds[kind] if kind in kinds else "a device"


def open_folder(path: str | os.PathLike[str], held: contextlib.ExitStack) -> int:
    """Opens a folder until the stack `held` closes, and returns its file descriptor.

    While it is open, the system cannot reuse its inode for another folder.

    Raises:
      OSError: the folder cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, descriptor)
    return descriptor


def is_same(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Returns whether a path still refers to the file or folder that is open with this file descriptor.

    Returns True if the file system does not answer.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)


def target_problems(flag: str, path: str, example: str, endings: Sequence[str] = ()) -> list[Problem]:
    """Returns an error line if a command cannot write its output file, else []; call it before the command's work.

    Possible problems: the folder does not exist, the path is not a file, this user may not write it, or the ending of
    the name is not in `endings`.

    Args:
      flag: the flag that names the file, for the error.
      path: the file, which need not exist.
      example: a legal file name, for the error.
      endings: the allowed endings of the file name, in lower case; if empty, any ending is allowed.
    """
    if not path:
        return [Problem(flag, got="''", allowed="a file's name", nearest=example)]
    if endings and not path.lower().endswith(tuple(endings)):
        line = Problem(
            flag,
            got=f"'{path}'",
            condition="endings",
            allowed=", ".join(endings),
            nearest=f"{flag}={path}{endings[0]}",
        )
        return [line, *target_problems(flag, path, example)]
    folder = Path(path).absolute().parent
    if what_is_at(folder) != "a folder":
        got = f"'{path}', whose folder does not exist"
        return [Problem(flag, got=got, allowed="a file in an existing folder", nearest=example)]
    what = what_is_at(path)
    if what not in ("a file", "nothing there"):
        return [Problem(flag, got=f"'{path}', {what}", allowed="a file's name", nearest=example)]
    # Checks the rights of the effective user if the system supports it.
    effective = os.access in os.supports_effective_ids
    if not os.access(path if what == "a file" else folder, os.W_OK, effective_ids=effective):
        got = f"'{path}', which this user cannot write"
        return [Problem(flag, got=got, allowed="a file that can be written", nearest=example)]
    return []


def hash_of_sources(folder: Path) -> str:
    """Returns a hash of the names and contents of all Python files below a folder: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def is_utf8(text: str) -> bool:
    """Returns whether a text can be encoded as UTF-8.

    Python decodes a file name with other bytes to a text with lone surrogates, which cannot be encoded.
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)
