"""Each process reads its own files: a difference in any of them is one line in all, before the first step."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshtrain.config.resolve import resolve
from meshtrain.data.dataset import Dataset
from meshtrain.data.loader import content_hash, order_hash
from meshtrain.data.prepare import main as prepare
from meshtrain.errors import UserError
from meshtrain.files import hash_of_sources
from meshtrain.hf import tensor_files
from meshtrain.launch import peers
from meshtrain.models.task import Task, token_batch
from meshtrain.run import dataset, preflight
from meshtrain.run.dataset import data_facts, open_data, refuse_unequal_data

TASK = Task(init=dict, loss=len, batch=token_batch(4, 8), vocab_size=300)
LINES = "the quick brown fox jumps over the lazy dog\n" * 40
SMALL = {"batch_size": 4, "sequence_length": 8}


def given(source, path, **more):
    return resolve({**SMALL, "data": {"source": source, "path": str(path), **more}})


def texts(folder, change):
    path = folder / "text.txt"
    path.write_text(LINES.replace("fox", "cat") if change else LINES)
    return given("text", path)


def fewer_lines(folder, change):
    path = folder / "text.txt"
    path.write_text(LINES[: len(LINES) // (2 if change else 1)])
    return given("text", path)


def validation(folder, change):
    (folder / "text.txt").write_text(LINES)
    (folder / "valid.txt").write_text(LINES.replace("dog", "cow") if change else LINES + "\n")
    return given("text", folder / "text.txt", validation_path=str(folder / "valid.txt"))


def mixture(folder, change):
    (folder / "a.txt").write_text(LINES)
    (folder / "b.txt").write_text(LINES.upper() if change else LINES + "\n")
    return given("text", f"{folder / 'a.txt'}:2,{folder / 'b.txt'}:1")


def tokens(folder, change):
    (folder / "text.txt").write_text(LINES.replace("fox", "cat") if change else LINES)
    assert prepare([f"--path={folder / 'text.txt'}", f"--output={folder / 't.bin'}"]) in (0, None)
    return given("tokens", folder / "t.bin")


def chat(folder, change):
    told = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no" if change else "yo"}]
    (folder / "chat.jsonl").write_text(f"{json.dumps({'messages': told})}\n" * 40)
    template = folder / "template.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    return given("chat", folder / "chat.jsonl", validation_fraction=0.2, chat_template=str(template))


@pytest.fixture
def told(monkeypatch):
    """A function (what another process has said) -> makes this process 1 of two; process 0 has said that."""

    def hears(facts):
        monkeypatch.setattr(peers, "count", lambda: 2)
        monkeypatch.setattr(peers, "gather_values", lambda name, value: [facts, value])

    return hears


@pytest.mark.parametrize(
    "made", [texts, fewer_lines, validation, mixture, tokens, chat], ids=lambda made: made.__name__
)
def test_other_data_at_the_same_path_are_one_line(made, tmp_path, told):
    of_each = []
    for host in (0, 1):
        folder = tmp_path / str(host)
        folder.mkdir()
        config = made(folder, change=host)
        of_each.append((config, open_data(config, TASK)))
    told(data_facts(*of_each[0], 0))
    refuse_unequal_data(*of_each[0], 0)
    with pytest.raises(UserError, match=r"^processes: data differs: fingerprint is '\w{16}' in process 1 and") as error:
        refuse_unequal_data(*of_each[1], 0)
    assert len(error.value.problems) == 1
    assert error.value.problems[0].endswith("nearest: the same files on every machine, for example in a shared folder")


CONFIG = resolve({**SMALL, "data": {"source": "synthetic"}})
EXAMPLE = {name: np.zeros(entry.shape[1:], entry.dtype) for name, entry in token_batch(4, 8).items()}
DATA = Dataset([{**EXAMPLE, "tokens": np.full(8, number, np.int32)} for number in range(40)], (), "v1")


class Noisy:
    """A source that adds noise to its examples."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": np.random.default_rng().random(3)}


def reordered(monkeypatch):
    """A data loader of another commit with the same version number."""
    own = dataset.order_hash
    monkeypatch.setattr(dataset, "order_hash", lambda examples, **given: own(examples, **{**given, "seed": 7}))
    return DATA


@pytest.mark.parametrize(
    ("fact", "other"),
    [
        ("fingerprint", lambda _: dataclasses.replace(DATA, fingerprint="v2")),
        ("hash of the order", reordered),
        ("hash of some training examples", lambda _: dataclasses.replace(DATA, train=[DATA.train[1], *DATA.train[1:]])),
        ("hash of some validation examples", lambda _: dataclasses.replace(DATA, validation=DATA.train[:1])),
        ("prompts", lambda _: dataclasses.replace(DATA, prompts=["a"])),
    ],
)
def test_own_sources_are_compared_by_what_they_yield_not_by_their_word(fact, other, told, monkeypatch):
    told(data_facts(CONFIG, DATA, 0))
    refuse_unequal_data(CONFIG, DATA, 0)
    with pytest.raises(UserError, match=f"^processes: data differs: {fact} is "):
        refuse_unequal_data(CONFIG, other(monkeypatch), 0)


def test_examples_with_noise_are_not_compared_and_order_depends_on_the_step():
    assert content_hash(Noisy()) == ""
    assert content_hash(()) != content_hash(DATA.train) == content_hash(list(DATA.train))
    orders = {order_hash(DATA.train, seed=seed, first_sample=first) for seed in (0, 1) for first in (0, 8)}
    assert len(orders) == 4


def test_another_commit_of_the_same_version_is_another_source(tmp_path, told, monkeypatch):
    (tmp_path / "a.py").write_text("ORDER = 1\n")
    before = hash_of_sources(tmp_path)
    (tmp_path / "a.py").write_text("ORDER = 2\n")
    assert hash_of_sources(tmp_path) != before
    monkeypatch.setattr(peers, "count", lambda: 2)
    monkeypatch.setattr(peers, "gather_values", lambda name, value: [{**value, "meshtrain's source": "x"}, value])
    with pytest.raises(UserError, match=r"processes: versions differs: meshtrain's source is '\w{12}' in process 1"):
        preflight.refuse_unequal_processes(CONFIG, tmp_path)


def test_weights_of_the_same_names_and_shapes_are_compared_by_content(tmp_path):
    hashes = []
    for value in (1.0, 1.0, 2.0):
        save_file({"a": np.zeros(4, np.float32), "b": np.full(4, value, np.float32)}, tmp_path / "model.safetensors")
        hashes.append(tensor_files.content_hash(tensor_files.tensors(tmp_path)[0]))
    assert hashes[0] == hashes[1] != hashes[2]
