"""Text from a run's weights, the same on every mesh; and what `explain` says of a configuration."""

import argparse
import errno
import json

import jax
import pytest

from meshtrain import explain, generate
from meshtrain.cli import output_files
from meshtrain.errors import UserError
from meshtrain.pipeline import __main__ as pipeline
from meshtrain.plan import __main__ as plan
from meshtrain.report import __main__ as report

FSDP = ("mesh.fsdp=2",)
WORDS = ["--prompt=def f1(x", "--num-tokens=12"]


def generated(capsys, *words):
    assert generate.main(words) == 0
    return capsys.readouterr().out


def test_the_most_probable_text_is_the_same_on_every_mesh(straight, command, capsys):
    other = ["mesh.tensor=2", "mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.num_chunks=2"]
    # On the run's own mesh, as its config.json says.
    own = generated(capsys, f"--workdir={straight.directory}", "--temperature=0", *WORDS)
    assert own.startswith("def f1(x")
    assert len(own) > len("def f1(x") + 1
    assert generated(capsys, *command(straight.directory, *other), "--temperature=0", *WORDS) == own
    assert generated(capsys, f"--workdir={straight.directory}", "--temperature=0", *WORDS, "--config.seed=0") == own


def test_a_given_file_does_not_replace_what_the_run_was_started_with(straight, config_file, tmp_path, capsys):
    """The file lacks the run's overrides (here: has other widths); the run's own config.json has them."""
    other = tmp_path / "other.py"
    other.write_text(config_file.read_text().replace("mlp_dim = 64", "mlp_dim = 128"))
    own = generated(capsys, f"--workdir={straight.directory}", "--temperature=0", *WORDS)
    assert generate.main([f"--config={other}", f"--workdir={straight.directory}", "--temperature=0", *WORDS]) == 0
    said = capsys.readouterr()
    assert said.out == own
    [line] = said.err.splitlines()
    assert line.startswith(f"meshtrain: WARNING: --config={other} is not read: {straight.directory / 'config.json'} ")


def test_a_long_prompt_counts_with_its_end(straight, capsys):
    prompt = "x" * 100
    said = generated(capsys, f"--workdir={straight.directory}", f"--prompt={prompt}", "--num-tokens=3")
    assert said.startswith(prompt)


def test_weights_of_another_shape_are_refused(straight, command):
    with pytest.raises(UserError) as caught:
        generate.main(command(straight.directory, "model.mlp_dim=128"))
    assert any("params/layers/mlp" in line for line in caught.value.problems)


def test_explain_says_where_each_array_lives(command, straight, tmp_path, capsys):
    changes = ["mesh.pipeline=2", "mesh.fsdp=2", "pipeline.schedule=interleaved_1f1b", "pipeline.num_chunks=2"]
    changes.append("zero.level=1")
    picture = tmp_path / "mesh.png"
    assert explain.main([*command(tmp_path / "run", *changes, "data.path=/not/here.txt"), f"--draw={picture}"]) == 0
    said = capsys.readouterr().out
    table = said[said.index("without effect here") :].splitlines()
    assert table[2].split() == ["zero.level", "1", "mesh.data=1"], "legal, and no reason to be surprised"
    for path, _ in jax.tree_util.tree_leaves_with_path(straight.result.state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        [line] = [line for line in said.splitlines() if line.startswith(f"{name} ")]
        if name == "params/layers/mlp/down":
            assert line.split()[1:8] == ["2", "x", "2", "x", "64", "x", "32"]
            assert "chunks layers mlp embed" in line
            assert line.split()[-5:] == ["pipeline", "-", "fsdp", "8", "KiB"]
    assert "schedule     interleaved_1f1b, 2 microbatches, 2 chunks a stage" in said
    assert "stage 0      layers 0, 2; 1/2 of the vocabulary" in said
    assert "stage 1      layers 1, 3; 1/2 of the vocabulary" in said
    assert f"parameters   {straight.result.assembly.task.num_parameters:,} without padding" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run").exists()


def test_explain_refuses_what_does_not_fit(command, tmp_path):
    with pytest.raises(UserError, match=r"^batch_size: got 12; allowed: a multiple of 8"):
        explain.main(command(tmp_path / "run", "mesh.data=-1", "batch_size=12"))


def test_texts_of_several_prompts_go_to_the_terminal_or_to_a_file(straight, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts.write_text('{"prompt": "def f1(x"}\n\n{"prompt": "ret", "more": 1}\n')
    words = [f"--workdir={straight.directory}", f"--prompts={prompts}", "--num-samples=2", "--num-tokens=12"]
    words += ["--top-k=9", "--top-p=0.9", "--stop=f", "--stop= x", "--seed=3"]
    said = generated(capsys, *words)
    assert generated(capsys, *words, f"--out={out}") == f"4 texts in {out}\n"
    texts = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(one["prompt"], one["index"], one["sample"]) for one in texts] == [
        ("def f1(x", 0, 0), ("def f1(x", 0, 1), ("ret", 1, 0), ("ret", 1, 1),
    ]  # fmt: skip
    assert {one["ended"] for one in texts} <= {"stop", "length"}
    assert not any("f" in one["text"] or " x" in one["text"] for one in texts)
    titles = [f"--- prompt {prompt} of 2, sample {sample} of 2" for prompt in (1, 2) for sample in (1, 2)]
    blocks = [f"{title}\n{one['prompt']}{one['text']}\n" for title, one in zip(titles, texts, strict=True)]
    assert said == "".join(blocks)


def test_a_disk_that_is_full_at_the_end_is_one_line(command, straight, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_files, "write_whole", full)
    picture, texts, page = (str(tmp_path / name) for name in ("mesh.png", "texts.jsonl", "report.html"))
    generating = [f"--workdir={straight.directory}", "--prompt=def", "--num-tokens=2", f"--out={texts}"]
    for main, words, flag, path in (
        (explain.main, [*command(tmp_path / "run"), f"--draw={picture}"], "--draw", picture),
        (pipeline.main, ["--stages=2", "--json", f"--out={picture}"], "--out", picture),
        (generate.main, generating, "--out", texts),
        (report.main, [str(straight.directory), f"--html={page}"], "--html", page),
        (lambda words: plan.write(argparse.Namespace(json=words[0], html=""), {}, str), [texts], "--json", texts),
    ):
        with pytest.raises(UserError) as caught:
            main(words)
        (line,) = caught.value.problems
        assert line.startswith(f"{flag}: got '{path}', which cannot be written (No space left on device); allowed: ")


def test_a_checkpoint_of_another_task_is_refused(straight):
    with pytest.raises(UserError) as caught:
        generate.main([f"--workdir={straight.directory}", "--config.task=convnet", "--prompt=x"])
    assert any("task" in line or "model." in line for line in caught.value.problems)
