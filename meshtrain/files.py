"""Paths as users write them, JSON that others may have written, and files that are replaced whole.

A reader of a replaced file sees the content before or after, never a part of it. Functions of paths raise no OSError,
and open no pipe, which would block.
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

_MOST_LEVELS = 100  # of nested objects and lists
_TOO_DEEP = f"nested deeper than {_MOST_LEVELS} levels"

Json: TypeAlias = Any  # what a text of JSON holds: an object, a list, a text, a number, a bool or None
JsonObject: TypeAlias = dict[str, Json]  # an object of JSON


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


def read_json(text: str | bytes) -> Json:
    """Returns what a text of JSON holds; a whole number beyond float64, which would overflow later, is infinite.

    Raises:
      ValueError: it is no JSON in UTF-8, or nested deeper than 100 levels.
    """
    try:
        # `json.loads` itself decodes bytes with lone surrogates.
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        content = json.loads(text, parse_int=_whole)
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
    """Returns the objects and lists that are directly in a value."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in values if isinstance(one, dict | list)]


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= sys.float_info.max_10_exp else float(digits)


# The option, or the command and its argument -> the schemes of the URLs that its place reads; without an entry none.
READ: Mapping[str, Sequence[str]] = dict.fromkeys(
    (
        *("checkpoint.directory", "init_from", "data.path", "data.validation_path", "prepare --path"),
        *("evaluate --workdir", "generate --workdir", "hf --workdir", "verify DIR"),
    ),
    ("gs",),
)
_MOUNTS = {"s3": "s3fs BUCKET /mnt/BUCKET, and the path below it"}  # what gives the files of a scheme a path

_SCHEME = re.compile(r"\s*([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


_LFS = b"version https://git-lfs"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)")
_OWN_FOLDERS = ("runs", "models", "configs", "data")  # of a user who has not made them yet


def download_command(name: str) -> str:
    """Returns how to get `OWNER/NAME` from Hugging Face, as the end of an error; '' for a path that is no name there.

    A path in a folder that exists here is a mistyped path.

    >>> download_command("Qwen/Qwen3-0.6B")
    '`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`, then models/Qwen3-0.6B'
    """
    match = _HUB_NAME.fullmatch(name)
    if not match or match[1] in _OWN_FOLDERS or what_is_at(match[1]) != "nothing there":
        return ""
    return f"`hf download {name} --local-dir models/{match[2]}`, then models/{match[2]}"


def snapshot_of(folder: str | os.PathLike[str]) -> str:
    """Returns the newest snapshot in a folder `models--OWNER--NAME` of the cache of huggingface_hub; '' without one."""
    at = expanded(folder) / "snapshots"
    if what_is_at(at) != "a folder":
        return ""
    with contextlib.suppress(OSError):
        found = [path for path in at.iterdir() if what_is_at(path / "config.json") == "a file"]
        return str(max(found, key=lambda path: path.stat().st_mtime_ns, default=""))
    return ""


def pointer_problem(path: str | os.PathLike[str]) -> str:
    """Returns the line about a file that is a pointer of Git LFS in place of its content; '' for any other file."""
    if what_is_at(path) != "a file":
        return ""
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            folder = shlex.quote(str(Path(path).parent))
            return f"{path}: got a pointer of Git LFS; allowed: the file's content; nearest: git -C {folder} lfs pull"
    return ""


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns the path with `~` and `~name` expanded; unchanged if there is no such user, or no such name."""
    with contextlib.suppress(ValueError):
        return Path(os.path.expanduser(path))
    return Path(path)


def real(path: str | os.PathLike[str]) -> str:
    """Returns the path without links and `..`; a name that no file can have is returned as it is."""
    with contextlib.suppress(ValueError):
        return os.path.realpath(path)
    return str(path)


def identities(path: str | os.PathLike[str]) -> set[str | tuple[int, int]]:
    """Returns a file's resolved path, and its device and inode; of an object in a bucket its URL.

    Two paths lead to one file (by `..`, a link, a hard link or a mount) if they have an identity in common. The inode
    alone does not suffice: some mounted file systems number files anew for each path.
    """
    if is_url(str(path)):
        return {str(path)}
    found: set[str | tuple[int, int]] = {real(path)}
    with contextlib.suppress(OSError, ValueError):  # nothing is there, or a name that no file can have
        about = os.stat(path)
        found.add((about.st_dev, about.st_ino))
    return found


def is_url(path: str) -> bool:
    """Returns whether a path begins like a URL, which an operating system would take for a folder such as `gs:`."""
    return _SCHEME.match(path) is not None


def url_problems(key: str, path: str, command: str = "") -> list[str]:
    """Returns one line if one of these paths, commas between them, is a URL that the place `key` does not read.

    Args:
      key: the option, or the argument of `command`.
      path: as the user wrote it.
      command: whose argument it is; '' for an option.

    >>> url_problems("--workdir", "gs://bucket/run")
    ["--workdir: got 'gs://bucket/run', a URL; allowed: a path of this machine; nearest: mount or copy it"]
    """
    schemes = [match[0].removesuffix("://") for one in path.split(",") if (match := _SCHEME.match(one))]
    place = f"{command} {key}".strip()
    read = READ[place] if place in READ else ()
    if all(scheme in read for scheme in schemes):
        return []
    mounts = [_MOUNTS[scheme] for scheme in schemes if scheme in _MOUNTS]
    fix = mounts[0] if mounts else "mount or copy it"
    allowed = ", ".join(["a path of this machine", *(f"{scheme}://" for scheme in read)])
    return [f"{key}: got '{path}', a URL; allowed: {allowed}; nearest: {fix}"]


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


def open_folder(path: str | os.PathLike[str], held: contextlib.ExitStack) -> int:
    """Opens a folder for as long as `held` is open: until then the system gives its number to no other folder.

    Raises:
      OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, descriptor)
    return descriptor


def is_same(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Returns whether an open file or folder is still the one at its path; True while a network does not answer."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)


def target_problems(flag: str, path: str, example: str, endings: Sequence[str] = ()) -> list[str]:
    """Returns one line if a file cannot be written, else none; it is asked before the work begins.

    The folder does not exist, the path is no file, this user may not write it, or its name has another ending.

    Args:
      flag: the argument that names the file, for the error.
      path: the file; it need not exist.
      example: a legal name, for the error.
      endings: of its name, in lower case; none: any.
    """
    if not path:
        return [f"{flag}: got ''; allowed: a file's name; nearest: {example}"]
    if endings and not path.lower().endswith(tuple(endings)):
        line = f"{flag}: got '{path}'; allowed endings: {', '.join(endings)}; nearest: {flag}={path}{endings[0]}"
        return [line, *target_problems(flag, path, example)]
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


def hash_of_sources(folder: Path) -> str:
    """Returns a hash of all Python files below a folder and of their names: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def is_utf8(text: str) -> bool:
    """Returns whether a text can be encoded as UTF-8. Python decodes other bytes of a file name as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
