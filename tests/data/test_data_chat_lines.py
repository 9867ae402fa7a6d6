"""Rows of fine-tuning formats: which answers are trained, and which fields are errors because nothing reads them."""

import json

import pytest

from meshtrain.data import chat
from meshtrain.data.chat import write_texts
from meshtrain.data.chat_lines import INVERSE_SWITCHES, SWITCHES, line_of
from meshtrain.data.sources import DataOptions
from meshtrain.data.tokenizer import byte_tokenizer
from meshtrain.errors import Problems
from meshtrain.examples.preferences import read_pairs

ROLE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
    "{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)
ASKED, WRONG = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "five"}
AGAIN, RIGHT = {"role": "user", "content": "again"}, {"role": "assistant", "content": "four"}


def trained(row, template=ROLE, *, last_only=False, tmp_path):
    """The texts of the answers of a row that are targets."""
    file = tmp_path / "t.jinja"
    file.write_text(template)
    problems = Problems()
    lines = [line_of(json.dumps(row).encode(), "line 1")]
    [line] = write_texts(lines, "bytes", str(file), problems, last_only=last_only)
    assert not problems.lines()
    return [line.text[begin:end] for begin, end in line.answers]


def off(name):
    return {name: name in INVERSE_SWITCHES}


@pytest.mark.parametrize("template", [ROLE, TAGGED])
@pytest.mark.parametrize("name", [*SWITCHES, *INVERSE_SWITCHES])
def test_a_switch_excludes_an_answer(name, template, tmp_path):
    on = {name: name not in INVERSE_SWITCHES}
    for excluded, other in (
        (off(name), on),
        ({name: float(off(name)[name])}, {}),
        ({name: int(off(name)[name])}, {name: None}),
    ):
        row = {"messages": [ASKED, WRONG | excluded, AGAIN | off(name), RIGHT | other]}
        assert trained(row, template, tmp_path=tmp_path) == ["four|"]
        human = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "five", **excluded},
                 {"from": "human", "value": "again"}, {"from": "gpt", "value": "four", **other}]  # fmt: skip
        assert trained({"conversations": human}, template, tmp_path=tmp_path) == ["four|"]
        none = {"messages": [ASKED, WRONG, AGAIN, RIGHT | excluded]}
        assert trained(none, template, last_only=True, tmp_path=tmp_path) == []
        assert trained(none, template, tmp_path=tmp_path) == ["five|"]
    assert trained({"messages": [ASKED, WRONG, AGAIN, RIGHT]}, template, tmp_path=tmp_path) == ["five|", "four|"]


def test_the_excluded_answer_is_no_target(tmp_path):
    """As in the file without the switch, except for the targets: the same ids in one row, fewer of them counted."""
    file = tmp_path / "t.jinja"
    file.write_text(ROLE)
    tokens = []
    for extra in ({}, {"weight": 0}):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"messages": [ASKED, WRONG | extra, AGAIN, RIGHT]}) + "\n")
        options = DataOptions(source="chat", path=str(path), chat_template=str(file))
        tokenizer = byte_tokenizer()
        [line] = chat.tokenize(tokenizer, chat.lines_of(options, [path], tokenizer, 257)[0])
        tokens.append(line)
    assert tokens[0].ids.tolist() == tokens[1].ids.tolist()
    assert (tokens[0].counted.sum(), tokens[1].counted.sum()) == (10, 5)


@pytest.mark.parametrize("name", [*SWITCHES, *INVERSE_SWITCHES])
@pytest.mark.parametrize("value", [0.5, 2, -1, "no", "0", [0], {}, float("nan")])
def test_a_value_that_is_no_switch_is_an_error(name, value):
    with pytest.raises(ValueError, match=f"for '{name}' of message 2; allowed: 0 or 1"):
        line_of({"messages": [ASKED, WRONG | {name: value}]}, "")
    with pytest.raises(ValueError, match=f"for '{name}' of message 1, of the user; allowed: training only on"):
        line_of({"messages": [ASKED | {name: not off(name)[name]}, WRONG]}, "")


CONVERSATION = {"messages": [ASKED, RIGHT]}
PAIR = {"prompt": "2+2=", "completion": "4"}
FORMS = (CONVERSATION, PAIR, {"instruction": "2+2?", "output": "4"}, {"prompt": [ASKED], "completion": [RIGHT]},
         {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})  # fmt: skip
WITHOUT_EFFECT = {
    **dict.fromkeys(("weight", "loss_weight", "sample_weight", "example_weight"), 0.5),
    **dict.fromkeys(("train_on_input", "train_on_inputs", "train_on_prompt"), True),
    **dict.fromkeys(("mask", "loss_mask", "completion_mask", "assistant_mask", "assistant_masks"), "0 1"),
    **dict.fromkeys(("label", "kto_tag", "train"), False),
    **dict.fromkeys(("chosen", "rejected", "preferred_output", "non_preferred_output", "rejected_response"), "text"),
    "rejected_messages": [RIGHT],
    "labels": [True],
    "chat_template_kwargs": {"enable_thinking": False},
    **dict.fromkeys(("tools", "functions", "documents", "images", "videos", "audios", "history"), ({},)),
    **dict.fromkeys(("image", "video", "audio"), "x.png"),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_of_a_row_that_would_change_training_is_named(name):
    for form in FORMS:
        line_of(form, "")
        line_of(form | {name: None}, "")
        with pytest.raises(ValueError, match=f"'{name}'"):
            line_of(form | {name: WITHOUT_EFFECT[name]}, "")


@pytest.mark.parametrize(
    "name", ["mask", "loss_mask", "train_detail", "tool_calls", "function_call", "images", "audio"]
)
def test_a_field_of_a_message_that_would_change_training_is_named(name):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", name: [1]}]
    answer = RIGHT | {name: [1]}
    for form in ({"messages": [ASKED, answer]}, {"prompt": [ASKED], "completion": [answer]}, {"conversations": turns}):
        with pytest.raises(ValueError, match=f"got '{name}' in "):
            line_of(form, "")


def test_fields_that_describe_what_is_done_and_other_fields_are_accepted():
    done = {"weight": 1, "train": True, "train_on_input": False, "loss_weight": 1.0, "images": [], "tools": None}
    beside = {"id": 3, "score": 0.7, "label": "arithmetic", "source": "made", "text": "x", "chat_template_kwargs": {}}
    for form in FORMS:
        assert line_of(form | done | beside, "") == line_of(form, "")


def test_rated_rows_name_the_source_that_reads_them():
    for extra in ({"label": True}, {"chosen": "4", "rejected": "5"}):
        with pytest.raises(ValueError, match=r"nearest: .*data\.source=preferences"):
            line_of(PAIR | extra, "")


def test_a_prompt_and_a_completion_of_messages_train_the_completion(tmp_path):
    for template in (ROLE, TAGGED):
        row = {"prompt": [ASKED, WRONG, AGAIN], "completion": [RIGHT]}
        assert trained(row, template, tmp_path=tmp_path) == ["four|"]
        several = {"prompt": [ASKED], "completion": [WRONG | {"weight": 0}, AGAIN, RIGHT], "system": "short"}
        assert trained(several, template, tmp_path=tmp_path) == ["four|"]
    [line] = [line_of(several, "")]
    assert [message["role"] for message in line.messages] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": [ASKED], "completion": "4"},
            "for 'prompt'; allowed: a text in complete characters, like the other",
        ),
        (
            {"prompt": "2+2", "completion": [RIGHT]},
            "for 'completion'; allowed: a text in complete characters, like",
        ),
        ({"prompt": [ASKED], "completion": [AGAIN]}, "got no assistant message for 'completion'"),
        ({"prompt": [], "completion": [RIGHT]}, r"got \[\] for 'prompt'"),
        ({"prompt": [ASKED], "completion": []}, "got no assistant message for 'completion'"),
        (PAIR | {"system": "be short"}, "got 'system' with a prompt"),
        (
            {"messages": [{"role": "system", "content": "a"}, ASKED, RIGHT], "system": "b"},
            "got 'system', and a system message in",
        ),
    ],
)
def test_what_a_prompt_and_a_completion_have_to_be(row, said):
    with pytest.raises(ValueError, match=said):
        line_of(row, "")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "text", "value": "hi"}, "got no 'text' but 'value' in a part of type text in a message; allowed: "),
        ({"type": "text", "content": "hi"}, "got no 'text' but 'content' in a part of type text"),
        ({"type": "text"}, "got no 'text' in a part of type text"),
        ({"type": "text", "text": 3}, "got 3 for 'text' in a part of type text"),
        ({"type": "image"}, 'got a part of type "image" in a message; allowed: parts of type text'),
        ({"text": "hi"}, "got a part of type null in a message"),
        ("hi", 'got a part of type "hi" in a message'),
    ],
)
def test_a_part_without_text_names_what_it_has(part, said):
    with pytest.raises(ValueError, match=r"in a (message|part)") as caught:
        line_of({"messages": [{"role": "user", "content": [part]}, RIGHT]}, "")
    assert said in str(caught.value)


PREFERENCE = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "b", "rejected": "c"}, "got null for 'prompt'"),
        ({"prompt": "a", "chosen": "b"}, "got the fields prompt, chosen"),
        (PREFERENCE | {"images": ["x.png"]}, "got 'images' in addition"),
        (PREFERENCE | {"weight": 0.5}, "got 0.5 for 'weight', which has no effect here"),
        (
            {"prompt": [ASKED], "chosen": [RIGHT | {"weight": 0}], "rejected": [WRONG]},
            "an untrained last answer in 'chosen'",
        ),
    ],
)
def test_what_is_wrong_with_every_pair_is_said_once(tmp_path, row, said):
    path, problems = tmp_path / "a.jsonl", Problems()
    path.write_text((json.dumps(PREFERENCE) + "\n") + (json.dumps(row) + "\n") * 40)
    assert len(list(read_pairs([path], problems))) == 1
    assert problems.count == 40
    [line] = problems.lines()
    assert line.startswith(f"data.path: {path}, line 2 and others: ")
    assert said in line
    assert line.endswith("; nearest: leave them out, or rewrite them")
