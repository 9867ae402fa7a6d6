"""One file under two names: training files are no validation files, and no file is in two sources."""

import json
import os

import numpy as np
import pytest

from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, check
from meshtrain.data.text import find_files
from meshtrain.errors import UserError
from meshtrain.examples import images
from meshtrain.examples.preferences import PreferenceData, preferences
from meshtrain.generate import _prompts
from tests.examples.test_examples_idx import idx

# How a file is named again: relative, with `..`, as a link, by a folder that is a link, as a hard link.
ALIASES = ("{}", "./{}", "other/../{}", "{folder}/{}", "link-{}", "linked/{}", "hard-{}")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of each source; `{}` is the one that the aliases name again."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 50)
        prepare(f"{name}.txt", f"{name}.bin")
        row = {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "yes"}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(np.full((4, 8, 8), ord(name))))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(4)))
    (tmp_path / "other").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path)
    for name in sorted(os.listdir(tmp_path)):
        if name.startswith("a"):
            (tmp_path / f"link-{name}").symlink_to(tmp_path / name)
            os.link(tmp_path / name, tmp_path / f"hard-{name}")
    return tmp_path


SOURCES = {
    "text": ("a.txt", DataOptions, check),
    "tokens": ("a.bin", DataOptions, check),
    "chat": ("a.jsonl", DataOptions, check),
    "preferences": ("a.jsonl", PreferenceData, preferences.check),
    "idx": ("a-images-idx3-ubyte", images.ImageOptions, images.check),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_training_file_is_no_validation_file_by_any_name(folder, source):
    name, kind, check_of = SOURCES[source]
    for alias in ALIASES:
        again = alias.format(name, folder=folder)
        [line] = check_of(kind(source=source, path=name, validation_path=again), True)
        assert line.startswith(f"data.validation_path: got '{again.removeprefix('./')}', which data.path also lists")
    assert not check_of(kind(source=source, path=name.replace("a", "b", 1), validation_path=name), True)


@pytest.mark.parametrize("source", ["text", "tokens", "chat"])
def test_a_file_is_in_one_source_and_in_one_validation_set(folder, source):
    name = SOURCES[source][0]
    other = name.replace("a", "b", 1)
    for alias in ALIASES:
        again = alias.format(name, folder=folder)
        got = again.removeprefix("./")
        said = f" as '{name}'" if got != name else ""
        mixture = check(DataOptions(source=source, path=f"{name}:1,{other}:1,other={again}:2"))
        wanted = f"got '{got}', which 'a' also lists{said}; allowed: each file once; nearest: leave it out"
        assert mixture == [f"data.path: {wanted}"]
        sets = check(DataOptions(source=source, path=other, validation_path=f"{name},other={again}"))
        assert sets == [f"data.validation_path: {wanted}"]


def test_a_file_that_is_named_twice_is_read_once(folder):
    for alias in ALIASES:
        files, problems = find_files(f"a.txt,b.txt,{alias.format('a.txt', folder=folder)}")
        assert not problems
        assert [str(path) for path in files] == ["a.txt", "b.txt"]


def test_token_files_of_one_text_are_no_training_and_validation_files(folder):
    prepare("link-a.txt", "again.bin")
    [line] = check(DataOptions(source="tokens", path="a.bin", validation_path="again.bin"))
    assert line.startswith(
        "data.validation_path: got 'again.bin', whose text is also in data.path as 'a.bin'; allowed: "
    )
    assert not check(DataOptions(source="tokens", path="a.bin", validation_path="b.bin"))
    (folder / "a.txt").write_text("another text")  # the same name, and other documents
    prepare("a.txt", "later.bin")
    assert not check(DataOptions(source="tokens", path="a.bin", validation_path="later.bin"))


@pytest.mark.parametrize("target", ["x.bin", "x.bin.json"])
def test_prepare_writes_no_file_that_it_reads(folder, target):
    (folder / "x.bin.json").write_text('{"text": "not a description"}')
    (folder / "x.bin").write_text("text")
    (folder / "named.jsonl").symlink_to(folder / target)
    with pytest.raises(UserError, match=f"'x.bin.*' is also an input file|--output: '{target}' is also"):
        prepare("named.jsonl", "x.bin", overwrite=True)


def test_generate_does_not_overwrite_its_prompts(folder):
    (folder / "p.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "link.jsonl").symlink_to(folder / "p.jsonl")
    given = {"stop": [], "prompt": None, "prompts": "p.jsonl", "chat": False}
    arguments = type("Arguments", (), given | {"out": "link.jsonl"})
    assert "which is also the file of --prompts" in _prompts(arguments)[1][0]
    assert not _prompts(type("Arguments", (), given | {"out": "texts.jsonl"}))[1]
