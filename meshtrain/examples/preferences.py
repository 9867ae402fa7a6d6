"""Data source of preferences: prompts with a chosen and a rejected answer, from files or generated.

A line of a file is a JSON object with the fields `prompt`, `chosen` and `rejected`. Two forms are allowed. In the
first, all three fields are texts, and `chosen` and `rejected` continue the text `prompt`. In the second, `chosen` and
`rejected` are lists of messages; if `prompt` is also a list, its messages precede both. In lists of messages, only the
last answer is trained. Without files, pairs are generated: each prompt asks for sorted digits.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.data import chat
from meshtrain.data.chat import Tokens
from meshtrain.data.chat_lines import Line, fields_of, messages_of, refuse_ignored
from meshtrain.data.chat_template import ASSISTANT
from meshtrain.data.corpus import open_parts, tokenizer_for, vocabulary_of
from meshtrain.data.dataset import Dataset
from meshtrain.data.encoding.special_tokens import ENCODE, MODES
from meshtrain.data.loader import Examples
from meshtrain.data.packing import FirstFitExamples, TokenStream
from meshtrain.data.sources import (
    DataOptions,
    DataRequest,
    Source,
    check,
    check_files,
    fraction_problems,
    tokenizer_of,
    unread,
)
from meshtrain.data.text import read_rows, split_by_hash
from meshtrain.data.tokenizer import Tokenizer, vocabulary_problems
from meshtrain.errors import Problem, Problems, UserError, as_json_text, nearest, refuse
from meshtrain.files import Json, JsonObject, is_utf8
from meshtrain.options import option
from meshtrain.store.buckets import Place

ANSWERS = ("chosen", "rejected")
ALLOWED = "a JSON object with 'prompt', 'chosen' and 'rejected', texts or lists of messages"
NUM_MADE = 4000


@dataclasses.dataclass(frozen=True)
class PreferenceData(DataOptions):
    """The options of the data source `preferences`: files, tokenizer, special tokens and validation split."""

    end_token: str = option(
        "", "the token that ends an answer; '': the folder's, else a well-known token, else an added id"
    )
    begin_token: str = option(
        "",
        "the token before a text that no chat template formats; '': the tokens that tokenizer.json's post-processor "
        "adds; none: no token",
    )
    special_tokens: str = option(
        ENCODE, "encode: a special token's text in a prompt or answer becomes this token; text: it is plain text",
        choices=MODES,
    )  # fmt: skip
    validation_fraction: float = option(
        0.05, "share of the pairs kept for validation, 0 to below 1", minimum=0, only_for={"validation_path": ("",)}
    )


class Pair(NamedTuple):
    """A prompt with two answers.

    Attributes:
      where: file and line from which the pair was read, for error lines.
      prompt: the prompt as text; pairs with the same prompt are in the same split.
      texts: (prompt with the chosen answer, prompt with the rejected answer).
    """

    where: str
    prompt: str
    texts: tuple[Line, Line]


def _pair(fields: JsonObject, where: str) -> Pair:
    """Returns the pair that a line of a file contains.

    Args:
      fields: the line's JSON object.
      where: file and line, for error lines.

    Raises:
      UserError: the line does not have one of the two forms in the module's docstring. The error does not name the file
        and the line; the caller adds them.
    """
    if missing := [name for name in ANSWERS if name not in fields]:
        fix = nearest(missing[0], fields)
        raise UserError(Problem(None, got=f"the fields {', '.join(fields) or '(none)'}", allowed=ALLOWED, fix=fix))
    refuse_ignored(fields)
    values: list[Json] = [fields[name] if name in fields else None for name in ("prompt", *ANSWERS)]
    prompt, *answers = values
    if all(isinstance(answer, list) for answer in answers):
        before = prompt if isinstance(prompt, list) else []
        texts = [Line(where, None, *messages_of(before + answer)) for answer in answers]
        for name, answer, text in zip(ANSWERS, answers, texts, strict=True):
            if all(message["role"] != ASSISTANT for message in answer):
                raise UserError(Problem(None, got=f"no {ASSISTANT} message for '{name}'", allowed=ALLOWED))
            if not chat.last_answer_counts(text):
                raise UserError(Problem(None, got=f"an untrained last answer in '{name}'", allowed=ALLOWED))
        return Pair(where, str(texts[0].messages[:-1]), (texts[0], texts[1]))
    for name, text in zip(("prompt", *ANSWERS), (prompt, *answers), strict=True):
        if not isinstance(text, str) or not is_utf8(text) or (not text and name in ANSWERS):
            raise UserError(Problem(None, got=f"{as_json_text(text)} for '{name}'", allowed=ALLOWED))
    return Pair(where, prompt, (Line(where, (prompt, answers[0])), Line(where, (prompt, answers[1]))))


def generate_pairs() -> Iterator[Pair]:
    """Yields 4,000 generated pairs: a prompt of 3 to 6 digits, its sorted digits, and a wrong answer.

    Wrong answers contain another digit or are not sorted. The pairs are the same in each call.
    """
    generator = np.random.default_rng(0)
    for number in range(NUM_MADE):
        digits, size = generator.permutation(10), generator.integers(3, 7)
        right, wrong = np.sort(digits[:size]), np.sort(digits[1 : size + 1])
        if number % 2:
            wrong = np.roll(right, generator.integers(1, size))
        prompt, *answers = ("".join(map(str, one)) for one in (digits[:size], right, wrong))
        yield _pair({"prompt": f"{prompt} sorted: ", **dict(zip(ANSWERS, answers, strict=True))}, f"pair {number}")


def read_pairs(files: Iterable[Place], problems: Problems) -> Iterator[Pair]:
    """Yields the pairs in files of JSON lines; adds an error to `problems` for each invalid line.

    Ends early if `problems.is_enough()`, which is true from 1,000 errors on.
    """
    for where, row, _ in itertools.chain.from_iterable(map(read_rows, files)):
        try:
            yield _pair(fields_of(row, ALLOWED), where)
        except UserError as error:
            problems.add_at(where, error.problems[0].at("data.path: {where}"))
        if problems.is_enough():
            return


def open_pairs(options: DataOptions, asked: DataRequest) -> Dataset:
    """Returns the dataset of the pairs in the files of `data.path`, or of generated pairs if `data.path` is empty.

    Each example contains both texts of a pair: the prompt with the chosen answer and the prompt with the rejected
    answer.

    Args:
      options: data options with the source `preferences`.
      asked: the run's requirements for its data, such as the sequence length and the vocabulary size.

    Raises:
      UserError: has one line for each line of a file that is not a pair, whose answers are equal, or whose two texts
        have more than `sequence_length` tokens together. The error is also raised if the tokenizer or the task does not
        fit.
    """
    files = check_files(options, like="chat") if options.path else []
    tokenizer = tokenizer_of(options)
    problems = Problems(vocabulary_problems(tokenizer, asked.ids_below))
    pairs = list(read_pairs(files, problems) if files else generate_pairs())
    lines = [line for pair in pairs for line in pair.texts]
    special = tokenizer.special
    written = chat.write_texts(
        lines, options.tokenizer, options.chat_template, problems, special=special, last_only=True
    )
    refuse(problems.lines())
    tokens = chat.tokenize(tokenizer, written)
    both = list(zip(tokens[::2], tokens[1::2], strict=True))
    lengths, most = [len(one.ids) + len(other.ids) - 2 for one, other in both], asked.sequence_length
    for pair, texts in zip(pairs, both, strict=True):
        if np.array_equal(texts[0].ids, texts[1].ids):
            problems.add_at(
                pair.where, Problem("data.path: {where}", got="equal answers", allowed="two different answers")
            )
    long = [pair.where for pair, length in zip(pairs, lengths, strict=True) if length > most]
    for where in long:
        up_to, fix = "up to " if len(long) > 1 else "", f"sequence_length={max(lengths)}, or leave out that line"
        got = f"{up_to}{max(lengths)} tokens of both answers with their prompt"
        problem = Problem("data.path: {where}", got=got, allowed=f"at most sequence_length={most}")
        problems.add_at(where, problem, fix=fix)
    refuse(problems.lines())
    splits = split_by_hash(both, [pair.prompt for pair in pairs], options.validation_fraction)
    train, validation = ([text for texts in part for text in texts] for part in splits)
    return Dataset(
        train=_examples(train, most, tokenizer),
        validation=_examples(validation, most, tokenizer),
        fingerprint=chat.fingerprint([train, validation]),
        summary=f"preferences of {options.path or 'sorted digits'}: {len(splits[0]):,} + {len(splits[1]):,} pairs, the "
        f"longest of {max(lengths, default=0):,} tokens{special.counted(chat.num_special(lines, special))}",
        text=tokenizer,
        prompts=[line.text[: line.answers[-1][0]] for line in written[-2:-1] if line.answers[-1][0]],
        are_templated=not all(line.ends for line in written[-2:-1]),
    )


def open_each(options: DataOptions, asked: DataRequest) -> dict[str, Examples]:
    """Returns {path: the examples of this file} for the files of `data.path`, without a validation split.

    Args:
      options: data options with the source `preferences`.
      asked: the run's requirements for its data, such as the sequence length and the vocabulary size.

    Raises:
      UserError: for the reasons stated in `open_pairs`.
    """
    whole = functools.partial(dataclasses.replace, options, validation_fraction=0.0)
    return {str(path): open_pairs(whole(path=str(path)), asked).train for path in check_files(options, like="chat")}


def _examples(texts: Sequence[Tokens], sequence_length: int, tokenizer: Tokenizer) -> FirstFitExamples:
    """Returns examples of two consecutive texts each: the chosen and the rejected answer of a pair.

    Args:
      texts: tokens of the texts, chosen and rejected alternating.
      sequence_length: tokens in an example, including padding.
      tokenizer: provides the dtype of ids and the end token.
    """
    lengths = np.asarray([len(one.ids) for one in texts], np.int64)
    ids = np.concatenate([np.empty(0, tokenizer.dtype), *(one.ids for one in texts)])
    counted = np.concatenate([np.empty(0, bool), *(one.counted for one in texts)])
    starts, rows = np.cumsum(lengths) - lengths, np.arange(0, len(texts) + 1, len(ANSWERS))
    return FirstFitExamples(TokenStream((ids,), tokenizer.end_id), sequence_length, starts, lengths - 1, rows, counted)


def _check(options: DataOptions, reads_data: bool) -> list[Problem]:
    if options.path:
        return check(options, reads_data, like="chat")
    return unread(options, ("tokenizer", "chat_template")) + fraction_problems(options)


preferences = Source(
    open=functools.partial(open_parts, open_pairs),
    check=_check,
    tokenizer=tokenizer_for,
    vocab_size=vocabulary_of,
    options=PreferenceData,
    open_files=open_each,
)
