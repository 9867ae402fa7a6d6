import json
import pathlib
import re

import pytest

from meshtrain.data.chat import Written, tokenize
from meshtrain.data.chat_template import BEGIN, compile_template, file_problems, open_template
from meshtrain.data.tokenizer import open_tokenizer
from meshtrain.errors import UserError

FOLDER = pathlib.Path(__file__).parents[1] / "hf" / "fixtures" / "chat"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())  # of transformers, see docs/guide/finetuning.md
USER = {"role": "user", "content": "a?"}
ANSWER = {"role": "assistant", "content": "b."}


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda one: one["messages"][-1]["content"])
def test_text_ids_and_mask_are_those_of_transformers(expected):
    template, tokenizer = open_template(str(FOLDER), ""), open_tokenizer(str(FOLDER))
    text, answers = template.written(expected["messages"])
    assert text == expected["text"]
    [tokens] = tokenize(tokenizer, [Written(text, answers, ends=False)])
    assert tokens.ids.tolist() == expected["input_ids"]
    assert tokens.counted.astype(int).tolist() == expected["assistant_mask"]
    assert template.prompt(expected["messages"][:-1]) == expected["prompt"]
    assert tokenizer.encode(text) == expected["input_ids"]


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda one: one["messages"][-1]["content"])
def test_without_the_tag_an_answer_is_what_its_message_adds(expected):
    source = (FOLDER / "chat_template.jinja").read_text()
    plain = compile_template(re.sub(r"\{% (end)?generation %\}", "", source), "plain", {})
    text, answers = plain.written(expected["messages"])
    assert text == expected["text"]
    wanted = [f"{one['content']}<|im_end|>\n" for one in expected["messages"] if one["role"] == "assistant"]
    assert [text[begin:end] for begin, end in answers] == wanted


def test_a_template_that_rewrites_what_came_before_is_refused():
    source = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }};{% endfor %}"
    with pytest.raises(ValueError, match=r"an answer in message 2 that t does not append to the text of the messages"):
        compile_template(source, "t", {}).written([USER, ANSWER, USER])


REFUSED = {
    "{{ messages.__class__.__mro__ }}": "'__class__' of 'list' object is unsafe",
    "{{ ''.__class__.__base__.__subclasses__() }}": "'__class__' of 'str' object is unsafe",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "'__init__' of 'type' object is unsafe",
    "{{ raise_exception.__globals__['json'] }}": "'__globals__' of 'function' object is unsafe",
    "{{ '{0.__class__.__mro__}'.format(messages) }}": "'__class__' of 'list' object is unsafe",
    "{{ messages.append(1) }}": "'append' of 'list' object is unsafe",
    "{{ messages[0].update({'role': 'x'}) }}": "'update' of 'dict' object is unsafe",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}{{ os }}": "no loader",
    "{{ range(10000000) | list }}": "Range too big",
    "{{ raise_exception('roles must alternate') }}": "ValueError: roles must alternate",
    "{{ strftime_now('%d %b %Y') }}": "'strftime_now' is undefined",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}": "an answer inside an answer",
}


@pytest.mark.parametrize("source", REFUSED)
def test_a_template_reaches_nothing_and_its_errors_are_one_line(source):
    with pytest.raises(ValueError, match=re.escape(REFUSED[source])):
        compile_template(source, "t", {}).written([USER])


def test_what_templates_of_hugging_face_rely_on():
    def text(source, tokens=None):
        return compile_template(source, "t", tokens or {}).prompt([USER, ANSWER])

    assert text("{{ messages | tojson }}") == json.dumps([USER, ANSWER])
    assert text("{{ {'a': '<ü>'} | tojson }}") == '{"a": "<ü>"}', "nothing is escaped"
    assert (
        text("{% for m in messages %}{% if loop.index0 %}{% break %}{% endif %}{{ m['role'] }}{% endfor %}") == "user"
    )
    assert text("{% if true %}\n  {% if true %}\na\n  {% endif %}\n{% endif %}\n") == "a\n", (
        "lines of tags alone vanish"
    )
    assert text("{{ bos_token + messages[0].content }}", {"bos_token": "<s>"}) == "<s>a?"
    assert text("{{ 'tools' if tools else 'none' }}, {{ add_generation_prompt }}") == "none, True"
    assert text("{% if strftime_now is defined %}today{% else %}26 Jul 2024{% endif %}") == "26 Jul 2024"
    assert text("{% set x = 1 %}{%- generation -%} {{ x }}{% set x = 2 %} {%- endgeneration -%} {{ x }}") == "11"


def test_which_template_a_folder_brings(tmp_path):
    def opened(**settings):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return open_template(str(tmp_path), "").prompt([USER])

    assert opened(chat_template="{{ eos_token }}", eos_token={"content": "</s>"}) == "</s>"
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert opened(chat_template=several) == "d"
    with pytest.raises(UserError, match=r"^data.chat_template: got '' and .*, which has no chat template; allowed:"):
        opened(chat_template=several[:1])
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}, of a file")
    assert opened(chat_template="c", eos_token="</s>") == "</s>, of a file"
    (tmp_path / "own.jinja").write_text("own")
    assert open_template(str(tmp_path), str(tmp_path / "own.jinja")).prompt([USER]) == "own"
    assert open_template("bytes", str(tmp_path / "own.jinja")).prompt([USER]) == "own"


@pytest.mark.parametrize(
    "source",
    ["{% for a in b %}" * 25 + "{% endfor %}" * 25, "{% if a %}" * 150 + "{% endif %}" * 150, "{% break %}",
     "{{ " + "1" * 5000 + " }}"],
    ids=["loops", "ifs", "a break outside", "digits"],
)  # fmt: skip
def test_templates_that_python_does_not_compile_are_one_line(source):
    with pytest.raises(
        UserError, match=r"^data.chat_template: 't' is not a valid template \(.*\); allowed: Jinja, .*nearest: "
    ):
        compile_template(source, "t", {})


def test_templates_that_cannot_be_read_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"data.chat_template: 't' is not a valid template \(.*unknown tag 'nothing'"):
        compile_template("{% nothing %}", "t", {})
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"latin.jinja' cannot be read \(.*utf-8"):
        open_template("bytes", str(tmp_path / "latin.jinja"))
    for content in (b"[]", b"{", b"\xff"):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(UserError, match=r"data.tokenizer: '.*tokenizer_config.json' (holds list|cannot be read)"):
            open_template(str(tmp_path), "")
    assert file_problems("") == file_problems(str(tmp_path / "latin.jinja")) == []
    assert "a folder; allowed" in file_problems(str(tmp_path))[0]
    assert "does not exist" in file_problems(str(tmp_path / "none"))[0]


def test_the_marks_around_answers_can_be_in_no_template_twice():
    with pytest.raises(ValueError, match="an answer without an end"):
        compile_template(BEGIN, "t", {}).written([USER])
