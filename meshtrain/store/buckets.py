"""Accesses a bucket, `gs://bucket/prefix`, that contains checkpoints or text.

A bucket differs from a disk: a prefix cannot be renamed, so a save is complete once its last objects exist, and a
deletion removes these objects first. The listing contains the size and the CRC32C of each object, so objects are
verified without reading their data. Orbax writes arrays through TensorStore, and small objects through etils.epath and
gcsfs; this module uses etils.epath and gcsfs.
"""

import contextlib
import functools
import importlib.util
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
from etils import epath

from meshtrain.errors import Problem, UserError, first_line, warn
from meshtrain.files import expand_user, is_url, write_whole
from meshtrain.user_functions import import_modules

Place: TypeAlias = Path | epath.Path  # a folder on a disk, or a prefix in a bucket
# Additional rounds of tries by gcsfs (six tries in 34 s), their total minutes, and the seconds between two warnings.
_ROUNDS, _MOST_MINUTES, _SILENCE_SECONDS = 4, 3, 60.0
COMMITTED = "commit_success.txt"  # Orbax writes this object last; on a disk it renames the folder instead

# Words in an error of the store -> the problem and its fix. Any other error is attributed to the network.
_REASONS = (
    (("401", "nonymous", "redentials"), "no credentials", "gcloud auth application-default login"),
    (("403", "Forbidden"), "no permission", "grant the role storage.{} on the bucket"),
    (("",), "no answer", "run the same command when the network works again"),
)


class Unreached(UserError):
    """Raised if a bucket does not answer, does not exist, or denies this user access; the message is one line."""


def place(directory: str | os.PathLike[str], key: str = "") -> Place:
    """Converts a path or a bucket's URL to an object for file access; checks that the bucket exists.

    Returns an absolute `pathlib.Path` for a folder on a disk, and an `epath.Path` for a `gs://` URL.

    Args:
      directory: the path or URL that the user wrote.
      key: the option that contains the path, if the program only reads from it; error lines begin with this key. Empty:
        the program also writes to the path.

    Raises:
      UserError: the bucket does not exist or cannot be listed, or the package gcsfs is not installed.
    """
    if not is_url(str(directory)):
        return expand_user(directory).absolute()
    if not importlib.util.find_spec("gcsfs"):
        problem = Problem(directory, got="a bucket", allowed="with the extra 'gcs'", nearest="pip install gcsfs")
        raise UserError(_of(key, problem))
    # Without these settings a process would not see other processes' writes, and errors would be printed twice, the
    # second time with a stack trace.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    for library in ("gcsfs", "google.auth"):
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    _wait_longer()
    found = epath.Path(str(directory))
    try:
        with wrap_bucket_errors(found, key):
            _client().find(f"{found}/{COMMITTED}")  # a missing object is not an error, a missing bucket is
    except FileNotFoundError as error:
        fix = f"gcloud storage buckets create gs://{str(found).split('/')[2]}"
        problem = Problem(found, got="no bucket with this name", allowed="an existing bucket", nearest=fix)
        raise Unreached(_of(key, problem)) from error
    return found


@contextlib.contextmanager
def wrap_bucket_errors(place: Place, key: str = "") -> Iterator[None]:
    """Returns a context manager: if code in the `with` block fails to access a bucket, it raises `Unreached` instead.

    Errors about missing or existing objects, errors of a disk, and UserErrors are raised unchanged.

    Args:
      place: the folder on a disk or the prefix in a bucket that the code in the `with` block accesses.
      key: the option that contains the path, if the program only reads from it; error lines begin with this key. Empty:
        the program also writes to the path.
    """
    try:
        yield
    except Exception as error:
        if isinstance(place, Path) or isinstance(error, FileNotFoundError | FileExistsError | UserError):
            raise
        said = first_line(error)
        what, fix = next(rest for words, *rest in _REASONS if any(word in said for word in words))
        rights, role = ("list and read", "objectViewer") if key else ("list, read and write", "objectAdmin")
        allowed = f"a bucket that this user can {rights}"
        problem = Problem(place, got=f"{what} ({said})", allowed=allowed, nearest=fix.format(role))
        raise Unreached(_of(key, problem)) from error


def _of(key: str, problem: Problem) -> Problem:
    return problem.at(key) if key else problem


@functools.cache
def _wait_longer() -> None:
    """Makes gcsfs retry requests for about three minutes; by default it gives up after half a minute.

    If one of several processes gave up, the run would end, because the other processes wait for its part of the save.
    """
    gcsfs, retry = import_modules("gcsfs", "gcsfs.retry")
    tries, said_seconds = gcsfs.GCSFileSystem._request, [-math.inf]

    async def request(*given: Any, **named: Any) -> Any:
        for _ in range(_ROUNDS):
            try:
                return await tries(*given, **named)
            except Exception as error:
                if not retry.is_retriable(error):
                    raise
                if time.monotonic() - said_seconds[0] > _SILENCE_SECONDS:
                    warn(f"a bucket does not answer ({first_line(error)}); retrying for {_MOST_MINUTES} minutes")
                said_seconds[0] = time.monotonic()
        return await tries(*given, **named)

    gcsfs.GCSFileSystem._request = request


def _client() -> Any:
    # These are the arguments that epath uses, so that fsspec returns the same cached object.
    return fsspec.filesystem("gcs", finalize_on_close=True)


def list_objects(place: epath.Path) -> dict[str, tuple[int, str]]:
    """Returns name -> (bytes, CRC32C in base64) of each object below a prefix, with one listing request.

    Names are relative to the prefix.
    """
    found = _client().find(str(place), detail=True)
    above = f"{str(place).partition('://')[2]}/"
    return {name.removeprefix(above): (int(one["size"]), one["crc32c"]) for name, one in found.items()}


def objects(pattern: str, key: str) -> dict[epath.Path, int]:
    """Returns the size in bytes of each object that matches a URL or a glob, sorted by name, with one listing request.

    Args:
      pattern: a URL `gs://bucket/...`, in which `**` matches any depth.
      key: the option that contains the pattern; error lines begin with this key.

    Raises:
      UserError: the bucket does not exist or cannot be listed, or the package gcsfs is not installed.
    """
    with wrap_bucket_errors(place(pattern, key), key):
        found = _client().glob(pattern, detail=True)
    files = sorted((name, int(one["size"])) for name, one in found.items() if one["type"] == "file")
    return {epath.Path(f"gs://{name}"): num_bytes for name, num_bytes in files}


def version(path: Place, key: str) -> str:
    """Returns a text that changes with a file's content: its modification time in ns on a disk, its CRC32C in a bucket.

    Args:
      path: the file on a disk or the object in a bucket.
      key: the option that contains the path; error lines begin with this key.

    Raises:
      UserError: the bucket does not answer or denies access.
    """
    if isinstance(path, Path):
        return str(path.stat().st_mtime_ns)
    with wrap_bucket_errors(path, key):
        return str(_client().info(str(path))["crc32c"])


def make(directory: Place) -> None:
    """Creates a folder and its parents; has no effect for a bucket, in which prefixes need not be created.

    Raises:
      UserError: the folder cannot be created.
    """
    try:
        if isinstance(directory, Path):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            Problem(
                directory,
                got=error.strerror or error,
                allowed="a directory that can be written",
                nearest="another --workdir",
            )
        ) from error


def write(path: Place, text: str, *, is_new: bool = False) -> None:
    """Writes text to a file or an object; if the file or object exists, it is replaced atomically.

    Args:
      path: the file on a disk or the object in a bucket.
      text: the new content.
      is_new: whether to raise FileExistsError if the file or object already exists.
    """
    if not isinstance(path, Path):
        _client().pipe_file(str(path), text.encode(), mode="create" if is_new else "overwrite")
    elif is_new and path.exists():
        raise FileExistsError(path)
    else:
        write_whole(path, text)


def read(path: Place) -> str:
    """Returns the text of a file or object; safe if another process replaces the object at the same time.

    `epath.read_text` requests the size first, so it would truncate a longer text that is written in between.
    """
    if isinstance(path, Path):
        return path.read_text(encoding="utf-8")
    return str(_client().cat_file(str(path)).decode())


def delete(place: epath.Path, first: str) -> None:
    """Deletes a checkpoint from a bucket.

    `first` and the object that marks the checkpoint as complete are deleted first, so that an interrupted deletion
    leaves no valid checkpoint.

    Args:
      place: the prefix of the checkpoint.
      first: the name of the object in the checkpoint to delete before all other objects, such as the manifest.
    """
    for name in (first, COMMITTED):
        (place / name).unlink(missing_ok=True)
    _client().rm(str(place), recursive=True)


def move(place: epath.Path, to: epath.Path) -> None:
    """Moves a checkpoint within a bucket: the store copies its objects, and then the old objects are deleted.

    Args:
      place: the prefix of the checkpoint.
      to: the new prefix of the checkpoint.
    """
    _client().mv(str(place), str(to), recursive=True)
