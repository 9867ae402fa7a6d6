"""Reads prompts from the command line or a file, and tokenizes them; reports all problems of all prompts together."""

from collections.abc import Sequence
from typing import NamedTuple

from meshtrain.data.chat_lines import messages_of
from meshtrain.data.chat_template import ChatTemplate
from meshtrain.data.encoding.special_tokens import Message, SpecialTokens, unmark
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Problem, Problems, UserError, as_json_text, refuse
from meshtrain.files import expand_user, is_utf8, read_json, what_is_at
from meshtrain.generation.answers import room_left
from meshtrain.models.task import Decode

_SHOWN = 40  # characters of a prompt in an error
_LINE = '{"prompt": "def "}'


class Prompt(NamedTuple):
    """A prompt before tokenization, as text or as a conversation.

    Attributes:
      text: the text that the model continues or answers.
      where: the source of the prompt, for errors: `--prompt`, or a file and a line.
      messages: the conversation whose last message is `text`; () if the prompt is no conversation.
      is_templated: whether a chat template produced the text. Such a text includes the template's begin tokens.
    """

    text: str
    where: str
    messages: Sequence[Message] = ()
    is_templated: bool = False


def from_flags(texts: Sequence[str], problems: Problems) -> list[Prompt]:
    """Converts the values of `--prompt` to prompts; adds an error to `problems` for each empty or non-UTF-8 value."""
    for text in texts:
        if not text or not is_utf8(text):
            problems.add(Problem("--prompt", got=f"'{text}'", allowed="a text in UTF-8, not empty", nearest="'def '"))
    return [Prompt(text, "--prompt") for text in texts]


def from_file(path: str, problems: Problems, *, chat: bool = False, key: str = "--prompts") -> list[Prompt]:
    """Reads prompts from a file with one JSON object per line, such as {"prompt": "..."}; adds errors to `problems`.

    Args:
      path: the file. Empty lines are skipped.
      problems: receives the errors; reading stops when `problems.is_enough()`.
      chat: whether a line may have a conversation `messages` instead of `prompt`; the model answers its last message.
      key: the option that names the file, for errors.
    """
    name, near = expand_user(path), "--prompt='def '" if key == "--prompts" else "prompts.jsonl"
    if (what := what_is_at(name)) != "a file":
        problems.add(Problem(key, got=f"'{path}', {what}", allowed=f"a file with lines like {_LINE}", nearest=near))
        return []
    prompts = []
    try:
        with name.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    prompts.append(_of_line(line, f"{path}, line {number}", chat))
                except UserError as error:
                    problems.add_at(f"{path}, line {number}", error.problems[0].at(f"{key}: {{where}}"), _LINE)
                if problems.is_enough():
                    break
    except OSError as error:
        problems.add(
            Problem(
                key,
                got=f"'{path}', which cannot be read ({error.strerror})",
                allowed="a readable file",
                nearest=f"chmod a+r '{path}'",
            )
        )
        return []
    if not prompts and not problems.count:
        problems.add(
            Problem(key, got=f"'{path}', which contains no prompt", allowed="at least one line", nearest=_LINE)
        )
    return prompts


def _of_line(line: bytes, where: str, chat: bool) -> Prompt:
    """Parses a line of a file of prompts; returns the `Prompt`.

    Args:
      line: a JSON object in UTF-8.
      where: the file and the line, stored in the prompt.
      chat: whether the line may have `messages` instead of `prompt`.

    Raises:
      UserError: the line is no JSON object, or lacks a valid `prompt` or `messages`. The error does not name the file
        and the line; the caller adds them.
    """
    wanted = "a JSON object with 'prompt', a text that is not empty"
    try:
        fields = read_json(line)
    except ValueError as error:
        raise UserError(Problem(None, got=f"not JSON in UTF-8 ({error})", allowed=wanted)) from error
    if chat and isinstance(fields, dict) and "messages" in fields and "prompt" not in fields:
        messages, _ = messages_of(fields["messages"])
        return Prompt(messages[-1]["content"], where, messages)
    if not isinstance(fields, dict) or "prompt" not in fields:
        got = ", ".join(fields) or "no field" if isinstance(fields, dict) else type(fields).__name__
        raise UserError(Problem(None, got=got, allowed=f"{wanted}{', or with messages' if chat else ''}"))
    text = fields["prompt"]
    if not isinstance(text, str) or not text or not is_utf8(text):
        raise UserError(Problem(None, got=f"{as_json_text(text)} for 'prompt'", allowed=wanted))
    return Prompt(text, where)


def in_chat(prompts: Sequence[Prompt], template: ChatTemplate, special: SpecialTokens) -> list[Prompt]:
    """Formats prompts with a chat template, up to the start of the assistant's answer.

    Args:
      prompts: each is a conversation, or else a text that becomes the message of a user.
      template: the chat template.
      special: the special tokens of the tokenizer.

    Raises:
      UserError: has one line for each conversation that the template rejects.
    """
    problems, found = Problems(), []
    for prompt in prompts:
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        try:
            text, _ = special.through_template(lambda given: (template.prompt(given), ()), messages)
            found.append(Prompt(text, prompt.where, is_templated=True))
        except UserError as error:
            problems.add_at(prompt.where, error.problems[0].at("{where}"), "leave it out")
    refuse(problems.lines())
    return found


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, vocab_size: int, decode: Decode) -> list[list[int]]:
    """Returns the token ids of each prompt.

    Args:
      prompts: at least one prompt.
      tokenizer: the tokenizer of the run.
      vocab_size: the vocabulary size of the model; 0 if unknown.
      decode: the task's functions for generation, with the model's limits on the number of tokens.

    Raises:
      UserError: has one line for each prompt that cannot be encoded, has no tokens, has ids outside of the vocabulary,
        or has more tokens than the model has positions.
    """
    problems, tokens = Problems(), list[list[int]]()
    for text, where, _, is_templated in prompts:
        plain = unmark(text)
        shown = plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]}..."
        try:
            ids = tokenizer.encode_templated(text) if is_templated else tokenizer.encode(text)
        except UserError as error:
            problems.add(*(problem.at(where) for problem in error.problems))
            continue
        tokens.append(ids)
        if not ids:
            problems.add(
                Problem(where, got=f"'{shown}', which has no tokens", allowed="at least one", nearest="'def '")
            )
        elif vocab_size and max(ids) >= vocab_size:
            problems.add(
                Problem(
                    where,
                    got=f"'{shown}', which has the token {max(ids)}",
                    allowed=f"below model.vocab_size = {vocab_size}",
                    nearest="the data.tokenizer of the run",
                )
            )
        elif room_left(decode, len(ids)) == 0:
            most = decode.max_prompt or decode.max_positions - 1
            problems.add(
                Problem(
                    where,
                    got=f"'{shown}', {len(ids)} tokens",
                    allowed=f"at most {most}, the positions of the model",
                    nearest=f"its last {most} tokens",
                )
            )
    refuse(problems.lines())
    return tokens
