import json

import pytest

from meshtrain.data.chat import read_lines, write_texts
from meshtrain.errors import Problems

PAIR = {"prompt": "2 + 2 = ", "completion": "4"}
CHAT = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]}
BROKEN = {
    b"xyz": "got not JSON in UTF-8",
    b'{"prompt": "a", "completion": "b"': "got not JSON in UTF-8",
    b"\xff": "got not JSON in UTF-8",
    b"[" * 100_000: "got not JSON in UTF-8",
    b"[1]": "got list; allowed: a JSON object with 'prompt' and 'completion', or with 'messages'",
    b"{}": "got the fields (none); allowed",
    b'{"prompt": "a"}': "got the fields prompt; allowed",
    b'{"prompt": "a", "completions": "b"}': "did you mean 'completion'?",
    b'{"prompt": "a", "completion": null}': "got null for 'completion'; allowed: a text",
    b'{"prompt": ["a"], "completion": "b"}': "got [\"a\"] for 'prompt'; allowed: a text",
    b'{"prompt": "\\ud800", "completion": "b"}': "for 'prompt'; allowed: a text in complete characters",
    b'{"prompt": "a", "completion": "b", "messages": []}': "got the fields prompt, completion, messages; allowed",
    b'{"messages": []}': "got [] for 'messages'; allowed: a list like",
    b'{"messages": "a"}': "got \"a\" for 'messages'; allowed: a list like",
    b'{"messages": ["a"]}': 'got "a" as message 1; allowed: {"role"',
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}': "got null for 'content' of message 2",
    b'{"messages": [{"from": "user", "content": "a"}]}': "got null for 'role' of message 1",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}': "for 'content' of message 1; allowed: a text",
    b'{"messages": [{"role": "user", "content": "\\ufdd0"}]}': "for 'content' of message 1; allowed: a text",
    (
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}'
    ): "got 'tools' in addition to the messages; allowed",
}


def test_each_broken_line_is_one_line_and_all_come_at_once(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps(PAIR).encode()
    for number, (line, said) in enumerate(BROKEN.items()):
        path.write_bytes(b"\n".join([good, b"", line, good]))
        problems = Problems()
        assert len(read_lines(path, problems)) == 2, "the others are read"
        [problem] = problems.lines()
        assert problem.startswith(f"data.path: {path}, line 3: got "), number
        assert said in problem
        assert problem.endswith("; nearest: leave out that line")
    path.write_bytes(b"\n".join(BROKEN))
    problems = Problems()
    assert read_lines(path, problems) == []
    assert problems.count == len(BROKEN)


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


ASKED, ANSWERED, FIRST = ("user", "a?"), ("assistant", "b."), ("system", "s")
FORMS = {
    "alpaca": ({"instruction": "a?", "output": "b.", "text": "x"}, [ASKED, ANSWERED]),
    "alpaca with nothing": ({"instruction": "a?", "input": None, "output": ""}, [ASKED, ("assistant", "")]),
    "alpaca with input": ({"instruction": "a?", "input": "c", "output": "b."}, [("user", "a?\n\nc"), ANSWERED]),
    "alpaca with system": ({"system": "s", "instruction": "a?", "input": "", "output": "b."}, [FIRST, ASKED, ANSWERED]),
    "sharegpt": (
        {"id": 3, "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a?"},
                                    {"from": "gpt", "value": "b.", "weight": 1}]},
        [FIRST, ASKED, ANSWERED],
    ),
    "sharegpt with system": ({"system": "s", "conversations": [{"from": "user", "value": "a?"}]}, [FIRST, ASKED]),
    "conversations of roles": ({"conversations": turns(ASKED, ANSWERED)}, [ASKED, ANSWERED]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]},
                      *turns(ANSWERED)], "tools": None},
        [ASKED, ANSWERED],
    ),
    "no calls": ({"messages": [turns(ASKED)[0] | {"tool_calls": None}]}, [ASKED]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_forms_that_people_have_are_messages(name, tmp_path):
    given, expected = FORMS[name]
    problems = Problems()
    [line] = read_lines(saved(tmp_path, given), problems)
    assert problems.lines() == []
    assert [(one["role"], one["content"]) for one in line.messages] == expected


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
PICTURE = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}]
ALIKE = {
    "tool calls": ({"messages": [*turns(ASKED), CALL]}, "got 'tool_calls' in a message; allowed: messages with only"),
    "an older call": ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
                      "got 'function_call' in a message"),
    "tools": ({"messages": turns(ASKED), "tools": [{}]}, "got 'tools' in addition to the messages"),
    "images": ({"conversations": [{"from": "human", "value": "<image>"}], "images": ["x.png"]}, "got 'images' in"),
    "a picture": ({"messages": [{"role": "user", "content": PICTURE}]}, 'got a part of type "image_url" in a message'),
    "observations": ({"conversations": [{"from": "observation", "value": "x"}]},
                     "got \"observation\" for 'from'; allowed: human, gpt, system, user, assistant"),
    "earlier turns": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "got 'history' in addition"),
    "strange input": ({"instruction": "a", "input": {"b": 1}, "output": "b"}, "got {\"b\": 1} for 'content'"),
    "other fields": ({"question": "a", "answer": "b"}, "got the fields question, answer; allowed: a JSON object with"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_wrong_with_every_line_is_said_once(name, tmp_path):
    given, said = ALIKE[name]
    problems = Problems()
    path = saved(tmp_path, PAIR, *[given] * 20)
    assert len(read_lines(path, problems)) == 1
    [line] = problems.lines()
    assert line.startswith(f"data.path: {path}, line 2 and others: {said}")
    assert line.endswith("; nearest: leave them out, or rewrite them")
    assert "that line" not in line


def test_byte_order_marks_are_left_out_with_a_note(tmp_path, capsys):
    path, whole = tmp_path / "a.jsonl", json.dumps(PAIR).encode()
    path.write_bytes(b"\xef\xbb\xbf" + whole + b"\n\xef\xbb\xbf\n" + whole)
    problems = Problems()
    assert [line.pair for line in read_lines(path, problems)] == [tuple(PAIR.values())] * 2
    assert problems.lines() == []
    assert capsys.readouterr().err == f"meshtrain: WARNING: {path}: removed 2 byte order mark(s)\n"


def saved(tmp_path, *contents):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in contents))
    return path


def lines_of(tmp_path, *contents):
    return read_lines(saved(tmp_path, *contents), Problems())


def test_pairs_need_no_template_and_messages_do(tmp_path):
    problems = Problems()
    [one] = write_texts(lines_of(tmp_path, PAIR), "bytes", "", problems)
    assert one == ("2 + 2 = 4", ((8, 9),), True)
    [nothing] = write_texts(lines_of(tmp_path, PAIR | {"completion": ""}), "bytes", "", problems)
    assert nothing == ("2 + 2 = ", (), True)
    assert not problems.count
    assert len(write_texts(lines_of(tmp_path, PAIR, CHAT, CHAT), "bytes", "", problems)) == 1
    [problem] = problems.lines()
    assert problem.startswith("data.chat_template: got '' and data.tokenizer=bytes, which has no chat template;")


def test_a_conversation_that_the_template_does_not_take_is_named(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% endfor %}"
    )
    system = {"messages": [{"role": "system", "content": "x"}, *CHAT["messages"]]}
    problems = Problems()
    found = write_texts(lines_of(tmp_path, CHAT, system, PAIR, system), "bytes", str(template), problems)
    assert found == [("a?b.", ((2, 4),), False), ("2 + 2 = 4", ((8, 9),), True)]
    [line] = problems.lines()
    assert line.startswith(f"data.path: {tmp_path}/a.jsonl, line 2 and others: got messages that ")
    assert "(ValueError: no system); nearest: leave them out, or rewrite them" in line
