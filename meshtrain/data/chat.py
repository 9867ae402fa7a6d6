"""Fine-tuning data: lines of .jsonl with `prompt` and `completion`, or with `messages` -> texts with their answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.data.chat_template import BEGIN, END, ChatTemplate, Message, Spans, open_template
from meshtrain.words.errors import Problems, UserError, nearest
from meshtrain.words.paths import is_utf8

PAIR, MESSAGES = ("prompt", "completion"), "messages"
_ALLOWED = "allowed: a JSON object with 'prompt' and 'completion', or with 'messages'"
_A_MESSAGE = '{"role": "user", "content": "..."}'


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


def read_lines(path: Path, problems: Problems) -> list[Line]:
    """Returns the lines of a file that are not empty.

    Args:
      path: .jsonl.
      problems: gets a line for each one that is broken; reading ends once they are enough.
    """
    found = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    found.append(_line(line, where))
                except ValueError as error:
                    problems.add(f"data.path: {where}: {error}; nearest: leave out that line")
                if problems.is_enough():
                    break
    except OSError as error:
        problems.add(
            f"data.path: '{path}' cannot be read ({error.strerror or error}); allowed: readable files; nearest: leave "
            "it out"
        )
    return found


def _line(line: bytes, where: str) -> Line:
    """Returns what a line holds. Raises ValueError: what it got, and what is allowed."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got no JSON in UTF-8 ({error}); allowed: one JSON object a line") from error
    if not isinstance(fields, dict):
        raise ValueError(f"got {type(fields).__name__}; {_ALLOWED}")
    if MESSAGES in fields and not fields.keys() & set(PAIR):
        if fields.keys() & {"tools", "documents"}:
            raise ValueError("got 'tools' or 'documents' beside the messages; allowed: conversations without them")
        return Line(where, None, messages_of(fields[MESSAGES]))
    if MESSAGES in fields or not set(PAIR) <= fields.keys():
        near = next(filter(None, (nearest(name, (*PAIR, MESSAGES)) for name in fields if name not in PAIR)), "")
        raise ValueError(f"got the fields {', '.join(fields) or '(none)'}; {_ALLOWED}{near}")
    for name in PAIR:
        if not isinstance(fields[name], str) or not is_utf8(fields[name]):
            raise ValueError(f"got {_shown(fields[name])} for '{name}'; allowed: a text in whole characters")
    return Line(where, (fields["prompt"], fields["completion"]))


def messages_of(given: Any) -> Sequence[Message]:
    """Returns the messages of a conversation.

    Raises:
      ValueError: `given` is no list of them: what it got, and what is allowed.
    """
    if not isinstance(given, list) or not given:
        raise ValueError(f"got {_shown(given)} for 'messages'; allowed: a list like [{_A_MESSAGE}]")
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"got {_shown(message)} as message {number}; allowed: {_A_MESSAGE}")
        for name in ("role", "content"):
            value = message[name] if name in message else None
            if not isinstance(value, str) or not is_utf8(value) or BEGIN in value or END in value:
                near = nearest(name, message) if name not in message else ""
                raise ValueError(f"got {_shown(value)} for '{name}' of message {number}; allowed: a text{near}")
    return given


def _shown(value: Any) -> str:
    """Returns a value as JSON, shortened."""
    text = json.dumps(value)
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
        for problem in error.problems:
            problems.add(problem)
    found = []
    for where, pair, messages in lines:
        if pair is not None:
            text = "".join(pair)
            found.append(Written(text, ((len(pair[0]), len(text)),) if pair[1] else (), ends=True))
        elif template is not None:
            try:
                found.append(Written(*template.written(messages), ends=False))
            except ValueError as error:
                problems.add(f"data.path: {where}: {error}; nearest: leave out that line")
                if problems.is_enough():
                    break
    return found
