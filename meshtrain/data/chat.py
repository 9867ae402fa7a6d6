"""Opens fine-tuning data: formats prompts and conversations as text, tokenizes it, and packs it into examples.

A line is a line of a .jsonl file or a row of a .parquet file. It is never split over several examples, and only tokens
of answers count as targets. `chat_lines.py` parses the formats of lines.

Shapes: T sequence_length, N tokens of a line.
"""

import codecs
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.data.chat_lines import Line, line_of
from meshtrain.data.chat_template import ASSISTANT, ChatTemplate, open_template
from meshtrain.data.dataset import Dataset
from meshtrain.data.encoding.special_tokens import Spans, SpecialTokens, unmark
from meshtrain.data.packing import FirstFitExamples, TokenStream, pack_whole
from meshtrain.data.sources import LAST_ANSWER, DataOptions, DataRequest, check_files, tokenizer_of
from meshtrain.data.text import read_rows, split_by_hash
from meshtrain.data.tokenizer import Tokenizer, vocabulary_problems
from meshtrain.errors import Problem, Problems, UserError, refuse, warn
from meshtrain.launch import peers
from meshtrain.store.buckets import Place

_GROUP_LINES = 1024  # lines that are tokenized at a time


class Written(NamedTuple):
    """The formatted text of a line, before tokenization.

    Attributes:
      text: prompt and completion, or the output of the chat template.
      answers: (start, stop) of each answer to train on, in characters of `text`.
      ends: whether the tokenizer's begin tokens and end token are added around the text. Then the end token counts as a
        target if the line has an answer. False for the output of a chat template, which contains such tokens.
    """

    text: str
    answers: Spans
    ends: bool


def read_lines(path: Place, problems: Problems) -> list[Line]:
    """Parses the lines of a file, and returns them without empty lines and invalid lines.

    Args:
      path: a .jsonl or .parquet file, perhaps compressed.
      problems: receives an error for each invalid line, or if the file cannot be read. Reading stops when
        `problems.is_enough()`.
    """
    result, num_marks = list[Line](), 0
    try:
        for where, row, _ in read_rows(path):
            if isinstance(row, bytes) and row.startswith(codecs.BOM_UTF8):
                num_marks += 1
                row = row.removeprefix(codecs.BOM_UTF8)
                if not row.strip():
                    continue
            try:
                result.append(line_of(row, where))
            except UserError as error:
                problems.add_at(where, error.problems[0].at("data.path: {where}"))
                if problems.is_enough():
                    break
    except UserError as error:
        problems.add(*error.problems)
    if num_marks and peers.is_main_process():
        warn(f"{path}: removed {num_marks} byte order mark(s)")
    return result


def write_texts(
    lines: Sequence[Line],
    tokenizer: str,
    template_file: str,
    problems: Problems,
    *,
    special: SpecialTokens = SpecialTokens({}),  # noqa: B008  frozen
    last_only: bool = False,
) -> list[Written]:
    """Formats each line as text, and locates the answers to train on.

    Args:
      lines: the parsed lines of all files.
      tokenizer: the value of `data.tokenizer`; its folder may contain the chat template.
      template_file: the value of `data.chat_template`; '' uses the template in the tokenizer's folder.
      problems: receives an error for each conversation that the template rejects, and if the template is missing.
      special: the special tokens of the tokenizer.
      last_only: whether only the last answer of a conversation is trained on.

    Returns:
      One text for each line, except for rejected conversations.
    """
    template: ChatTemplate | None = None
    try:
        if template_file or any(line.pair is None for line in lines):
            template = open_template(tokenizer, template_file)
    except UserError as error:
        problems.add(*error.problems)
    result = []
    for line in lines:
        if line.pair is not None:
            prompt, completion = map(unmark, line.pair) if special.as_text else line.pair
            text = prompt + completion
            result.append(Written(text, ((len(prompt), len(text)),) if completion else (), ends=True))
        elif template is not None:
            try:
                write = functools.partial(template.written, learned=line.learned)
                text, answers = special.through_template(write, line.messages)
                if last_only:
                    answers = answers[-1:] if last_answer_counts(line) else ()
                result.append(Written(text, answers, ends=False))
            except UserError as error:
                problems.add_at(line.where, error.problems[0].at("data.path: {where}"))
    return result


def last_answer_counts(line: Line) -> bool:
    """Returns whether the last answer of a conversation may be trained on; False for a conversation without answers."""
    answers = [
        counts for message, counts in zip(line.messages, line.learned, strict=True) if message["role"] == ASSISTANT
    ]
    return bool(answers and answers[-1])


def num_special(lines: Iterable[Line], special: SpecialTokens) -> int:
    """Returns how often the text of a special token occurs in the prompts, completions and messages of lines."""
    return sum(special.count([*(line.pair or ()), *line.messages]) for line in lines)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of a line.

    Attributes:
      ids: unsigned integers [N], the token ids.
      counted: bool [N], True for tokens of an answer to train on.
    """

    ids: np.ndarray
    counted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Lines packed into examples, with counts of the truncated and the dropped lines.

    Attributes:
      examples: the packed examples, of T tokens each.
      num_lines: number of lines in the examples.
      num_truncated: number of lines in the examples that were truncated to T + 1 tokens.
      num_dropped: number of lines that were dropped, because they have no target to train on.
    """

    examples: FirstFitExamples
    num_lines: int
    num_truncated: int
    num_dropped: int


def open_chat(options: DataOptions, asked: DataRequest) -> Dataset:
    """Opens fine-tuning data as packed training and validation examples.

    Args:
      options: the data options; the source `chat` reads `path`, `tokenizer`, `chat_template`, `end_token`, `loss_on`
        and `validation_fraction`.
      asked: the run's requirements for its data; the batch must have an entry `weights`.

    Raises:
      UserError: a line of a file is invalid, the tokenizer or the task does not fit, or a split has no answer.
    """
    if "weights" not in asked.batch:
        raise UserError(
            Problem(
                "data.source",
                got="chat, which trains only on answers, with a task whose batch has no 'weights'",
                allowed="a task whose loss uses 'weights'",
                nearest="task=decoder",
            )
        )
    files, sequence_length = check_files(options), asked.sequence_length
    tokenizer = tokenizer_of(options)
    lines, counted = lines_of(options, files, tokenizer, asked.ids_below)
    splits = split_by_hash(lines, [line.text for line in lines], options.validation_fraction)
    tokens = [tokenize(tokenizer, part) for part in splits]
    fitted = [as_examples(part, sequence_length, tokenizer) for part in tokens]
    names = ("training", "validation") if options.validation_fraction else ("training",)
    empty = [
        Problem(
            "data.path",
            got=(
                f"{len(part)} lines for {name}, of which {one.num_dropped} have no token of an answer within "
                f"sequence_length = {sequence_length}"
            ),
            allowed="at least one line with an answer",
            nearest="more lines, or another validation_fraction",
        )
        for name, part, one in zip(names, splits, fitted, strict=False)
        if not one.num_lines
    ]
    refuse(empty)
    prompted = _first_prompted(splits[1] or splits[0])
    return Dataset(
        train=fitted[0].examples,
        validation=fitted[1].examples,
        fingerprint=fingerprint(tokens),
        summary=f"chat of {options.path}: {summary(fitted)}{counted}",
        text=tokenizer,
        prompts=(prompted.text[: prompted.answers[0][0]],) if prompted else (),
        are_templated=prompted is not None and not prompted.ends,
    )


def open_whole(
    options: DataOptions, files: Iterable[Place], tokenizer: Tokenizer, asked: DataRequest
) -> dict[str, FirstFitExamples]:
    """Returns {path: the examples of this file} for a file-by-file evaluation.

    Only tokens of answers are targets. A warning counts the truncated and the dropped lines of a file.

    Args:
      options: the data options, of which `tokenizer`, `chat_template`, `end_token` and `loss_on` are read.
      files: the files of `data.path`.
      tokenizer: the tokenizer of the options.
      asked: the run's requirements for its data, such as the sequence length and the vocabulary size.

    Raises:
      UserError: has one line for each problem of the files, and for each file without an answer.
    """
    examples, empty = dict[str, FirstFitExamples](), Problems()
    for path in files:
        lines = tokenize(tokenizer, lines_of(options, [path], tokenizer, asked.ids_below)[0])
        one = as_examples(lines, asked.sequence_length, tokenizer)
        examples[str(path)] = one.examples
        if not one.num_lines:
            empty.add(
                Problem(
                    "data.path",
                    fault=f"'{path}' has no line with a token of an answer",
                    allowed="files with an answer",
                    nearest="leave it out",
                )
            )
        elif (one.num_truncated or one.num_dropped) and peers.is_main_process():
            warn(f"{path}: {losses([one])}")
    refuse(empty.lines())
    return examples


def lines_of(
    options: DataOptions, files: Iterable[Place], tokenizer: Tokenizer, vocab_size: int
) -> tuple[list[Written], str]:
    """Reads the lines of files and formats them as text.

    Args:
      options: the data options, of which `tokenizer`, `chat_template` and `loss_on` are read.
      files: .jsonl or .parquet files, perhaps compressed.
      tokenizer: the tokenizer of the options.
      vocab_size: the model's vocabulary size; all ids must be below it.

    Returns:
      The formatted text of each line, and a text with the number of special tokens, to append to the data's summary.

    Raises:
      UserError: a line of a file is invalid, or the tokenizer has ids outside the model's vocabulary.
    """
    problems, lines = Problems(vocabulary_problems(tokenizer, vocab_size)), []
    for path in files:
        lines += read_lines(path, problems)
        if problems.is_enough():
            break
    last_only = options.loss_on == LAST_ANSWER
    special = tokenizer.special
    result = write_texts(
        lines, options.tokenizer, options.chat_template, problems, special=special, last_only=last_only
    )
    refuse(problems.lines())
    return result, special.counted(num_special(lines, special))


def tokenize(tokenizer: Tokenizer, lines: Sequence[Written]) -> list[Tokens]:
    """Tokenizes each line, and marks the tokens of the answers to train on."""
    assert tokenizer.with_places is not None, tokenizer.name
    tokens = []
    for start in range(0, len(lines), _GROUP_LINES):
        some = lines[start : start + _GROUP_LINES]
        for line, (ids, places) in zip(some, tokenizer.with_places([line.text for line in some]), strict=True):
            begin, end = ([*tokenizer.begin], [tokenizer.end_id]) if line.ends else ([], [])
            inside, is_learned = in_spans(places, line.answers), bool(line.answers)
            counted = np.concatenate([np.zeros(len(begin), bool), inside, np.full(len(end), is_learned)])
            tokens.append(Tokens(np.concatenate([begin, ids, end]).astype(tokenizer.dtype), counted))
    return tokens


def in_spans(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Returns a mask of the tokens that have at least one character in a span, bool [N].

    Args:
      places: int [N, 2], (start, stop) of each token in characters of the text. A token of blanks only may have an
        empty range at its end.
      spans: (start, stop) of each span, in characters of the text.
    """
    begins, ends = places[:, 0], places[:, 1]
    is_inside = np.zeros(len(places), bool)
    for begin, end in spans:
        is_inside |= (ends > begin) & ((begins < end) | ((begins == ends) & (ends <= end)))
    return is_inside


def as_examples(lines: Sequence[Tokens], sequence_length: int, tokenizer: Tokenizer) -> Fitted:
    """Packs lines into examples: truncates lines that are too long, and drops lines without a target to train on.

    A line of N tokens has N - 1 inputs and targets. If N > T + 1, the line is truncated to T + 1 tokens: to its first
    tokens if they contain its last answer, else to the tokens that end with its last answer. A warning counts the lines
    that lose tokens of answers.

    Args:
      lines: the tokens of each line, of any length.
      sequence_length: T, tokens of an example.
      tokenizer: the tokenizer that encoded the lines.
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
            counted[0] = False  # the first token is never a target
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
    """Returns a text with the numbers of lines, sequences, answer tokens, and truncated and dropped lines.

    Args:
      fitted: the packed lines of each split or file.
    """
    lines, rows = (" + ".join(f"{number:,}" for number in numbers) for numbers in (
        [one.num_lines for one in fitted], [len(one.examples) for one in fitted]))  # fmt: skip
    counted = [one.examples.counted for one in fitted if one.examples.counted is not None]
    num_tokens, num_answers = sum(map(len, counted)), sum(int(one.sum()) for one in counted)
    text = f"{lines} lines in {rows} sequences; {num_answers:,} of {num_tokens:,} tokens belong to answers"
    return f"{text}; {losses(fitted)}"


def losses(fitted: Sequence[Fitted]) -> str:
    """Returns a text with the numbers of truncated and dropped lines, summed over the splits or files."""
    truncated, dropped = sum(one.num_truncated for one in fitted), sum(one.num_dropped for one in fitted)
    return f"{truncated:,} lines truncated, {dropped:,} dropped without a token of an answer"


def fingerprint(splits: Sequence[Sequence[Tokens]]) -> str:
    """Returns a hexadecimal sha256 over the ids and answer masks of all lines of each split."""
    digest = hashlib.sha256()
    for lines in splits:
        digest.update(f"{len(lines)}".encode())
        for line in lines:
            digest.update(f" {len(line.ids)} ".encode())
            digest.update(line.ids.astype("<u4").tobytes())
            digest.update(line.counted.tobytes())
    return digest.hexdigest()


def _first_prompted(lines: Sequence[Written]) -> Written | None:
    """Returns the first line that has text before its first answer, or None.

    The text before the answer is the prompt of the sample that a run generates at its end.
    """
    return next((line for line in lines if line.answers and line.answers[0][0]), None)
