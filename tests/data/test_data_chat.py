import json

from meshtrain.data.chat import read_lines, written
from meshtrain.words.errors import Problems

PAIR = {"prompt": "2 + 2 = ", "completion": "4"}
CHAT = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]}
BROKEN = {
    b"xyz": "got no JSON in UTF-8",
    b'{"prompt": "a", "completion": "b"': "got no JSON in UTF-8",
    b"\xff": "got no JSON in UTF-8",
    b"[" * 100_000: "got no JSON in UTF-8",
    b"[1]": "got list; allowed: a JSON object with 'prompt' and 'completion', or with 'messages'",
    b"{}": "got the fields (none); allowed",
    b'{"prompt": "a"}': "got the fields prompt; allowed",
    b'{"prompt": "a", "completions": "b"}': "did you mean 'completion'?",
    b'{"prompt": "a", "completion": null}': "got null for 'completion'; allowed: a text",
    b'{"prompt": ["a"], "completion": "b"}': "got [\"a\"] for 'prompt'; allowed: a text",
    b'{"prompt": "\\ud800", "completion": "b"}': "for 'prompt'; allowed: a text in whole characters",
    b'{"prompt": "a", "completion": "b", "messages": []}': "got the fields prompt, completion, messages; allowed",
    b'{"messages": []}': "got [] for 'messages'; allowed: a list like",
    b'{"messages": "a"}': "got \"a\" for 'messages'; allowed: a list like",
    b'{"messages": ["a"]}': 'got "a" as message 1; allowed: {"role"',
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}': "got null for 'content' of message 2",
    b'{"messages": [{"from": "user", "content": "a"}]}': "got null for 'role' of message 1",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}': "for 'content' of message 1; allowed: a text",
    b'{"messages": [{"role": "user", "content": "\\ufdd0"}]}': "for 'content' of message 1; allowed: a text",
    b'{"messages": [{"role": "user", "content": "a"}], "tools": []}': "got 'tools' or 'documents' beside",
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


def lines_of(tmp_path, *contents):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in contents))
    return read_lines(path, Problems())


def test_pairs_need_no_template_and_messages_do(tmp_path):
    problems = Problems()
    [one] = written(lines_of(tmp_path, PAIR), "bytes", "", problems)
    assert one == ("2 + 2 = 4", ((8, 9),), True)
    [nothing] = written(lines_of(tmp_path, PAIR | {"completion": ""}), "bytes", "", problems)
    assert nothing == ("2 + 2 = ", (), True)
    assert not problems.count
    assert len(written(lines_of(tmp_path, PAIR, CHAT, CHAT), "bytes", "", problems)) == 1
    [problem] = problems.lines()
    assert problem.startswith("data.chat_template: got '' and data.tokenizer=bytes, which brings no chat template;")


def test_a_conversation_that_the_template_does_not_take_is_named(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% endfor %}"
    )
    system = {"messages": [{"role": "system", "content": "x"}, *CHAT["messages"]]}
    problems = Problems()
    found = written(lines_of(tmp_path, CHAT, system, PAIR, system), "bytes", str(template), problems)
    assert found == [("a?b.", ((2, 4),), False), ("2 + 2 = 4", ((8, 9),), True)]
    assert [line.split(": ")[1] for line in problems.lines()] == [f"{tmp_path}/a.jsonl, line {n}" for n in (2, 4)]
    assert all("(ValueError: no system); nearest: leave out that line" in line for line in problems.lines())
