"""Stored runs of a former version: they resume with the losses of the unbroken run, and every command reads them.

`python -m scripts.benchmarks.fixtures tests/run/fixtures` has made them, at the commit that added them: a change that
cannot read them any more is a change for users, and making them anew would hide it.
"""

import json
import pathlib
import tarfile

import pytest

from meshtrain.__main__ import main

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
PROMPTS = {
    "experts": "1 2 3", "seq2seq": "7", "int8": "1 2 3", "topk": "1 2 3", "one_step_late": "1 2 3",
    "local_steps": "1 2 3", "eight_bits": "def f1(", "lora": "1 2 3",
}  # fmt: skip
NAMES = [*PROMPTS, "convnet"]  # whose task generates nothing
FAST = ("experts", "seq2seq")  # two tasks, a router's saved bias, a mesh of two axes and one that shards weights
MOST_BYTES = 300_000
TOLERANCE = 1e-5  # relative; other versions of JAX, and meshes, round sums otherwise


@pytest.fixture(params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in NAMES])
def name(request, tmp_path, monkeypatch):
    """The name of a stored run; the current folder holds its files."""
    with tarfile.open(FIXTURES / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return request.param


def rows():
    return [json.loads(line) for line in pathlib.Path("run/metrics.jsonl").read_text().splitlines()]


def test_commands_read_it_and_it_resumes_with_the_losses_of_the_unbroken_run(name, capsys):
    assert main(["verify", "run"]) == 0
    assert main(["evaluate", "--workdir=run", "--json"]) == 0
    if name in PROMPTS:
        words = [f"--prompt={PROMPTS[name]}", "--num-tokens=4", "--temperature=0", "--out=texts.jsonl"]
        assert main(["generate", "--workdir=run", *words]) == 0
        assert json.loads(pathlib.Path("texts.jsonl").read_text())["prompt"] == PROMPTS[name]
    assert main(["report", "run", "--html=page.html"]) == 0
    before = rows()
    assert before[-1]["step"] == 3
    assert main(["train", "--config=run.py", "--workdir=run"]) == 0
    assert rows()[: len(before)] == before, "it went on from its save, and did not begin again"
    resumed = {row["step"]: row["loss"] for row in rows() if "loss" in row}
    unbroken = {int(step): loss for step, loss in json.loads(pathlib.Path("losses.json").read_text()).items()}
    assert resumed == pytest.approx(unbroken, rel=TOLERANCE, abs=0)
    assert "WARNING" not in capsys.readouterr().err


def test_all_are_there_and_small():
    files = {path.name.partition(".")[0]: path.stat().st_size for path in FIXTURES.iterdir()}
    assert sorted(files) == sorted(NAMES)
    assert sum(files.values()) <= MOST_BYTES
