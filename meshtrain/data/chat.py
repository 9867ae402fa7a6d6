"""Fine-tuning data: lines of .jsonl with `prompt` and `completion`, or with `messages` -> texts with their answers.

Lines of Alpaca (`instruction`, `input`, `output`) and ShareGPT (`conversations` of `from` and `value`) are messages.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.data.chat_template import ASSISTANT, BEGIN, END, ChatTemplate, Message, Spans, open_template
from meshtrain.launch import peers
from meshtrain.words.errors import Problems, UserError, nearest, warn
from meshtrain.words.paths import is_utf8

PAIR = ("prompt", "completion")
ALPACA = ("instruction", "output")
MESSAGES, SHAREGPT = "messages", "conversations"
ROLES = {"human": "user", "gpt": ASSISTANT, "system": "system", "user": "user", ASSISTANT: ASSISTANT}  # of ShareGPT
# Fields beside messages and in them that no text says.
_BESIDE = ("tools", "functions", "documents", "images", "history")
_INSIDE = ("tool_calls", "function_call")
_ALLOWED = "allowed: a JSON object with 'prompt' and 'completion', or with 'messages', or as Alpaca or ShareGPT have it"
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
      path: .jsonl that can be read, as `find_files` has seen.
      problems: gets a line for each kind of broken ones; reading ends once they are enough.
    """
    found, wrong, num_marks = list[Line](), dict[str, list[str]](), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            num_marks += line.startswith(codecs.BOM_UTF8)
            line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                found.append(_line(line, where))
            except ValueError as error:
                wrong.setdefault(str(error), []).append(where)
                if sum(map(len, wrong.values())) >= 1000:
                    break
    if num_marks and peers.is_main_process():
        warn(f"{path}: got {num_marks} byte order mark(s), which are left out")
    _add(wrong, problems)
    return found


def _add(wrong: Mapping[str, Sequence[str]], problems: Problems) -> None:
    """Adds a line for each kind of problem: what is wrong -> the lines of files where it is."""
    for error, places in wrong.items():
        where, near = f"{places[0]} and others", "leave them out, or rewrite them"
        if len(places) == 1:
            where, near = places[0], "leave out that line"
        problems.add(f"data.path: {where}: {error}; nearest: {near}")


def _line(line: bytes, where: str) -> Line:
    """Returns what a line holds. Raises ValueError: what it got, and what is allowed."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got no JSON in UTF-8 ({error}); allowed: one JSON object a line") from error
    if not isinstance(fields, dict):
        raise ValueError(f"got {type(fields).__name__}; {_ALLOWED}")
    messages = None if set(PAIR) <= fields.keys() else _messages(fields)
    if messages is not None:
        if beside := [name for name in _BESIDE if fields.get(name)]:
            raise ValueError(f"got '{beside[0]}' beside the messages; allowed: conversations without")
        return Line(where, None, messages_of(messages))
    if MESSAGES in fields or not set(PAIR) <= fields.keys():
        known = (*PAIR, MESSAGES, SHAREGPT, *ALPACA)
        near = next(filter(None, (nearest(name, known) for name in fields if name not in PAIR)), "")
        raise ValueError(f"got the fields {', '.join(fields) or '(none)'}; {_ALLOWED}{near}")
    for name in PAIR:
        if not isinstance(fields[name], str) or not is_utf8(fields[name]):
            raise ValueError(f"got {_shown(fields[name])} for '{name}'; allowed: a text in whole characters")
    return Line(where, (fields["prompt"], fields["completion"]))


def _messages(fields: Mapping[str, Any]) -> Any:
    """Returns the messages of a line, as OpenAI, ShareGPT or Alpaca have them, not checked; None: it has none."""
    if MESSAGES in fields:
        return None if fields.keys() & set(PAIR) else fields[MESSAGES]
    turns: list[Any] = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
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
                raise ValueError(f"got {_shown(one['from'])} for 'from'; allowed: {', '.join(ROLES)}")
            one = {"role": role, "content": one.get("value")}
        turns.append(one)
    return turns


def messages_of(given: Any) -> Sequence[Message]:
    """Returns the messages of a conversation, those in parts of text as one text each.

    Raises:
      ValueError: `given` is no list of them: what it got, and what is allowed.
    """
    if not isinstance(given, list) or not given:
        raise ValueError(f"got {_shown(given)} for 'messages'; allowed: a list like [{_A_MESSAGE}]")
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"got {_shown(message)} as message {number}; allowed: {_A_MESSAGE}")
        if calls := [name for name in _INSIDE if message.get(name)]:
            raise ValueError(f"got '{calls[0]}' in a message; allowed: messages of text alone")
        for part in parts if isinstance(parts := message.get("content"), list) else ():
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"got a part of type {_shown(kind)} in a message; allowed: parts of type text")
        if isinstance(parts, list):
            message["content"] = "".join(part["text"] for part in parts)
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
    found, wrong = [], dict[str, list[str]]()
    for where, pair, messages in lines:
        if pair is not None:
            text = "".join(pair)
            found.append(Written(text, ((len(pair[0]), len(text)),) if pair[1] else (), ends=True))
        elif template is not None:
            try:
                found.append(Written(*template.written(messages), ends=False))
            except ValueError as error:
                wrong.setdefault(str(error), []).append(where)
    _add(wrong, problems)
    return found
