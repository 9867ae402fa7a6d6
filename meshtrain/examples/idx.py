"""Reads images and labels from IDX files, the format of MNIST, uncompressed or compressed by gzip.

A file starts with a magic number: two zero bytes, the type of the elements, the number of dims. The size of each dim
follows as a big-endian uint32, then the elements in C order. Images and labels are unsigned bytes, so images [N, H, W]
have the magic number 0x00000803, and labels [N] have 0x00000801.
"""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meshtrain.data.text import find_files
from meshtrain.errors import Problem, Problems, UserError, refuse
from meshtrain.files import what_is_at

IMAGES, LABELS = 0x00000803, 0x00000801
_NAMES = {IMAGES: "images", LABELS: "labels"}
_GZIP = b"\x1f\x8b"
_MOST_GROWTH = 1032  # the maximum expansion factor of deflate (zlib's technical details)


def labels_of(images: Path) -> Path:
    """Returns the path of the labels for a file of images: `images` and `idx3` in its name become `labels` and `idx1`.

    >>> labels_of(Path("mnist/train-images-idx3-ubyte.gz")).as_posix()
    'mnist/train-labels-idx1-ubyte.gz'
    """
    return images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))


def find_images(paths: str, key: str) -> tuple[list[Path], list[Problem]]:
    """Returns the image files that an option's value matches, and an error line for each problem in their headers.

    The headers of the label files (`labels_of` each image file) are checked as well. All images must have one size.

    Args:
      paths: value of the option: files or globs of image files, comma separated.
      key: name of the option, for error lines.
    """
    if not paths.strip():
        return [], [
            Problem(
                key,
                got="''",
                condition="with data.source=idx",
                allowed="files of images, or globs, comma separated",
                nearest="data.source=digits",
                depends_on=["data.source"],
            )
        ]
    sizes_of, found = find_files(paths)
    files = list(sizes_of)
    if found:
        return files, [problem.with_parts(key=problem.key.replace("data.path", key, 1)) for problem in found]
    problems, sizes = Problems(), dict[tuple[int, ...], Path]()
    for path in files:
        try:
            num_images, *size = header(path, IMAGES, key)
            sizes.setdefault(tuple(size), path)
            num_labels = header(labels_of(path), LABELS, key)[0]
        except UserError as error:
            problems.add(*error.problems)
            continue
        if num_labels != num_images:
            problems.add(
                Problem(
                    key,
                    got=f"'{path}' with {num_images} images and '{labels_of(path).name}' with {num_labels} labels",
                    allowed="equal numbers of images and labels",
                    nearest="both files of one download",
                )
            )
    if len(sizes) > 1:
        sizes_text = ", ".join(f"'{path}' of {height} x {width}" for (height, width), path in sizes.items())
        problems.add(
            Problem(
                key,
                got=f"images of different sizes ({sizes_text})",
                allowed="images of the same size",
                nearest="one of the files",
            )
        )
    return files, problems.lines()


def header(path: Path, magic: int, key: str) -> tuple[int, ...]:
    """Reads the header of an IDX file and returns the size of each dim: (N, H, W) of images, (N,) of labels.

    Args:
      path: the file, uncompressed or compressed.
      magic: the expected magic number, `IMAGES` or `LABELS`.
      key: name of the option that contains the path, for error lines.

    Raises:
      UserError: the file is missing or unreadable, has a different magic number, or has a dim of size 0. The error is
        also raised if the file does not have the size that follows from its header. A compressed file is only rejected
        if it is too small.
    """
    num_dims = magic & 0xFF
    with _open(path, magic, key) as file:
        first = _bytes(file, 4 + 4 * num_dims, path, key)
    if len(first) < 4 or int.from_bytes(first[:4]) != magic:
        raise UserError(_wrong_beginning(path, first, magic, key))
    if len(first) < 4 + 4 * num_dims:
        raise UserError(_cut_short_problem(path, f"ends within its header, after {len(first)} bytes", key))
    dims = struct.unpack(f">{num_dims}I", first[4:])
    if 0 in dims:
        raise UserError(
            Problem(key, got=f"'{path}', whose header has {_dims_text(dims)}", allowed="sizes above 0", nearest=1)
        )
    own, stored = 4 + 4 * num_dims, path.stat().st_size
    expected = own + math.prod(dims)
    if expected > _MOST_GROWTH * stored if _is_compressed(path) else expected != stored:
        raise UserError(
            _cut_short_problem(path, f"has {stored} bytes, but according to its header {own} + {_dims_text(dims)}", key)
        )
    return dims


def read(path: Path, magic: int, key: str) -> np.ndarray:
    """Returns the elements of an IDX file, uint8: images [N, H, W] or labels [N].

    Args:
      path: the file, uncompressed or compressed.
      magic: the expected magic number, `IMAGES` or `LABELS`.
      key: name of the option that contains the path, for error lines.

    Raises:
      UserError: `header` rejects the file, the file's compressed data are damaged, or it contains fewer or more bytes
        than its header requires.
    """
    dims = header(path, magic, key)
    num_elements = math.prod(dims)
    with _open(path, magic, key) as file:
        _bytes(file, 4 + 4 * len(dims), path, key)
        content = _bytes(file, num_elements + 1, path, key)  # one more byte, to detect data after the end
    if len(content) != num_elements:
        amount = "more" if len(content) > num_elements else f"{len(content)}"
        raise UserError(
            _cut_short_problem(
                path, f"contains {amount} bytes of data, but according to its header {_dims_text(dims)}", key
            )
        )
    return np.frombuffer(content, np.uint8).reshape(dims)


def read_pairs(files: Sequence[Path], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images [N, H, W] of some image files, and their labels [N], both concatenated and uint8.

    Args:
      files: image files; the labels are read from `labels_of` each file.
      key: name of the option that contains the paths, for error lines.

    Raises:
      UserError: has one line for each file that `read` rejects.
    """
    arrays, problems = dict[int, list[np.ndarray]]({IMAGES: [], LABELS: []}), Problems()
    for path in files:
        for magic, one in ((IMAGES, path), (LABELS, labels_of(path))):
            try:
                arrays[magic].append(read(one, magic, key))
            except UserError as error:
                problems.add(*error.problems)
    refuse(problems.lines())
    return np.concatenate(arrays[IMAGES]), np.concatenate(arrays[LABELS])


def _open(path: Path, magic: int, key: str) -> BinaryIO:
    what = what_is_at(path)
    if what != "a file":
        state = "which does not exist" if what == "nothing there" else what
        beside = "" if magic == IMAGES else ", in the folder of the images"
        raise UserError(
            Problem(
                key,
                got=f"'{path}', {state}",
                allowed=f"a file of {_NAMES[magic]}{beside}",
                nearest=f"'{path.parent}/*'",
            )
        )
    try:
        return gzip.open(path) if _is_compressed(path) else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise UserError(_unreadable(path, error, key)) from error


def _is_compressed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == _GZIP


def _bytes(file: BinaryIO, most: int, path: Path, key: str) -> bytes:
    """Returns the next `most` bytes of an open file, decompressed, or fewer bytes at the end of the file.

    `path` and the option `key` are for error lines.

    Raises:
      UserError: the file cannot be read, or its compressed data are damaged or incomplete.
    """
    parts, left = list[bytes](), most
    try:
        while left and (part := file.read(min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
    except EOFError as error:
        raise UserError(_cut_short_problem(path, "ends before the end of its compressed data", key)) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UserError(_cut_short_problem(path, f"is damaged ({error})", key)) from error
    except OSError as error:
        raise UserError(_unreadable(path, error, key)) from error
    return b"".join(parts)


def _wrong_beginning(path: Path, first: bytes, magic: int, key: str) -> str:
    got = int.from_bytes(first[:4])
    wanted = f"0x{magic:08x}, the first bytes of an IDX file of {_NAMES[magic]}"
    if len(first) >= 4 and got in _NAMES:
        is_swapped = magic == LABELS or _images_of(path) == os.fspath(path)  # the two files have exchanged names
        fix = "the other of the two files" if is_swapped else f"'{_images_of(path)}'"
        return Problem(key, got=f"'{path}', a file of {_NAMES[got]}", allowed=wanted, nearest=fix)
    return Problem(
        key, got=f"'{path}', which starts with 0x{first[:4].hex()}", allowed=wanted, nearest="a file from MNIST"
    )


def _images_of(labels: Path) -> str:
    return os.fspath(labels.with_name(labels.name.replace("labels", "images").replace("idx1", "idx3")))


def _dims_text(dims: Sequence[int]) -> str:
    return f"{' x '.join(map(str, dims))} bytes" if len(dims) > 1 else f"{dims[0]} bytes"


def _cut_short_problem(path: Path, said: str, key: str) -> str:
    return Problem(
        key, got=f"'{path}', which {said}", allowed="complete IDX files", nearest="copy or download it again"
    )


def _unreadable(path: Path, error: OSError, key: str) -> str:
    why = error.strerror or error
    return Problem(
        key, fault=f"'{path}' cannot be read ({why})", allowed="readable files", nearest=f"chmod a+r '{path}'"
    )
