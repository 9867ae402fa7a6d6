"""The safetensors files of a folder: their headers, checked entry by entry, and each tensor as a view of its file.

A file is a length (uint64, little-endian), a JSON object name -> {dtype, shape, data_offsets}, and the bytes of the
tensors without gaps; https://github.com/huggingface/safetensors describes it. The files come from strangers: nothing
in a header is believed before it is compared with the file, and all problems of all files are reported together.
"""

import collections
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshtrain.words.errors import Problems
from meshtrain.words.paths import is_utf8, what_is_at

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
READABLE: Mapping[str, np.dtype] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16),
}  # fmt: skip
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F64": 8, **{name: dtype.itemsize for name, dtype in READABLE.items()},
}  # fmt: skip
_PICKLES = re.compile(r".*\.(bin|pth|pt|ckpt)")
_AGAIN = "nearest: download it again"
_LENGTH_BYTES = 8
_MOST_DIMS = 64  # of a NumPy array


class Stored(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
      file: that holds it.
      dtype: as the format names it; one of `READABLE` can be read.
      shape: of the tensor.
      begin: its first byte, from the start of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


def tensors(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Returns name -> tensor for all tensors of a folder, and a line for each problem of its files.

    `model.safetensors` is read if it is there, otherwise the files of the index, otherwise all safetensors files.

    Args:
      folder: that exists.
    """
    problems, placed = Problems(), dict[str, str]()
    if what_is_at(folder / ONE_FILE) != "nothing there":
        files = [ONE_FILE]
    elif what_is_at(folder / INDEX_FILE) != "nothing there":
        placed = _index(folder, problems)
        files = sorted(set(placed.values()) - {""})
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            problems.add(_no_files(folder))
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(folder / file, problems).items():
            if name in found and name not in placed:
                problems.add(
                    f"{folder / file}: {name}: it is in {found[name].file.name}, too; allowed: each tensor once; "
                    "nearest: remove one of the files"
                )
            if name not in placed or placed[name] == file:
                found[name] = stored
    for name in {name for name, file in placed.items() if file} - found.keys():
        problems.add(f"{folder / INDEX_FILE}: {name}: not in {placed[name]}; allowed: a tensor of that file; {_AGAIN}")
    for name in found.keys() - placed.keys() if placed else ():
        problems.add(f"{found[name].file}: {name}: not in {INDEX_FILE}; allowed: the names of the index; {_AGAIN}")
    return found, problems.lines()


def opened(stored: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """Returns name -> tensor as a read-only view of its file, for readable dtypes; bytes are read where it is used."""
    maps = {file: np.memmap(file, np.uint8, "r") for file in {one.file for one in stored.values()}}
    found = {}
    for name, one in stored.items():
        num_bytes = math.prod(one.shape) * _ITEM_BYTES[one.dtype]
        raw = np.asarray(maps[one.file])[one.begin : one.begin + num_bytes]
        found[name] = raw.view(READABLE[one.dtype]).reshape(one.shape)
    return found


def _no_files(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if _PICKLES.fullmatch(name)]
    got = f"{pickles[0]}, a pickle, which may run code" if pickles else "no safetensors file"
    near = "save_pretrained(DIR) of a newer transformers" if pickles else "download model.safetensors, too"
    return f"{folder}: got {got}; allowed: safetensors; nearest: {near}"


def _index(folder: Path, problems: Problems) -> dict[str, str]:
    """Returns name -> file of the index; '' where the entry is a problem."""
    path = folder / INDEX_FILE
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        listed = given["weight_map"]
        if not isinstance(listed, dict) or not listed:
            raise TypeError(f"weight_map is {type(listed).__name__} without entries")
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        problems.add(f"{path}: not an index ({error}); allowed: a JSON object with weight_map, name -> file; {_AGAIN}")
        return {}
    placed, missing = dict.fromkeys(listed, ""), set[str]()
    for name, file in listed.items():
        if not isinstance(file, str) or not _is_plain(file):
            problems.add(f"{path}: {name}: got {str(file)[:200]!r}; allowed: a file's name in this folder; {_AGAIN}")
        elif file in missing:
            continue
        elif (what := what_is_at(folder / file)) != "a file":
            missing.add(file)
            problems.add(f"{path}: {file}: got {what}; allowed: a file; {_AGAIN}")
        else:
            placed[name] = file
    return placed


def _is_plain(file: str) -> bool:
    """Returns whether a name can only be that of a file in the folder itself."""
    return file not in ("", "..") and Path(file).name == file and not set(file) & {"\\", "\0"} and is_utf8(file)


def _header(path: Path, problems: Problems) -> dict[str, Stored]:
    """Returns name -> tensor of a file, without the entries that are problems."""
    try:
        if (what := what_is_at(path)) != "a file":
            raise ValueError(f"got {what}; allowed: a file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(_LENGTH_BYTES)
            length, most = int.from_bytes(first, "little"), min(size - _LENGTH_BYTES, MAX_HEADER_BYTES)
            if not 2 <= length <= most:
                raise ValueError(
                    f"header: got a length of {length} bytes in a file of {size}; allowed: 2 to {max(most, 2)}"
                )
            text = file.read(length)
        header = _object(text)
    except OSError as error:
        problems.add(f"{path}: got {error.strerror or error}; allowed: a file that can be read; nearest: chmod a+r")
        return {}
    except ValueError as error:
        problems.add(f"{path}: {error}; {_AGAIN}")
        return {}
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    entries: dict[str, Stored] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        try:
            stored, end = _entry(path, entry, start, size)
        except ValueError as error:
            problems.add(f"{path}: {name}: {error}; {_AGAIN}")
            continue
        entries[name] = stored
        spans.append((stored.begin, end, name))
    # Without every entry, a gap is not one.
    for line in _overlaps(spans, start, size, is_whole=len(entries) == len(header)):
        problems.add(f"{path}: {line}; {_AGAIN}")
    return entries


def _object(text: bytes) -> dict[str, Any]:
    """Returns the JSON object of a header; raises ValueError with the rest of a line."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(name for name, _ in pairs)
        if len(counts) < len(pairs):
            raise ValueError(f"'{counts.most_common(1)[0][0]}' stands there twice")
        return dict(pairs)

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
        if not isinstance(header, dict):
            raise ValueError(type(header).__name__)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"header: not a JSON object ({error}); allowed: name -> dtype, shape, data_offsets") from error
    return header


def _entry(path: Path, entry: Any, start: int, size: int) -> tuple[Stored, int]:
    """Returns a tensor and the byte after its last one; raises ValueError with the rest of a line."""
    wanted = ("dtype", "shape", "data_offsets")
    if not isinstance(entry, dict) or not all(key in entry for key in wanted):
        raise ValueError(f"got {str(entry)[:200]}; allowed: an object with {', '.join(wanted)}")
    dtype, shape, offsets = (entry[key] for key in wanted)
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype: got {str(dtype)[:200]!r}; allowed: {', '.join(READABLE)}")
    if not _are_counts(shape):
        raise ValueError(f"shape: got {str(shape)[:200]}; allowed: a list of whole numbers, {_MOST_DIMS} at most")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - start:
        raise ValueError(
            f"data_offsets: got {str(offsets)[:200]}; allowed: from 0 to {size - start}, the end of the file"
        )
    num_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise ValueError(
            f"data_offsets: got {offsets}, {offsets[1] - offsets[0]} bytes; allowed: the {num_bytes} of {dtype}{shape}"
        )
    return Stored(path, dtype, tuple(shape), start + offsets[0]), start + offsets[1]


def _are_counts(values: Any) -> bool:
    # The product of thousands of large numbers would take minutes.
    is_short = isinstance(values, list) and len(values) <= _MOST_DIMS
    return is_short and all(type(value) is int and 0 <= value < 1 << 128 for value in values)


def _overlaps(spans: list[tuple[int, int, str]], start: int, size: int, *, is_whole: bool) -> Iterator[str]:
    """Yields a line for each byte range that two tensors share, and, of a whole header, for each that none has."""
    last, previous = start, "the header"
    for begin, end, name in sorted(spans):
        if begin < last:
            yield f"{name}: its bytes are also those of {previous}; allowed: each byte once"
        elif begin > last and is_whole:
            yield f"{name}: {begin - last} bytes before it belong to no tensor; allowed: each byte once"
        if end >= last:
            last, previous = end, name
    if is_whole and last < size:
        yield f"got {size - last} bytes after the last tensor; allowed: none"
