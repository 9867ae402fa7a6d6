"""Documents: from files that the user names, or from the running Python's standard library."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from meshtrain.errors import UserError, nearest

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_MOST_PROBLEMS = 10


def standard_library() -> list[tuple[str, str]]:
    """Returns (path within the library, text) of each .py file, sorted: about 11 MB that every machine has.

    Tests, installed packages, and files that cannot be read as UTF-8 are left out.

    Raises:
      UserError: this Python came without the source of its library.
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
            f"data.source: got 'python', but {root} holds no readable .py files; allowed: a Python with its "
            "library's source, or data.source=text with data.path"
        )
    return sorted(documents)


def share(key: str) -> float:
    """Returns a number in [0, 1) that depends on nothing but `key`: which documents are kept for validation.

    The prefix was chosen so that of the standard library's files no single large one fills the validation split.
    """
    return int.from_bytes(hashlib.sha256(f"validation {key}".encode()).digest()[:8]) / 2**64


def _beside(path: Path) -> str:
    """Returns the near miss among the files that stand where `path` was looked for."""
    try:
        return nearest(path.name, os.listdir(path.parent))
    except OSError:
        return f"; the folder '{path.parent}' does not exist" if not path.parent.exists() else ""


def find_files(paths: str) -> tuple[list[Path], list[str]]:
    """Finds the files of `data.path`, reading none of them.

    Args:
      paths: files or globs (`**` for any depth), comma separated.

    Returns:
      The files in order, each once, and one line for each problem. In a glob, files of size 0 are passed over.
    """
    files: dict[Path, None] = {}
    problems = []
    items = [os.path.expanduser(item.strip()) for item in paths.split(",") if item.strip()]
    if not items:
        problems.append("data.path: got ''; allowed: files or globs, comma separated; nearest: data.source=python")
    for item in items:
        path = Path(item)
        if path.is_file():
            files[path] = None
            if not path.stat().st_size:
                problems.append(f"data.path: got '{item}', which is empty; allowed: files with at least one sequence")
        elif path.is_dir():
            problems.append(f"data.path: got '{item}', a folder; allowed: files or globs; nearest: '{path}/*'")
        elif glob.has_magic(item):
            found = [Path(name) for name in sorted(glob.glob(item, recursive=True))]
            full = [one for one in found if one.is_file() and one.stat().st_size]
            files.update(dict.fromkeys(full))
            if not full:
                what = f"only folders or empty files ({len(found)})" if found else "nothing"
                problems.append(f"data.path: got '{item}', which matches {what}; allowed: a glob that matches files")
        else:
            problems.append(
                f"data.path: got '{item}', which does not exist; allowed: existing files or globs{_beside(path)}"
            )
    problems += [f"data.path: '{path}' is not readable by this user" for path in files if not os.access(path, os.R_OK)]
    return list(files), some(problems)


def some(problems: list[str]) -> list[str]:
    """Returns the first few problems, and how many more there are."""
    if len(problems) <= _MOST_PROBLEMS:
        return problems
    return problems[:_MOST_PROBLEMS] + [f"... and {len(problems) - _MOST_PROBLEMS} more like these"]


def _line_text(line: bytes, where: str, text_field: str) -> str:
    try:
        fields = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise UserError(f"data.path: {where} is no JSON in UTF-8 ({error}); allowed: one JSON object a line") from error
    if not isinstance(fields, dict) or not isinstance(fields.get(text_field), str):
        texts = [name for name, value in fields.items() if isinstance(value, str)] if isinstance(fields, dict) else []
        raise UserError(
            f"data.text_field: got '{text_field}', which holds no text in {where}; "
            f"allowed there: {', '.join(texts) or 'nothing'}{nearest(text_field, texts)}"
        )
    text = str(fields[text_field])
    # JSON can escape half of a surrogate pair, which is no character and has no bytes in UTF-8.
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"data.path: {where} escapes half of a surrogate pair; allowed: whole characters")
    return text


def read_documents(path: Path, text_field: str) -> Iterator[tuple[str, int]]:
    """Yields the documents of one file: each line of a .jsonl, or the whole of any other file.

    Args:
      path: the file; what is not .jsonl is read whole.
      text_field: the field of a .jsonl line that holds the document.

    Yields:
      The text, and how many bytes of the file it took.

    Raises:
      UserError: the file cannot be read, is not UTF-8, or a line does not hold a document.
    """
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _line_text(line, f"{path}, line {number}", text_field), len(line)
            return
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"data.path: '{path}' cannot be read ({error.strerror or error})") from error
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        hint = "; nearest: data.source=tokens for a prepared file" if path.suffix == ".bin" else ""
        raise UserError(
            f"data.path: '{path}' is not UTF-8 text (byte {error.start} is {content[error.start]:#04x}); "
            f"allowed: text in UTF-8{hint}"
        ) from error
    yield text, len(content)
