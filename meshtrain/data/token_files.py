"""Prepared token files: NAME.bin holds token ids only, NAME.bin.json describes them, NAME.bin.index was read from them.

The index saves a start from reading the ids. It counts while the file has the size and the time of change that it had.
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
from meshtrain.errors import Problems, UserError, refuse, unknown
from meshtrain.files import Json, read_json, what_is_at, write_whole

DTYPES = ("uint16", "uint32")
# Fields of a description that are equal in files that are used together.
TOKENIZER_FIELDS = ("vocab_size", "end_id", "tokenizer_sha256", "begin", "special_tokens")
MOST_INNER_ENDS = 1_000_000  # in a file, because its description lists them

_WRITTEN = "allowed: what python -m meshtrain prepare writes; nearest: prepare it again"
_CHUNK_BYTES = 1 << 24
_WHOLE_UP_TO_BYTES = 1 << 32
_NUM_SAMPLED_CHUNKS = 64
_LENGTHS = ("uint8", "uint16", "uint32", "uint64")
_MOST_HEAD_BYTES = 1 << 12  # of an index
_MOST_OPEN = 256  # token files: a process may have 1,024 descriptors
_TICK_NS = 20_000_000  # longer than file systems' clocks stand still


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """The description of NAME.bin that NAME.bin.json holds.

    Attributes:
      dtype: `uint16` or `uint32`, little-endian.
      vocab_size: one more than the largest id that the tokenizer can write.
      num_tokens: number of ids in the file.
      num_documents: number of documents.
      end_id: the id that ends each document; -1 for none.
      tokenizer: `bytes`, or the name of a tokenizer.json beside the file.
      tokenizer_sha256: of that tokenizer.json; `` for bytes.
      end_token: the value of data.end_token when it was prepared.
      sha256: hexadecimal, of the file; `` if an earlier version prepared it.
      text_field: the field of the lines or rows that were read; `` for files of text, which have no fields.
      source: the resolved path or the URL of the file of text; `` for several files, or if an earlier version prepared
        it.
      source_bytes: size of the file of text.
      source_version: its time of change in nanoseconds; in a bucket, its CRC32C.
      begin: the ids before each document; [] if an earlier version prepared it.
      special_tokens: the value of data.special_tokens when it was prepared.
      num_special: how many special tokens the texts contained.
      inner_ends: the positions of the end ids that end no document, in order; an earlier version took each for an end.
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
    """Returns the path of the description of the token file `path`."""
    return path.with_name(path.name + ".json")


def read_sidecar(path: Path) -> TokenFile:
    """Reads the description of the token file `path` and checks the file's size against it.

    Raises:
      UserError: the description is missing or malformed, or the file has another size.
    """
    described = read_description(path)
    num_bytes, expected_bytes = path.stat().st_size, described.num_tokens * np.dtype(described.dtype).itemsize
    if num_bytes != expected_bytes:
        raise UserError(
            f"data.path: '{path}' has {num_bytes} bytes; its description says {described.num_tokens} tokens in "
            f"{expected_bytes} bytes; {_WRITTEN}"
        )
    return described


def is_intact(path: Path, described: TokenFile) -> bool:
    """Returns whether a token file has the sha256 of its description; the file is read to its end."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == described.sha256


def read_description(path: Path) -> TokenFile:
    """Reads the description of the token file `path`, which need not be there.

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
            f"data.path: '{path}' has no readable '{sidecar.name}' beside it ({error.strerror}); allowed: files "
            "written by python -m meshtrain prepare; nearest: data.source=text if it is text"
        ) from error
    except ValueError as error:
        raise UserError(f"data.path: '{sidecar}' is no JSON ({error}); {_WRITTEN}") from error
    content = later | content if isinstance(content, dict) else content
    if not isinstance(content, dict) or any(type(content.get(name)) is not kind for name, kind in wanted.items()):
        raise UserError(f"data.path: '{sidecar}' must be an object with {', '.join(wanted)}; {_WRITTEN}")
    described = TokenFile(**{name: content[name] for name in wanted})
    if described.dtype not in DTYPES:
        raise UserError(unknown(f"dtype in '{sidecar}'", described.dtype, DTYPES) + "; nearest: prepare it again")
    bounds = {"vocab_size": 1, "num_tokens": 0, "num_documents": 0, "end_id": -1, "source_bytes": 0, "num_special": 0}
    wrong = [name for name, least in bounds.items() if getattr(described, name) < least]
    if described.end_id >= described.vocab_size:
        wrong.append("end_id")
    if described.vocab_size > np.iinfo(described.dtype).max + 1:  # ids that this dtype cannot hold
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
        raise UserError(f"data.path: '{sidecar}' says {got}; {_WRITTEN}")
    return described


def _are_indices(values: Sequence[Json], stop: int) -> bool:
    return all(type(value) is int and 0 <= value < stop for value in values)


def _chunks(path: Path, dtype: str, *, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first position, ids): of the whole file up to 4 GiB, or if asked; else of 64 chunks, evenly spaced."""
    kind, num_bytes = np.dtype(dtype).newbyteorder("<"), path.stat().st_size
    length, num_tokens = _CHUNK_BYTES // kind.itemsize, num_bytes // kind.itemsize
    if whole or num_bytes <= _WHOLE_UP_TO_BYTES:
        starts = list(range(0, num_tokens, length))
    else:
        starts = [int(start) for start in np.linspace(0, num_tokens - length, _NUM_SAMPLED_CHUNKS)]
    for start in starts:  # not mapped: pages of a map count as this process's memory
        yield start, np.fromfile(path, kind, length, offset=start * kind.itemsize)


@dataclasses.dataclass(frozen=True)
class Index:
    """What the ids of a token file tell: in NAME.bin.index a line of JSON, and behind it the lengths as they are.

    Attributes:
      size: of the file, in bytes.
      mtime_ns: its time of change.
      digest: hexadecimal sha256 over dtype, number and ids; of files above 4 GiB over samples of them.
      largest_id: of the ids that were read: of all, or of the samples.
      is_whole: whether all were read, for the lengths.
      lengths: unsigned [number of end ids], how many tokens each end id is behind the one before.
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
    """Returns the index of a token file; None: there is none, it is malformed, or the file has changed since."""
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
    """Writes the index of a token file; in a folder that may only be read, the next start reads the ids again."""
    head = vars(index) | {"lengths": index.lengths.dtype.name}
    with contextlib.suppress(OSError):
        write_whole(_index_path(path), json.dumps(head).encode() + b"\n" + index.lengths.tobytes())


def make_index(path: Path, described: TokenFile, *, whole: bool = False) -> Index:
    """Returns the index of a token file from its ids.

    Args:
      path: the token file.
      described: its description.
      whole: whether files above 4 GiB are read whole too, and the ends of documents looked for.
    """
    about = path.stat()
    if time.time_ns() - about.st_mtime_ns < _TICK_NS:
        time.sleep(_TICK_NS / 1e9)  # another change within one tick of the clock would leave the time as it is
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


def scan(path: Path, described: TokenFile, vocab_size: int) -> tuple[str, str]:
    """Returns the digest of a token file and its first id outside the vocabulary, by its index.

    Without one, the file is read once, and the index is written if its ids are in order. Files above 4 GiB are sampled
    then: a change or a bad id between the samples goes unnoticed.

    Args:
      path: the token file.
      described: its description.
      vocab_size: the model's; every id must be below.

    Returns:
      Hexadecimal sha256 over size and chunks, and a line for the problem or ``.
    """
    found = read_index(path)
    index = found or make_index(path, described)
    needed, problem = max(index.largest_id + 1, described.vocab_size), ""
    if needed > vocab_size:
        problem = f"'{path}' was written with a vocabulary of {needed} ids"
        for start, ids in _chunks(path, described.dtype) if index.largest_id >= vocab_size else ():
            if (is_outside := ids >= vocab_size).any():
                position = int(np.argmax(is_outside))
                problem = f"'{path}' holds id {ids[position]} at token {start + position}"
                break
        problem = (
            f"data.path: {problem}; allowed: ids below model.vocab_size, {vocab_size}; nearest: set it to {needed}"
        )
    elif not found:
        write_index(path, index)
    return index.digest, problem


def document_ends(files: Sequence[Path]) -> np.ndarray:
    """Returns the position after each document of token files end to end, int64 [documents].

    The positions of end ids are read from the files' indices; a file whose index lacks them is read once.
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
    """Returns where token files, end to end, contain an end id that ends no document, int64, by their descriptions."""
    places, start = [np.empty(0, np.int64)], 0
    for described in map(read_sidecar, files):
        places.append(np.asarray(described.inner_ends, np.int64) + start)
        start += described.num_tokens
    return np.concatenate(places)


def token_file_tokenizer(path: Path, described: TokenFile) -> Tokenizer:
    """Returns the tokenizer that wrote the token file `path`.

    Raises:
      UserError: its tokenizer.json is no longer beside the file, or has changed.
    """
    if described.tokenizer == "bytes":
        return byte_tokenizer()
    beside = path.with_name(described.tokenizer)
    tokenizer = file_tokenizer(str(beside), described.end_token, tuple(described.begin), described.special_tokens)
    if hashlib.sha256(beside.read_bytes()).hexdigest() != described.tokenizer_sha256:
        raise UserError(f"data.path: '{beside}' is not the tokenizer that wrote '{path}'; {_WRITTEN}")
    return tokenizer


class OpenFile:
    """A token file while a run reads it. A memory map beyond the end of a file that shrinks would be a bus error."""

    def __init__(self, path: Path, dtype: str, *, stays_open: bool) -> None:
        """Opens the file.

        Args:
          path: of the file.
          dtype: `uint16` or `uint32`.
          stays_open: whether its descriptor stays open; else each read opens it again.
        """
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self._descriptor = os.open(path, os.O_RDONLY)
        self._opened = os.fstat(self._descriptor)
        if not stays_open:
            self._close()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the ids start..stop, read-only.

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
                f"data.path: '{self.path}' has changed while it is read ({before.st_size} bytes at first, now "
                f"{now.st_size}); allowed: a file that stays as it is; nearest: write other data to another file"
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
    """Ids start..stop of a token file, which `np.asarray` reads; a slice reads nothing."""

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
    """Opens token files that belong together.

    Args:
      files: the .bin files, in order.
      vocab_size: the model's; every id must be below.

    Returns:
      The ids of each file, and the digest of them all.

    Raises:
      UserError: the files differ in tokenizer, ids do not fit, or a description is missing or wrong.
    """
    problems: list[str] = []
    described: list[TokenFile] = []
    digest = hashlib.sha256()
    for path in files:
        described.append(one := read_sidecar(path))
        differing = [name for name in TOKENIZER_FIELDS if getattr(one, name) != getattr(described[0], name)]
        problems += [
            f"data.path: '{path}' has {name} {getattr(one, name)!r}, but the first file has "
            f"{getattr(described[0], name)!r}; allowed: files prepared with one tokenizer; nearest: prepare them again"
            for name in differing
        ]
        file_digest, problem = scan(path, one, vocab_size)
        digest.update(file_digest.encode())
        digest.update(np.asarray(one.inner_ends, "<i8").data)  # the same ids may be other documents
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
