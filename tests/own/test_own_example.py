"""The example of the docs: short enough to read, and it learns on three axes from the command line."""

import json
import pathlib
import subprocess
import sys

import pytest

from meshtrain import explain, generate
from meshtrain.config import __main__ as fields
from meshtrain.errors import UserError
from meshtrain.main import main

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "guide" / "own_model.py"
CONFIG = ["--config=docs/guide/own_model.py", "--config.observe.progress=no"]
MOST_LINES = 75


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that the command line has trained."""
    folder = tmp_path_factory.mktemp("own") / "run"
    changes = {"num_steps": 30, "log_every": 1, "num_eval_batches": 1, "learning_rate.peak": 1e-2, "sample_tokens": 0}
    words = [f"--config.{key}={value}" for key, value in changes.items()]
    assert main([*CONFIG, f"--workdir={folder}", "--config.learning_rate.warmup_steps=3", *words]) == 0
    return folder


def test_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_command_line_trains_it_on_three_axes(run):
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in logged if "loss" in line]
    assert losses[0] > 5.0, "the first loss is that of guessing"
    assert losses[-1] < 3.5
    [table] = [line for line in (run / "layout.txt").read_text().splitlines() if line.startswith("params/table ")]
    assert " ".join(table.split()) == "params/table 384 x 64 float32 vocab embed tensor fsdp 24 KiB"
    config = json.loads((run / "config.json").read_text())
    assert (config["task"], config["model"]) == ("docs.guide.own_model:eight_bytes", {"width": 64, "hidden": 256})


def test_the_command_line_goes_on_from_its_weights(run, capsys):
    named = "--config.task=docs.guide.own_model:eight_bytes"  # a function of the run's configuration, which runs here
    assert generate.main([f"--workdir={run}", named, "--num-tokens=3", "--prompt=import ", "--temperature=0"]) == 0
    assert capsys.readouterr().out.startswith("import ")
    with pytest.raises(UserError, match=r"another run: model\.width: was 64, now 32"):
        main([*CONFIG, f"--workdir={run}", "--config.num_steps=31", "--config.model.width=32"])


def test_the_command_line_explains_it_and_lists_its_options(capsys):
    assert explain.main([*CONFIG, "--config.model.hidden=512"]) == 0
    said = capsys.readouterr().out
    assert f"parameters   {384 * 64 + 8 * 64 * 512 + 512 * 64:,} without padding" in said
    assert fields.main([*CONFIG, "--config.model.width=96"]) == 0
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if line.startswith(("model.", "task "))]
    assert lines[0][:3] == ["task", "str", '"decoder"']
    assert lines[1:] == [["model.width", "int", "64", "96"], ["model.hidden", "int", "256", "inner"]]
    with pytest.raises(UserError, match=r"model\.widht: unknown key; .* did you mean 'model\.width'\?"):
        explain.main([*CONFIG, "--config.model.widht=3"])


@pytest.mark.slow
@pytest.mark.long
def test_example_beats_the_bigram(tmp_path):
    """As README starts it."""
    ended = subprocess.run(
        [sys.executable, EXAMPLE],
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "the run is better" in ended.stdout
    assert (tmp_path / "runs" / "own_model" / "layout.txt").exists()
