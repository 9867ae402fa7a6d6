"""Writes questions about the standard library, made from its docstrings, for docs/guide/finetuning.md.

    scripts/bench docstring_questions runs/example

A question is a function's name and signature, the answer is the first line of its docstring. Functions are read from
the source, because importing every module would run it. A file's functions are held out if a run with `data.source` =
python holds the file out. Therefore neither the run's training nor the fine-tuning has seen them.
"""

import argparse
import ast
import inspect
import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshtrain.data.sources import DataOptions
from meshtrain.data.text import share, standard_library
from meshtrain.errors import UserError, run
from meshtrain.files import what_is_at, write_whole

QUESTIONS, HELD_OUT = "questions.jsonl", "held_out.jsonl"
SHORTEST, LONGEST = 12, 120  # characters of an answer; of both, so that they fit 128 bytes with the template


class Asked(NamedTuple):
    """A function with its file in the library, name and signature, and the first line of its docstring."""

    path: str
    question: str
    answer: str


def functions(path: str, source: str) -> list[Asked]:
    """Returns the functions and methods of a file that have a docstring, in the order of `ast.walk`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files have escapes about which Python warns
        try:
            tree = ast.parse(source)
        except SyntaxError:  # the library keeps some files broken on purpose
            return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node, clean=False)):
            first = inspect.cleandoc(text).partition("\n")[0].strip()
            found.append(Asked(path, f"{node.name}({ast.unparse(node.args)})", first))
    return found


def split(asked: Iterable[Asked]) -> tuple[list[Asked], list[Asked]]:
    """Returns the training questions and the held-out questions.

    Each answer occurs once, in one part only.

    Args:
      asked: sorted by file. Questions that are too short, too long or not ASCII are skipped, and answers that continue
        on the next line.
    """
    parts: tuple[dict[str, Asked], dict[str, Asked]] = ({}, {})
    for one in asked:
        both, is_whole = one.question + one.answer, one.answer.endswith(".")
        if is_whole and len(one.answer) >= SHORTEST and len(both) <= LONGEST and both.isascii():
            parts[share(one.path) < DataOptions().validation_fraction].setdefault(one.answer, one)
    train, held_out = parts
    return list(train.values()), [one for answer, one in held_out.items() if answer not in train]


def line(asked: Asked) -> str:
    """Returns a line of fine-tuning data."""
    messages = [{"role": "user", "content": asked.question}, {"role": "assistant", "content": asked.answer}]
    return json.dumps({"messages": messages}) + "\n"


def main(argv: Sequence[str]) -> int:
    """Writes questions.jsonl and held_out.jsonl into a folder, and prints their numbers of questions."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench docstring_questions", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", help="existing folder for the two files")
    folder = parser.parse_args(argv).folder
    if (what := what_is_at(folder)) != "a folder":
        raise UserError(f"folder: got '{folder}', {what}; allowed: a folder; nearest: mkdir -p '{folder}'")
    parts = split(one for path, source in standard_library() for one in functions(path, source))
    for name, part in zip((QUESTIONS, HELD_OUT), parts, strict=True):
        write_whole(Path(folder, name), "".join(map(line, part)))
        print(f"{len(part):,} questions in {Path(folder, name)}")
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
