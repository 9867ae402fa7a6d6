"""The same documents from every kind of file, broken ones in one line, and a folder of shards that goes on."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from meshtrain.data import text as text_module
from meshtrain.data.chat import read_lines
from meshtrain.data.corpus import open_corpus
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest
from meshtrain.errors import Problems, UserError

DOCUMENTS = [f"document {number} \u2603 " * (number % 9 + 1) for number in range(300)]
KINDS = ("a.jsonl", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.json.zst", "a.parquet")


def compressed(content):
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, "zstd") as file:
        file.write(content)
    return out.getvalue().to_pybytes()


def write(path, rows):
    """Writes rows as the file's name says; a .parquet in several row groups."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=70)
        return path
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes({".gz": gzip.compress, ".zst": compressed, ".jsonl": bytes}[path.suffix](lines))
    return path


@pytest.mark.parametrize("name", KINDS)
def test_every_format_gives_the_same_tokens(tmp_path, name):
    write(tmp_path / "plain.jsonl", [{"text": one} for one in DOCUMENTS])
    write(tmp_path / name, [{"id": number, "text": one} for number, one in enumerate(DOCUMENTS)])
    for one in ("plain.jsonl", name):
        prepare(str(tmp_path / one), str(tmp_path / f"{one}.bin"))
    assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / "plain.jsonl.bin").read_bytes()
    options = [DataOptions(source="text", path=str(tmp_path / one)) for one in ("plain.jsonl", name)]
    plain, other = (open_corpus(one, DataRequest({}, {}, 8, 257, 0)) for one in options)
    assert plain.fingerprint == other.fingerprint


@pytest.mark.parametrize("name", KINDS[1:])
def test_conversations_are_those_of_the_lines(tmp_path, name):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": said[: 1 + number % 2], "id": number} for number in range(5)]
    rows.append({"messages": [{"role": "system", "content": "c", "name": "d"}, *said]})
    plain, problems = write(tmp_path / "plain.jsonl", rows), Problems()
    found = [[one.messages for one in read_lines(path, problems)] for path in (plain, write(tmp_path / name, rows))]
    assert found[0] == found[1]
    assert not problems.count


def test_text_of_a_whole_file_may_be_compressed(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one document\nof two lines"))
    assert prepare(str(tmp_path / "a.txt.gz"), str(tmp_path / "a.bin")).num_tokens == 26
    (tmp_path / "b.bin.gz").write_bytes(gzip.compress(np.arange(50, dtype="<u2").tobytes()))
    with pytest.raises(UserError, match="which has zero bytes"):
        prepare(str(tmp_path / "b.bin.gz"), str(tmp_path / "b.bin"))


@pytest.mark.parametrize("name", KINDS[1:])
@pytest.mark.parametrize("broken", ["cut", "flipped", "another"])
def test_a_broken_file_is_one_line(tmp_path, name, broken):
    path = write(tmp_path / name, [{"text": one} for one in DOCUMENTS])
    content = path.read_bytes()
    place = len(content) - 9 if path.suffix == ".parquet" else len(content) // 2
    change = {"cut": content[:-20], "another": b"plain text\n" * 30}
    change["flipped"] = content[:4] + bytes(8) + content[12:place] + bytes(8) + content[place + 8 :]
    path.write_bytes(change[broken])
    with pytest.raises(UserError) as caught:
        prepare(str(path), str(tmp_path / "out.bin"))
    [line] = caught.value.problems
    assert f"'{path}' cannot be read (" in line
    problems = Problems()
    assert read_lines(path, problems) is not None
    assert f"'{path}' cannot be read (" in problems.lines()[0]


def test_a_column_that_is_not_there_or_holds_no_text_is_one_line_with_those_that_are(tmp_path):
    path = write(tmp_path / "a.parquet", [{"id": 3, "content": "a", "title": "b"}] * 90)
    for column, fix in (
        ("zz", "nearest: data.text_field=content"),
        ("contents", "did you mean 'content'?"),
        ("id", ""),
    ):
        with pytest.raises(UserError) as caught:
            prepare(str(path), str(tmp_path / "out.bin"), text_field=column)
        [line] = caught.value.problems
        assert f"got '{column}', which is not a text column of '{path}', with the columns id, content, title" in line
        assert "allowed there: content, title" in line
        assert fix in line
    write(path, [{"text": "a"}, {"text": None}, {"text": "b"}])
    with pytest.raises(UserError, match=r"has no text in .*a.parquet, row 2"):
        prepare(str(path), str(tmp_path / "out.bin"))


def test_without_the_package_the_line_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        UserError, match=r"a.parquet', which needs the package pyarrow .*pip install 'meshtrain\[data\]'"
    ):
        prepare(str(path), str(tmp_path / "out.bin"))


class Counted(io.FileIO):
    """A file that counts the bytes that are asked of it."""

    num_bytes = 0

    def read(self, size=-1):
        content = super().read(size)
        self.num_bytes += len(content)
        return content


def test_little_of_a_row_group_is_in_memory(tmp_path, monkeypatch):
    """Rows are handed on before what comes after them is read or decoded, in one row group of 14 MB."""
    path, file_bytes = tmp_path / "a.parquet", 14_000_000
    rows = pyarrow.table({"text": [os.urandom(1000).hex() for _ in range(7000)]})
    pyarrow.parquet.write_table(rows, path, compression="none", use_dictionary=False)
    monkeypatch.setattr(text_module, "_ROWS", 7)
    before, most = pyarrow.total_allocated_bytes(), 0
    with Counted(path) as file:
        for number, _ in enumerate(text_module._parquet_rows(path, file, "text")):
            most = max(most, pyarrow.total_allocated_bytes() - before)
            assert file.num_bytes < file_bytes * (number / 7000) + 4_000_000
    assert 0 < most < 4_000_000


def test_a_folder_has_a_token_file_for_each_file_and_goes_on_where_it_was(tmp_path, capsys):
    paths = [write(tmp_path / f"part-{number}.jsonl", [{"text": f"words {number}"}] * 3) for number in range(4)]
    out, glob = tmp_path / "tokens", f"{tmp_path}/part-*.jsonl"
    paths[2].write_text("broken")
    with pytest.raises(UserError, match="line 1 is not JSON"):
        prepare(glob, f"{out}/")
    made = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert sorted(made) == [f"part-{number}.jsonl.bin" for number in (0, 1, 3)]
    (out / "part-3.jsonl.bin.json").unlink()  # killed between a file and its description
    write(paths[2], [{"text": "words 2"}] * 3)
    assert prepare(glob, f"{out}/").num_documents == 12
    assert "2 of 4 files are complete" in capsys.readouterr().out
    again = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert {name for name in made if again[name] == made[name]} == {"part-0.jsonl.bin", "part-1.jsonl.bin"}
    prepare(glob, str(tmp_path / "one.bin"))
    whole = b"".join((out / f"part-{number}.jsonl.bin").read_bytes() for number in range(4))
    assert whole == (tmp_path / "one.bin").read_bytes()
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "part-0.jsonl", [{"text": "other words"}])
    with pytest.raises(UserError, match="got 1 files with the same name as another file"):
        prepare(f"{glob},{tmp_path}/other/part-0.jsonl", f"{out}/")


def test_killed_prepares_end_with_the_same_files(tmp_path):
    for number in range(6):
        write(tmp_path / f"part-{number}.jsonl", [{"text": "words of a shard " * 40}] * 9000)
    words = [sys.executable, "-m", "meshtrain", "prepare", f"--path={tmp_path}/*.jsonl", f"--output={tmp_path}/tokens/"]
    child, begun = subprocess.Popen(words, stdout=subprocess.PIPE), time.monotonic()
    while len([*tmp_path.glob("tokens/*.bin.json")]) < 2 and time.monotonic() - begun < 120:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    whole = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("tokens/*.bin.json")}
    assert 2 <= len(whole) < 6
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"tokens: {len(whole)} of 6 files are complete" in done.stdout
    assert {name: os.stat(tmp_path / "tokens" / name).st_mtime_ns for name in whole} == whole
    assert len({path.read_bytes() for path in tmp_path.glob("tokens/*.bin")}) == 1
    assert len([*tmp_path.glob("tokens/*.bin.json")]) == 6
