"""Prepared token files: NAME.bin holds token ids only, NAME.bin.json describes them."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from meshtrain.data.tokenizer import Tokenizer, byte_tokenizer, file_tokenizer
from meshtrain.errors import Problems, UserError, unknown
from meshtrain.files import what_is_at

DTYPES = ("uint16", "uint32")

_WRITTEN = "allowed: what python -m meshtrain prepare writes; nearest: prepare it again"
_CHUNK_BYTES = 1 << 24
_WHOLE_UP_TO_BYTES = 1 << 32
_NUM_SAMPLED_CHUNKS = 64


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
    """

    dtype: str
    vocab_size: int
    num_tokens: int
    num_documents: int
    end_id: int
    tokenizer: str
    tokenizer_sha256: str
    end_token: str


def sidecar_path(path: Path) -> Path:
    """Returns the path of the description of the token file `path`."""
    return path.with_name(path.name + ".json")


def read_sidecar(path: Path) -> TokenFile:
    """Reads the description of the token file `path` and checks the file's size against it.

    Raises:
      UserError: the description is missing or malformed, or the file has another size.
    """
    sidecar = sidecar_path(path)
    wanted = {field.name: field.type for field in dataclasses.fields(TokenFile)}
    try:
        if (what := what_is_at(sidecar)) not in ("a file", "nothing there"):
            raise OSError(None, what)  # not opened: reading a pipe would block
        content = json.loads(sidecar.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"data.path: '{path}' has no readable '{sidecar.name}' beside it ({error.strerror}); allowed: files "
            "written by python -m meshtrain prepare; nearest: data.source=text if it is text"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.path: '{sidecar}' is no JSON ({error}); {_WRITTEN}") from error
    if not isinstance(content, dict) or any(type(content.get(name)) is not kind for name, kind in wanted.items()):
        raise UserError(f"data.path: '{sidecar}' must be an object with {', '.join(wanted)}; {_WRITTEN}")
    described = TokenFile(**{name: content[name] for name in wanted})
    if described.dtype not in DTYPES:
        raise UserError(unknown(f"dtype in '{sidecar}'", described.dtype, DTYPES) + "; nearest: prepare it again")
    bounds = {"vocab_size": 1, "num_tokens": 0, "num_documents": 0, "end_id": -1}
    wrong = [name for name, least in bounds.items() if getattr(described, name) < least]
    if described.end_id >= described.vocab_size:
        wrong.append("end_id")
    if described.vocab_size > np.iinfo(described.dtype).max + 1:  # ids that this dtype cannot hold
        wrong.append("vocab_size")
    if (
        wrong
        or not described.tokenizer
        or Path(described.tokenizer).name != described.tokenizer
        or "\0" in described.tokenizer
    ):
        got = ", ".join(f"{name} {getattr(described, name)}" for name in wrong) or f"tokenizer '{described.tokenizer}'"
        raise UserError(f"data.path: '{sidecar}' says {got}; {_WRITTEN}")
    expected_bytes = described.num_tokens * np.dtype(described.dtype).itemsize
    if path.stat().st_size != expected_bytes:
        raise UserError(
            f"data.path: '{path}' has {path.stat().st_size} bytes; its description says {described.num_tokens} tokens "
            f"in {expected_bytes} bytes; {_WRITTEN}"
        )
    return described


def _chunks(path: Path, dtype: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first position, ids): the whole file up to 4 GiB, else 64 evenly spaced chunks with both ends."""
    array = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r")
    length = _CHUNK_BYTES // array.itemsize
    if array.nbytes <= _WHOLE_UP_TO_BYTES:
        starts = list(range(0, len(array), length))
    else:
        starts = [int(start) for start in np.linspace(0, len(array) - length, _NUM_SAMPLED_CHUNKS)]
    for start in starts:
        yield start, array[start : start + length]


def scan(path: Path, described: TokenFile, vocab_size: int) -> tuple[str, str]:
    """Reads a token file once, in chunks, and returns its digest and its first id outside the vocabulary.

    Files above 4 GiB are sampled: a change or a bad id between the samples goes unnoticed.

    Args:
      path: the token file.
      described: its description.
      vocab_size: the model's; every id must be below.

    Returns:
      Hexadecimal sha256 over size and chunks, and a line for the problem or ``.
    """
    digest = hashlib.sha256(f"{described.dtype} {described.num_tokens}".encode())
    largest, problem = -1, ""
    for start, ids in _chunks(path, described.dtype):
        digest.update(ids.data)
        largest = max(largest, int(ids.max()))
        if largest >= vocab_size and not problem:
            position = int(np.argmax(ids >= vocab_size))
            problem = f"'{path}' holds id {ids[position]} at token {start + position}"
    needed = max(largest + 1, described.vocab_size)
    if not problem and needed > vocab_size:
        problem = f"'{path}' was written with a vocabulary of {needed} ids"
    if problem:
        problem = (
            f"data.path: {problem}; allowed: ids below model.vocab_size, {vocab_size}; nearest: set it to {needed}"
        )
    return digest.hexdigest(), problem


def token_file_tokenizer(path: Path, described: TokenFile) -> Tokenizer:
    """Returns the tokenizer that wrote the token file `path`.

    Raises:
      UserError: its tokenizer.json is no longer beside the file, or has changed.
    """
    if described.tokenizer == "bytes":
        return byte_tokenizer()
    beside = path.with_name(described.tokenizer)
    tokenizer = file_tokenizer(str(beside), described.end_token)
    if hashlib.sha256(beside.read_bytes()).hexdigest() != described.tokenizer_sha256:
        raise UserError(f"data.path: '{beside}' is not the tokenizer that wrote '{path}'; {_WRITTEN}")
    return tokenizer


def open_token_files(files: Sequence[Path], vocab_size: int) -> tuple[list[np.ndarray], str]:
    """Memory-maps token files that belong together.

    Args:
      files: the .bin files, in order.
      vocab_size: the model's; every id must be below.

    Returns:
      One read-only array [num_tokens] a file, and the digest of them all.

    Raises:
      UserError: the files differ in tokenizer, ids do not fit, or a description is missing or wrong.
    """
    problems: list[str] = []
    described: list[TokenFile] = []
    digest = hashlib.sha256()
    for path in files:
        described.append(one := read_sidecar(path))
        names = ("vocab_size", "end_id", "tokenizer_sha256")
        differing = [name for name in names if getattr(one, name) != getattr(described[0], name)]
        problems += [
            f"data.path: '{path}' has {name} {getattr(one, name)!r}, but the first file has "
            f"{getattr(described[0], name)!r}; allowed: files prepared with one tokenizer; nearest: prepare them again"
            for name in differing
        ]
        file_digest, problem = scan(path, one, vocab_size)
        digest.update(file_digest.encode())
        problems += [problem] if problem else []
    if problems:
        raise UserError(*Problems(problems).lines())
    arrays = [
        np.memmap(path, np.dtype(one.dtype).newbyteorder("<"), "r") for path, one in zip(files, described, strict=True)
    ]
    return list(arrays), digest.hexdigest()
