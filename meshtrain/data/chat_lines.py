"""Parses rows of fine-tuning data: the fields of a row become a prompt and its completion, or a conversation.

A row has `messages` (OpenAI), `conversations` (ShareGPT), `prompt` and `completion` (two texts, or TRL's two lists of
messages), or `instruction` and `output` (Alpaca). Other fields are ignored, with an exception: fields that select the
trained messages in a known format either take effect or raise an error that names the field.
"""

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from meshtrain.data.chat_template import ASSISTANT, BEGIN, END
from meshtrain.data.encoding.special_tokens import Message
from meshtrain.errors import Problem, UserError, as_json_text, nearest
from meshtrain.files import Json, JsonObject, is_utf8, read_json

PAIR = ("prompt", "completion")
ALPACA = ("instruction", "output")
MESSAGES, SHAREGPT = "messages", "conversations"
ROLES = {"human": "user", "gpt": ASSISTANT, "system": "system", "user": "user", ASSISTANT: ASSISTANT}  # keys: ShareGPT

# Fields of a message, with value 0 or 1, that select it for training. OpenAI, Mistral, Together; Axolotl; ms-swift.
SWITCHES = ("weight", "train", "training", "loss_weight", "loss", "loss_scale")
INVERSE_SWITCHES = ("masked",)  # of torchtune: 1 excludes a message from training

# Fields of a message whose meaning differs from program to program.
_OTHER_SWITCHES = ("mask", "loss_mask", "train_detail", "training_detail")
# Fields of a row that rate answers -> their type, in formats of DPO, OpenAI, ms-swift, KTO and stepwise supervision.
_RATINGS: Mapping[str, type] = {
    **dict.fromkeys(("chosen", "rejected", "preferred_output", "non_preferred_output"), object),
    **dict.fromkeys(("rejected_response", "rejected_messages"), object),
    "label": bool,
    "kto_tag": bool,
    "labels": list,
}
# Fields of a row that select the trained messages -> the values that agree with this program's training.
_ROW_SWITCHES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("weight", "loss_weight", "sample_weight", "example_weight", "train"), (1,)),
    **dict.fromkeys(("train_on_input", "train_on_inputs", "train_on_prompt"), (0,)),
    **dict.fromkeys(("mask", "loss_mask", "completion_mask", "assistant_mask", "assistant_masks"), ()),
    "chat_template_kwargs": (),
}
# Fields with content other than text, of a row (_BESIDE) and of a message (_INSIDE).
_BESIDE = ("tools", "functions", "documents", "images", "videos", "audios", "image", "video", "audio", "history")
_INSIDE = ("tool_calls", "function_call", "images", "videos", "audios", "image", "video", "audio")

ALLOWED = "a JSON object with 'prompt' and 'completion', or with 'messages', or as Alpaca or ShareGPT have it"
_A_MESSAGE = '{"role": "user", "content": "..."}'
_A_PART = '{"type": "text", "text": "..."}'


class Line(NamedTuple):
    """A parsed line of a file: either a prompt and its completion, or a conversation.

    Attributes:
      where: the file and the line number, for errors.
      pair: the texts of a prompt and its completion; None for a conversation.
      messages: the messages of a conversation, with `role` and `content`; () for a pair.
      learned: for each message, whether it is an answer to train on.
    """

    where: str
    pair: tuple[str, str] | None
    messages: Sequence[Message] = ()
    learned: Sequence[bool] = ()


def fields_of(row: bytes | JsonObject, allowed: str) -> JsonObject:
    """Parses a JSON line to its fields; returns the fields of a table's row unchanged.

    Args:
      row: a line in UTF-8, or the fields of a row.
      allowed: the allowed form of a line, as text for the error.

    Raises:
      UserError: the row is not a JSON object. The error does not name the file and the line; the caller adds them.
    """
    try:
        fields = read_json(row) if isinstance(row, bytes) else row
    except ValueError as error:
        raise UserError(
            Problem(None, got=f"not JSON in UTF-8 ({error})", allowed="one JSON object per line")
        ) from error
    if not isinstance(fields, dict):
        raise UserError(Problem(None, got=type(fields).__name__, allowed=allowed))
    return fields


def line_of(row: bytes | JsonObject, where: str) -> Line:
    """Parses a JSON line or the fields of a table's row as fine-tuning data.

    Args:
      row: a line in UTF-8, or the fields of a row.
      where: the file and the line number, stored in the result.

    Raises:
      UserError: the row has no known form. The error does not name the file and the line; the caller adds them.
    """
    fields = fields_of(row, ALLOWED)
    _refuse_ratings(fields)
    given, num_before = _turns(fields)
    refuse_ignored(fields)
    if given is not None:
        messages, learned = messages_of(given)
        learned = [one and number >= num_before for number, one in enumerate(learned)]
        if num_before and not any(message["role"] == ASSISTANT for message in messages[num_before:]):
            raise UserError(Problem(None, got=f"no {ASSISTANT} message for 'completion'", allowed=ALLOWED))
        return Line(where, None, messages, learned)
    for name in PAIR:
        if not isinstance(fields[name], str) or not is_utf8(fields[name]):
            other = fields[PAIR[1 - PAIR.index(name)]]
            both = ", like the other field" if isinstance(fields[name], list) and isinstance(other, str) else ""
            got = f"{as_json_text(fields[name])} for '{name}'"
            raise UserError(Problem(None, got=got, allowed=f"a text in complete characters{both}"))
    if fields.get("system"):
        raise UserError(
            Problem(None, got="'system' with a prompt that is a text", allowed="the system text inside 'prompt'")
        )
    return Line(where, (fields["prompt"], fields["completion"]))


def _turns(fields: JsonObject) -> tuple[Json, int]:
    """Returns the unchecked messages of a row, and how many of them form the prompt; (None, 0) for a pair of texts.

    The number is 0 if every answer of the conversation may be trained on.

    Raises:
      UserError: the row has no known form. The error does not name the file and the line; the caller adds them.
    """
    if set(PAIR) <= fields.keys() and MESSAGES not in fields:
        prompt, completion = (fields[name] for name in PAIR)
        if not isinstance(prompt, list) or not isinstance(completion, list):
            return None, 0
        if not prompt:
            raise UserError(Problem(None, got="[] for 'prompt'", allowed="at least one message"))
        return _behind_system(fields, [*prompt, *completion]), len(prompt) + bool(fields.get("system"))
    if MESSAGES in fields and not fields.keys() & set(PAIR):
        return _behind_system(fields, fields[MESSAGES]), 0
    if MESSAGES not in fields and set(ALPACA) <= fields.keys():
        asked = [fields[name] for name in ("instruction", "input") if fields.get(name)]
        strange = [one for one in asked if not isinstance(one, str)]
        user: Json = {"role": "user", "content": strange[0] if strange else "\n\n".join(asked)}
        return [*_system(fields), user, {"role": ASSISTANT, "content": fields["output"]}], 0
    if MESSAGES not in fields and fields.get(SHAREGPT) is not None:
        given = fields[SHAREGPT]
        return [*_system(fields), *map(_of_sharegpt, given)] if isinstance(given, list) else given, 0
    known = (*PAIR, MESSAGES, SHAREGPT, *ALPACA)
    fix = next(filter(None, (nearest(name, known) for name in fields if name not in PAIR)), "")
    raise UserError(Problem(None, got=f"the fields {', '.join(fields) or '(none)'}", allowed=ALLOWED, fix=fix))


def _system(fields: JsonObject) -> list[Json]:
    return [{"role": "system", "content": fields["system"]}] if fields.get("system") else []


def _behind_system(fields: JsonObject, given: Json) -> Json:
    """Returns `given`, a list of messages, with a system message before it if the row has a field `system`.

    Raises:
      UserError: the row has a field `system`, and the messages include a system message.
    """
    system = _system(fields)
    if (
        system
        and isinstance(given, list)
        and any(isinstance(one, dict) and one.get("role") == "system" for one in given)
    ):
        raise UserError(Problem(None, got="'system', and a system message in the messages", allowed="one of them"))
    return [*system, *given] if system and isinstance(given, list) else given


def _of_sharegpt(turn: Json) -> Json:
    """Converts a ShareGPT turn, an object with `from` and `value`, to a message; returns any other value unchanged.

    Raises:
      UserError: the role in `from` is unknown.
    """
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if (role := ROLES.get(str(turn["from"]))) is None:
        raise UserError(Problem(None, got=f"{as_json_text(turn['from'])} for 'from'", allowed=", ".join(ROLES)))
    read = (*SWITCHES, *INVERSE_SWITCHES, *_OTHER_SWITCHES, *_INSIDE)
    kept = {name: turn[name] for name in read if name in turn}
    return {"role": role, "content": turn.get("value"), **kept}


def refuse_ignored(fields: JsonObject) -> None:
    """Raises UserError for a field of a row that affects training in other programs but would be ignored here."""
    for name, values in _ROW_SWITCHES.items():
        value = fields.get(name)
        if value is not None and value not in ("", [], {}) and not _is_in(value, values):
            allowed = f"{values[0]}, or 'weight' in a message" if values else "'weight' in a message, 0 or 1"
            raise UserError(
                Problem(None, got=f"{as_json_text(value)} for '{name}', which has no effect here", allowed=allowed)
            )
    if beside := [name for name in _BESIDE if fields.get(name)]:
        raise UserError(Problem(None, got=f"'{beside[0]}' in addition to the messages", allowed="only messages"))


def _refuse_ratings(fields: JsonObject) -> None:
    for name, kind in _RATINGS.items():
        if fields.get(name) is not None and isinstance(fields[name], kind):
            raise UserError(
                Problem(
                    None,
                    got=f"'{name}', which rates answers",
                    condition="here",
                    allowed="rows whose answers are all trained",
                    nearest=(
                        f"the good answers without '{name}', or data.source=preferences for pairs of 'chosen' and "
                        "'rejected'"
                    ),
                )
            )


def _is_in(value: Json, values: Container[Json]) -> bool:
    return isinstance(value, int | float) and value in values


def messages_of(given: Json) -> tuple[Sequence[Message], Sequence[bool]]:
    """Checks the messages of a conversation; returns them, and for each whether it is an answer to train on.

    If `content` is a list of text parts, the parts are joined. Fields that exclude a message from training, such as
    `weight`, are removed from the returned messages, so that the chat template does not receive them.

    Args:
      given: the value of the row's field `messages`.

    Raises:
      UserError: `given` is no list of messages, or a field would have no effect. The error does not name the file and
        the line; the caller adds them.
    """
    if not isinstance(given, list) or not given:
        raise UserError(
            Problem(None, got=f"{as_json_text(given)} for 'messages'", allowed=f"a list like [{_A_MESSAGE}]")
        )
    messages, learned = list[Message](), list[bool]()
    for number, message in enumerate(given, start=1):
        if not isinstance(message, dict):
            raise UserError(Problem(None, got=f"{as_json_text(message)} as message {number}", allowed=_A_MESSAGE))
        if inside := [name for name in _INSIDE if message.get(name)]:
            raise UserError(Problem(None, got=f"'{inside[0]}' in a message", allowed="messages with only text"))
        is_off = _is_switched_off(message, number)
        message = {name: value for name, value in message.items() if name not in (*SWITCHES, *INVERSE_SWITCHES)}
        if isinstance(message.get("content"), list):
            message["content"] = "".join(_text_of_part(part) for part in message["content"])
        for name in ("role", "content"):
            value = message[name] if name in message else None
            if not isinstance(value, str) or not is_utf8(value) or BEGIN in value or END in value:
                fix = nearest(name, message) if name not in message else ""
                raise UserError(
                    Problem(
                        None, got=f"{as_json_text(value)} for '{name}' of message {number}", allowed="a text", fix=fix
                    )
                )
        messages.append(message)
        learned.append(message["role"] == ASSISTANT and not is_off)
    return messages, learned


def _is_switched_off(message: JsonObject, number: int) -> bool:
    """Returns whether a field of a message, such as `weight`, excludes the message from training.

    Args:
      message: the fields of the message.
      number: the position of the message in its conversation, from 1, for errors.

    Raises:
      UserError: such a field is not 0 or 1, or requests training on a message that is no answer.
    """
    if other := [name for name in _OTHER_SWITCHES if message.get(name) is not None]:
        raise UserError(
            Problem(
                None,
                got=f"'{other[0]}' in message {number}",
                allowed="'weight', 0 or 1, which applies to a complete message",
            )
        )
    given = {name: message[name] for name in (*SWITCHES, *INVERSE_SWITCHES) if message.get(name) is not None}
    for name, value in given.items():
        if not _is_in(value, (0, 1)):
            raise UserError(
                Problem(
                    None, got=f"{as_json_text(value)} for '{name}' of message {number}", allowed="0 or 1, true or false"
                )
            )
        if message.get("role") != ASSISTANT and bool(value) != (name in INVERSE_SWITCHES):
            raise UserError(
                Problem(
                    None,
                    got=f"{as_json_text(value)} for '{name}' of message {number}, of the {message.get('role')}",
                    allowed=f"training only on messages of the {ASSISTANT}",
                )
            )
    return any(bool(value) == (name in INVERSE_SWITCHES) for name, value in given.items())


def _text_of_part(part: Json) -> str:
    """Returns the text of one part of a message's content.

    Raises:
      UserError: the part is no text. The error does not name the file and the line; the caller adds them.
    """
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind != "text":
        raise UserError(
            Problem(None, got=f"a part of type {as_json_text(kind)} in a message", allowed="parts of type text")
        )
    if isinstance(text := part.get("text"), str):
        return text
    got = f"{as_json_text(text)} for 'text'" if "text" in part else "no 'text'"
    others = [name for name in part if name != "type"]
    beside = f" but '{others[0]}'" if others and "text" not in part else ""
    raise UserError(Problem(None, got=f"{got}{beside} in a part of type text in a message", allowed=_A_PART))
