"""Reads prepared token files: NAME.bin contains the token ids, NAME.bin.json a description, NAME.bin.index an index.

The index stores facts that were computed from all ids, such as the ends of documents, so that a later start need not
read the ids. It is valid until the size or the modification time of NAME.bin changes.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from meshtrain.data.encoding.special_tokens import ENCODE, MODES
from meshtrain.data.text import only_empty
from meshtrain.data.tokenizer import Tokenizer, byte_tokenizer, file_tokenizer
from meshtrain.errors import Problem, Problems, UserError, refuse, unknown
from meshtrain.files import Json, read_json, what_is_at, write_whole

DTYPES = ("uint16", "uint32")
# Fields of a description that must be equal in all token files of a run.
TOKENIZER_FIELDS = ("vocab_size", "end_id", "tokenizer_sha256", "begin", "special_tokens")
MOST_INNER_ENDS = 1_000_000  # maximum per file, because its description lists them

_WRITTEN = "a file written by python -m meshtrain prepare"
_AGAIN = "prepare it again"
_CHUNK_BYTES = 1 << 24
_WHOLE_UP_TO_BYTES = 1 << 32
_NUM_SAMPLED_CHUNKS = 64
_LENGTHS = ("uint8", "uint16", "uint32", "uint64")
_MOST_HEAD_BYTES = 1 << 12  # maximum length of the JSON line of an index
_MOST_OPEN = 256  # maximum of open token files: a process may have 1,024 descriptors
_TICK_NS = 20_000_000  # longer than the resolution of file systems' clocks


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """The content of NAME.bin.json, which describes NAME.bin.

    Attributes:
      dtype: the type of the ids, `uint16` or `uint32`, little-endian.
      vocab_size: one more than the largest id that the tokenizer can write.
      num_tokens: number of ids in the file.
      num_documents: number of documents in the file.
      end_id: the id that ends each document; -1: no id ends a document.
      tokenizer: `bytes`, or the name of a tokenizer.json in the same folder.
      tokenizer_sha256: hexadecimal sha256 of the tokenizer.json; '' for `bytes`.
      end_token: the token that ends a document, as text; '' if the tokenizer's default was used.
      sha256: hexadecimal sha256 of the token file; '' if an earlier version of this program prepared the file.
      text_field: the field of the lines or rows that contained the documents; '' for plain text.
      source: the resolved path or the URL of the file of text; '' for several files of text, or if an earlier version
        prepared the file.
      source_bytes: size in bytes of the file of text.
      source_version: modification time of the file of text in nanoseconds; in a bucket, its CRC32C.
      begin: the ids before each document; [] if an earlier version prepared the file.
      special_tokens: the value of `data.special_tokens` when the file was prepared.
      num_special: number of special tokens in the documents.
      inner_ends: sorted positions of end ids that do not end a document. In files of an earlier version, the list is
        empty, and each end id ends a document.
    """

    dtype: str
    vocab_size: int
    num_tokens: int
    num_documents: int
    end_id: int
    tokenizer: str
    tokenizer_sha256: str
    end_token: str
    sha256: str = ""
    text_field: str = ""
    source: str = ""
    source_bytes: int = 0
    source_version: str = ""
    begin: list[int] = dataclasses.field(default_factory=list)
    special_tokens: str = ENCODE
    num_special: int = 0
    inner_ends: list[int] = dataclasses.field(default_factory=list)


def sidecar_path(path: Path) -> Path:
    """Returns the path of the description that belongs to the token file `path`: NAME.bin.json for NAME.bin."""
    return path.with_name(path.name + ".json")


def read_sidecar(path: Path) -> TokenFile:
    """Reads the description of the token file `path` and checks the file's size against it.

    Raises:
      UserError: the description is missing or malformed, or it states a different size of the file.
    """
    described = read_description(path)
    num_bytes, expected_bytes = path.stat().st_size, described.num_tokens * np.dtype(described.dtype).itemsize
    if num_bytes != expected_bytes:
        raise UserError(
            _malformed(
                f"'{path}' has {num_bytes} bytes, but its description has {described.num_tokens} tokens in "
                f"{expected_bytes} bytes"
            )
        )
    return described


def _malformed(fault: str) -> Problem:
    """Returns the error line for a token file, description or tokenizer.json that `prepare` cannot have written.

    Args:
      fault: the error in the file, as text; it is the first part of the error line.
    """
    return Problem("data.path", fault=fault, allowed=_WRITTEN, nearest=_AGAIN)


def is_intact(path: Path, described: TokenFile) -> bool:
    """Returns whether a token file matches the sha256 in its description; reads the complete file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == described.sha256


def read_description(path: Path) -> TokenFile:
    """Reads and checks the description of the token file `path`; the token file itself need not exist.

    Raises:
      UserError: the description is missing or malformed.
    """
    sidecar = sidecar_path(path)
    fields = dataclasses.fields(TokenFile)
    wanted = {field.name: typing.get_origin(field.type) or field.type for field in fields}
    later = {field.name: field.default for field in fields if field.default != dataclasses.MISSING}
    later |= {field.name: field.default_factory() for field in fields if field.default_factory != dataclasses.MISSING}
    try:
        if (what := what_is_at(sidecar)) not in ("a file", "nothing there"):
            raise OSError(None, what)  # not opened: reading a pipe would block
        content = read_json(sidecar.read_bytes())
    except OSError as error:
        raise UserError(
            Problem(
                "data.path",
                fault=f"'{path}' has no readable description '{sidecar.name}' ({error.strerror})",
                allowed="files written by python -m meshtrain prepare",
                nearest="data.source=text if it is text",
            )
        ) from error
    except ValueError as error:
        raise UserError(_malformed(f"'{sidecar}' is not JSON ({error})")) from error
    content = later | content if isinstance(content, dict) else content
    if not isinstance(content, dict) or any(type(content.get(name)) is not kind for name, kind in wanted.items()):
        raise UserError(_malformed(f"'{sidecar}' must be an object with {', '.join(wanted)}"))
    described = TokenFile(**{name: content[name] for name in wanted})
    if described.dtype not in DTYPES:
        problem = unknown(f"dtype in '{sidecar}'", described.dtype, DTYPES)
        raise UserError(problem.with_parts(fix=f"{problem.fix}; nearest: {_AGAIN}"))
    bounds = {"vocab_size": 1, "num_tokens": 0, "num_documents": 0, "end_id": -1, "source_bytes": 0, "num_special": 0}
    wrong = [name for name, least in bounds.items() if getattr(described, name) < least]
    if described.end_id >= described.vocab_size:
        wrong.append("end_id")
    if described.vocab_size > np.iinfo(described.dtype).max + 1:  # ids outside the range of this dtype
        wrong.append("vocab_size")
    if not _are_indices(described.begin, described.vocab_size):
        wrong.append("begin")
    ends = described.inner_ends
    if not _are_indices(ends, described.num_tokens) or any(one >= other for one, other in itertools.pairwise(ends)):
        wrong.append("inner_ends")
    if described.special_tokens not in MODES:
        wrong.append("special_tokens")
    if (
        wrong
        or not described.tokenizer
        or described.tokenizer == ".."
        or Path(described.tokenizer).name != described.tokenizer
        or "\0" in described.tokenizer
    ):
        values = (f"{name} {str(getattr(described, name))[:40]}" for name in wrong)
        got = ", ".join(values) or f"tokenizer '{described.tokenizer}'"
        raise UserError(_malformed(f"'{sidecar}' says {got}"))
    return described


def _are_indices(values: Sequence[Json], stop: int) -> bool:
    return all(type(value) is int and 0 <= value < stop for value in values)


def _chunks(path: Path, dtype: str, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
    """Reads a token file in chunks; yields (position of the chunk's first id, ids).

    A file above 4 GiB is only sampled, unless `whole` is set: 64 evenly spaced chunks are read.

    Args:
      path: the token file.
      dtype: `uint16` or `uint32`.
      whole: whether to read files above 4 GiB completely.
    """
    kind, num_bytes = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    length, num_tokens = _CHUNK_BYTES // kind.itemsize, num_bytes // kind.itemsize
    if whole or num_bytes <= _WHOLE_UP_TO_BYTES:
        starts = list(range(0, num_tokens, length))
    else:
        starts = [int(start) for start in np.linspace(0, num_tokens - length, _NUM_SAMPLED_CHUNKS)]
    for start in starts:  # no memory map, because its pages would count as this process's memory
        yield start, np.fromfile(path, kind, length, offset=start * kind.itemsize)


@dataclasses.dataclass(frozen=True)
class Index:
    """The content of NAME.bin.index, which is a line of JSON followed by the raw array `lengths`.

    Attributes:
      size: size of the token file in bytes.
      mtime_ns: modification time of the token file in nanoseconds.
      digest: hexadecimal sha256 over the dtype, the number of ids, and the ids; for files above 4 GiB, over samples of
        the ids.
      largest_id: the maximum of the ids that were read: all ids, or samples of a file above 4 GiB.
      is_whole: whether `lengths` was computed from all ids; otherwise `lengths` is empty.
      lengths: unsigned [number of end ids], the distance in tokens of each end id from the previous end id; the first
        is the number of tokens up to and including the first end id.
    """

    size: int
    mtime_ns: int
    digest: str
    largest_id: int
    is_whole: bool
    lengths: np.ndarray


def _index_path(path: Path) -> Path:
    return path.with_name(path.name + ".index")


def read_index(path: Path) -> Index | None:
    """Reads the index of a token file; returns None if it is missing or malformed, or the token file has changed."""
    wanted = {field.name: field.type for field in dataclasses.fields(Index)} | {"lengths": str}
    if what_is_at(_index_path(path)) != "a file":  # reading a pipe would block
        return None
    try:
        with _index_path(path).open("rb") as file:
            head, start = read_json(file.readline(_MOST_HEAD_BYTES)), file.tell()
        if {name: type(value) for name, value in head.items()} != wanted or head["lengths"] not in _LENGTHS:
            return None
        bytes.fromhex(head["digest"])
        rest = _index_path(path).stat().st_size - start
        lengths = np.memmap(_index_path(path), head["lengths"], "r", start) if rest else np.empty(0, head["lengths"])
        now = path.stat()
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    found = Index(**head | {"lengths": lengths})
    return found if (found.size, found.mtime_ns) == (now.st_size, now.st_mtime_ns) else None


def write_index(path: Path, index: Index) -> None:
    """Writes the index of the token file `path`, if possible.

    If the folder is read-only, no index is written, and the next start reads the ids again.
    """
    head = vars(index) | {"lengths": index.lengths.dtype.name}
    with contextlib.suppress(OSError):
        write_whole(_index_path(path), json.dumps(head).encode() + b"\n" + index.lengths.tobytes())


def make_index(path: Path, described: TokenFile, *, whole: bool = False) -> Index:
    """Computes the index of a token file from its ids.

    Args:
      path: the token file.
      described: the description of the token file.
      whole: whether to read files above 4 GiB completely, and to compute `lengths`.
    """
    about = path.stat()
    if time.time_ns() - about.st_mtime_ns < _TICK_NS:
        time.sleep(_TICK_NS / 1e9)  # a second change within one clock tick would not change the time
    digest, largest_id = hashlib.sha256(f"{described.dtype} {described.num_tokens}".encode()), -1
    for _, ids in _chunks(path, described.dtype):
        digest.update(ids.data)
        largest_id = max(largest_id, int(ids.max()))
    index = Index(about.st_size, about.st_mtime_ns, digest.hexdigest(), largest_id, False, np.empty(0, np.uint8))
    if not whole:
        return index
    ends = [np.zeros(1, np.int64)]
    for start, ids in _chunks(path, described.dtype, whole=True):
        largest_id = max(largest_id, int(ids.max()))
        ends.append(np.flatnonzero(ids == described.end_id) + (start + 1))
    lengths = np.diff(np.concatenate(ends))
    lengths = lengths.astype(np.min_scalar_type(lengths.max(initial=0)))
    return dataclasses.replace(index, largest_id=largest_id, is_whole=True, lengths=lengths)


def scan(path: Path, described: TokenFile, vocab_size: int) -> tuple[str, Problem | None]:
    """Checks that the ids of a token file are below the model's vocabulary size; also returns the file's digest.

    A valid index is used instead of the ids. Without an index the ids are read, and an index is written if they are
    below the vocabulary size. Of files above 4 GiB only samples are read then: a change or an invalid id between the
    samples is not detected.

    Args:
      path: the token file.
      described: the description of the token file.
      vocab_size: the model's vocabulary size; every id must be below it.

    Returns:
      The digest (see `Index`), and a problem if the vocabulary of the file is larger than the model's, else None.
    """
    found = read_index(path)
    index = found or make_index(path, described)
    needed, problem = max(index.largest_id + 1, described.vocab_size), None
    if needed > vocab_size:
        fault = f"'{path}' was written with a vocabulary of {needed} ids"
        for start, ids in _chunks(path, described.dtype) if index.largest_id >= vocab_size else ():
            if (is_outside := ids >= vocab_size).any():
                position = int(np.argmax(is_outside))
                fault = f"'{path}' contains id {ids[position]} at token {start + position}"
                break
        problem = Problem(
            "data.path",
            fault=fault,
            allowed=f"ids below model.vocab_size, {vocab_size}",
            nearest=f"set it to {needed}",
        )
    elif not found:
        write_index(path, index)
    return index.digest, problem


def document_ends(files: Sequence[Path]) -> np.ndarray:
    """Returns the position after each document's end id in the concatenation of token files, int64 [documents].

    The positions of end ids are stored in the files' indices. A file without them in its index is read once.
    """
    ends, start = [np.empty(0, np.int64)], 0
    for path in files:
        described, index = read_sidecar(path), read_index(path)
        if index is None or not index.is_whole or int(index.lengths.sum(dtype=np.int64)) > described.num_tokens:
            index = make_index(path, described, whole=True)
            write_index(path, index)
        ends.append(np.cumsum(index.lengths, dtype=np.int64) + start)
        start += described.num_tokens
    all_ends, inside = np.concatenate(ends), ends_inside(files)
    return all_ends[~np.isin(all_ends, inside + 1)] if len(inside) else all_ends


def ends_inside(files: Sequence[Path]) -> np.ndarray:
    """Returns the positions of end ids that do not end a document in the concatenation of token files, int64, sorted.

    The positions are stored in the files' descriptions.
    """
    places, start = [np.empty(0, np.int64)], 0
    for described in map(read_sidecar, files):
        places.append(np.asarray(described.inner_ends, np.int64) + start)
        start += described.num_tokens
    return np.concatenate(places)


def token_file_tokenizer(path: Path, described: TokenFile) -> Tokenizer:
    """Opens the tokenizer that encoded the documents of the token file `path`.

    Args:
      path: the token file.
      described: the description of the token file.

    Raises:
      UserError: the tokenizer.json next to the token file is missing or has changed.
    """
    if described.tokenizer == "bytes":
        return byte_tokenizer()
    beside = path.with_name(described.tokenizer)
    tokenizer = file_tokenizer(str(beside), described.end_token, tuple(described.begin), described.special_tokens)
    if hashlib.sha256(beside.read_bytes()).hexdigest() != described.tokenizer_sha256:
        raise UserError(_malformed(f"'{beside}' is not the tokenizer that wrote '{path}'"))
    return tokenizer


class OpenFile:
    """A token file open for reading. It is not memory-mapped: reading a mapped file that has shrunk is a bus error."""

    def __init__(self, path: Path, dtype: str, *, stays_open: bool) -> None:
        """Opens the file.

        Args:
          path: the token file.
          dtype: the type of the ids, `uint16` or `uint32`.
          stays_open: whether the file descriptor stays open; if not, each read opens the file again.
        """
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self._descriptor = os.open(path, os.O_RDONLY)
        self._opened = os.fstat(self._descriptor)
        if not stays_open:
            self._close()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads the ids at positions start .. stop - 1, as a read-only array of the file's dtype.

        Raises:
          UserError: the file has changed since it was opened.
        """
        descriptor = os.open(self.path, os.O_RDONLY) if self._descriptor < 0 else self._descriptor
        try:
            size, now = self.dtype.itemsize, os.fstat(descriptor)
            parts, place = list[bytes](), start * size
            while place < stop * size and (part := os.pread(descriptor, stop * size - place, place)):
                parts.append(part)
                place += len(part)
        finally:
            if descriptor != self._descriptor:
                os.close(descriptor)
        before = self._opened
        if place < stop * size or (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise UserError(
                Problem(
                    "data.path",
                    fault=(
                        f"'{self.path}' changed while the run was reading it ({before.st_size} bytes at "
                        f"first, now {now.st_size})"
                    ),
                    allowed="a file that does not change",
                    nearest="write other data to another file",
                )
            )
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            self._close()


@dataclasses.dataclass(frozen=True)
class FileIds:
    """A range of the ids in a token file, as an array-like object: `np.asarray` reads the ids, slicing reads nothing.

    Attributes:
      file: the token file.
      start: position of the first id in the file.
      stop: position after the last id.
    """

    file: OpenFile
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> "FileIds":
        start, stop, _ = part.indices(len(self))
        return FileIds(self.file, self.start + start, self.start + max(start, stop))

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self.file.read(self.start, self.stop).astype(dtype or self.file.dtype, copy=bool(copy))


def open_token_files(files: Sequence[Path], vocab_size: int) -> tuple[list[FileIds], str]:
    """Opens the token files of a data source, and checks that they were prepared with one tokenizer.

    Args:
      files: the .bin files, in order.
      vocab_size: the model's vocabulary size; every id must be below it.

    Returns:
      The ids of each file, which are not read yet, and a hexadecimal sha256 over all ids and ends of documents.

    Raises:
      UserError: the files differ in tokenizer, have ids outside the vocabulary, or contain only empty documents; or a
        description is missing or invalid.
    """
    problems: list[Problem] = []
    described: list[TokenFile] = []
    digest = hashlib.sha256()
    for path in files:
        described.append(one := read_sidecar(path))
        differing = [name for name in TOKENIZER_FIELDS if getattr(one, name) != getattr(described[0], name)]
        problems += [
            Problem(
                "data.path",
                fault=f"'{path}' has {name} {getattr(one, name)!r}, but the first file has {first!r}",
                allowed="files prepared with one tokenizer",
                nearest="prepare them again",
            )
            for name, first in ((name, getattr(described[0], name)) for name in differing)
        ]
        file_digest, problem = scan(path, one, vocab_size)
        digest.update(file_digest.encode())
        digest.update(np.asarray(one.inner_ends, "<i8").data)  # the same ids may form other documents
        problems += [problem] if problem else []
    num_documents = sum(one.num_documents for one in described)
    num_around = sum(one.num_documents * (len(one.begin) + 1) for one in described)  # ids that begin and end documents
    if num_documents and num_around == sum(one.num_tokens for one in described):
        problems.append(only_empty(num_documents))
    refuse(Problems(problems).lines())
    stays_open = len(files) <= _MOST_OPEN
    ids = [
        FileIds(OpenFile(path, one.dtype, stays_open=stays_open), 0, one.num_tokens)
        for path, one in zip(files, described, strict=True)
    ]
    return ids, digest.hexdigest()
