"""Fine-tuning on answers, and `generate --chat`: the same template writes what is learned and what is asked."""

import json

import numpy as np
import pytest

from meshtrain import generate
from meshtrain.config.schema import Config
from meshtrain.data.sources import DataOptions
from meshtrain.errors import UserError
from meshtrain.generation.prompts import Prompt
from meshtrain.models.task import Entry, Task
from meshtrain.run.dataset import open_data

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n{% else %}A:{% generation %}{{ m.content }}."
    "{% endgeneration %}{{ '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def line(number):
    if number % 2:
        return {"prompt": f"Q: {number}\nA:", "completion": f"{number}."}
    return {"messages": [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": f"{number}"}]}


@pytest.fixture(scope="module")
def tuned(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "t.jinja").write_text(TEMPLATE)
    lines = [*map(line, range(60)), {"prompt": "x", "completion": ""}, {"prompt": "y" * 99, "completion": "z"}]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    changes = ["data.source=chat", f"data.path={folder}/a.jsonl", f"data.chat_template={folder}/t.jinja"]
    changes += ["data.validation_fraction=0.1", "num_steps=2", "eval_every=2", "model.num_layers=1", "sample_tokens=4"]
    return run(folder / "run", *changes)


def test_a_run_says_what_it_lost_and_answers_what_was_held_out(tuned):
    assert "chat of " in tuned.output
    assert "56 + 5 lines in " in tuned.output
    assert "; 1 lines truncated, 1 dropped without a token of an answer" in tuned.output
    assert "| Q: 56\n  | A:" in tuned.output, "the sample at its end answers a line that was held out"


def test_chat_asks_what_the_template_writes(tuned, tmp_path, capsys):
    out, again = tmp_path / "chat.jsonl", tmp_path / "plain.jsonl"
    words = [f"--workdir={tuned.directory}", "--num-tokens=4", "--temperature=0"]
    asked = tmp_path / "asked.jsonl"
    messages = [*line(4)["messages"], {"role": "user", "content": "7"}]
    asked.write_text("".join(json.dumps(one) + "\n" for one in ({"prompt": "5"}, {"messages": messages})))
    assert generate.main([*words, "--chat", f"--prompts={asked}", f"--out={out}"]) == 0
    plain = ["--prompt=Q: 5\nA:", "--prompt=Q: 4\nA:4.\nQ: 7\nA:"]
    assert generate.main([*words, *plain, f"--out={again}"]) == 0
    answers, continued = ([json.loads(one) for one in path.read_text().splitlines()] for path in (out, again))
    assert [one["text"] for one in answers] == [one["text"] for one in continued]
    assert [one["prompt"] for one in answers] == ["5", "7"]
    capsys.readouterr()
    assert generate.main([*words, "--chat", "--prompt=5"]) == 0
    assert capsys.readouterr().out == answers[0]["text"] + "\n", "the answer alone"


def test_each_answer_stands_under_its_question():
    prompts = [Prompt("f(x,\n  y)", "--prompt"), Prompt("g" * 99, "--prompt")]
    assert generate._heads(prompts, 1, continues=False) == [
        "--- prompt 1 of 2, sample 1 of 1: f(x, y)\n",
        f"--- prompt 2 of 2, sample 1 of 1: {'g' * 60}...\n",
    ]
    assert generate._heads(prompts[:1], 1, continues=False) == [""]


REFUSED = {
    "no template": (
        ["--prompt=a", "--config.data.chat_template="],
        r"data.chat_template: got '' and data.tokenizer=bytes",
    ),
    "no file": (
        ["--prompt=a", "--config.data.chat_template=no.jinja"],
        r"data.chat_template: 'no.jinja' cannot be read",
    ),
    "no prompt": ([], r"--prompt: got none; allowed: at least one here"),
    "not taken": (
        ["--prompt=a", "--config.data.chat_template=DIR/bad.jinja"],
        r"--prompt: got messages that .* no user",
    ),
    "no messages": (["--prompts=DIR/bad.jsonl"], r"--prompts: DIR/bad.jsonl, line 1: got \[\] for 'messages'; allowed"),
}


@pytest.mark.parametrize("words, message", REFUSED.values(), ids=REFUSED)
def test_a_wrong_chat_is_refused_in_one_line(words, message, tuned, tmp_path):
    (tmp_path / "bad.jinja").write_text("{{ raise_exception('no user') }}")
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    words = [word.replace("DIR", str(tmp_path)) for word in words]
    with pytest.raises(UserError, match=message.replace("DIR", str(tmp_path))) as raised:
        generate.main([f"--workdir={tuned.directory}", "--chat", *words])
    assert len(raised.value.problems) == 1


def test_messages_need_the_flag(tuned, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps(line(0)) + "\n")
    with pytest.raises(UserError, match=r"line 1: got messages; allowed: a JSON object with 'prompt'"):
        generate.main([f"--workdir={tuned.directory}", f"--prompts={tmp_path}/asked.jsonl"])


def test_a_task_that_would_count_all_tokens_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    task = Task(lambda rng: {}, lambda *given: None, {"tokens": Entry((8, 32), np.int32, ("batch", "sequence"))})
    with pytest.raises(UserError, match=r"^data.source: got chat, which trains only on answers, with a task whose"):
        open_data(
            Config(data=DataOptions("chat", path=str(tmp_path / "a.jsonl")), batch_size=8, sequence_length=32), task
        )
