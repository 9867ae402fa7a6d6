"""configs/numbers.py from the command line: exact match wherever metrics go, and what is refused."""

import contextlib
import dataclasses
import io
import json
import pathlib
import re

import pytest

from meshtrain import generate
from meshtrain.config.config import default, resolve
from meshtrain.config.resume import difference
from meshtrain.errors import UserError
from meshtrain.examples.numbers import NumberOptions
from meshtrain.main import main
from meshtrain.models.task import Task, token_batch
from meshtrain.run.opened import open_data
from tests.run.broken import Case, assert_refused

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


def lines(task, changes):
    given = default(task)
    if task == "seq2seq" and "data.source" not in changes:
        given.data.source = "numbers"
    try:
        resolve(given, changes)
    except UserError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "task, changes, said",
    [
        (
            "seq2seq",
            {"data.source": "python"},
            "data.source: got python with task=seq2seq, which takes pairs of a source and a target; allowed: numbers,",
        ),
        (
            "decoder",
            {"data.source": "numbers"},
            "data.source: got numbers with task=decoder, which takes packed tokens;",
        ),
        ("seq2seq", {"model.num_heads": "3"}, "model.embed_dim: got 128; allowed: a multiple of model.num_heads = 3"),
        (
            "seq2seq",
            {"model.positions": "rotary", "model.head_dim": "5"},
            "model.head_dim: got 5; allowed: an even number with rotary positions; nearest: 6",
        ),
        (
            "seq2seq",
            {"model.embed_dim": "65", "model.num_heads": "5"},
            "model.embed_dim: got 65; allowed: an even number with sinusoidal positions; nearest: 66",
        ),
        ("seq2seq", {"model.dropout_rate": "1"}, "model.dropout_rate: got 1.0; allowed: 0 to below 1; nearest: 0.9"),
        ("seq2seq", {"model.attention": "cudnn"}, "model.attention: got cudnn computing in float32; allowed: cudnn w"),
        ("seq2seq", {"model.begin_id": "3"}, "model.begin_id: got 3; allowed with data.source=numbers: 0, with which"),
        (
            "seq2seq",
            {
                "model.begin_id": "30",
                "model.vocab_size": "30",
                "data.source": f"{__name__}:words",
            },
            "model.begin_id: got 30; allowed: a token, below model.vocab_size = 30; nearest: 29",
        ),
        (
            "seq2seq",
            {"remat.policy": "full", "remat.every": "2", "model.num_encoder_layers": "3"},
            "remat.every: got 2; allowed: a divisor of model.num_encoder_layers = 3; nearest: ",
        ),
        ("seq2seq", {"mesh.pipeline": "2"}, "mesh.pipeline: got 2, and this task has no stages; allowed: 1; nearest:"),
        (
            "seq2seq",
            {"mesh.tensor": "2", "layout.sequence_parallel": "yes", "model.source_length": "33"},
            "model.source_length: got 33; allowed: a multiple of 2, as rule 'residual_sequence' splits it over mesh.te",
        ),
        ("seq2seq", {"data.num_held_out": "1000"}, "data.num_held_out: got 1000; allowed: below data.numbers_below ="),
        ("seq2seq", {"data.path": "a.txt"}, "data.path: got 'a.txt' with data.source=numbers, which reads no files;"),
        ("seq2seq", {"data.tokenizer": "t.json"}, "data.tokenizer: got 't.json' with data.source=numbers: it reads n"),
    ],
)
def test_what_a_configuration_shows_is_refused(task, changes, said):
    [line] = lines(task, changes)
    assert line.startswith(said)
    assert "; nearest: " in line or "did you mean" in line


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
        "data.source: got numbers, pairs of a source and a target, with a task whose batch has no 'source_tokens'; "
        "allowed: a task whose batch has source_tokens and tokens; nearest: task=seq2seq"
    )
