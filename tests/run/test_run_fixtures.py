"""Stored runs of version 0.2: every command but `train` reads them, and `init_from` begins with their weights.

`python -m scripts.benchmarks.fixtures tests/run/fixtures` has made them, at the commit that added them: a change that
cannot read them any more is a change for users, and making them anew would hide it.
"""

import json
import pathlib
import tarfile

import pytest

from meshtrain import __version__
from meshtrain.__main__ import main
from meshtrain.errors import UserError

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
PROMPTS = {
    "experts": "1 2 3", "seq2seq": "7", "int8": "1 2 3", "topk": "1 2 3", "one_step_late": "1 2 3",
    "local_steps": "1 2 3", "eight_bits": "def f1(", "lora": "1 2 3",
}  # fmt: skip
NAMES = [*PROMPTS, "convnet"]  # whose task generates nothing
FAST = ("experts", "seq2seq")  # two tasks, a router's saved bias, a mesh of two axes and one that shards weights
MOST_BYTES = 300_000


@pytest.fixture(params=[pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in NAMES])
def name(request, tmp_path, monkeypatch):
    """The name of a stored run; the current folder holds its files."""
    with tarfile.open(FIXTURES / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return request.param


EXPORTED = ("int8", "topk", "one_step_late", "local_steps", "eight_bits", "lora")  # a family of transformers has them


def test_commands_read_it_and_a_new_run_begins_with_its_weights(name, capsys):
    assert main(["verify", "run"]) == 0
    # The run is of another user, so its path of data has to be named again.
    data_path = json.loads(pathlib.Path("run/config.json").read_text())["data"].get("path")
    named = [f"--config.data.path={data_path}"] if data_path else []
    assert main(["evaluate", "--workdir=run", "--json", *named]) == 0
    if name in PROMPTS:
        words = [f"--prompt={PROMPTS[name]}", "--num-tokens=4", "--temperature=0", "--out=texts.jsonl"]
        assert main(["generate", "--workdir=run", *words]) == 0
        assert json.loads(pathlib.Path("texts.jsonl").read_text())["prompt"] == PROMPTS[name]
    if name in EXPORTED:
        assert main(["hf", "export", "--workdir=run", "--to=exported"]) == 0
        assert pathlib.Path("exported/config.json").is_file()
    assert main(["report", "run", "--html=page.html"]) == 0
    before = {path: path.read_bytes() for path in pathlib.Path("run").rglob("*") if path.is_file()}
    with pytest.raises(UserError) as error:
        main(["train", "--config=run.py", "--workdir=run"])
    own = pathlib.Path("run").absolute()
    assert list(error.value.problems) == [
        f"workdir {own} holds a run of version 0.2 or earlier; allowed: runs since 0.3; nearest: another --workdir "
        f"with --config.init_from={own}"
    ]
    assert {path: path.read_bytes() for path in pathlib.Path("run").rglob("*") if path.is_file()} == before
    short = ["--config.num_steps=2", "--config.learning_rate.warmup_steps=0"]
    assert main(["train", "--config=run.py", "--workdir=new", f"--config.init_from={own}", *short]) == 0
    assert json.loads(pathlib.Path("new/config.json").read_text())["version"] == __version__
    assert "WARNING" not in capsys.readouterr().err


def test_all_are_there_and_small():
    files = {path.name.partition(".")[0]: path.stat().st_size for path in FIXTURES.iterdir()}
    assert sorted(files) == sorted(NAMES)
    assert sum(files.values()) <= MOST_BYTES
