"""Fine-tuning data as examples: whole lines, packed by first fit; tokens of answers alone count as targets.

Shapes: T sequence_length, N tokens of a line.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from meshtrain.data.chat import Written, read_lines, written
from meshtrain.data.chat_template import Spans
from meshtrain.data.corpus import vocabulary_problems
from meshtrain.data.own import Data
from meshtrain.data.packing import FirstFitExamples, TokenStream, pack_whole
from meshtrain.data.sources import DataOptions, check
from meshtrain.data.text import find_files, share
from meshtrain.data.tokenize import Tokenizer, open_tokenizer
from meshtrain.launch import peers
from meshtrain.words.errors import Problems, UserError, warn
from meshtrain.words.options import problems as option_problems

_SPLIT_BY_HASH_FROM = 100  # lines; fewer are split at one position
_GROUP_LINES = 1024  # tokenized at a time


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a line.

    Attributes:
      ids: unsigned [N].
      counted: bool [N], whether a token is part of an answer.
    """

    ids: np.ndarray
    counted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Lines of at most T + 1 tokens as examples, and what became of the others.

    Attributes:
      examples: T tokens each.
      num_lines: lines in the examples.
      num_truncated: how many of them have lost tokens.
      num_dropped: lines that are left out, as no target of theirs would count.
    """

    examples: FirstFitExamples
    num_lines: int
    num_truncated: int
    num_dropped: int


def open_chat(options: DataOptions, *, sequence_length: int, vocab_size: int) -> Data:
    """Opens fine-tuning data.

    Args:
      options: `path`, `tokenizer`, `chat_template`, `end_token` and `validation_fraction`.
      sequence_length: T.
      vocab_size: the model's, which every id must be below.

    Raises:
      UserError: one line for each broken line of a file; or the tokenizer does not fit; or no answer is left.
    """
    if problems := option_problems(options, "data") + check(options):
        raise UserError(*problems)
    files, _ = find_files(options.path)
    tokenizer = open_tokenizer(options.tokenizer, options.end_token)
    lines = lines_of(options, files, tokenizer, vocab_size)
    splits = _split(lines, options.validation_fraction)
    tokens = [tokenized(tokenizer, split) for split in splits]
    fitted = [as_examples(split, sequence_length, tokenizer) for split in tokens]
    names = ("training", "validation") if options.validation_fraction else ("training",)
    empty = [
        f"data.path: got {len(split)} lines for {name}, {one.num_dropped} of them without a token of an answer within "
        f"sequence_length = {sequence_length}; allowed: at least one line with an answer; nearest: more lines, or "
        "another validation_fraction"
        for name, split, one in zip(names, splits, fitted, strict=False)
        if not one.num_lines
    ]
    if empty:
        raise UserError(*empty)
    return Data(
        train=fitted[0].examples,
        validation=fitted[1].examples,
        fingerprint=_fingerprint(tokens),
        summary=f"chat of {options.path}: {summary(fitted)}",
        text=tokenizer,
        prompts=_prompts(splits[1] or splits[0]),
    )


def lines_of(options: DataOptions, files: Iterable[Path], tokenizer: Tokenizer, vocab_size: int) -> list[Written]:
    """Returns the text of each line of some files.

    Raises:
      UserError: a line for each one that is broken, and if the tokenizer has ids that the model does not have.
    """
    problems, lines = Problems(vocabulary_problems(tokenizer, vocab_size)), []
    for path in files:
        lines += read_lines(path, problems)
        if problems.is_enough():
            break
    found = written(lines, options.tokenizer, options.chat_template, problems)
    if problems.count:
        raise UserError(*problems.lines())
    return found


def _split(lines: list[Written], validation_fraction: float) -> tuple[list[Written], list[Written]]:
    """Returns the lines to train on and those for validation: by the hash of the text, or the last ones of few."""
    if len(lines) < _SPLIT_BY_HASH_FROM:
        num_validation = max(round(len(lines) * validation_fraction), 1) if validation_fraction else 0
        return lines[: len(lines) - num_validation], lines[len(lines) - num_validation :]
    splits: tuple[list[Written], list[Written]] = ([], [])
    for line in lines:
        splits[share(line.text) < validation_fraction].append(line)
    return splits


def tokenized(tokenizer: Tokenizer, lines: Sequence[Written]) -> list[Tokens]:
    """Returns the tokens of each line."""
    assert tokenizer.with_places is not None, tokenizer.name
    found = []
    for start in range(0, len(lines), _GROUP_LINES):
        some = lines[start : start + _GROUP_LINES]
        for line, (ids, places) in zip(some, tokenizer.with_places([line.text for line in some]), strict=True):
            end = [tokenizer.end_id] if line.ends else []
            counted = np.append(in_spans(places, line.answers), np.full(len(end), bool(line.answers)))
            found.append(Tokens(np.append(ids, end).astype(tokenizer.dtype), counted))
    return found


def in_spans(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Returns which tokens have a character in a span, bool [N].

    Args:
      places: int [N, 2], where each token begins and ends. One of blanks alone may be empty, at its end.
      spans: of characters.
    """
    begins, ends = places[:, 0], places[:, 1]
    found = np.zeros(len(places), bool)
    for begin, end in spans:
        found |= (ends > begin) & ((begins < end) | ((begins == ends) & (ends <= end)))
    return found


def as_examples(lines: Sequence[Tokens], sequence_length: int, tokenizer: Tokenizer) -> Fitted:
    """Returns lines as examples: too long ones are truncated, and those without a target that counts left out.

    A line gives N - 1 inputs and targets. One with N > T + 1 keeps the T + 1 tokens up to its last answer's end, so it
    loses its beginning; a warning counts those that lose a part of an answer.

    Args:
      lines: any number.
      sequence_length: T.
      tokenizer: of the lines.
    """
    kept, num_truncated, num_cut = list[Tokens](), 0, 0
    for line in lines:
        is_long = len(line.ids) > sequence_length + 1
        if is_long and line.counted.any():
            stop = max(int(np.flatnonzero(line.counted)[-1]) + 1, sequence_length + 1)
            place = slice(stop - sequence_length - 1, stop)
            num_cut += bool(line.counted[: place.start].any())
            line = Tokens(line.ids[place], line.counted[place])
        if line.counted[1:].any():
            counted = line.counted.copy()
            counted[0] = False  # it is nothing's target
            kept.append(Tokens(line.ids, counted))
            num_truncated += is_long
    if num_cut and peers.is_main_process():
        warn(f"data.path: {num_cut:,} of {len(lines):,} lines lose tokens of answers: sequence_length = "
             f"{sequence_length}, and the longest has {max(len(line.ids) for line in lines):,}")  # fmt: skip
    ids = np.concatenate([np.empty(0, tokenizer.dtype), *(line.ids for line in kept)])
    counted = np.concatenate([np.empty(0, bool), *(line.counted for line in kept)])
    lengths = np.asarray([len(line.ids) for line in kept], np.int64)
    stream = TokenStream((ids,), tokenizer.end_id)
    examples = pack_whole(stream, lengths, sequence_length, counted)
    return Fitted(examples, len(kept), num_truncated, len(lines) - len(kept))


def summary(fitted: Sequence[Fitted]) -> str:
    """Returns what the examples of some splits or files hold, and what was lost, in words."""
    lines, rows = (" + ".join(f"{number:,}" for number in numbers) for numbers in (
        [one.num_lines for one in fitted], [len(one.examples) for one in fitted]))  # fmt: skip
    counted = [one.examples.counted for one in fitted if one.examples.counted is not None]
    num_tokens, num_answers = sum(map(len, counted)), sum(int(one.sum()) for one in counted)
    said = f"{lines} lines in {rows} sequences; {num_answers:,} of {num_tokens:,} tokens are answers'"
    return f"{said}; {losses(fitted)}"


def losses(fitted: Sequence[Fitted]) -> str:
    """Returns in words how many lines were truncated, and how many dropped."""
    truncated, dropped = sum(one.num_truncated for one in fitted), sum(one.num_dropped for one in fitted)
    return f"{truncated:,} lines truncated, {dropped:,} dropped without a token of an answer"


def _fingerprint(splits: Sequence[Sequence[Tokens]]) -> str:
    digest = hashlib.sha256()
    for lines in splits:
        digest.update(f"{len(lines)}".encode())
        for line in lines:
            digest.update(f" {len(line.ids)} ".encode())
            digest.update(line.ids.astype("<u4").tobytes())
            digest.update(line.counted.tobytes())
    return digest.hexdigest()


def _prompts(lines: Sequence[Written]) -> tuple[str, ...]:
    """Returns the text of the first line up to its first answer, for the sample at the end of a run."""
    starts = [line.text[: line.answers[0][0]] for line in lines if line.answers and line.answers[0][0]]
    return tuple(starts[:1])
