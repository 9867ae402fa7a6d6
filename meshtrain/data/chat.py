"""Fine-tuning data: lines or rows of files -> texts with their answers -> examples, packed by first fit.

A line has `prompt` and `completion`, or `messages`; lines of Alpaca (`instruction`, `input`, `output`) and ShareGPT
(`conversations` of `from` and `value`) are messages. Lines stay whole, and tokens of answers alone count as targets.

Shapes: T sequence_length, N tokens of a line.
"""

import codecs
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshtrain.data.chat_template import ASSISTANT, BEGIN, END, ChatTemplate, Message, Spans, open_template
from meshtrain.data.own_source import Data
from meshtrain.data.packing import FirstFitExamples, TokenStream, pack_whole
from meshtrain.data.sources import LAST_ANSWER, Asked, DataOptions, checked_files
from meshtrain.data.text import read_rows, split
from meshtrain.data.tokenizer import Tokenizer, open_tokenizer, vocabulary_problems
from meshtrain.errors import Problems, UserError, nearest, refuse, warn
from meshtrain.files import Json, JsonObject, is_utf8
from meshtrain.launch import peers
from meshtrain.store.buckets import Place

PAIR = ("prompt", "completion")
ALPACA = ("instruction", "output")
MESSAGES, SHAREGPT = "messages", "conversations"
ROLES = {"human": "user", "gpt": ASSISTANT, "system": "system", "user": "user", ASSISTANT: ASSISTANT}  # of ShareGPT
# Fields beside messages and in them that no text says.
_BESIDE = ("tools", "functions", "documents", "images", "history")
_INSIDE = ("tool_calls", "function_call")
_ALLOWED = "allowed: a JSON object with 'prompt' and 'completion', or with 'messages', or as Alpaca or ShareGPT have it"
_A_MESSAGE = '{"role": "user", "content": "..."}'
_GROUP_LINES = 1024  # tokenized at a time


class Line(NamedTuple):
    """A line of a file: a prompt and its completion, or messages; and where it is from."""

    where: str
    pair: tuple[str, str] | None
    messages: Sequence[Message] = ()


class Written(NamedTuple):
    """The text of a line.

    Attributes:
      text: prompt and completion, or what the chat template writes.
      answers: where each answer begins and ends, in characters.
      ends: whether the end token follows, as part of the answer if there is one; a template writes its own.
    """

    text: str
    answers: Spans
    ends: bool


def read_lines(path: Place, problems: Problems) -> list[Line]:
    """Returns the lines of a file that are not empty.

    Args:
      path: of lines or rows.
      problems: gets a line for each kind of broken ones, or where the file cannot be read; reading ends once they are
        enough.
    """
    result, wrong, num_marks = list[Line](), dict[str, list[str]](), 0
    try:
        for where, row, _ in read_rows(path):
            if isinstance(row, bytes) and row.startswith(codecs.BOM_UTF8):
                num_marks += 1
                row = row.removeprefix(codecs.BOM_UTF8)
                if not row.strip():
                    continue
            try:
                result.append(_line(row, where))
            except ValueError as error:
                wrong.setdefault(str(error), []).append(where)
                if sum(map(len, wrong.values())) >= 1000:
                    break
    except UserError as error:
        problems.add(str(error))
    if num_marks and peers.is_main_process():
        warn(f"{path}: got {num_marks} byte order mark(s), which are left out")
    _add(wrong, problems)
    return result


def _add(wrong: Mapping[str, Sequence[str]], problems: Problems) -> None:
    """Adds a line for each kind of problem: what is wrong -> the lines of files where it is."""
    for error, places in wrong.items():
        where, fix = f"{places[0]} and others", "leave them out, or rewrite them"
        if len(places) == 1:
            where, fix = places[0], "leave out that line"
        problems.add(f"data.path: {where}: {error}; nearest: {fix}")


def fields_of(row: bytes | JsonObject, allowed: str) -> JsonObject:
    """Returns the fields of a line or row. Raises ValueError: what it got, and what is allowed."""
    try:
        fields = json.loads(row) if isinstance(row, bytes) else row
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got no JSON in UTF-8 ({error}); allowed: one JSON object a line") from error
    if not isinstance(fields, dict):
        raise ValueError(f"got {type(fields).__name__}; {allowed}")
    return fields


def _line(row: bytes | JsonObject, where: str) -> Line:
    """Returns what a line or row holds. Raises ValueError: what it got, and what is allowed."""
    fields = fields_of(row, _ALLOWED)
    messages = None if set(PAIR) <= fields.keys() else _messages(fields)
    if messages is not None:
        if beside := [name for name in _BESIDE if fields.get(name)]:
            raise ValueError(f"got '{beside[0]}' beside the messages; allowed: conversations without")
        return Line(where, None, messages_of(messages))
    if MESSAGES in fields or not set(PAIR) <= fields.keys():
        known = (*PAIR, MESSAGES, SHAREGPT, *ALPACA)
        fix = next(filter(None, (nearest(name, known) for name in fields if name not in PAIR)), "")
        raise ValueError(f"got the fields {', '.join(fields) or '(none)'}; {_ALLOWED}{fix}")
    for name in PAIR:
        if not isinstance(fields[name], str) or not is_utf8(fields[name]):
            raise ValueError(f"got {shown(fields[name])} for '{name}'; allowed: a text in whole characters")
    return Line(where, (fields["prompt"], fields["completion"]))


def _messages(fields: Mapping[str, Json]) -> Json:
    """Returns the messages of a line, as OpenAI, ShareGPT or Alpaca have them, not checked; None: it has none."""
    if MESSAGES in fields:
        return None if fields.keys() & set(PAIR) else fields[MESSAGES]
    turns: list[Json] = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    if set(ALPACA) <= fields.keys():
        asked = [fields[name] for name in ("instruction", "input") if fields.get(name)]
        strange = [one for one in asked if not isinstance(one, str)]
        turns.append({"role": "user", "content": strange[0] if strange else "\n\n".join(asked)})
        return [*turns, {"role": ASSISTANT, "content": fields["output"]}]
    if not isinstance(given := fields.get(SHAREGPT), list):
        return given
    for one in given:
        if isinstance(one, dict) and "from" in one:
            if (role := ROLES.get(str(one["from"]))) is None:
                raise ValueError(f"got {shown(one['from'])} for 'from'; allowed: {', '.join(ROLES)}")
            one = {"role": role, "content": one.get("value")}
        turns.append(one)
    return turns


def messages_of(given: Json) -> Sequence[Message]:
    """Returns the messages of a conversation, those in parts of text as one text each.

    Raises:
      ValueError: `given` is no list of them: what it got, and what is allowed.
    """
    if not isinstance(given, list) or not given:
        raise ValueError(f"got {shown(given)} for 'messages'; allowed: a list like [{_A_MESSAGE}]")
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"got {shown(message)} as message {number}; allowed: {_A_MESSAGE}")
        if calls := [name for name in _INSIDE if message.get(name)]:
            raise ValueError(f"got '{calls[0]}' in a message; allowed: messages of text alone")
        for part in parts if isinstance(parts := message.get("content"), list) else ():
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"got a part of type {shown(kind)} in a message; allowed: parts of type text")
        if isinstance(parts, list):
            message["content"] = "".join(part["text"] for part in parts)
        for name in ("role", "content"):
            value = message[name] if name in message else None
            if not isinstance(value, str) or not is_utf8(value) or BEGIN in value or END in value:
                fix = nearest(name, message) if name not in message else ""
                raise ValueError(f"got {shown(value)} for '{name}' of message {number}; allowed: a text{fix}")
    return given


def shown(value: Json) -> str:
    """Returns a value as JSON, shortened; a column of a table may hold what JSON has not."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."


def written(lines: Sequence[Line], tokenizer: str, template_file: str, problems: Problems) -> list[Written]:
    """Returns the text of each line.

    Args:
      lines: of all files.
      tokenizer: `data.tokenizer`, whose folder may bring the chat template.
      template_file: `data.chat_template`; `` takes the folder's.
      problems: gets a line for each conversation that the template does not take, and one where there is no template.
    """
    template: ChatTemplate | None = None
    try:
        if template_file or any(line.pair is None for line in lines):
            template = open_template(tokenizer, template_file)
    except UserError as error:
        problems.add(*error.problems)
    result, wrong = [], dict[str, list[str]]()
    for where, pair, messages in lines:
        if pair is not None:
            text = "".join(pair)
            result.append(Written(text, ((len(pair[0]), len(text)),) if pair[1] else (), ends=True))
        elif template is not None:
            try:
                result.append(Written(*template.written(messages), ends=False))
            except ValueError as error:
                wrong.setdefault(str(error), []).append(where)
    _add(wrong, problems)
    return result


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


def open_chat(options: DataOptions, asked: Asked) -> Data:
    """Opens fine-tuning data.

    Args:
      options: `path`, `tokenizer`, `chat_template`, `end_token`, `loss_on` and `validation_fraction`.
      asked: by the run; its batch has an entry `weights`.

    Raises:
      UserError: one line for each broken line of a file; or the tokenizer or the task does not fit; or no answer is
        left.
    """
    if "weights" not in asked.batch:
        raise UserError(
            "data.source: got chat, whose answers alone count, with a task whose batch has no 'weights'; allowed: a "
            "task whose loss is weighted by them; nearest: task=decoder"
        )
    files, sequence_length = checked_files(options), asked.sequence_length
    tokenizer = open_tokenizer(options.tokenizer, options.end_token)
    lines = lines_of(options, files, tokenizer, asked.ids_below)
    splits = split(lines, [line.text for line in lines], options.validation_fraction)
    tokens = [tokenized(tokenizer, part) for part in splits]
    fitted = [as_examples(part, sequence_length, tokenizer) for part in tokens]
    names = ("training", "validation") if options.validation_fraction else ("training",)
    empty = [
        f"data.path: got {len(part)} lines for {name}, {one.num_dropped} of them without a token of an answer within "
        f"sequence_length = {sequence_length}; allowed: at least one line with an answer; nearest: more lines, or "
        "another validation_fraction"
        for name, part, one in zip(names, splits, fitted, strict=False)
        if not one.num_lines
    ]
    refuse(empty)
    return Data(
        train=fitted[0].examples,
        validation=fitted[1].examples,
        fingerprint=fingerprint(tokens),
        summary=f"chat of {options.path}: {summary(fitted)}",
        text=tokenizer,
        prompts=_prompts(splits[1] or splits[0]),
    )


def open_whole(
    options: DataOptions, files: Iterable[Place], tokenizer: Tokenizer, asked: Asked
) -> dict[str, FirstFitExamples]:
    """Returns the path of each file -> its examples; see `corpus.open_whole`."""
    examples, empty = dict[str, FirstFitExamples](), Problems()
    for path in files:
        lines = tokenized(tokenizer, lines_of(options, [path], tokenizer, asked.ids_below))
        one = as_examples(lines, asked.sequence_length, tokenizer)
        examples[str(path)] = one.examples
        if not one.num_lines:
            empty.add(
                f"data.path: '{path}' has no line with a token of an answer; allowed: files with an answer; nearest: "
                "leave it out"
            )
        elif (one.num_truncated or one.num_dropped) and peers.is_main_process():
            warn(f"{path}: {losses([one])}")
    refuse(empty.lines())
    return examples


def lines_of(options: DataOptions, files: Iterable[Place], tokenizer: Tokenizer, vocab_size: int) -> list[Written]:
    """Returns the text of each line of some files, with the answers that are targets.

    Raises:
      UserError: a line for each one that is broken, and if the tokenizer has ids that the model does not have.
    """
    problems, lines = Problems(vocabulary_problems(tokenizer, vocab_size)), []
    for path in files:
        lines += read_lines(path, problems)
        if problems.is_enough():
            break
    result = written(lines, options.tokenizer, options.chat_template, problems)
    refuse(problems.lines())
    if options.loss_on == LAST_ANSWER:
        return [line._replace(answers=line.answers[-1:]) for line in result]
    return result


def tokenized(tokenizer: Tokenizer, lines: Sequence[Written]) -> list[Tokens]:
    """Returns the tokens of each line."""
    assert tokenizer.with_places is not None, tokenizer.name
    tokens = []
    for start in range(0, len(lines), _GROUP_LINES):
        some = lines[start : start + _GROUP_LINES]
        for line, (ids, places) in zip(some, tokenizer.with_places([line.text for line in some]), strict=True):
            end = [tokenizer.end_id] if line.ends else []
            counted = np.append(in_spans(places, line.answers), np.full(len(end), bool(line.answers)))
            tokens.append(Tokens(np.append(ids, end).astype(tokenizer.dtype), counted))
    return tokens


def in_spans(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Returns which tokens have a character in a span, bool [N].

    Args:
      places: int [N, 2], where each token begins and ends. One of blanks alone may be empty, at its end.
      spans: of characters.
    """
    begins, ends = places[:, 0], places[:, 1]
    is_inside = np.zeros(len(places), bool)
    for begin, end in spans:
        is_inside |= (ends > begin) & ((begins < end) | ((begins == ends) & (ends <= end)))
    return is_inside


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
    text = f"{lines} lines in {rows} sequences; {num_answers:,} of {num_tokens:,} tokens are answers'"
    return f"{text}; {losses(fitted)}"


def losses(fitted: Sequence[Fitted]) -> str:
    """Returns in words how many lines were truncated, and how many dropped."""
    truncated, dropped = sum(one.num_truncated for one in fitted), sum(one.num_dropped for one in fitted)
    return f"{truncated:,} lines truncated, {dropped:,} dropped without a token of an answer"


def fingerprint(splits: Sequence[Sequence[Tokens]]) -> str:
    """Returns a hexadecimal sha256 over the ids of lines, which of them count, and the splits."""
    digest = hashlib.sha256()
    for lines in splits:
        digest.update(f"{len(lines)}".encode())
        for line in lines:
            digest.update(f" {len(line.ids)} ".encode())
            digest.update(line.ids.astype("<u4").tobytes())
            digest.update(line.counted.tobytes())
    return digest.hexdigest()


def _prompts(lines: Sequence[Written]) -> tuple[str, ...]:
    """Returns the text of the first line up to its first target, for the sample at the end of a run."""
    starts = [line.text[: line.answers[0][0]] for line in lines if line.answers and line.answers[0][0]]
    return tuple(starts[:1])
