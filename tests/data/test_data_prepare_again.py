"""`prepare --output=FOLDER/` again: which token files count as complete, which are made again, which are refused."""

import json
import os

import pytest

from meshtrain.data import prepare as prepare_module
from meshtrain.data.prepare import prepare
from meshtrain.data.token_files import sidecar_path
from meshtrain.errors import UserError
from tests.data.test_data_token_files import words_tokenizer


@pytest.fixture
def made(tmp_path):
    """Two files of text, and a function that prepares them into one folder; they are prepared once."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"first {name}", "other": "field"}) + "\n")
    (tmp_path / "moved").mkdir()

    def again(path="*.jsonl", **options):
        return prepare(f"{tmp_path}/{path}", f"{tmp_path}/tokens/", **options)

    again()
    return tmp_path, again


def tokens_of(folder):
    """Name -> content and inode of each token file: a file that was written again has another inode."""
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in sorted(folder.glob("tokens/*.bin"))}


def grow(folder):
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"text": "grown", "other": "field"}\n')


def same_size(folder):
    (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text().replace("first", "other"))


def damage(folder):
    path = folder / "tokens" / "a.jsonl.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"\1\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # no time tells it


def truncate(folder):
    os.truncate(folder / "tokens" / "a.jsonl.bin", 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [(grow, "has changed since"), (same_size, "has changed since"), (damage, "damaged"), (truncate, "damaged")],
)
def test_a_token_file_of_changed_text_and_a_damaged_one_are_made_again(made, capsys, change, why):
    folder, again = made
    before = tokens_of(folder)
    again()
    assert tokens_of(folder) == before
    assert "2 of 2 files are complete" in capsys.readouterr().out
    change(folder)
    again()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{folder}/tokens/a.jsonl.bin: ")
    assert why in first
    assert second.endswith("1 of 2 files are complete")
    after = tokens_of(folder)
    prepare(f"{folder}/a.jsonl", f"{folder}/direct.bin")
    assert after["a.jsonl.bin"][0] == (folder / "direct.bin").read_bytes()
    assert after["b.jsonl.bin"] == before["b.jsonl.bin"]
    again()
    assert tokens_of(folder) == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_field": "other"}, "with text_field 'text', and this command has 'other'"),
        ({"tokenizer": "words.json"}, "with vocab_size 257, and this command has 3"),
        ({"path": "moved/*.jsonl"}, r"with source '.*/a.jsonl', and this command has '.*/moved/a.jsonl'"),
    ],
)
def test_tokens_of_another_text_or_way_are_not_replaced_unasked(made, options, message):
    folder, again = made
    words_tokenizer(folder / "words.json", [0, 1, 2])
    for name in ("a", "b"):
        (folder / "moved" / f"{name}.jsonl").write_text('{"text": "of another corpus"}\n')
    if "tokenizer" in options:
        options = {"tokenizer": str(folder / "words.json")}
    before = tokens_of(folder)
    with pytest.raises(UserError, match=message) as caught:
        again(**options)
    assert len(caught.value.problems) == 2
    assert all(line.endswith("or --overwrite") for line in caught.value.problems)
    assert tokens_of(folder) == before
    again(overwrite=True, **options)
    assert tokens_of(folder)["a.jsonl.bin"][0] != before["a.jsonl.bin"][0]
    again(**options)


def test_a_file_of_text_has_no_field(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("words")
    for text_field in ("text", "other"):
        prepare(f"{tmp_path}/a.txt", f"{tmp_path}/tokens/", text_field=text_field)
    assert "1 of 1 files are complete" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["earlier", "{", "[]"])
def test_a_description_without_a_source_completes_nothing(made, content):
    folder, again = made
    sidecar = sidecar_path(folder / "tokens" / "a.jsonl.bin")
    described = json.loads(sidecar.read_text())
    earlier = {name: value for name, value in described.items() if not name.startswith(("source", "text_field"))}
    sidecar.write_text(json.dumps(earlier) if content == "earlier" else content)
    before = tokens_of(folder)
    with pytest.raises(UserError, match="--overwrite"):
        again()
    assert tokens_of(folder) == before
    sidecar.unlink()  # as the page says
    again()
    assert json.loads(sidecar.read_text()) == described


def test_a_lost_tokenizer_beside_complete_files_is_written_again(made):
    folder, again = made
    words = words_tokenizer(folder / "words.json", [0, 1, 2])
    again(tokenizer=words, overwrite=True)
    [copy] = (folder / "tokens").glob("tokenizer.*.json")
    content, before = copy.read_bytes(), tokens_of(folder)
    copy.unlink()
    again(tokenizer=words)
    assert copy.read_bytes() == content
    assert tokens_of(folder) == before


def test_a_change_while_the_text_is_read_is_noticed_next_time(made, monkeypatch):
    folder, again = made
    grow(folder)
    write_tokens = prepare_module._write_tokens

    def change_too(files, *given):
        result = write_tokens(files, *given)
        grow(folder)
        return result

    monkeypatch.setattr(prepare_module, "_write_tokens", change_too)
    again()
    monkeypatch.undo()
    assert again().num_documents == 4
