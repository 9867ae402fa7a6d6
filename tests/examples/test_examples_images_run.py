"""configs/digits.py from the command line: metrics, evaluation, a resume on another mesh; and what is refused."""

import gzip
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from meshtrain import evaluate, generate
from meshtrain.config.build import default
from meshtrain.config.resolve import resolve
from meshtrain.errors import UserError
from meshtrain.examples.idx import read_pairs
from meshtrain.examples.images import DIGITS
from meshtrain.main import main
from tests.examples.test_examples_idx import idx
from tests.messages.refused import Case, assert_refused

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/digits.py"
# One batch of 256 and one of 103 images, which padding fills up.
SMALL = {
    "batch_size": 256,
    "num_steps": 4,
    "log_every": 1,
    "eval_every": 2,
    "checkpoint.every": 2,
    "model.filters": 8,
    "model.hidden": 16,
    "learning_rate.warmup_steps": 0,
    "observe.progress": "no",
    "observe.tensorboard": "no",
}
NUM_HELD_OUT = 359


def words(run, **changes):
    return [CONFIG, f"--workdir={run}", *(f"--config.{key}={value}" for key, value in (SMALL | changes).items())]


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of four steps on one device, evaluated and saved after two and four."""
    run = tmp_path_factory.mktemp("digits") / "run"
    assert main(words(run)) == 0
    return run


def test_the_metrics_count_images(trained):
    last = [row for row in rows(trained) if "loss" in row][-1]
    assert 0 <= last["accuracy"] <= 1
    assert last["images"] == 4 * 256
    assert last["images_per_second"] > 0
    assert not [name for name in last if "token" in name]
    for row in (row for row in rows(trained) if "eval_accuracy" in row):
        right = row["eval_accuracy"] * NUM_HELD_OUT
        assert right == pytest.approx(round(right), abs=1e-3), "each image is counted once, padding is not"


def test_it_goes_on_on_another_mesh(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "4")
    assert main(words(run, **{"mesh.data": 2, "mesh.fsdp": 2})) == 0
    for name in ("loss", "eval_loss", "eval_accuracy"):
        before, after = ([row[name] for row in rows(one) if name in row and row["step"] > 2] for one in (trained, run))
        np.testing.assert_allclose(after, before, rtol=1e-5)
        assert before


def test_files_of_images_are_evaluated_whole(trained, tmp_path, capsys):
    part = tmp_path / "part-images"
    pixels, labels = read_pairs([DIGITS], "data.path")
    part.write_bytes(idx(pixels[:3]))
    (tmp_path / "part-labels").write_bytes(idx(labels[:3]))
    found = [
        evaluate.main([f"--workdir={trained}", "--json", *words])
        for words in (
            [],
            ["--config.data.source=idx", f"--config.data.path={part},{DIGITS}", "--config.mesh.data=2"],
        )
    ]
    assert found == [0, 0]
    split, files = map(json.loads, capsys.readouterr().out.splitlines())
    last = [row for row in rows(trained) if "eval_accuracy" in row][-1]
    assert split["all"]["accuracy"] == pytest.approx(last["eval_accuracy"])
    assert [(one["name"], one["images"]) for one in files["files"]] == [(str(part), 3), (str(DIGITS), 1797)]
    right = [one["accuracy"] * one["images"] for one in (*files["files"], files["all"])]
    assert right[2] == pytest.approx(right[0] + right[1])


def test_it_generates_no_text(trained):
    with pytest.raises(UserError, match=r"^task: got ") as caught:
        generate.main([f"--workdir={trained}"])
    assert len(caught.value.problems) == 1


def lines(given, **keywords):
    try:
        resolve(given, keywords)
    except UserError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "task, changes, said",
    [
        (
            "convnet",
            {},
            "data.source: got python with task=convnet, which trains on images; allowed: digits, idx, or pack",
        ),
        ("convnet", {"data.source": "synthetic"}, "data.source: got synthetic with task=convnet"),
        (
            "decoder",
            {"data.source": "digits"},
            "data.source: got digits with task=decoder, which trains on packed tokens;",
        ),
        (
            "convnet",
            {"model.num_groups": "5"},
            "model.num_groups: got 5; allowed: a divisor of model.filters = 32; nea",
        ),
        ("convnet", {"model.dropout_rate": "1"}, "model.dropout_rate: got 1.0; allowed: 0 to below 1; nearest: 0.9"),
        ("convnet", {"model.max_shift": "8"}, "model.max_shift: got 8; allowed: 0 to 7, below model.height"),
        (
            "convnet",
            {"mesh.pipeline": "2"},
            "mesh.pipeline: got 2, but this task has no pipeline stages; allowed: 1; nearest:",
        ),
        (
            "convnet",
            {"mesh.tensor": "3"},
            "model.filters: got 32 for dim 'filters' of first/kernel and 1 more; allowed:",
        ),
        (
            "convnet",
            {"data.path": "a-idx3-ubyte"},
            "data.path: got 'a-idx3-ubyte' with data.source=digits, which reads",
        ),
        (
            "convnet",
            {"data.validation_path": "x"},
            "data.validation_path: got 'x' with data.source=digits, which takes",
        ),
        (
            "convnet",
            {"data.chat_template": "t"},
            "data.chat_template: got 't' with data.source=digits, whose models do not answer messages;",
        ),
        (
            "convnet",
            {"data.tokenizer": "t.json"},
            "data.tokenizer: got 't.json' with data.source=digits: it reads no t",
        ),
    ],
)
def test_what_a_configuration_shows_is_refused(task, changes, said):
    given = default(task)
    if task == "convnet" and "data.source" not in changes and changes:
        given.data.source = "digits"
    found = lines(given, **changes)
    assert found[0].startswith(said)
    assert len(found) <= 2  # a mesh that filters do not divide by does not divide the dense layer either


def idx_cases():
    images = gzip.decompress(DIGITS.read_bytes())
    numbers = gzip.decompress((DIGITS.parent / "labels-idx1-ubyte.gz").read_bytes())
    small = ("data.source=idx", "data.path=t-images-idx3-ubyte")

    def case(name, start, *changes, images=images, labels=numbers):
        def prepare(folder):
            (folder / "t-images-idx3-ubyte").write_bytes(images)
            (folder / "t-labels-idx1-ubyte").write_bytes(labels)
            os.mkfifo(folder / "v-images-idx3-ubyte")
            return [CONFIG, "--workdir=run", *(f"--config.{change}" for change in (*small, *changes))]

        return Case(name, prepare, (start,))

    cut, wrong = DIGITS.read_bytes()[:-9], numbers[:8] + b"\x0a" + numbers[9:]
    return [
        case("a header cut", "data.path: got 't-images-idx3-ubyte', which has 1000 bytes", images=images[:1000]),
        case("content cut", "data.path: got 't-images-idx3-ubyte', which ends before", images=cut),
        case("another size", "data.path: got grey images of 8 x 8", "model.height=28", "model.width=28"),
        case("a label too many", "data.path: got label 10 of image 0;", labels=wrong),
        case("a pipe", "data.validation_path: got 'v-images-idx3", "data.validation_path=v-images-idx3-ubyte"),
    ]


@pytest.mark.parametrize("case", idx_cases(), ids=lambda case: case.name)
def test_wrong_files_are_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    assert len(assert_refused(case, tmp_path, monkeypatch)) == 1
