"""Reads documents from files that the user names, or from the running Python's standard library."""

import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from meshtrain.errors import Problem, Problems, UserError, nearest
from meshtrain.files import Json, JsonObject, expand_user, is_url, is_utf8, url_problems, what_is_at
from meshtrain.store.buckets import Place, objects, wrap_bucket_errors

_T = TypeVar("_T")

PARQUET = ".parquet"
# Suffixes of files with a document in each line or row; published corpora also use .json for compressed lines.
TABLES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", PARQUET)
_BUFFER_BYTES = 1 << 20
_ROWS = 64  # rows of a .parquet decoded at a time: a document may have megabytes
# Exceptions of pyarrow, gzip and zlib for truncated or corrupt content.
_BROKEN = (OSError, EOFError, ValueError, NotImplementedError, TypeError, MemoryError, zlib.error)
_KEY = "data.path"
SPLIT_BY_HASH_FROM = 100  # items; fewer are split at one position, because few hashes would miss the fraction by far
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_ZEROS_IN = 1 << 16  # bytes at the start of a file that are searched for zero bytes


def standard_library() -> list[tuple[str, str]]:
    """Reads Python's standard library; returns (path, text) of each .py file, sorted by path: about 11 MB in total.

    Paths are relative to the library's folder. Tests, installed packages, and files that cannot be read as UTF-8 are
    left out.

    Raises:
      UserError: this Python installation has no source files of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in files:
            if not name.endswith(".py"):
                continue
            path = Path(folder, name)
            try:
                documents.append((path.relative_to(root).as_posix(), path.read_bytes().decode()))
            except (OSError, UnicodeDecodeError):
                continue
    if not documents:
        raise UserError(
            Problem(
                "data.source",
                got=f"'python', but {root} contains no readable .py files",
                allowed="a Python installation with the source of its library, or data.source=text with data.path",
                depends_on=["data.path"],
            )
        )
    return sorted(documents)


def share(key: str) -> float:
    """Returns a number in [0, 1) that is a hash of a document's key and determines the split of the document.

    Documents with a number below `validation_fraction` are used for validation. The hashed text is `validation ` + key.
    This prefix was chosen so that no single large file of the standard library fills the validation split.
    """
    return int.from_bytes(hashlib.sha256(f"validation {key}".encode()).digest()[:8]) / 2**64


def split_by_hash(items: Sequence[_T], keys: Sequence[str], validation_fraction: float) -> tuple[list[_T], list[_T]]:
    """Splits items into (training, validation) by a hash of their keys, see `share`.

    Fewer than 100 items are split at one position instead. Then at least one item is used for validation, unless
    `validation_fraction` is 0.

    Args:
      items: the items, such as documents.
      keys: one text for each item. An item keeps its split as long as its key does not change.
      validation_fraction: the fraction of items for validation; 0: no item.
    """
    if len(items) < SPLIT_BY_HASH_FROM:
        num_validation = max(round(len(items) * validation_fraction), 1) if validation_fraction else 0
        place = len(items) - num_validation
        return list(items[:place]), list(items[place:])
    splits: tuple[list[_T], list[_T]] = ([], [])
    for item, key in zip(items, keys, strict=True):
        splits[share(key) < validation_fraction].append(item)
    return splits


def _beside(path: Path) -> str:
    """Returns a suggestion for an error about the missing file `path`: a file with a similar name, or else a folder.

    The folder is the nearest existing folder above `path`.
    """
    folder = path.parent
    while what_is_at(folder) != "a folder" and folder != folder.parent:
        folder = folder.parent
    try:
        names = sorted(name for name in os.listdir(folder) if what_is_at(folder / name) == "a file")
    except OSError:  # the folder is not readable
        names = []
    if folder != path.parent:
        return f"; the folder '{path.parent}' does not exist; nearest: '{folder / '*'}'"
    return nearest(path.name, names) or f"; nearest: '{folder / '*'}'"


def find_files(paths: str) -> tuple[dict[Place, int], list[Problem]]:
    """Lists the files that `data.path` names, without reading them.

    Args:
      paths: files, objects of buckets, or globs (`**` for any depth), comma separated.

    Returns:
      {file: size in bytes} in order, and an error line for each problem. Globs skip empty files. A file that several
      names in `paths` refer to, also by a link, is listed once.
    """
    files: dict[Place, int] = {}
    problems = []
    given = [item.strip() for item in paths.split(",") if item.strip()]
    items = [item if is_url(item) else str(expand_user(item)) for item in given]
    if not items:
        allowed = "files or globs, comma separated"
        problems.append(Problem(_KEY, got="''", allowed=allowed, nearest="data.source=python"))
    for item in items:
        path, what = Path(item), what_is_at(item)
        if is_url(item):
            found, lines = _find_objects(item)
            files |= found
            problems += lines
        elif what == "a file":
            files[path] = path.stat().st_size
            if not files[path]:
                got, allowed = f"'{item}', which is empty", "files with at least one sequence"
                problems.append(Problem(_KEY, got=got, allowed=allowed, nearest=f"'{path.parent}/*'"))
        elif what == "a folder":
            problems.append(Problem(_KEY, got=f"'{item}', a folder", allowed="files or globs", nearest=f"'{path}/*'"))
        elif what == "nothing there" and glob.has_magic(item):
            names = [Path(name) for name in sorted(glob.glob(item, recursive=True))]
            full = {one: size for one in names if what_is_at(one) == "a file" and (size := one.stat().st_size)}
            files |= full
            if not full:
                said = f"only folders or empty files ({len(names)})" if names else "nothing"
                got, allowed = f"'{item}', which matches {said}", "a glob that matches files"
                problems.append(Problem(_KEY, got=got, allowed=allowed, fix=_beside(path)))
        else:
            said = "which does not exist" if what == "nothing there" else what
            allowed = "existing files or globs"
            problems.append(Problem(_KEY, got=f"'{item}', {said}", allowed=allowed, fix=_beside(path)))
    for path in [path for path in files if isinstance(path, Path) and not _can_read(path)]:
        got, fix = f"'{path}', which this user cannot read", f"chmod a+r '{path}'"
        problems.append(Problem(_KEY, got=got, allowed="readable files", nearest=fix))
    return _each_once(files), Problems(problems).lines()


def _each_once(files: Mapping[Place, int]) -> dict[Place, int]:
    """Removes duplicates from {file: size in bytes}: of several paths to the same file, the first is retained.

    Files on a disk are compared by device and inode, objects of buckets by name.
    """
    first: dict[Place | tuple[int, int], Place] = {}
    for path in files:
        key: Place | tuple[int, int] = path
        if isinstance(path, Path):
            about = path.stat()
            key = (about.st_dev, about.st_ino)
        first.setdefault(key, path)
    return {path: files[path] for path in first.values()}


def _find_objects(pattern: str) -> tuple[dict[Place, int], list[Problem]]:
    """Lists the objects of a bucket that a URL or a glob matches, as `find_files` does for files.

    Returns:
      {object: size in bytes} without empty objects, and a list of error lines; one of the two is empty.
    """
    if lines := url_problems(_KEY, pattern):  # another scheme, after a `NAME=`
        return {}, lines
    folder, _, name = pattern.rpartition("/")
    try:
        found = objects(pattern, _KEY)
        full: dict[Place, int] = {path: num_bytes for path, num_bytes in found.items() if num_bytes}
        if full:
            return full, []
        beside = {path.name: path for path in objects(f"{folder}/*", _KEY)}
        below = objects(f"{pattern}/*", _KEY)
    except UserError as error:
        return {}, list(error.problems)
    said = f"only empty objects ({len(found)})" if found else "no object"
    problem = Problem(
        _KEY,
        got=f"'{pattern}', which matches {said}",
        allowed="objects of a bucket, or globs",
        fix=nearest(name, beside),
        nearest=f"'{pattern if below else folder}/*'",
    )
    return {}, [problem]


def _can_read(path: Path) -> bool:
    # Opens the file, because `os.access` checks the real user, and the process may run with the rights of another user.
    try:
        path.open("rb").close()
    except OSError:
        return False
    return True


def tokens_as_text(files: Iterable[Place]) -> list[Problem]:
    """Returns an error line for each file that contains token ids instead of text.

    A token file has a description next to it, or contains zero bytes. It must be rejected: the bytes of small ids are
    legal UTF-8, so a model would train on them without an error.
    """
    problems = []
    for path in files:
        sidecar = path.with_name(f"{path.name}.json")
        if path.suffix == ".bin" and what_is_at(sidecar) == "a file":
            got = f"which contains tokens according to '{sidecar.name}'"
        elif _has_zeros(path):
            got = "which has zero bytes, so it is not text; it may be a token file"
        else:
            continue
        problems.append(
            Problem("data.path", got=f"'{path}', {got}", allowed="text in UTF-8", nearest="data.source=tokens")
        )
    return problems


def _has_zeros(path: Place) -> bool:
    if is_table(path):  # its lines are checked one by one later, and there may be thousands of objects
        return False
    try:
        with open_documents(path) as (file, _):
            return b"\0" in file.read(_ZEROS_IN)
    except UserError:  # reported when the file is read
        return False


@contextlib.contextmanager
def open_documents(path: Place) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file of documents in a `with` statement; converts read errors inside the statement to UserError.

    Yields:
      The file's content, decompressed if its name ends in .gz or .zst, and the underlying file, whose position is the
        number of bytes that were read.

    Raises:
      UserError: the file cannot be read, is truncated or corrupt, or needs a package that is not installed.
    """
    with wrap_bucket_errors(path, _KEY):
        try:
            with path.open("rb") as file:
                content: BinaryIO = file
                if path.suffix == ".gz":
                    content = io.BufferedReader(gzip.GzipFile(fileobj=file), _BUFFER_BYTES)
                elif path.suffix == ".zst":
                    import pyarrow

                    # Unlike the package zstandard, pyarrow detects a truncated file.
                    content = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), _BUFFER_BYTES)
                yield content, file
        except UserError:
            raise
        except ImportError as error:
            raise UserError(
                Problem(
                    "data.path",
                    got=f"'{path}', which needs the package pyarrow ({error})",
                    allowed="files that need no package",
                    nearest="pip install 'meshtrain[data]'",
                )
            ) from error
        except _BROKEN as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            raise UserError(
                Problem(
                    "data.path",
                    fault=f"'{path}' cannot be read ({why})",
                    allowed="complete files that this user can read",
                    nearest="leave it out, or download it again",
                )
            ) from error


def is_table(path: Place) -> bool:
    """Returns whether each line or row of a file is a document, according to the file's name."""
    return path.name.endswith(TABLES)


def read_rows(path: Place, column: str = "") -> Iterator[tuple[str, bytes | JsonObject, int]]:
    """Yields the lines of a file, except empty lines, or the rows of a .parquet file; reads a small part at a time.

    Args:
      path: a file for which `is_table` is true.
      column: the only column to read of a .parquet file, a column of texts; '': all columns.

    Yields:
      The file and the line or row number, for errors; the line, or {column: value} of the row without nulls; and the
      number of bytes that the line or row occupies in the file.

    Raises:
      UserError: the file cannot be read, is truncated or corrupt, or needs a package that is not installed; or it has
        no column of this name.
    """
    with open_documents(path) as (lines, file):
        if path.suffix == PARQUET:
            yield from _parquet_rows(path, file, column)
            return
        end = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                begin, end = end, file.tell()
                yield f"{path}, line {number}", line, end - begin


def _parquet_rows(path: Place, file: BinaryIO, column: str) -> Iterator[tuple[str, JsonObject, int]]:
    import pyarrow.parquet

    # Otherwise pyarrow reads all requested columns at once, and without a buffer a complete row group.
    bounded = {"pre_buffer": False, "buffer_size": _BUFFER_BYTES}
    table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True, **bounded)
    texts = [one.name for one in table.schema_arrow if "string" in str(one.type)]
    if column and column not in texts:
        raise UserError(
            Problem(
                "data.text_field",
                got=(
                    f"'{column}', which is not a text column of '{path}', with the columns "
                    f"{', '.join(table.schema_arrow.names) or '(none)'}"
                ),
                condition="there",
                allowed=", ".join(texts) or "nothing",
                fix=nearest(column, texts),
                nearest=f"data.text_field={texts[0] if texts else column}",
            )
        )
    row_bytes = file.seek(0, os.SEEK_END) // max(table.metadata.num_rows, 1)
    batches = table.iter_batches(_ROWS, columns=[column] if column else None, use_threads=False)
    rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", _present(row), row_bytes


def _present(value: Json) -> Json:
    """Removes null entries from a nested JSON value; the row of a table has null in each column without a value."""
    if isinstance(value, dict):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value


def _row_text(row: bytes | JsonObject, text_field: str) -> str:
    """Returns the document in the field `text_field` of a JSON line or table row.

    Raises:
      UserError: the line is no JSON object, or has no valid text in this field. The problem has the placeholder
        `{where}` for the file and the line, see `Problems.add_at`.
    """
    try:
        fields = json.loads(row) if isinstance(row, bytes) else row
    # JSONDecodeError and UnicodeDecodeError are both ValueErrors; brackets may be nested deeper than Python can follow.
    except (ValueError, RecursionError) as error:
        raise UserError(
            Problem("data.path", fault=f"{{where}} is not JSON in UTF-8 ({error})", allowed="one JSON object per line")
        ) from error
    if not isinstance(fields, dict) or not isinstance(fields.get(text_field), str):
        texts = [name for name, value in fields.items() if isinstance(value, str)] if isinstance(fields, dict) else []
        raise UserError(
            Problem(
                "data.text_field",
                got=f"'{text_field}', which has no text in {{where}}",
                condition="there",
                allowed=", ".join(texts) or "nothing",
                fix=nearest(text_field, texts),
                nearest=f"data.text_field={texts[0]}" if texts else 'lines like {"text": "..."}',
            )
        )
    text = str(fields[text_field])
    # JSON can escape half of a surrogate pair, which UTF-8 cannot encode.
    if not text.isascii() and not is_utf8(text):
        raise UserError(
            Problem("data.path", fault="{where} escapes half of a surrogate pair", allowed="complete characters")
        )
    return text


def only_empty(num_documents: int) -> Problem:
    """Returns the error line for data that consist of `num_documents` empty documents."""
    return Problem(
        "data.path",
        got=f"only empty documents ({num_documents:,})",
        allowed="at least one document with text",
        nearest="data.text_field=FIELD, the field with the text, or other files",
    )


def read_documents(path: Place, text_field: str, problems: Problems) -> Iterator[tuple[str, int]]:
    """Yields the documents of one file: one per line or row if `is_table(path)`, else the complete file as a document.

    Args:
      path: the file; .gz and .zst are decompressed.
      text_field: the field of a line, or the column of a .parquet, that contains the document.
      problems: receives an error line if the file cannot be read or is not UTF-8, and for each row without a document.
        Reading continues after a problem until `problems.is_enough()`.

    Yields:
      The text of the document, and the number of bytes that the document occupies in the file.
    """
    try:
        if is_table(path):
            for where, row, num_bytes in read_rows(path, text_field):
                try:
                    text = _row_text(row, text_field)
                except UserError as error:
                    [problem] = error.problems
                    problems.add_at(where, problem, None if problem.fix else "")
                    if problems.is_enough():
                        return
                    continue
                yield text, num_bytes
            return
        with open_documents(path) as (file, stored):
            content, num_bytes = file.read(), stored.tell()
    except UserError as error:
        problems.add(*error.problems)
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        fix = "data.source=tokens" if path.suffix == ".bin" else f"iconv -t UTF-8 '{path}'"
        problems.add(
            Problem(
                "data.path",
                fault=f"'{path}' is not UTF-8 text (byte {error.start} is {content[error.start]:#04x})",
                allowed="text in UTF-8",
                nearest=fix,
            )
        )
        return
    yield text, num_bytes
