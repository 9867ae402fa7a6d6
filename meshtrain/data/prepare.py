"""Writes text as token files: `python -m meshtrain prepare --path='books/*.txt' --output=books.bin`.

If the output ends in /, it is a folder, and each file of text becomes a token file in it. Token files that are already
complete are not written again.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from meshtrain.cli import flags
from meshtrain.data.encoding.special_tokens import ENCODE, MODES, TEXT, SpecialTokens
from meshtrain.data.encoding.tokenizer_folder import folder_end_token, tokenizer_file
from meshtrain.data.packing import inner_ends
from meshtrain.data.text import find_files, is_table, only_empty, read_documents, tokens_as_text
from meshtrain.data.token_files import (
    MOST_INNER_ENDS,
    TokenFile,
    is_intact,
    make_index,
    read_description,
    sidecar_path,
    write_index,
)
from meshtrain.data.tokenizer import NO_TOKEN, Tokenizer, file_problems, open_tokenizer
from meshtrain.errors import Problem, Problems, UserError, refuse, run
from meshtrain.files import expand_user, identities, replacing, what_is_at, write_whole
from meshtrain.store.buckets import Place, version

# Amount of text that is tokenized at a time: enough for the tokenizer's threads, but small in memory.
_GROUP_BYTES = 1 << 20
_NUM_GROUPS_AHEAD = 2
# Fields of a description that are known only after all tokens are written.
_COUNTED = ("num_tokens", "num_documents", "sha256", "num_special", "inner_ends")
_KEYS = re.compile(
    r"\bdata\.(?:(path|text_field|tokenizer|end_token|begin_token|special_tokens)\b|source=tokens)"
)  # options that this command sets by flags, and the option that reads its files
_QUIET_SECONDS = 60.0  # between two lines of progress if standard error is no terminal


def _groups(files: Iterable[Place], text_field: str) -> Iterator[tuple[list[str], int]]:
    """Reads documents; yields (documents, number of bytes that they occupy in the files), about 1 MiB at a time.

    After the first problem nothing more is yielded, and the remaining files are only checked.

    Args:
      files: the files of text.
      text_field: the field of a line, or the column of a table, that contains the document.

    Raises:
      UserError: has one line for each problem, after all files are read; or all documents are empty.
    """
    texts: list[str] = []
    size = num_bytes = num_documents = num_with_text = 0
    problems = Problems()
    for path in files:
        if problems.is_enough():
            break
        for text, taken_bytes in read_documents(path, text_field, problems):
            if problems.count:
                continue
            texts.append(text)
            num_documents, num_with_text = num_documents + 1, num_with_text + bool(text)
            size, num_bytes = size + len(text), num_bytes + taken_bytes
            if size >= _GROUP_BYTES:
                yield texts, num_bytes
                texts, size, num_bytes = [], 0, 0
    refuse(problems.lines())
    if num_documents and not num_with_text:
        raise UserError(only_empty(num_documents))
    if texts:
        yield texts, num_bytes


def _tokenize(
    groups: Iterable[tuple[list[str], int]], tokenizer: Tokenizer
) -> Iterator[tuple[list[np.ndarray], int, int]]:
    """Tokenizes groups of documents; yields (ids of each document, number of bytes, number of special tokens).

    Threads tokenize the next groups ahead.

    Args:
      groups: (documents, number of bytes that they occupy in the files), from `_groups`.
      tokenizer: the tokenizer.
    """
    ahead = collections.deque[tuple[Future[list[np.ndarray]], int, int]]()
    with ThreadPoolExecutor(_NUM_GROUPS_AHEAD) as threads:
        for texts, num_bytes in groups:
            num_special = tokenizer.special.count(texts)
            ahead.append((threads.submit(tokenizer.encode_documents, texts), num_bytes, num_special))
            if len(ahead) > _NUM_GROUPS_AHEAD:
                ids, taken_bytes, taken_special = ahead.popleft()
                yield ids.result(), taken_bytes, taken_special
        for ids, taken_bytes, taken_special in ahead:
            yield ids.result(), taken_bytes, taken_special


def _write_tokens(
    files: Iterable[Place], text_field: str, tokenizer: Tokenizer, described: TokenFile, out: BinaryIO, bar: tqdm
) -> TokenFile:
    """Writes the ids of all documents, with the end id after each; returns the description with counts and sha256.

    Args:
      files: the files of text.
      text_field: the field of a line, or the column of a table, that contains the document.
      tokenizer: the tokenizer.
      described: the description of the token file, without counts and sha256.
      out: the open token file.
      bar: the progress bar, which advances by the bytes read.

    Raises:
      UserError: a file has a problem, or all documents are empty; or the documents contain more end ids than a
        description may list.
    """
    num_tokens = num_documents = num_special = 0
    digest, ends = hashlib.sha256(), list[int]()
    end = np.asarray([tokenizer.end_id], tokenizer.dtype).tobytes()
    for documents, num_bytes, num_special_here in _tokenize(_groups(files, text_field), tokenizer):
        ends += (inner_ends(documents, tokenizer.end_id) + num_tokens).tolist()
        for ids in documents:
            content = ids.astype(tokenizer.dtype).tobytes() + end
            digest.update(content)
            out.write(content)
            num_tokens += len(ids) + 1
        num_documents, num_special = num_documents + len(documents), num_special + num_special_here
        if len(ends) > MOST_INNER_ENDS:
            fix = f"begin_token={NO_TOKEN}" if tokenizer.end_id in tokenizer.begin else f"special_tokens={TEXT}"
            raise UserError(
                Problem(
                    "data.path",
                    got=f"more than {MOST_INNER_ENDS:,} end tokens inside the documents of a token file",
                    allowed="fewer, because the file's description lists them",
                    nearest=f"data.{fix}",
                )
            )
        bar.update(num_bytes)
    return dataclasses.replace(
        described,
        num_tokens=num_tokens,
        num_documents=num_documents,
        sha256=digest.hexdigest(),
        num_special=num_special,
        inner_ends=ends,
    )


def _progress(file_bytes: Iterable[int], what: str = "prepare") -> tqdm:
    """Returns a progress bar over the bytes of files, with rate and remaining time.

    If standard error is no terminal, the bar prints one line a minute.

    Args:
      file_bytes: the size of each file.
      what: the label of the bar.
    """
    quiet = 0.1 if sys.stderr.isatty() else _QUIET_SECONDS
    options = {"unit": "B", "unit_scale": True, "mininterval": quiet, "delay": quiet, "ascii": quiet > 1}
    return tqdm(total=sum(file_bytes), desc=what, **options)


def _output_problems(targets: Sequence[Path], read: Set[object], overwrite: bool) -> list[Problem]:
    """Returns an error line for each reason why the files `targets` cannot or must not be written.

    Args:
      targets: the files to write; the first is the token file.
      read: the identities (see `identities`) of all files of text, which must not be replaced.
      overwrite: whether existing files are replaced.
    """
    problems, out_path = [], targets[0]
    stands = {target: what for target in targets if (what := what_is_at(target)) != "nothing there"}
    for target, what in stands.items():
        # Other programs may use a link, a pipe or a device, so it must not be replaced by a file.
        if what != "a file" or os.path.islink(target):
            got = "a link" if os.path.islink(target) else what
            fix = Path("tokens.bin") if target == out_path else f"--output={out_path}.new.bin"
            problems.append(
                Problem("--output", got=f"'{target}', {got}", allowed="a new name, or a regular file", nearest=fix)
            )
    if stands and not overwrite and not problems:
        problems.append(
            Problem(
                "--output",
                fault=f"'{next(iter(stands))}' already exists",
                allowed="a new name",
                nearest="--overwrite",
            )
        )
    if what_is_at(out_path.parent) != "a folder":
        problems.append(
            Problem(
                "--output",
                got=f"'{out_path}', but the folder '{out_path.parent}' does not exist",
                allowed="a file in an existing folder",
                nearest="create it",
            )
        )
    problems += [
        Problem(
            "--output",
            fault=f"'{target}' is also an input file",
            allowed="another name",
            nearest=f"{out_path}.bin",
        )
        for target in stands
        if read & identities(target)
    ]
    return problems


def _folder_problems(output: str, folder: Path, overwrite: bool) -> list[Problem]:
    """Returns an error line if `folder` is no folder but exists, or if it does not exist and cannot be created.

    Args:
      output: the value of --output, for the error.
      folder: the path of the folder for token files.
      overwrite: whether existing files are replaced.
    """
    if (what := what_is_at(folder)) == "nothing there":
        return _output_problems([folder], set(), overwrite)
    if what == "a folder":
        return []
    return [Problem("--output", got=f"'{output}', {what}", allowed="a folder, or a new name", nearest="tokens/")]


def _file_names(output: str) -> Path:
    out_path = expand_user(output)
    if not out_path.name or out_path.name == "..":
        raise UserError(
            Problem(
                "--output",
                got=f"'{output}', which is not a file name",
                allowed="the file to write",
                nearest="tokens.bin",
            )
        )
    return out_path


def prepare(
    path: str,
    output: str,
    *,
    tokenizer: str = "bytes",
    end_token: str = "",
    begin_token: str = "",
    special_tokens: str = ENCODE,
    text_field: str = "text",
    overwrite: bool = False,
) -> TokenFile:
    """Writes OUTPUT (ids, uint16 or uint32), OUTPUT.json (description), OUTPUT.index, and a copy of the tokenizer.json.

    The description is written last: a token file without a description is incomplete, and training rejects it. If the
    output is a folder, incomplete token files are written again, and complete token files are not.

    Args:
      path: files, objects of buckets (`gs://`), or globs, comma separated.
      output: the .bin file to write; or, with / at its end, a folder to create, with a NAME.bin for each file NAME.
      tokenizer: `bytes`, or the path of a tokenizer.json or its folder.
      end_token: the token that ends a document; '' uses the folder's token, else a well-known token, or adds one id.
      begin_token: the token before a document; '' uses the tokens that the tokenizer.json adds, `none` no token.
      special_tokens: how special tokens in documents are encoded: `encode` (as these tokens) or `text`.
      text_field: the field of a line, or the column of a table, that contains the document.
      overwrite: replace existing files.

    Returns:
      The description of the token file; for a folder, with the total counts of all its token files.

    Raises:
      UserError: the text or the tokenizer cannot be read, or the output exists or cannot be written. In a folder, the
        valid files are written first.
    """
    out_path, is_folder = _file_names(output), output.endswith("/")
    files, problems = find_files(path)
    problems = problems or Problems(tokens_as_text(files)).lines()
    problems += file_problems(tokenizer) if tokenizer != "bytes" else []
    if is_folder:
        problems += _folder_problems(output, out_path, overwrite)
    else:
        copies = [] if tokenizer == "bytes" else [out_path.with_name(f"{out_path.name}.tokenizer.json")]
        read = set[object]().union(*map(identities, files))
        problems += _output_problems([out_path, sidecar_path(out_path), *copies], read, overwrite)
    refuse(problems)
    opened = open_tokenizer(tokenizer, end_token, begin_token, special_tokens)
    content = b"" if tokenizer == "bytes" else tokenizer_file(tokenizer).read_bytes()
    described = _description(opened, content, out_path.name * (not is_folder), end_token or folder_end_token(tokenizer))
    write = functools.partial(_write, text_field=text_field, tokenizer=opened, content=content)
    try:
        if is_folder:
            described = _write_each(files, described, out_path, overwrite, text_field, write)
            _restore_copy(out_path / described.tokenizer, content)
            return described
        if len(files) == 1:
            described = _with_source(described, *next(iter(files.items())), text_field)
        with _progress(files.values()) as bar:
            return write(files, out_path, bar, described=described)
    except OSError as error:
        fault = f"'{output}' cannot be written ({error.strerror or error})"
        raise UserError(Problem("--output", fault=fault, allowed="a writable file", nearest="tokens.bin")) from error


def _restore_copy(path: Path, content: bytes) -> None:
    """Writes the tokenizer.json `content` to `path` if the file there is missing or differs; b"" writes nothing.

    For a folder whose token files are already complete, so that no other function writes this copy.
    """
    if content and (what_is_at(path) != "a file" or path.read_bytes() != content):
        write_whole(path, content)


def _description(tokenizer: Tokenizer, content: bytes, name: str, end_token: str) -> TokenFile:
    """Returns the description of a token file before it is written, without counts and sha256.

    Args:
      tokenizer: the tokenizer.
      content: the bytes of the tokenizer.json; b"" for the tokenizer `bytes`.
      name: the name of the token file; '' for a folder, whose token files share one copy of the tokenizer.json.
      end_token: the token that ends a document; '' if the tokenizer's default is used.
    """
    digest = hashlib.sha256(content).hexdigest() if content else ""
    copied = f"{name}.tokenizer.json" if name else f"tokenizer.{digest[:8]}.json"
    return TokenFile(
        dtype=tokenizer.dtype.name,
        vocab_size=tokenizer.vocab_size,
        num_tokens=0,
        num_documents=0,
        end_id=tokenizer.end_id,
        tokenizer=copied if content else "bytes",
        tokenizer_sha256=digest,
        end_token=end_token,  # the copy has no tokenizer_config.json next to it
        begin=list(tokenizer.begin),
        special_tokens=TEXT if tokenizer.special.as_text else ENCODE,
    )


def _with_source(described: TokenFile, file: Place, num_bytes: int, text_field: str) -> TokenFile:
    """Returns `described` with the path, size and version of the file of text from which the token file is made.

    Called before the text is read, so that a later change of the text is detected.

    Args:
      described: the description of the token file.
      file: the file of text.
      num_bytes: the size of this file.
      text_field: the field of a line, or the column of a table, that contains the document.
    """
    return dataclasses.replace(
        described,
        text_field=text_field if is_table(file) else "",
        source=os.path.realpath(file) if isinstance(file, Path) else str(file),
        source_bytes=num_bytes,
        source_version=version(file, "--path"),
    )


def _write(
    files: Iterable[Place],
    out_path: Path,
    bar: tqdm,
    *,
    text_field: str,
    tokenizer: Tokenizer,
    content: bytes,
    described: TokenFile,
) -> TokenFile:
    """Writes a token file, its description, its index, and the copy of the tokenizer.json; returns the description.

    Args:
      files: the files of text.
      out_path: the token file to write.
      bar: the progress bar, which advances by the bytes read.
      text_field: the field of a line, or the column of a table, that contains the document.
      tokenizer: the tokenizer.
      content: the bytes of the tokenizer.json; b"" for the tokenizer `bytes`.
      described: the description of the token file, without counts and sha256.
    """
    with replacing(out_path) as out:
        described = _write_tokens(files, text_field, tokenizer, described, out, bar)
        # The old description is deleted first and the new one written last: it never describes other tokens.
        sidecar_path(out_path).unlink(missing_ok=True)
        if content:
            write_whole(out_path.with_name(described.tokenizer), content)
    write_whole(sidecar_path(out_path), json.dumps(dataclasses.asdict(described), indent=2) + "\n")
    if described.num_tokens:
        write_index(out_path, make_index(out_path, described, whole=True))
    return described


def _write_each(
    files: Mapping[Place, int],
    described: TokenFile,
    folder: Path,
    overwrite: bool,
    text_field: str,
    write: Callable[..., TokenFile],
) -> TokenFile:
    """Writes a token file for each file of text, except for token files that are already complete.

    Args:
      files: file of text -> its size in bytes.
      described: the description that all token files share, without source, counts and sha256.
      folder: the folder of the token files, created if it is missing.
      overwrite: whether existing token files are replaced.
      text_field: the field of a line, or the column of a table, that contains the document.
      write: the function `_write`, with the arguments that are the same for all files already bound.

    Returns:
      `described` with the total counts of all token files.

    Raises:
      UserError: two files of text have the same name, or one line for each file with a problem.
    """
    parts = {folder / f"{path.name}.bin": path for path in files}
    if len(parts) < len(files):
        raise UserError(
            Problem(
                "--path",
                got=f"{len(files) - len(parts)} files with the same name as another file",
                allowed="different file names if --output is a folder",
                nearest="one folder at a time",
            )
        )
    wanted = {part: _with_source(described, path, files[path], text_field) for part, path in parts.items()}
    whole, again, problems = _complete({} if overwrite else wanted)
    left, read = [part for part in parts if part not in whole], set[object]().union(*map(identities, files))
    for part in left:
        targets, is_new = [part, sidecar_path(part)], what_is_at(sidecar_path(part)) == "nothing there"
        if folder.exists() and not problems.count:
            problems.add(*_output_problems(targets, read, overwrite or is_new or part in again))
    refuse(problems.lines())
    folder.mkdir(exist_ok=True)
    for part, why in again.items():
        print(f"{part}: {why}; preparing it again", flush=True)
    if whole:
        print(f"{folder}: {len(whole):,} of {len(parts):,} files are complete", flush=True)
    with _progress(files[parts[part]] for part in left) as bar:
        for part in left:
            try:
                whole[part] = write([parts[part]], part, bar, described=wanted[part])
            except UserError as error:
                problems.add(*error.problems)
    refuse(problems.lines())
    names = ("num_tokens", "num_documents", "num_special")
    counts = {name: sum(getattr(part, name) for part in whole.values()) for name in names}
    return dataclasses.replace(described, **counts)


def _complete(wanted: Mapping[Path, TokenFile]) -> tuple[dict[Path, TokenFile], dict[Path, str], Problems]:
    """Determines which token files of a folder are complete, by comparing them with this command's options and texts.

    Each token file is read to its end, to verify its sha256.

    Args:
      wanted: token file -> the description that this command would write, without counts and sha256.

    Returns:
      {complete token file: its description}; {token file to write again: the reason}; and an error line for each token
      file that was prepared with other options, which only `--overwrite` replaces.
    """
    whole, again, problems = dict[Path, TokenFile](), dict[Path, str](), Problems()
    sizes = {part: part.stat().st_size for part in wanted if what_is_at(part) == "a file"}
    with _progress(sizes.values(), "compare") as bar:
        for part, num_bytes in sizes.items():
            bar.update(num_bytes)
            if what_is_at(sidecar_path(part)) == "nothing there":
                continue
            try:
                old, new = read_description(part), wanted[part]
                problem, change = _difference(part, old, new)
            except UserError as error:
                problems.add(*(one.with_parts(fix=f"{one.fix}, or --overwrite") for one in error.problems))
                continue
            if problem:
                problems.add(problem)
            elif change:
                again[part] = change
            else:
                whole[part] = old
    return whole, again, problems


def _difference(part: Path, old: TokenFile, new: TokenFile) -> tuple[Problem | None, str]:
    """Compares a token file's description with the description that this command would write.

    Args:
      part: the token file.
      old: its description.
      new: the description that this command would write, without counts and sha256.

    Returns:
      (problem, '') if the token file was prepared with other options or from another file: only `--overwrite` replaces
        it. (None, reason) if it must be written again, because the text has changed or the ids are damaged. (None, '')
        if it is complete.
    """
    found = {
        field.name: (getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(TokenFile)
    }
    differing = [name for name, (was, now) in found.items() if name not in _COUNTED and was != now]
    options = [name for name in differing if name not in ("source_bytes", "source_version")]
    fault = ""
    if not old.source:
        fault = f"'{part}' is from an earlier version, which did not record its source"
    elif options:
        was, now = found[options[0]]
        fault = f"'{part}' was prepared with {options[0]} {was!r}, and this command has {now!r}"
    if fault:
        fix = "another --output, or --overwrite"
        return Problem("--output", fault=fault, allowed="a separate folder for each set of options", nearest=fix), ""
    if differing:
        return None, f"'{new.source}' has changed since it was prepared"
    return None, "" if is_intact(part, old) else "it is damaged: its ids differ from its checksum"


def _as_flags(problem: Problem) -> Problem:
    """Replaces the configuration's keys in a problem, such as data.path, by flags of this command, such as --path."""
    if problem.nearest == "data.source=python":
        problem = problem.with_parts(nearest="--path='*.txt'")
    parts = {name: getattr(problem, name) for name in ("key", "fault", "allowed", "condition", "fix")}
    return problem.with_parts(**{name: _KEYS.sub(_as_flag, text) for name, text in parts.items()})


def _as_flag(key: re.Match[str]) -> str:
    return f"--{key[1]}" if key[1] else f"train on it with {key[0]}"


def main(arguments: Sequence[str]) -> None:
    """Runs the command `prepare`: writes token files, and prints their counts and the options to train on them."""
    parser = flags.Parser(prog="python -m meshtrain prepare", description=__doc__, allow_abbrev=False)
    kinds = ".txt, .py, .jsonl, .parquet, and text as .gz or .zst"
    parser.add_argument(
        "--path", metavar="FILES", required=True, help=f"files or globs, also gs://, comma separated: {kinds}"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        required=True,
        help="the .bin file; or FOLDER/ for one file per input, which an interrupted command can resume",
    )
    parser.add_argument("--tokenizer", metavar="FILE", default="bytes", help="bytes, or a tokenizer.json or its folder")
    parser.add_argument("--end_token", default="", help="the token that ends a document")
    parser.add_argument("--begin_token", default="", help="the token before a document; none: no token")
    parser.add_argument(
        "--special_tokens",
        choices=MODES,
        default=ENCODE,
        help="text: a special token's text in a document is encoded as plain text",
    )
    parser.add_argument(
        "--text_field", default="text", help="the field of a JSON line, or the column of a table, with the document"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    given = parser.parse_args(arguments)
    try:
        described = prepare(**vars(given))
    except UserError as error:
        raise UserError(*map(_as_flags, error.problems)) from error
    print(
        f"{given.output}: {described.num_tokens:,} tokens of {described.num_documents:,} documents, {described.dtype}, "
        f"vocabulary {described.vocab_size:,}"
        f"{SpecialTokens({}, given.special_tokens == TEXT).counted(described.num_special)}"
    )
    names = f"'{given.output}*.bin'" if given.output.endswith("/") else given.output
    print(f"train on it: --config.data.source=tokens --config.data.path={names}")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
