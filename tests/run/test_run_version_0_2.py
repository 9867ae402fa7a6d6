"""A run of a decoder that version 0.2 has stored: commands use its weights, and `init_from` starts with them.

The archive was made by meshtrain 0.2.0: `run/` is the workdir of a run that was stopped after half of its steps.
"""

import json
import pathlib
import tarfile

import pytest

from meshtrain import __version__
from meshtrain.__main__ import main
from meshtrain.config.resolve import resolve
from meshtrain.errors import UserError
from meshtrain.run import workdir

ARCHIVE = pathlib.Path(__file__).parent / "fixtures" / "version_0_2.tar.xz"
# The configuration of the run in today's keys; the run has stopped at step 3.
SAME = """
from meshtrain.config import default


def get_config():
    config = default()
    config.num_steps = 6
    config.batch_size, config.sequence_length, config.num_eval_batches, config.sample_tokens = 8, 16, 1, 0
    config.data.source, config.data.num_threads = "synthetic", 0
    config.learning_rate.warmup_steps = 0
    model = config.model
    model.num_layers, model.embed_dim, model.mlp_dim, model.num_heads, model.num_kv_heads = 2, 4, 8, 2, 2
    model.vocab_size, model.vocab_multiple, model.dropout_rate = 16, 8, 0.1
    config.mesh.data, config.lora.rank = 2, 2
    return config
"""


LOSS = 2.77600076981  # of its evaluation before options of the decoder were in groups


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The workdir of version 0.2, in the current folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "same.py").write_text(SAME)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_commands_read_it_and_a_new_run_begins_with_its_weights(run, capsys):
    assert main(["verify", "run"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--workdir=run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["loss"] == pytest.approx(LOSS, rel=1e-6)
    words = ["--prompt=1 2 3", "--num-tokens=4", "--temperature=0", "--out=texts.jsonl"]
    assert main(["generate", "--workdir=run", *words]) == 0
    assert json.loads(pathlib.Path("texts.jsonl").read_text())["prompt"] == "1 2 3"
    assert main(["hf", "export", "--workdir=run", "--to=exported"]) == 0
    assert json.loads(pathlib.Path("exported/config.json").read_text())["num_hidden_layers"] == 2
    assert main(["report", "run", "--html=page.html"]) == 0
    short = ["--config.num_steps=2", f"--config.init_from={run}"]
    assert main(["train", "--config=same.py", "--workdir=new", *short]) == 0
    assert json.loads(pathlib.Path("new/config.json").read_text())["version"] == __version__
    assert "WARNING" not in capsys.readouterr().err


def test_it_does_not_resume_and_is_left_as_it_is(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as error:
        main(["train", "--config=same.py", "--workdir=run"])
    assert list(error.value.problems) == [
        "config.json: got version 0.2 or earlier; allowed: 0.3; nearest: "
        f"--config.init_from={run.absolute()} in a new workdir"
    ]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"optimizer": {"name": "muon"}}, "--config.optimizer.muon_bias_correction=true in a new workdir"),
        (
            {"model": {"num_experts": 4, "experts_per_token": 2, "num_layers": 3, "balance_weight": 0.01}},
            "--config.model.moe.balance_weight=0.015 in a new workdir",
        ),
        (
            {"model": {"num_experts": 0, "experts_per_token": 2, "num_layers": 3, "balance_weight": 0.01}},
            "a new workdir",
        ),
        ({"version": "0.4.0", "optimizer": {"name": "muon"}}, "a new workdir"),
    ],
)
def test_a_run_to_resume_names_the_options_with_another_meaning(record, words, tmp_path):
    """`words` are those that give the options of the run the same effect in this version."""
    (tmp_path / "config.json").write_text(json.dumps(record))
    version = record["version"] if "version" in record else "0.2 or earlier"
    found = workdir.check(tmp_path, resolve({"data": {"source": "synthetic"}}), is_saved=False)
    assert list(found) == [f"config.json: got version {version}; allowed: 0.3; nearest: {words}"]
