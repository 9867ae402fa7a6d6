"""The pages of docs/gallery: their commands run, and show what the pages say."""

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from meshtrain.plan import __main__ as plan
from scripts.benchmarks import finetune

ROOT = pathlib.Path(__file__).parents[2]
GALLERY = ROOT / "docs" / "gallery"
AXES = ("data", "pipeline", "fsdp", "expert", "context", "tensor")
SHORT = ["--config.num_steps=3", "--config.log_every=1", "--config.num_eval_batches=1", "--config.sample_tokens=0"]
MOST_LINES, MOST_WORDS = 45, 600  # one screen; of all pages together


def page(name):
    return (GALLERY / f"{name}.md").read_text(encoding="utf-8")


def words_of(name, program):
    """Returns the arguments of a page's first command that begins with a program."""
    line = next(line for line in page(name).splitlines() if line.startswith(f"$ {program} "))
    return shlex.split(line)[1 + len(program.split()) :]


def test_a_page_is_one_screen_with_a_command_and_a_picture():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in GALLERY.glob("*.md")}
    assert len(pages) == 3
    for name, text in pages.items():
        assert len(text.splitlines()) <= MOST_LINES, name
        assert "```console\n$ " in text, name
        assert (GALLERY / re.search(r"!\[[^\]]+\]\((\w+\.png)\)", text).group(1)).is_file()
    assert sum(len(text.split()) for text in pages.values()) <= MOST_WORDS


@pytest.mark.slow
def test_three_steps_of_ones_own_model_are_the_same_on_64_devices_and_on_one(tmp_path):
    losses = []
    for name, more in (("six_axes", []), ("one", [f"--config.mesh.{axis}=1" for axis in AXES])):
        words = [*words_of("six_axes", "python -m meshtrain train"), f"--workdir={tmp_path / name}", *SHORT, *more]
        short = [*words, "--config.sequence_length=32", "--config.observe.tensorboard=no"]
        command = [sys.executable, "-m", "meshtrain", "train", *short]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert ("64 devices are simulated" in said) == (not more)
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_the_fine_tuning_of_the_page_is_the_one_of_the_guide():
    """Three steps of which are run by test_own_finetuning.py."""
    lines = re.sub(r" \\\n +", " ", page("fine_tune")).splitlines()
    shown = [line for line in lines if line.startswith("$ python -m ")]
    assert shown
    assert {*shown} <= {finetune.shown(words) for words in finetune.commands(finetune.FOLDER)}


@pytest.mark.gpu_compiler
def test_a_70b_is_planned_as_the_page_shows(tmp_path, capsys):
    words = [word for word in words_of("plan_70b", "scripts/plan") if not word.startswith("--html=")]
    assert plan.main([*words, f"--html={tmp_path / 'plan.html'}"]) == 0
    said = capsys.readouterr().out.splitlines()
    for line in re.findall(r"^(?:plan|model|memory|step) .*$", page("plan_70b"), re.MULTILINE):
        assert line in said
    assert "<svg" in (tmp_path / "plan.html").read_text()
