"""configs/numbers.py from the command line: exact match wherever metrics go, and what is refused."""

import contextlib
import dataclasses
import io
import json
import pathlib
import re

import pytest

from meshtrain import generate
from meshtrain.config.resolve import resolve
from meshtrain.config.resume import difference
from meshtrain.errors import UserError
from meshtrain.examples.numbers import NumberOptions
from meshtrain.main import main
from meshtrain.models.task import Task, token_batch
from meshtrain.run.dataset import open_data
from tests.messages.refused import Case, assert_refused

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/numbers.py"
SMALL = {
    "num_steps": 3,
    "log_every": 1,
    "eval_every": 2,
    "model.num_encoder_layers": 1,
    "model.num_layers": 1,
    "model.embed_dim": 16,
    "model.mlp_dim": 16,
    "model.num_heads": 2,
    "observe.progress": "no",
}
NUM_HELD_OUT = 100


def words(run, **changes):
    return [CONFIG, f"--workdir={run}", *(f"--config.{key}={value}" for key, value in (SMALL | changes).items())]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, what it printed) of a run of three steps on two devices in float16."""
    run, output = tmp_path_factory.mktemp("numbers") / "run", io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        assert main(words(run)) == 0
    return run, output.getvalue()


def test_exact_match_is_in_the_metrics_the_log_and_tensorboard(trained):
    run, said = trained
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["eval_exact_match"] for row in rows if "eval_exact_match" in row}
    assert list(found) == [2, 3]
    for share in found.values():
        assert share * NUM_HELD_OUT == pytest.approx(round(share * NUM_HELD_OUT), abs=1e-4), "each number counts once"
    [events] = (run / "tensorboard").glob("events*")
    assert b"eval_exact_match" in events.read_bytes()
    assert f"eval exact match {found[3]:.4g}" in said
    assert {row["loss_scale"] for row in rows if "loss" in row} == {16384}
    assert re.search(r"a sample\n +\| \d+ -> ", said)


def test_generate_answers_with_the_most_probable_words(trained, capsys):
    run, _ = trained
    found = []
    for flags in ([], ["--config.mesh.data=1", "--temperature=0"]):
        assert generate.main([f"--workdir={run}", "--prompt=407", "--prompt=8", "--num-tokens=5", *flags]) == 0
        found.append(capsys.readouterr().out)
    assert found[0].count("\n") == 4
    assert found[0] == found[1]


def test_other_numbers_are_another_run():
    old = {"task": "seq2seq", "data": {"source": "numbers"}}
    for name, value in (("spelling", "english"), ("numbers_below", 2000), ("num_held_out", 50)):
        [line] = difference(old, {**old, "data": {"source": "numbers", name: value}})
        assert line.startswith(f"data.{name}: was ")


def test_sizes_that_hold_no_number_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    arguments = [CONFIG, "--workdir=run", "--config.sequence_length=3", "--config.model.source_length=8"]
    said = "sequence_length: got 3; allowed for numbers below 1,000 in digits: at least 4, the w"
    [line] = assert_refused(Case("small", lambda folder: arguments, (said,)), tmp_path, monkeypatch)
    assert "; nearest: " in line


def test_a_task_without_sources_is_told_which_has_them():
    config = dataclasses.replace(resolve({"batch_size": 4}), data=NumberOptions(source="numbers"))
    with pytest.raises(UserError) as caught:
        open_data(config, Task(init=dict, loss=len, batch=token_batch(4, 8)))
    assert str(caught.value) == (
        "data.source: got numbers (pairs of a source and a target) with a task whose batch has no 'source_tokens'; "
        "allowed: a task whose batch has source_tokens and tokens; nearest: task=seq2seq"
    )
