"""Counts words that mark hard English, in 1,000 words of docstrings and comments, of pages, and of printed strings.

    scripts/bench prose [--worst=N] [PATH ...]

`scripts/test` runs it with its linters: the exit code is 1 if a total of the repository is above its limit. Paths are
files or folders; without a path, all but tests and CHANGELOG.md are read.
"""

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCSTRINGS, PAGES, STRINGS = "docstrings and comments", "pages", "strings"
LIMITS: Mapping[str, float] = {DOCSTRINGS: 3.0, PAGES: 3.0, STRINGS: 2.0}  # lowered whenever a total falls
LEAST_BLANKS = 3  # of a string: shorter strings are mostly keys

# Words that a reader has to look up or to read twice; CONTRIBUTING.md says how to write instead.
MARKERS = (
    r"\b(that|those) of\b",
    r"\bof (its|their|one's|his) own\b",
    r"(?:(?<=\bof )|(?<=\bin )|(?<=\bfor )|(?<=\bby )|(?<=\bwith )|(?<=\bto )|(?<=\breturns )|(?<=\bholds )|(?<=\bis ))"
    r"what\b|\bwhat (is|are|has|it|they|one|a|an|the|each|was|does|comes|goes|takes)\b",
    r"\b(stands?|stood|standing)\b",
    r"\balone\b",
    r"\bapart\b",
    r"\blikewise\b",
    r"\bwhole\b",
    r"\b(held|holds?)\b",
    r"\bbesides?\b",
    r"\b(is|are|was|were|what|as) found\b|\bfinds\b",
    r"\b(goes|go|going|went) on\b",
    r"\b(told|tells?)\b",
    r"\b(says?|said)\b",
    r"\b(begun|begins?|begin)\b",
    r"\bwhere (it|they|there|one|a|an|the|no|each|that|this|data|weights)\b",
    r"\bas (many|much|long|large|few|often) as\b",
    r"\bbut for\b|\bfor all that\b|\bsave for\b",
    r"\bsuch\b(?! as)",
    r"\b(the|this|that|which|each|every|no) one\b|\bones\b|\bone (that|with|without|which|of)\b",
    r"\bless (what|the|its|that|those)\b",
    r"\b(nothing|none|no one) (but|else)\b",
    r"\bso (many|much|few)\b",
)
_MARKER = re.compile("|".join(MARKERS))
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_CODE = re.compile(r"```.*?```|`[^`]*`|>>>.*|https?://\S+|\|[-: |]+\|", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.;:!?])\s+")
_SKIPPED = ("tests", "build", "dist", "CHANGELOG.md")


def texts(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yields (kind, line, text) of each docstring, comment and string of a Python file, or of a page."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield PAGES, 1, source
        return
    docstrings = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstrings.add(id(getattr(node.body[0], "value", None)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield DOCSTRINGS, node.lineno, node.value
            elif node.value.count(" ") >= LEAST_BLANKS:
                yield STRINGS, node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield DOCSTRINGS, token.start[0], token.string


def files(path: Path) -> Iterator[Path]:
    """Yields the Python files and pages of a folder, without hidden folders and tests; a file itself."""
    if path.is_file():
        yield path
        return
    for inner in sorted(path.iterdir()):
        if inner.name.startswith(".") or inner.name in _SKIPPED:
            continue
        if inner.is_dir() or inner.suffix in (".py", ".md"):
            yield from files(inner)


def main(argv: list[str] | None = None) -> int:
    """Prints the rate of each kind of text, and the sentences with most markers."""
    parser = argparse.ArgumentParser(prog="scripts/bench prose", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders (default: the repository)")
    parser.add_argument("--worst", type=int, default=0, help="number of sentences to print (default 0)")
    arguments = parser.parse_args(argv)
    words: collections.Counter[str] = collections.Counter()
    markers: collections.Counter[str] = collections.Counter()
    sentences = []
    for path in (inner for root in arguments.paths or [ROOT] for inner in files(root.absolute())):
        for kind, line, text in texts(path):
            clean = _CODE.sub("", text)
            words[kind] += len(_WORD.findall(clean))
            markers[kind] += len(_MARKER.findall(clean.lower()))
            for sentence in _SENTENCE.split(clean):
                count = len(_MARKER.findall(sentence.lower()))
                sentences.append((count, f"{path}:{line}", " ".join(sentence.split())))
    rates = {kind: 1000 * markers[kind] / max(words[kind], 1) for kind in LIMITS}
    for kind, limit in LIMITS.items():
        print(f"{kind}: {rates[kind]:.2f} markers in 1,000 of {words[kind]:,} words; limit {limit}")
    for count, place, sentence in sorted(sentences, reverse=True)[: arguments.worst]:
        print(f"{count}  {place}  {sentence[:240]}")
    return int(not arguments.paths and any(rates[kind] > limit for kind, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
