"""Chat templates: format a conversation as text and locate the characters of its answers.

A template is Jinja source that comes with a tokenizer. Hugging Face defines the context, the filters and the tag
`generation` (https://huggingface.co/docs/transformers/chat_templating). A template is untrusted code, so it runs in
Jinja's sandbox: it cannot reach Python's internal attributes, files or modules.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from meshtrain.data.encoding.special_tokens import Message, Spans
from meshtrain.data.encoding.tokenizer_folder import SETTINGS, TEMPLATE, settings, special_tokens
from meshtrain.errors import Problem, UserError
from meshtrain.files import Json, JsonObject, is_utf8, what_is_at

ASSISTANT = "assistant"
# Unicode reserves these two code points for internal use of programs, so valid texts do not contain them.
BEGIN, END = "\ufdd0", "\ufdd1"
_MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A compiled chat template.

    Attributes:
      name: the file of the template, for errors.
      marks_answers: whether the template has the tag `{% generation %}` around answers.
      render: (messages, whether to append the start of the next answer) -> text, with the characters `BEGIN` and `END`
        around each answer that the tag encloses. It raises UserError if the template rejects the messages.
    """

    name: str
    marks_answers: bool
    render: Callable[[Sequence[Message], bool], str]

    def prompt(self, messages: Sequence[Message]) -> str:
        """Formats a conversation as text, including the start of the assistant's next answer.

        Raises:
          UserError: the template rejects these messages.
        """
        return _strip_markers(self.render(messages, True))[0]

    def written(self, messages: Sequence[Message], learned: Sequence[bool] | None = None) -> tuple[str, Spans]:
        """Formats a conversation as text; returns the text, and (start, stop) of each answer in its characters.

        If the template has the tag `{% generation %}`, the tag encloses the answers. Otherwise, an answer is the text
        that its message adds to the prompt of the messages before it.

        Args:
          messages: the messages of the conversation.
          learned: for each message, whether to return it if it is an answer; None returns all answers.

        Raises:
          UserError: the template rejects these messages, or their answers cannot be located.
        """
        text, spans = _strip_markers(self.render(messages, False))
        counts = [learned is None or learned[index] for index, one in enumerate(messages) if one["role"] == ASSISTANT]
        if self.marks_answers and all(counts):
            return text, spans
        if self.marks_answers:
            if len(spans) != len(counts):
                raise UserError(
                    Problem(
                        None,
                        got=(
                            f"an answer that is not trained, but {self.name} marks {len(spans)} spans in "
                            f"{len(counts)} answers"
                        ),
                        allowed="one {% generation %} for each answer",
                    )
                )
            return text, tuple(span for span, is_learned in zip(spans, counts, strict=True) if is_learned)
        found = []
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT and (learned is None or learned[index]):
                before, after = self.render(messages[:index], True), self.render(messages[: index + 1], False)
                if not (text.startswith(after) and after.startswith(before)):
                    raise UserError(
                        Problem(
                            None,
                            got=(
                                f"an answer in message {index + 1} that {self.name} does not append to the "
                                "text of the messages before it"
                            ),
                            allowed="a template that only appends text, or marks answers with {% generation %}",
                        )
                    )
                found.append((len(before), len(after)))
        return text, tuple(found)


def open_template(tokenizer: str, file: str) -> ChatTemplate:
    """Reads and compiles the chat template in `file`, or in the tokenizer's folder if `file` is ''.

    Args:
      tokenizer: the value of `data.tokenizer`. The template may use the special tokens that this folder defines.
      file: the value of `data.chat_template`; '' uses the template in the tokenizer's folder.

    Raises:
      UserError: there is no template, or it cannot be read or compiled.
    """
    content = settings(tokenizer)
    beside = Path(tokenizer, TEMPLATE)
    if file or what_is_at(beside) == "a file":
        source, name = template_text(file or beside), str(file or beside)
    else:
        source, name = _of_settings(content), str(Path(tokenizer, SETTINGS))
    if not source:
        raise UserError(
            Problem(
                "data.chat_template",
                got=f"'' and data.tokenizer={tokenizer}, which has no chat template",
                allowed=f"a tokenizer's folder with {TEMPLATE}, or a template file",
                nearest="data.chat_template=FILE",
            )
        )
    return compile_template(source, name, special_tokens(content))


def template_text(file: str | Path) -> str:
    """Returns the text of a template file.

    Raises:
      UserError: the file cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            Problem(
                "data.chat_template",
                fault=f"'{file}' cannot be read ({error})",
                allowed="a template in UTF-8",
                nearest="another file",
            )
        ) from error


def _of_settings(content: JsonObject) -> str:
    """Returns the chat template in the content of a tokenizer_config.json; '' if it has none.

    If there are several templates, the template called `default` is returned.
    """
    given = content["chat_template"] if "chat_template" in content else ""
    if isinstance(given, list):
        named = [one for one in given if isinstance(one, dict) and {"name", "template"} <= one.keys()]
        given = next((one["template"] for one in named if one["name"] == "default"), "")
    return given if isinstance(given, str) else ""


def file_problems(path: str) -> list[Problem]:
    """Returns an error line if `path`, the value of `data.chat_template`, is neither a file nor ''; otherwise []."""
    what = what_is_at(path)
    if not path or what == "a file":
        return []
    state = "which does not exist" if what == "nothing there" else what
    return [
        Problem(
            "data.chat_template",
            got=f"'{path}', {state}",
            allowed="a template file, or ''",
            nearest="'', the template in the tokenizer's folder",
        )
    ]


def compile_template(source: str, name: str, tokens: Mapping[str, str]) -> ChatTemplate:
    """Compiles a chat template.

    The function `strftime_now` is not available: the text of a run's data must not change from day to day.

    Args:
      source: the Jinja source.
      name: the template's name in errors.
      tokens: name -> text of each special token, such as `eos_token`; the template can use these names.

    Raises:
      UserError: the source is no valid template.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag `{% generation %} ... {% endgeneration %}`, which encloses an answer."""

        tags = {"generation"}  # noqa: RUF012  of the base class

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
            return [begin, jinja2.nodes.Scope(body, lineno=line), end]

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    try:
        template = environment.from_string(source)
    except Exception as error:  # Python may reject the code that Jinja generates
        raise UserError(
            Problem(
                "data.chat_template",
                fault=f"'{name}' is not a valid template ({error})",
                allowed=f"Jinja, as in {TEMPLATE}",
                nearest="data.chat_template=FILE",
            )
        ) from error

    def render(messages: Sequence[Message], wants_answer: bool) -> str:
        given = {**tokens, "messages": list(messages), "tools": None, "documents": None}
        try:
            text = template.render(given, add_generation_prompt=wants_answer)
        except Exception as error:  # untrusted code may raise any exception
            reason = f"{type(error).__name__}: {error}"
            raise UserError(Problem(None, got=f"messages that {name} rejects ({reason})")) from error
        if not is_utf8(text):
            raise UserError(
                Problem(None, got=f"half of a surrogate pair in the text of {name}", allowed="complete characters")
            )
        return text

    return ChatTemplate(name, _MARKS_ANSWERS.search(source) is not None, render)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _as_json(value: Json, ensure_ascii: bool = False, **options: Json) -> str:
    # Jinja's own filter of this name escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strip_markers(marked: str) -> tuple[str, Spans]:
    """Removes `BEGIN` and `END` from a text; also returns the spans between them, in characters of the result.

    >>> _strip_markers("a" + BEGIN + "bc" + END + "d")
    ('abcd', ((1, 3),))
    """
    pieces, spans, length, begin = list[str](), list[tuple[int, int]](), 0, -1
    for piece in re.split(f"([{BEGIN}{END}])", marked):
        if piece not in (BEGIN, END):
            pieces.append(piece)
            length += len(piece)
        elif (piece == BEGIN) == (begin < 0):
            if piece == END:
                spans.append((begin, length))
            begin = length if piece == BEGIN else -1
        else:
            raise UserError(
                Problem(None, got="an answer inside an answer", allowed="one {% generation %} around each answer")
            )
    if begin >= 0:
        raise UserError(Problem(None, got="an answer without an end", allowed="{% endgeneration %} after each answer"))
    return "".join(pieces), tuple(spans)
