"""What a run's weights are worth: the same numbers on every mesh, for each file and in all, from one compiled step."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import evaluate
from meshtrain.checkpoint.checkpoint import CHECKPOINTS
from meshtrain.data.dataset import Dataset
from meshtrain.errors import UserError
from meshtrain.models.task import Entry, Ratio, Task
from meshtrain.options import option
from meshtrain.run.evaluation import means
from meshtrain.training import train

TEXTS = ["def f(x):\n    return x + 1\n", "class Ünïcode:\n    pass\n" * 20]
ON_TEXT = "--config.data.source=text"
ALSO = ["mesh.tensor=2", "mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.num_chunks=2"]


@pytest.fixture
def files(tmp_path):
    """Two files, and one of nine documents like the first: more rows than a batch has."""
    paths = [tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "nine.jsonl"]
    for path, text in zip(paths, TEXTS, strict=False):
        path.write_text(text, encoding="utf-8")
    paths[2].write_text((json.dumps({"text": TEXTS[0] * 2}) + "\n") * 9)
    return paths


@pytest.fixture
def compiled():
    """The names of the functions that are compiled from here on."""
    names = []

    def note(name, seconds, **what):
        if name == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            names.append(what["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def answered(capsys, run, *words):
    """The JSON object that the command prints, and nothing else."""
    assert evaluate.main([f"--workdir={run}", "--json", *words]) == 0
    [line] = capsys.readouterr().out.splitlines()
    return json.loads(line)


@pytest.mark.parametrize(("weight", "mean"), [(1e-4, 4.0), (0.5, 4.0), (0.0, 0.0)])
def test_a_mean_is_the_sum_over_any_positive_weight(weight, mean):
    assert means({"loss": 4.0 * weight, "weight": weight}) == pytest.approx({"loss": mean})


def test_the_validation_split_has_the_loss_of_the_run(straight, capsys):
    found = answered(capsys, straight.directory, "--config.num_eval_batches=2")
    [part] = found["files"]
    assert part.pop("name") == "validation"
    assert part == found["all"]
    assert part["loss"] == pytest.approx(straight.rows[-1]["eval_loss"], rel=1e-6)
    assert part["perplexity"] == pytest.approx(math.exp(part["loss"]))
    assert part["bits_per_byte"] == pytest.approx(part["loss"] * part["tokens"] / part["bytes"] / math.log(2))
    assert part["tokens"] == part["bytes"] == 2 * 8 * 32, "no document ends in these two batches"
    assert found["step"] == 10
    whole = answered(capsys, straight.directory)["all"]
    assert whole["tokens"] == 32 * num_validation(straight) > part["tokens"]
    assert not set(whole) & {"accuracy", "exact_match"}, "what the task does not give is left out"


def num_validation(straight):
    [line] = [line for line in straight.output.splitlines() if " sequences" in line]
    return int(line.split(" sequences")[0].rpartition("+ ")[2].replace(",", ""))


def test_each_file_is_scored_whole_by_one_compiled_step(straight, files, capsys, compiled):
    one, two, nine = files
    found = answered(capsys, straight.directory, ON_TEXT, f"--config.data.path={one},{two},{nine}")
    assert sum("step" in name for name in compiled) == 1, compiled
    parts = {part["name"]: part for part in found["files"]}
    assert list(parts) == [str(path) for path in files]
    num_bytes = len(TEXTS[1].encode())
    # Every byte but the first is a target, and the end of the document, which is no byte.
    assert (parts[str(two)]["bytes"], parts[str(two)]["tokens"]) == (num_bytes - 1, num_bytes)
    assert parts[str(nine)]["bytes"] == 9 * (2 * len(TEXTS[0]) - 1)
    sums = [part["loss"] * part["tokens"] for part in parts.values()]
    assert found["all"]["loss"] * found["all"]["tokens"] == pytest.approx(sum(sums), rel=1e-6)
    total_bytes = sum(part["bytes"] for part in parts.values())
    assert found["all"]["bits_per_byte"] == pytest.approx(sum(sums) / math.log(2) / total_bytes, rel=1e-6)
    (one.parent / "like.txt").write_text(TEXTS[0] * 2)
    alone = answered(capsys, straight.directory, ON_TEXT, f"--config.data.path={one.parent / 'like.txt'}")
    # One document fills two rows of a batch of eight, nine of them eighteen: padding counts nothing.
    assert alone["all"]["loss"] == pytest.approx(parts[str(nine)]["loss"], rel=1e-6)


def test_a_mesh_changes_no_number(straight, files, capsys):
    path = f"--config.data.path={files[1]}"
    own = answered(capsys, straight.directory, ON_TEXT, path)["all"]
    other = answered(capsys, straight.directory, ON_TEXT, path, *(f"--config.{change}" for change in ALSO))["all"]
    assert other["loss"] == pytest.approx(own["loss"], rel=1e-5)
    assert other["tokens"] == own["tokens"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the signs."""

    scale: float = option(1.0, "factor of the answer")


def signs(config, placement):
    """Whether w x is positive where x is: `right` of all examples, `large` of those whose x is large."""

    def loss(params, batch, rng, train):
        answer = config.model.scale * params["w"] * batch["x"]
        hits = batch["weights"] * (answer * batch["x"] > 0)
        is_large = batch["weights"] * (jnp.abs(batch["x"]) > 1)
        total = jnp.sum(batch["weights"] * (answer - batch["x"]) ** 2)
        return (
            total,
            batch["weights"].sum(),
            {"accuracy": hits.sum(), "large": Ratio((hits * is_large).sum(), is_large.sum())},
        )

    entry = Entry((config.batch_size,), jnp.float32, ("batch",))
    return Task(lambda rng: {"w": -jnp.ones(1)}, loss, {"x": entry, "weights": entry}, unit="numbers")


signs.options = Options


def numbers(config):
    """-2, -1, ... 3: six numbers, which batches of four do not divide; three of them are large."""
    examples = [{"x": np.float32(x), "weights": np.float32(1)} for x in range(-2, 4)]
    return Dataset(examples, examples, "numbers")


OWN = {
    "task": f"{__name__}:signs",
    "data": {"source": f"{__name__}:numbers"},
    "batch_size": 4,
    "num_steps": 6,
    "eval_every": 2,
    "num_eval_batches": 0,
    "learning_rate": {"name": "constant", "peak": 0.1, "warmup_steps": 0},
    "optimizer": {"name": "sgd"},
    "checkpoint": {"every": 2},
    "observe": {"progress": False},
}


# Without them no command imports this module because a run's config.json names it.
OWN_WORDS = [f"--config.task={OWN['task']}", f"--config.data.source={OWN['data']['source']}"]


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    return train(OWN, tmp_path_factory.mktemp("signs") / "run").directory


def test_any_task_and_any_of_its_checkpoints(own_run, capsys):
    rows = [json.loads(line) for line in (own_run / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row for row in rows if "eval_loss" in row}
    assert list(logged) == [2, 4, 6]
    for step in logged:
        found = answered(capsys, own_run, f"--step={step}", *OWN_WORDS)
        assert found["step"] == step
        assert found["all"] == {
            "loss": pytest.approx(logged[step]["eval_loss"]),
            "accuracy": pytest.approx(logged[step]["eval_accuracy"]),
            "large": pytest.approx(logged[step]["eval_large"]),
            "numbers": 6,
        }
    assert len({row["eval_loss"] for row in logged.values()}) == 3
    assert logged[6]["eval_accuracy"] == pytest.approx(5 / 6), "0 has no sign"
    assert logged[6]["eval_large"] == 1.0
    assert answered(capsys, own_run, *OWN_WORDS)["step"] == 6


def test_the_table_has_a_line_for_each_part_and_one_for_all(own_run, capsys):
    assert evaluate.main([f"--workdir={own_run}", *OWN_WORDS]) == 0
    first, _, titles, _, line = capsys.readouterr().out.splitlines()
    assert first.startswith(f"step 6 of {own_run} on one device")
    assert titles.split() == ["data", "loss", "accuracy", "large", "numbers"]
    assert line.split()[2:] == ["0.8333", "1.0000", "6"]
    values = {"loss": 2.0, "perplexity": math.inf, "tokens": 1234.0}
    said = evaluate.table({"a.txt": values, "b.txt": values | {"bytes": 5.0}}, values, "tokens").splitlines()
    assert said[2].split() == ["a.txt", "2.0000", "inf", "1,234"]
    assert [line.split()[0] for line in said[2:]] == ["a.txt", "b.txt", "all"]
    assert json.loads(evaluate.as_json({"a": values}, values))["all"]["perplexity"] is None


def token_file(folder, ids):
    np.asarray(ids, "<u2").tofile(folder / "ids.bin")
    described = {"dtype": "uint16", "vocab_size": 300, "num_tokens": len(ids), "num_documents": 1, "end_id": 256}
    described |= {"tokenizer": "bytes", "tokenizer_sha256": "", "end_token": ""}
    (folder / "ids.bin.json").write_text(json.dumps(described))


def broken_inputs(folder):
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (folder / "nothing.jsonl").write_text('{"text": ""}\n')
    (folder / "other.jsonl").write_text('{"body": "text"}\n')
    (folder / "whole.txt").write_text("words")
    token_file(folder, [1, 2, 299, 256])


WRONG = {
    "no such step": (["--step=3"], "got step 3; allowed: 10; nearest: 10"),
    "a negative step": (["--step=-1"], "--step: got -1; allowed: the step of a checkpoint"),
    "a step that is no number": (["--step=best"], "--step: "),
    "a misspelt flag": (["--jsn"], "arguments: got '--jsn'"),
    "json with a value": (["--json=x"], "--json: "),
    "a missing file": (["--config.data.path=nowhere.txt"], "data.path: got 'nowhere.txt', which does not exist"),
    "an empty file": (["--config.data.path=empty.txt"], "data.path: got 'empty.txt', which is empty"),
    "no UTF-8": (["--config.data.path=whole.txt,latin.txt"], "data.path: 'latin.txt' is not UTF-8"),
    "nothing to predict": (["--config.data.path=nothing.jsonl"], "data.path: 'nothing.jsonl' has no document with two"),
    "another field": (["--config.data.path=other.jsonl"], "data.text_field: got 'text', which has no text"),
    "tokens as text": (["--config.data.path=ids.bin"], "data.path: got 'ids.bin', which contains tokens"),
    "ids past the vocabulary": (
        ["--config.data.source=tokens", "--config.data.path=ids.bin"],
        "data.path: 'ids.bin' contains id 299",
    ),
    "no validation split": (
        ["--config.data.validation_fraction=0"],
        "data: got no validation examples with data.source=text; allowed: data with a validation split",
    ),
    "a source that reads no files": (
        ["--config.data.source=python", "--config.data.path=whole.txt"],
        "data.path: got 'whole.txt' with data.source=python, which reads no files",
    ),
    "too many devices": (["--config.mesh.data=16", "--config.batch_size=32"], "mesh: got 32 devices"),
    "weights of another shape": (["--config.model.mlp_dim=128"], "params/layers/mlp/down: got float32"),
    "another task": (["--config.task=docs.guide.own_model:eight_bytes"], "config.json: task: got 'docs.guide"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_evaluated_is_refused(name, straight, written, tmp_path, monkeypatch, compiled):
    words, said = WRONG[name]
    broken_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = written(straight.directory)
    with pytest.raises(UserError) as caught:
        evaluate.main([f"--workdir={straight.directory}", *words])
    assert any(said in line for line in caught.value.problems), caught.value.problems
    assert all("allowed: " in line or "nearest: " in line for line in caught.value.problems)
    assert not compiled
    assert written(straight.directory) == before


def test_problems_of_the_flags_and_of_the_configuration_come_together(straight):
    with pytest.raises(UserError) as caught:
        evaluate.main([f"--workdir={straight.directory}", "--step=-1", "--config.seed=-1", "--config.data.path=no.txt"])
    assert [line.partition(":")[0] for line in caught.value.problems] == ["--step", "seed", "data.path"]


def test_a_damaged_checkpoint_is_refused_when_it_is_asked_for(own_run, tmp_path, capsys):
    run = shutil.copytree(own_run, tmp_path / "run")
    part = next(path for path in (run / CHECKPOINTS / "4" / "extra").rglob("*") if path.is_file())
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(
        UserError, match=r"checkpoint .*4: extra/.* bytes have changed; allowed: .*; nearest: step 2, 6"
    ):
        evaluate.main([f"--workdir={run}", "--step=4", *OWN_WORDS])
    assert answered(capsys, run, "--step=2", *OWN_WORDS)["step"] == 2
