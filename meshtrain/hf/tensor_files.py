"""Reads the headers of a folder's safetensors files, and opens each tensor as a view of its file.

A file consists of a length (uint64, little-endian), a JSON object name -> {dtype, shape, data_offsets}, and the bytes
of the tensors without gaps; see https://github.com/huggingface/safetensors. The files are not trusted: the safetensors
library compares headers with files, and all problems of all files are reported together. Tensors are not read with this
library, since it copies them; views of the mapped file need no memory.
"""

import collections
import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from meshtrain.errors import Problem, Problems, warn
from meshtrain.files import Json, JsonObject, is_utf8, pointer_problem, read_json, what_is_at
from meshtrain.hf import mxfp4

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
READABLE: Mapping[str, np.dtype] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16),
}  # fmt: skip
_VIEWED = {**READABLE, mxfp4.DTYPE: np.dtype(np.uint8)}  # `mxfp4` decodes uint8 tensors
_PICKLES = re.compile(r".*\.(bin|pth|pt|ckpt)")
_AGAIN = "download it again"
_LENGTH_BYTES = 8
_HASHED_BYTES = 4096  # of each tensor, to compare the copies of a folder on several hosts
_COMPARED_ROWS = 4096  # rows of two tensors that are compared at a time
_SHARD = re.compile(r"(.*?)(\d{1,9})-of-(\d{1,9})\.safetensors")
_MOST_SHARDS = 10_000
_CHECKED = 1 << 18  # numbers of a tensor that are checked for NaN at a time
_NAMED = 3  # maximum number of tensors or files that a message names


class Stored(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
      file: the path of the file.
      dtype: the dtype in the format's notation, such as `BF16`. Keys of `READABLE`, and `U8` for packed 4-bit numbers,
        can be read; other dtypes cannot.
      shape: the shape of the tensor.
      begin: the offset of the tensor's first byte from the start of the file, in bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


def tensors(folder: Path) -> tuple[dict[str, Stored], list[Problem]]:
    """Returns name -> tensor for all tensors of a folder, and an error line for each problem of its files.

    Reads `model.safetensors` if it exists, otherwise the files of the index, otherwise all safetensors files.

    Args:
      folder: an existing folder.
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
        problems.add(*_missing_shards(folder, files))
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(folder / file, problems).items():
            if name in found and name not in placed:
                problems.add(
                    Problem(
                        f"{folder / file}: {name}",
                        fault=f"it is also in {found[name].file.name}",
                        allowed="each tensor once",
                        nearest="remove one of the files",
                    )
                )
            if name not in placed or placed[name] == file:
                found[name] = stored
    for name in {name for name, file in placed.items() if file} - found.keys():
        problems.add(
            Problem(
                f"{folder / INDEX_FILE}: {name}",
                fault=f"not in {placed[name]}",
                allowed="a tensor of that file",
                nearest=_AGAIN,
            )
        )
    for name in found.keys() - placed.keys() if placed else ():
        problems.add(
            Problem(
                f"{found[name].file}: {name}",
                fault=f"not in {INDEX_FILE}",
                allowed="only names in the index",
                nearest=_AGAIN,
            )
        )
    return found, problems.lines()


def open_tensors(stored: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """Returns name -> numpy array, a read-only view of the tensor's file; bytes are read when they are used."""
    maps = {file: np.memmap(file, np.uint8, "r") for file in {one.file for one in stored.values()}}
    result = {}
    for name, one in stored.items():
        result[name] = np.ndarray(one.shape, _VIEWED[one.dtype], maps[one.file], one.begin)
    return result


def same_values(one: Stored, other: Stored) -> bool:
    """Returns whether two tensors have equal shapes and values; False if a dtype is not readable.

    Reads both tensors in parts. The result is cached until a file changes.
    """
    return _same_values(one, other, one.file.stat().st_mtime_ns, other.file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _same_values(one: Stored, other: Stored, *mtimes_ns: int) -> bool:
    if one.shape != other.shape or not {one.dtype, other.dtype} <= READABLE.keys():
        return False
    first, second = (open_tensors({"": tensor})[""] for tensor in (one, other))
    for begin in range(0, len(first), _COMPARED_ROWS):
        left, right = (array[begin : begin + _COMPARED_ROWS] for array in (first, second))
        has_equal_bytes = one.dtype == other.dtype and np.array_equal(left.view(np.uint8), right.view(np.uint8))
        # float32 represents the values of all readable dtypes exactly.
        if not has_equal_bytes and not np.array_equal(left.astype("<f4"), right.astype("<f4"), equal_nan=True):
            return False
    return True


def has_only_finite(numbers: np.ndarray) -> bool:
    """Returns whether a contiguous array contains neither NaN nor infinity.

    Only NaN and infinity have the largest exponent. Examines the bits in parts, so it needs little extra memory.
    """
    if not jnp.issubdtype(numbers.dtype, jnp.floating):
        return True
    kind = jnp.finfo(numbers.dtype)
    exponent = ((1 << kind.nexp) - 1) << kind.nmant
    bits = numbers.reshape(-1).view(f"u{numbers.itemsize}")
    parts = (bits[begin : begin + _CHECKED] for begin in range(0, len(bits), _CHECKED))
    return all((part & exponent).max() != exponent for part in parts)


def warn_not_finite(place: str | Path, tensors: Collection[str]) -> None:
    """Prints one warning that names up to three tensors with NaN or infinity; prints nothing if there are none.

    Args:
      place: the file or folder of the tensors, with which the warning starts.
      tensors: the names of all tensors with NaN or infinity.
    """
    if tensors:
        more = f" and {len(tensors) - _NAMED} more tensors" if len(tensors) > _NAMED else ""
        warn(f"{place}: NaN or infinity in {', '.join([*tensors][:_NAMED])}{more}; the model's outputs may be NaN")


def content_hash(stored: Mapping[str, Stored]) -> str:
    """Returns a hexadecimal hash of the name, dtype, shape and first 4 KiB of every tensor in `stored`."""
    digest, files = hashlib.sha256(), dict[Path, BinaryIO]()
    with contextlib.ExitStack() as opened_files:
        for name, one in sorted(stored.items()):
            if one.file not in files:
                files[one.file] = opened_files.enter_context(one.file.open("rb"))
            files[one.file].seek(one.begin)
            digest.update(f"{name} {one.dtype} {one.shape}".encode() + files[one.file].read(_HASHED_BYTES))
    return digest.hexdigest()


def unreadable(stored: Mapping[str, Stored], readable: Collection[str] = READABLE) -> list[Problem]:
    """Returns an error line for each tensor whose dtype is not in `readable`.

    Args:
      stored: name -> tensor.
      readable: the readable dtypes in the notation of the files, such as `BF16`.
    """
    return [
        Problem(
            f"{one.file}: {name}",
            got=f"dtype {one.dtype}",
            allowed=", ".join(readable),
            nearest="the unquantized model",
        )
        for name, one in stored.items()
        if one.dtype not in readable
    ]


def _no_files(folder: Path) -> Problem:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if _PICKLES.fullmatch(name)]
    got = f"{pickles[0]}, a pickle, which may run code" if pickles else "no safetensors file"
    fix = "save_pretrained(DIR) of a newer transformers" if pickles else "also download model.safetensors"
    return Problem(folder, got=got, allowed="safetensors", nearest=fix)


def _missing_shards(folder: Path, files: Collection[str]) -> list[Problem]:
    """Returns an error line if the names of files (such as model-00001-of-00002.safetensors) imply missing files.

    Args:
      folder: the path of the folder, for the error line.
      files: the names of its safetensors files.
    """
    parts = [match for match in map(_SHARD.fullmatch, files) if match]
    if not parts or not int(parts[0][2]) <= int(parts[0][3]) <= _MOST_SHARDS:
        return []
    prefix, number, total = parts[0].groups()
    named = [f"{prefix}{index:0{len(number)}}-of-{total}.safetensors" for index in range(1, int(total) + 1)]
    missing = [name for name in named if name not in files]
    if not missing:
        return []
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    fix = f"download {', '.join(missing[:_NAMED])}{more}"
    return [
        Problem(folder, got=f"{len(named) - len(missing)} of {len(named)} files", allowed="all of them", nearest=fix)
    ]


def _index(folder: Path, problems: Problems) -> dict[str, str]:
    """Reads model.safetensors.index.json; returns name of a tensor -> name of its file, or '' if the entry is invalid.

    Adds an error line to `problems` for each invalid entry and for each missing file.
    """
    path = folder / INDEX_FILE
    try:
        if (what := what_is_at(path)) != "a file":
            raise TypeError(f"got {what}")
        given = read_json(path.read_bytes())
        listed = given["weight_map"]
        if not isinstance(listed, dict) or not listed:
            raise TypeError(f"weight_map is {type(listed).__name__} without entries")
    except (OSError, ValueError, KeyError, TypeError) as error:
        pointer = pointer_problem(path)
        problems.add(
            pointer
            or Problem(
                path,
                fault=f"not an index ({error})",
                allowed="a JSON object with weight_map, name -> file",
                nearest=_AGAIN,
            )
        )
        return {}
    placed, missing = dict.fromkeys(listed, ""), set[str]()
    for name, file in listed.items():
        if not isinstance(file, str) or not _is_plain(file):
            problems.add(
                Problem(
                    f"{path}: {name}",
                    got=f"{str(file)[:200]!r}",
                    allowed="a file's name in this folder",
                    nearest=_AGAIN,
                )
            )
        elif file in missing:
            continue
        elif (what := what_is_at(folder / file)) != "a file":
            missing.add(file)
            problems.add(Problem(f"{path}: {file}", got=what, allowed="a file", nearest=_AGAIN))
        else:
            placed[name] = file
    return placed


def _is_plain(file: str) -> bool:
    """Returns whether a string is a plain file name, so that it cannot refer to a file outside of the folder."""
    return file not in ("", "..") and Path(file).name == file and not set(file) & {"\\", "\0"} and is_utf8(file)


def _header(path: Path, problems: Problems) -> dict[str, Stored]:
    """Returns name -> tensor of a file; if the file cannot be read or is invalid, returns {} and adds a problem."""
    result: dict[str, Stored] = {}
    try:
        if (what := what_is_at(path)) != "a file":
            raise SafetensorError(f"got {what}")
        with safe_open(path, "numpy"), path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin = _LENGTH_BYTES + length + one["data_offsets"][0]
            result[name] = Stored(path, one["dtype"], tuple(one["shape"]), begin)
    except OSError as error:
        problems.add(Problem(path, got=error.strerror or error, allowed="a readable file", nearest="chmod a+r"))
    except SafetensorError as error:
        pointer = pointer_problem(path)
        problems.add(
            pointer
            or Problem(path, fault=f"not safetensors ({error})", allowed="a complete safetensors file", nearest=_AGAIN)
        )
    return result


def _once(pairs: Sequence[tuple[str, Json]]) -> JsonObject:
    """Converts the key-value pairs of a JSON object to a dict; raises SafetensorError if a key occurs twice.

    Without this check, the safetensors library would use the last value.
    """
    counts = collections.Counter(name for name, _ in pairs)
    if len(counts) < len(pairs):
        raise SafetensorError(f"'{counts.most_common(1)[0][0]}' is listed twice")
    return dict(pairs)
