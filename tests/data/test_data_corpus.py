import dataclasses
import errno
import json
import os
import pathlib

import numpy as np
import pytest

from meshtrain.data import corpus as corpus_module
from meshtrain.data.corpus import open_corpus, open_whole, tokenizer_for
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest, check
from meshtrain.data.text import share, standard_library
from meshtrain.data.token_files import TokenFile, sidecar_path
from meshtrain.errors import UserError


def opened(options, sequence_length=16, vocab_size=257, seed=0):
    return open_corpus(options, DataRequest({}, {}, sequence_length, vocab_size, seed))


def text_of(examples):
    """All tokens of stream examples, end to end."""
    return [token for index in range(len(examples)) for token in examples[index]["tokens"].tolist()]


@pytest.fixture(scope="module")
def library():
    return opened(DataOptions(), sequence_length=128)


def test_standard_library_is_the_default(library):
    assert len(library.train.stream) > 8_000_000
    assert 0.02 < len(library.validation) / (len(library.train) + len(library.validation)) < 0.1
    assert library.text.vocab_size == 257
    assert library.text.decode(library.text.encode("def f():\n")) == "def f():\n"
    assert opened(DataOptions(), sequence_length=128).fingerprint == library.fingerprint


def test_standard_library_leaves_out_tests_and_packages():
    paths = [path for path, _ in standard_library()]
    assert paths == sorted(paths)
    assert "os.py" in paths
    assert "unittest/case.py" in paths
    folders = {folder for path in paths for folder in path.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}


def test_standard_library_is_split_by_file(library):
    held_out = [path for path, _ in standard_library() if share(path) < 0.05]
    assert 10 < len(held_out) < 100
    name, text = next((path, text) for path, text in standard_library() if path == held_out[0])
    found = library.text.decode(text_of(dataclasses.replace(library.validation, sequence_length=128)))
    assert text[:2000] in found, name


def test_a_documents_split_depends_on_nothing_else():
    # Fixed for ever: another number would move documents from one split to the other.
    assert round(share("os.py"), 6) == 0.572393


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def documents_of(corpus_split):
    return corpus_split.stream.read(0, len(corpus_split.stream)).tolist()


def lines_of(corpus_split):
    """The documents of a split as a set of texts."""
    ends_as_newlines = bytes(10 if token == 256 else token for token in documents_of(corpus_split))
    return set(ends_as_newlines.decode().splitlines())


def test_text_files_globs_and_lines(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a.txt", "first")
    write(tmp_path / "none.txt", "")
    lines = write(tmp_path / "c.jsonl", '{"body": "third"}\n\n{"body": "f\\u00fcnf"}\n')
    options = DataOptions(
        source="text", path=f"{tmp_path}/*.txt, {lines},{tmp_path}/a.txt", text_field="body", validation_fraction=0
    )
    corpus = opened(options, sequence_length=4)
    wanted = [token for text in ("first", "second", "third", "fünf") for token in [*text.encode(), 256]]
    assert documents_of(corpus.train) == wanted
    assert len(corpus.validation) == 0
    assert corpus.summary.endswith(f": {len(wanted)} tokens, 6 + 0 sequences")


def test_few_documents_are_cut_at_one_place_and_many_by_content(tmp_path):
    one = DataOptions(
        source="text", path=write(tmp_path / "one.txt", bytes(range(97, 117)) * 10), validation_fraction=0.25
    )
    corpus = opened(one)
    whole = list(bytes(range(97, 117)) * 10) + [256]
    assert documents_of(corpus.train) + documents_of(corpus.validation) == whole
    assert len(corpus.validation.stream) == 50

    texts = [f"document number {number} of many" for number in range(300)]
    forward = write(tmp_path / "f.jsonl", "\n".join(json.dumps({"text": text}) for text in texts))
    backward = write(tmp_path / "b.jsonl", "\n".join(json.dumps({"text": text}) for text in reversed(texts)))
    splits = []
    for path in (forward, backward):
        many = opened(DataOptions(source="text", path=path, validation_fraction=0.2))
        splits.append([lines_of(many.train), lines_of(many.validation)])
    assert splits[0] == splits[1]
    assert splits[0][0] | splits[0][1] == set(texts)
    assert not splits[0][0] & splits[0][1]
    assert 30 < len(splits[0][1]) < 90


def test_fingerprint_sees_every_change(tmp_path):
    path = tmp_path / "a.txt"
    options = DataOptions(source="text", path=write(path, "abcdefgh" * 50), validation_fraction=0.25)
    first = opened(options).fingerprint
    assert opened(options).fingerprint == first
    assert opened(dataclasses.replace(options, validation_fraction=0.3)).fingerprint != first
    write(path, "abcdefgh" * 49 + "abcdefgx")
    assert opened(options).fingerprint != first
    os.rename(path, tmp_path / "b.txt")
    renamed = dataclasses.replace(options, path=str(tmp_path / "b.txt"))
    write(tmp_path / "b.txt", "abcdefgh" * 50)
    assert opened(renamed).fingerprint == first


def test_synthetic_is_random_access_and_seeded():
    options = DataOptions(source="synthetic")
    corpus = opened(options, vocab_size=32)
    example = corpus.train[123_456]
    assert example["tokens"].max() < 32
    assert np.array_equal(example["tokens"][1:], example["targets"][:-1])
    assert np.array_equal(example["tokens"], opened(options, vocab_size=32).train[123_456]["tokens"])
    rows = [corpus.train[7], corpus.train[8], corpus.validation[7], opened(options, vocab_size=32, seed=1).train[7]]
    assert len({row["tokens"].tobytes() for row in rows}) == len(rows)
    assert corpus.fingerprint != opened(options, vocab_size=32, seed=1).fingerprint
    assert corpus.text is None
    steps = np.diff(np.append(example["tokens"], example["targets"][-1])) % 32
    assert (steps == np.bincount(steps).argmax()).mean() > 0.5
    with pytest.raises(UserError, match="at least 2"):
        opened(options, vocab_size=1)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "good.txt", "good text " * 20)
    write(tmp_path / "empty.txt", "")
    return tmp_path


def test_unreadable_file(folder, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    assert "cannot read" in check(DataOptions(source="text", path=f"{folder}/good.txt"))[0]


def test_legal_options_have_no_problems(folder):
    assert check(DataOptions()) == []
    assert check(DataOptions(source="synthetic")) == []
    assert check(DataOptions(source="text", path=f"{folder}/good.txt")) == []


def test_problems_of_several_files_come_together(tmp_path):
    for number in range(15):
        write(tmp_path / f"{number:02}.txt", b"\xff")
    with pytest.raises(UserError) as raised:
        opened(DataOptions(source="text", path=f"{tmp_path}/*.txt"))
    assert len(raised.value.problems) == 11
    assert "5 more" in raised.value.problems[-1]


def test_validation_with_too_little(tmp_path):
    options = DataOptions(source="text", path=write(tmp_path / "a.txt", "abcd" * 20), validation_fraction=0.05)
    with pytest.raises(UserError, match="only 4 tokens for validation"):
        opened(options)


def test_vocabulary_smaller_than_the_tokenizer():
    with pytest.raises(UserError, match=r"vocab_size: got 256; allowed.*at least 257; nearest: 257"):
        opened(DataOptions(), vocab_size=256)


def test_library_without_source(monkeypatch, tmp_path):
    monkeypatch.setattr(
        corpus_module.standard_library.__globals__["sysconfig"], "get_paths", lambda: {"stdlib": str(tmp_path)}
    )
    with pytest.raises(UserError, match=r"contains no readable \.py files"):
        opened(DataOptions())


def test_tokenizer_without_data(tmp_path):
    assert tokenizer_for(DataOptions(), vocab_size=300).vocab_size == 257
    assert tokenizer_for(DataOptions(source="synthetic"), vocab_size=300).vocab_size == 300
    with pytest.raises(UserError, match="does not exist"):
        tokenizer_for(DataOptions(source="tokens", path=str(tmp_path / "a.bin")), vocab_size=300)


@pytest.mark.parametrize("packing", ["stream", "first_fit"])
@pytest.mark.parametrize("sequence_length", [32, 4096])
def test_documents_that_are_all_empty_are_named(tmp_path, packing, sequence_length):
    path = write(tmp_path / "a.jsonl", '{"text": ""}\n' * 1000)
    said = "got only empty documents .1,000.; allowed: at least one document with text; nearest: "
    options = DataOptions(source="text", path=path, packing=packing)
    with pytest.raises(UserError, match=f"data.path: {said}data.text_field="):
        open_corpus(options, DataRequest({}, {}, sequence_length, 257, 0))
    with pytest.raises(UserError, match="has no document with two tokens; all are empty; allowed"):
        open_whole(options, DataRequest({}, {}, sequence_length, 257, 0))
    for output in ("a.bin", "tokens/"):
        with pytest.raises(UserError, match=said):
            prepare(path, f"{tmp_path}/{output}")
    assert not list(tmp_path.glob("**/*.bin"))
    np.full(1000, 256, "<u2").tofile(tmp_path / "old.bin")  # as an earlier version wrote it
    described = TokenFile("uint16", 257, 1000, 1000, 256, "bytes", "", "")
    sidecar_path(tmp_path / "old.bin").write_text(json.dumps(vars(described)))
    tokens = dataclasses.replace(options, source="tokens", path=f"{tmp_path}/old.bin")
    for open_it in (open_corpus, open_whole):
        with pytest.raises(UserError, match=said):
            open_it(tokens, DataRequest({}, {}, sequence_length, 257, 0))
    write(tmp_path / "a.jsonl", '{"text": ""}\n' * 1000 + '{"text": "a few words of text"}\n')
    assert len(open_corpus(dataclasses.replace(options, validation_fraction=0), DataRequest({}, {}, 4, 257, 0)).train)
