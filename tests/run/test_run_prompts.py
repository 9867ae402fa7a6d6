"""Evaluations continue fixed prompts: the same texts as `generate`, on any mesh, and nothing compiles a second time."""

import json

import jax
import pytest

from meshtrain import generate
from meshtrain.errors import UserError
from meshtrain.report.runs import open_runs
from meshtrain.report.sections import run_page
from meshtrain.run import session
from tests.run.conftest import patched

PROMPTS = ("def f1(x", "<b>")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n\n" for prompt in PROMPTS))
    return path


def drawn(directory):
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "changes",
    [("precision.policy=bfloat16",), pytest.param(("mesh.pipeline=2", "mesh.tensor=2"), marks=pytest.mark.slow)],
)
def test_evaluations_continue_prompts_and_compile_once(changes, run, prompts, tmp_path):
    compiled, of_each = [], []

    def note(name, seconds, **what):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(what)

    def counted(original):
        def evaluate(*given):
            before = len(compiled)
            values = original(*given)
            of_each.append(len(compiled) - before)
            return values

        return evaluate

    jax.monitoring.register_event_duration_secs_listener(note)
    words = (f"eval_prompts={prompts}", "eval_tokens=5", "eval_every=2", "num_steps=6", *changes)
    try:
        with patched(session, "evaluate_with_texts", counted):
            ran = run(tmp_path / "run", *words)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert of_each[0] > 0
    assert of_each[1:] == [0, 0]
    rows = drawn(tmp_path / "run")
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, one) for step in (2, 4, 6) for one in PROMPTS]
    assert f'step 2  "<b>" -> {json.dumps(rows[1]["text"], ensure_ascii=False)}\n' in ran.output
    words = [f"--workdir={tmp_path / 'run'}", "--temperature=0", "--num-tokens=5", f"--prompts={prompts}"]
    assert generate.main([*words, f"--out={tmp_path / 'texts.jsonl'}"]) == 0
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert texts == [row["text"] for row in rows[-2:]]
    [shown], _ = open_runs([str(tmp_path / "run")])
    assert [row[:2] for row in shown.texts] == [(str(row["step"]), row["prompt"]) for row in rows]
    page = run_page([shown], [])
    assert "Prompts at evaluations of run" in page
    assert "<td>&lt;b&gt;</td>" in page


@pytest.mark.parametrize(
    ("lines", "changes", "said"),
    [
        (None, (), "eval_prompts: got '{}', nothing there; allowed: a file with lines like"),
        ("", (), "eval_prompts: got '{}', which contains no prompt; allowed: at least one line"),
        ('{"text": "a"}\n', (), "eval_prompts: {}, line 1: got text; allowed: a JSON object with 'prompt'"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', (), "data.chat_template: got ''"),
        (
            '{"prompt": "a"}\n',
            ("data.source=synthetic", "data.path="),
            "eval_prompts: got a file with data without text",
        ),
    ],
)
def test_prompts_that_cannot_be_continued_are_one_line_before_anything_is_written(lines, changes, said, run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", f"eval_prompts={path}", *changes)
    assert caught.value.problems[0].startswith(said.format(path))
    assert not (tmp_path / "run").exists()
