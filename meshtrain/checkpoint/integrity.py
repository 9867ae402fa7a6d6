"""Checksums of checkpoints: SHA-256 of each file, in a manifest that is written last.

    <step>/manifest.json        {"sha256": of "files" as JSON, "files": {name: {"bytes": ..., "sha256": ...}}}
                                in a bucket {"bytes": ..., "crc32c": ...}, from the bucket's listing
    <step>/manifest.<i>.part    checksums of the files of process i, until process 0 has merged the parts

Neither the storage nor Orbax detects a flipped byte: it would be read as part of a weight. A checkpoint without a
manifest is incomplete. This module reads files, not arrays.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from etils import epath

from meshtrain.errors import UserError
from meshtrain.files import read_json, what_is_at
from meshtrain.store import buckets
from meshtrain.store.buckets import Place, Unreached, wrap_bucket_errors

MANIFEST = "manifest.json"
_OWN = "ocdbt.process_"  # prefix of the folder with one process's files; the process index follows
_POLL_SECONDS = 0.05
_READ_BY_ORBAX = ("_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding", "extra/metadata")


class FileEntry(TypedDict, total=False):
    """A manifest entry: a file's size and checksum (hexadecimal SHA-256; in a bucket CRC32C in base64)."""

    bytes: int
    sha256: str
    crc32c: str


Files = dict[str, FileEntry]  # keys are names relative to the checkpoint's folder


def is_sealed(directory: Place) -> bool:
    """Returns whether a checkpoint's folder contains its manifest."""
    return (directory / MANIFEST).is_file()


def seal(directory: Place, index: int, num_processes: int, is_cancelled: Callable[[], bool]) -> bool:
    """Waits until Orbax has committed a checkpoint, computes checksums, and writes the manifest.

    Each process writes the checksums of its own files; process 0 merges them into the manifest.

    Args:
      directory: the checkpoint's final folder; it appears, complete, when Orbax commits it.
      index: the index of this process, which reads the files that it has written. Process 0 also reads the shared
        files.
      num_processes: the number of processes; they share the file system.
      is_cancelled: polled while waiting; returns True after the save has failed or the run's folder is lost.

    Returns:
      True after the manifest was written; False if the wait was cancelled.

    Raises:
      OSError: files cannot be read or written.
    """
    if not isinstance(directory, Path):
        return _seal_listed(directory, index, is_cancelled)
    if not _wait(directory.is_dir, is_cancelled) or is_cancelled():
        return False
    sums = checksums(directory, lambda name: _owner(name, num_processes) == index)
    if num_processes == 1:
        _write(directory / MANIFEST, sums)
        return True
    _write(directory / _part(index), sums)
    if index:
        return _wait(lambda: is_sealed(directory), is_cancelled)
    parts = [directory / _part(process) for process in range(num_processes)]
    if not _wait(lambda: all(part.is_file() for part in parts), is_cancelled):
        return False
    _write(directory / MANIFEST, {name: entry for part in parts for name, entry in _read(part).items()})
    for part in parts:
        part.unlink()
    return True


def _seal_listed(directory: epath.Path, index: int, is_cancelled: Callable[[], bool]) -> bool:
    """Seals a checkpoint in a bucket: process 0 lists all objects and writes the manifest; other processes wait for it.

    Returns True after the manifest was written, False if the wait was cancelled. The arguments are explained in `seal`.
    """
    mark = directory / (MANIFEST if index else buckets.COMMITTED)

    def is_there() -> bool:
        with contextlib.suppress(Unreached), wrap_bucket_errors(mark):  # the bucket may answer later
            return mark.exists()
        return False

    is_complete = _wait(is_there, is_cancelled)
    if is_complete and not index:
        _write(directory / MANIFEST, checksums(directory, lambda name: True))
    return is_complete


def checksums(directory: Place, is_wanted: Callable[[str], bool]) -> Files:
    """Returns {name: {"bytes", "sha256"}} of files below a folder, or {name: {"bytes", "crc32c"}} in a bucket.

    Names are relative to the folder. Manifests are not included.

    Args:
      directory: the checkpoint's folder.
      is_wanted: name -> whether to include this file. It is ignored in a bucket, where all objects are included.
    """
    if not isinstance(directory, Path):
        objects = sorted(buckets.list_objects(directory).items())
        return {name: {"bytes": size, "crc32c": crc} for name, (size, crc) in objects if name != MANIFEST}
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return {
        name: {"bytes": (directory / name).stat().st_size, "sha256": _sha256(directory / name)}
        for name in names
        if not name.startswith("manifest.") and is_wanted(name)
    }


def damage(directory: Place, index: int = 0, num_processes: int = 1) -> list[str]:
    """Returns an error line for each missing file and each file that differs from the manifest in size or checksum.

    The list is empty for an undamaged checkpoint. A missing or unreadable manifest is also an error line.

    Args:
      directory: the checkpoint's folder.
      index: the index of this process, which checks every `num_processes`-th file.
      num_processes: number of processes that call it together; each returns the errors of its own files.
    """
    try:
        expected = _read(directory / MANIFEST)
    except FileNotFoundError:
        return [f"no {MANIFEST}: the save was not finished"]
    except (OSError, UserError) as error:
        return [str(error)]
    names = sorted(expected)[index::num_processes]
    kind = "sha256" if isinstance(directory, Path) else "crc32c"
    if not all(kind in entry for entry in expected.values()):
        return [f"{MANIFEST}: no {kind} values: the checkpoint was copied between a disk and a bucket"]
    if not isinstance(directory, Path):
        found = checksums(directory, lambda name: True)
        odd = [name for name in names if name not in found or found[name] != expected[name]]
        return [f"{name}: {'its bytes have changed' if name in found else 'missing'}" for name in odd]
    return [line for name in names if (line := _difference(directory / name, name, expected[name]))]


def unreadable(directory: Place) -> list[str]:
    """Returns an error line for each JSON file of Orbax that differs from the manifest or is not a JSON object.

    Called before Orbax parses these files, because its parser has no limit on nesting. Reads no array. In a bucket, the
    checksums are not compared.
    """
    lines = []
    try:
        expected = _read(directory / MANIFEST)
        for name in (name for name in _READ_BY_ORBAX if name in expected):
            path = directory / name
            line = _difference(path, name, expected[name]) if isinstance(path, Path) else ""
            if not line and not isinstance(read_json(path.read_bytes()), dict):
                line = f"{name}: not a JSON object"
            lines += [line] if line else []
    except (OSError, UserError) as error:
        return [str(error)]
    except ValueError as error:
        return [f"{name}: not JSON ({error})"]
    return lines


def _difference(path: Path, name: str, expected: FileEntry) -> str:
    try:
        if other := _other_than_file(path):
            return f"{name}: not a file but {other}"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name}: {size:,} bytes instead of {expected['bytes']:,}"
        return "" if _sha256(path) == expected["sha256"] else f"{name}: its bytes have changed"
    except FileNotFoundError:
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: {error.strerror or error}"


def _other_than_file(path: Place) -> str:
    """Returns the kind of a path that exists but is not a file, as text; '' otherwise.

    Callers reject such a path before they read it, because reading a pipe would block.
    """
    return what_is_at(path) if path.exists() and not path.is_file() else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _owner(name: str, num_processes: int) -> int:
    """Returns the index of the process that hashes a file: the file's writer, or process 0 for shared files."""
    owners = [part.removeprefix(_OWN) for part in name.split("/") if part.startswith(_OWN)]
    index = int(owners[0]) if owners and owners[0].isdecimal() else 0
    return index if index < num_processes else 0


def _part(index: int) -> str:
    return f"manifest.{index}.part"


def _of(files: Files) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _write(path: Place, files: Files) -> None:
    buckets.write(path, json.dumps({"sha256": _of(files), "files": files}))


def _read(path: Place) -> Files:
    if other := _other_than_file(path):
        raise UserError(f"{path.name}: not a file but {other}")
    try:
        content = read_json(path.read_text(encoding="utf-8"))
        files = content["files"]
        if content["sha256"] == _of(files):
            return dict(files)
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path.name}: its bytes have changed")


def _wait(is_there: Callable[[], bool], is_cancelled: Callable[[], bool]) -> bool:
    while not is_there():
        if is_cancelled():
            return is_there()
        time.sleep(_POLL_SECONDS)
    return True
