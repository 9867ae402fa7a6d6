"""Documents: from files that the user names, or from the running Python's standard library."""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from meshtrain.errors import Problems, UserError, nearest
from meshtrain.files import is_utf8, what_is_at

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_ZEROS_IN = 1 << 16  # bytes of a file's beginning in which zero bytes are looked for


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
    """Returns a number in [0, 1) that is a hash of `key`: documents below `validation_fraction` are for validation.

    The prefix was chosen so that no single large file of the standard library fills the validation split.
    """
    return int.from_bytes(hashlib.sha256(f"validation {key}".encode()).digest()[:8]) / 2**64


def _beside(path: Path) -> str:
    """Returns a hint at the file in the folder of `path` with the closest name, else at the folder that exists."""
    folder = path.parent
    while what_is_at(folder) != "a folder" and folder != folder.parent:
        folder = folder.parent
    try:
        names = sorted(name for name in os.listdir(folder) if what_is_at(folder / name) == "a file")
    except OSError:  # a folder that may not be read
        names = []
    fix = nearest(path.name, names) if folder == path.parent else f"; the folder '{path.parent}' does not exist"
    every = folder / "*"
    return fix if "did you mean" in fix else f"{fix}; nearest: '{every}'"


def find_files(paths: str) -> tuple[list[Path], list[str]]:
    """Returns the files of `data.path`; none of them is read.

    Args:
      paths: files or globs (`**` for any depth), comma separated.

    Returns:
      The files in order, without duplicates, and one line for each problem. Globs skip empty files.
    """
    files: dict[Path, None] = {}
    problems = []
    items = [os.path.expanduser(item.strip()) for item in paths.split(",") if item.strip()]
    if not items:
        problems.append("data.path: got ''; allowed: files or globs, comma separated; nearest: data.source=python")
    for item in items:
        path, what = Path(item), what_is_at(item)
        if what == "a file":
            files[path] = None
            if not path.stat().st_size:
                problems.append(
                    f"data.path: got '{item}', which is empty; allowed: files with at least one sequence; "
                    f"nearest: '{path.parent}/*'"
                )
        elif what == "a folder":
            problems.append(f"data.path: got '{item}', a folder; allowed: files or globs; nearest: '{path}/*'")
        elif what == "nothing there" and glob.has_magic(item):
            found = [Path(name) for name in sorted(glob.glob(item, recursive=True))]
            full = [one for one in found if what_is_at(one) == "a file" and one.stat().st_size]
            files.update(dict.fromkeys(full))
            if not full:
                said = f"only folders or empty files ({len(found)})" if found else "nothing"
                problems.append(
                    f"data.path: got '{item}', which matches {said}; allowed: a glob that matches files{_beside(path)}"
                )
        else:
            said = "which does not exist" if what == "nothing there" else what
            problems.append(f"data.path: got '{item}', {said}; allowed: existing files or globs{_beside(path)}")
    problems += [
        f"data.path: got '{path}', which this user may not read; allowed: readable files; nearest: chmod a+r '{path}'"
        for path in files
        if not _can_read(path)
    ]
    return list(files), Problems(problems).lines()


def _can_read(path: Path) -> bool:
    # A real attempt: `os.access` answers for the real user, and the process may run with the rights of another.
    try:
        path.open("rb").close()
    except OSError:
        return False
    return True


def tokens_as_text(files: Iterable[Path]) -> list[str]:
    """Returns one line for each file that holds prepared tokens, to be called where text is to be read.

    A token file has its description beside it, or zero bytes. It has to be refused here: the bytes of small ids are
    legal UTF-8, so a model would learn from them without an error.
    """
    problems = []
    for path in files:
        sidecar = path.with_name(f"{path.name}.json")
        if path.suffix == ".bin" and what_is_at(sidecar) == "a file":
            got = f"which holds tokens, as '{sidecar.name}' beside it says"
        elif _has_zeros(path):
            got = "which has zero bytes, as token files have and text has not"
        else:
            continue
        problems.append(f"data.path: got '{path}', {got}; allowed: text in UTF-8; nearest: data.source=tokens")
    return problems


def _has_zeros(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(_ZEROS_IN)
    except OSError:  # `find_files` reports it
        return False


def _line_text(line: bytes, where: str, text_field: str) -> str:
    try:
        fields = json.loads(line)
    # JSONDecodeError and UnicodeDecodeError are both ValueErrors; brackets may be nested deeper than Python can follow.
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"data.path: {where} is no JSON in UTF-8 ({error}); allowed: one JSON object a line; "
            "nearest: leave out that line"
        ) from error
    if not isinstance(fields, dict) or not isinstance(fields.get(text_field), str):
        texts = [name for name, value in fields.items() if isinstance(value, str)] if isinstance(fields, dict) else []
        fix = f"; nearest: data.text_field={texts[0]}" if texts else '; nearest: lines like {"text": "..."}'
        raise UserError(
            f"data.text_field: got '{text_field}', which holds no text in {where}; "
            f"allowed there: {', '.join(texts) or 'nothing'}{nearest(text_field, texts) or fix}"
        )
    text = str(fields[text_field])
    # JSON can escape half of a surrogate pair, which UTF-8 cannot encode.
    if not text.isascii() and not is_utf8(text):
        raise UserError(
            f"data.path: {where} escapes half of a surrogate pair; allowed: whole characters; "
            "nearest: leave out that line"
        )
    return text


def read_documents(path: Path, text_field: str, problems: Problems) -> Iterator[tuple[str, int]]:
    """Yields the documents of one file: each line of a .jsonl, or the whole of any other file.

    Args:
      path: the file; what is not .jsonl is read whole.
      text_field: the field of a .jsonl line that holds the document.
      problems: gets a line where the file cannot be read or is not UTF-8, and for each line that holds no document;
        reading continues after a problem until `problems.is_enough()`.

    Yields:
      The text, and how many bytes of the file it took.
    """
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.strip():
                        continue
                    try:
                        yield _line_text(line, f"{path}, line {number}", text_field), len(line)
                    except UserError as error:
                        problems.add(str(error))
                        if problems.is_enough():
                            return
            return
        content = path.read_bytes()
    except OSError as error:
        problems.add(
            f"data.path: '{path}' cannot be read ({error.strerror or error}); allowed: readable files{_beside(path)}"
        )
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        fix = "data.source=tokens" if path.suffix == ".bin" else f"iconv -t UTF-8 '{path}'"
        problems.add(
            f"data.path: '{path}' is not UTF-8 text (byte {error.start} is {content[error.start]:#04x}); "
            f"allowed: text in UTF-8; nearest: {fix}"
        )
        return
    yield text, len(content)
