"""Writes text as a token file: `python -m meshtrain prepare --path='books/*.txt' --output=books.bin`."""

import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from meshtrain.cli import flags
from meshtrain.data.text import find_files, read_documents, tokens_as_text
from meshtrain.data.token_files import TokenFile, sidecar_path
from meshtrain.data.tokenizer import Tokenizer, file_problems, folder_end_token, open_tokenizer, tokenizer_file
from meshtrain.errors import Problems, UserError, run
from meshtrain.files import expanded, replacing, what_is_at, write_whole

# Bytes of text tokenized at a time: enough for the tokenizer's threads, few enough that the bar moves.
_GROUP_BYTES = 1 << 22


def _groups(files: Sequence[Path], text_field: str) -> Iterator[tuple[list[str], int]]:
    """Yields documents a few MiB at a time, and how many bytes of the files they took.

    Raises:
      UserError: one line for each problem, once all files are read. After the first problem nothing is yielded.
    """
    texts: list[str] = []
    num_bytes = 0
    problems = Problems()
    for path in files:
        if problems.is_enough():
            break
        for text, taken_bytes in read_documents(path, text_field, problems):
            if problems.count:
                continue
            texts.append(text)
            num_bytes += taken_bytes
            if num_bytes >= _GROUP_BYTES:
                yield texts, num_bytes
                texts, num_bytes = [], 0
    if problems.count:
        raise UserError(*problems.lines())
    if texts:
        yield texts, num_bytes


def _write_tokens(files: Sequence[Path], text_field: str, tokenizer: Tokenizer, out: BinaryIO) -> tuple[int, int]:
    """Writes the ids of all documents, each followed by the end id; returns (num_tokens, num_documents)."""
    num_tokens = num_documents = 0
    end = np.asarray([tokenizer.end_id], tokenizer.dtype).tobytes()
    total_bytes = sum(path.stat().st_size for path in files)
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="prepare", disable=None) as bar:
        for texts, num_bytes in _groups(files, text_field):
            for ids in tokenizer.encode_documents(texts):
                out.write(ids.astype(tokenizer.dtype).tobytes())
                out.write(end)
                num_tokens += len(ids) + 1
                num_documents += 1
            bar.update(num_bytes)
    return num_tokens, num_documents


def _output_problems(targets: Sequence[Path], files: Sequence[Path], overwrite: bool) -> list[str]:
    """Returns one line for each reason not to write `targets`, the token file first, from `files`."""
    problems, out_path = [], targets[0]
    stands = {target: what for target in targets if (what := what_is_at(target)) != "nothing there"}
    for target, what in stands.items():
        # Other programs may use a link, a pipe or a device: it is not replaced by a file.
        if what != "a file" or os.path.islink(target):
            got = "a link" if os.path.islink(target) else what
            fix = Path("tokens.bin") if target == out_path else f"--output={out_path}.new.bin"
            problems.append(f"--output: got '{target}', {got}; allowed: a new name, or a file; nearest: {fix}")
    if stands and not overwrite and not problems:
        problems.append(f"--output: '{next(iter(stands))}' is there already; allowed: a new name; nearest: --overwrite")
    if what_is_at(out_path.parent) != "a folder":
        problems.append(
            f"--output: got '{out_path}', but the folder '{out_path.parent}' does not exist; nearest: create it; "
            "allowed: a file in a folder that does"
        )
    if what_is_at(out_path) == "a file" and any(one.samefile(out_path) for one in files):
        problems.append(f"--output: '{out_path}' is also read as text; allowed: another name; nearest: {out_path}.bin")
    return problems


def _named(output: str) -> Path:
    out_path = expanded(output)
    if not out_path.name or out_path.name == "..":
        raise UserError(f"--output: got '{output}', no file's name; allowed: the file to write; nearest: tokens.bin")
    return out_path


def prepare(
    path: str,
    output: str,
    *,
    tokenizer: str = "bytes",
    end_token: str = "",
    text_field: str = "text",
    overwrite: bool = False,
) -> TokenFile:
    """Writes OUTPUT (ids, uint16 or uint32) and OUTPUT.json (their description), and copies a tokenizer.json.

    The description is written last: a token file without one is refused.

    Args:
      path: files or globs, comma separated.
      output: the .bin file to write.
      tokenizer: `bytes`, or the path of a tokenizer.json or its folder.
      end_token: the token that ends a document; `` takes the folder's, else a well-known one, or adds one id.
      text_field: the field of a .jsonl line that holds the document.
      overwrite: replace existing files.

    Returns:
      The description that was written.

    Raises:
      UserError: the text or the tokenizer cannot be read, or the output exists or cannot be written.
    """
    out_path = _named(output)
    copied = out_path.with_name(out_path.name + ".tokenizer.json")
    targets = [out_path, sidecar_path(out_path), copied][: 2 if tokenizer == "bytes" else 3]
    files, problems = find_files(path)
    problems = problems or Problems(tokens_as_text(files)).lines()
    problems += file_problems(tokenizer) if tokenizer != "bytes" else []
    if problems := problems + _output_problems(targets, files, overwrite):
        raise UserError(*problems)
    opened = open_tokenizer(tokenizer, end_token)
    content = b"" if tokenizer == "bytes" else tokenizer_file(tokenizer).read_bytes()
    end_token = end_token or folder_end_token(tokenizer)  # the copy has no tokenizer_config.json beside it
    try:
        with replacing(out_path) as out:
            num_tokens, num_documents = _write_tokens(files, text_field, opened, out)
            # The old description is deleted first and the new one written last: it never describes other tokens.
            sidecar_path(out_path).unlink(missing_ok=True)
            if content:
                write_whole(copied, content)
        described = TokenFile(
            dtype=opened.dtype.name,
            vocab_size=opened.vocab_size,
            num_tokens=num_tokens,
            num_documents=num_documents,
            end_id=opened.end_id,
            tokenizer=copied.name if content else "bytes",
            tokenizer_sha256=hashlib.sha256(content).hexdigest() if content else "",
            end_token=end_token,
        )
        write_whole(sidecar_path(out_path), json.dumps(dataclasses.asdict(described), indent=2) + "\n")
    except OSError as error:
        why = f"cannot be written ({error.strerror or error})"
        raise UserError(f"--output: '{output}' {why}; allowed: a file that can; nearest: tokens.bin") from error
    return described


def _as_flags(problem: str) -> str:
    """Returns a problem of the data with this program's flags instead of the configuration's fields."""
    problem = problem.replace("data.source=tokens", "train on it with data.source=tokens")
    problem = problem.replace("nearest: data.source=python", "nearest: --path='*.txt'")
    return re.sub(r"\bdata\.(path|text_field|tokenizer|end_token)\b", r"--\1", problem)


def main(arguments: Sequence[str]) -> None:
    """Parses the command line, writes the token file, and prints what it holds."""
    parser = flags.Parser(prog="python -m meshtrain prepare", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--path", metavar="FILES", required=True, help="files or globs, commas between: .txt, .py, .jsonl"
    )
    parser.add_argument("--output", metavar="FILE", required=True, help="the .bin file to write")
    parser.add_argument("--tokenizer", metavar="FILE", default="bytes", help="bytes, or a tokenizer.json or its folder")
    parser.add_argument("--end_token", default="", help="the token that ends a document")
    parser.add_argument("--text_field", default="text", help="the field of a .jsonl line that holds the document")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    given = parser.parse_args(arguments)
    try:
        described = prepare(**vars(given))
    except UserError as error:
        raise UserError(*map(_as_flags, error.problems)) from error
    print(
        f"{given.output}: {described.num_tokens:,} tokens of {described.num_documents:,} documents, {described.dtype}, "
        f"vocabulary {described.vocab_size:,}"
    )
    print(f"train on it: --config.data.source=tokens --config.data.path={given.output}")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
