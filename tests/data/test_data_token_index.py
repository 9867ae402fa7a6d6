"""The index of a token file: starts read it in place of the ids, and notice where it no longer is true."""

import json
import os
import pathlib
import time

import numpy as np
import pytest

from meshtrain import verify
from meshtrain.data import packing, token_files
from meshtrain.data.corpus import open_corpus
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest
from meshtrain.data.token_files import Index, TokenFile, document_ends, read_index, sidecar_path, write_index
from meshtrain.errors import UserError
from tests.messages.refused import unprivileged


def opened(path, *, length=4, vocab_size=257, **options):
    given = {"source": "tokens", "path": str(path), "validation_fraction": 0} | options
    return open_corpus(DataOptions(**given), DataRequest({}, {}, length, vocab_size, 0))


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "words " * n}) + "\n" for n in range(1, 30)))
    prepare(str(tmp_path / "a.jsonl"), str(tmp_path / "a.bin"))
    return tmp_path / "a.bin"


@pytest.fixture
def reads(monkeypatch):
    """The files whose ids were read, but for those of examples."""
    found, chunks = [], token_files._chunks
    monkeypatch.setattr(
        token_files, "_chunks", lambda path, *a, **named: found.append(path.name) or chunks(path, *a, **named)
    )
    monkeypatch.setattr(packing.TokenStream, "read", lambda *_: pytest.fail("a start reads ids"))
    return found


@pytest.mark.parametrize("kind", ["stream", "first_fit"])
def test_a_start_reads_no_ids(path, reads, kind):
    with_index = opened(path, packing=kind)
    assert reads == []
    os.unlink(f"{path}.index")
    without = opened(path, packing=kind)
    assert set(reads) == {"a.bin"}
    assert without.fingerprint == with_index.fingerprint
    assert len(without.train) == len(with_index.train)
    num_reads = len(reads)
    opened(path, packing=kind)
    assert len(reads) == num_reads, "what an older version prepared is read once"


def test_ends_of_documents_are_those_of_the_ids(path):
    ids = np.fromfile(path, "<u2")
    wanted = np.flatnonzero(ids == 256) + 1
    assert document_ends([path]).tolist() == wanted.tolist()
    assert document_ends([path, path]).tolist() == [*wanted, *(wanted + len(ids))]
    for fraction in (0.0, 0.3):
        corpus = opened(path, packing="first_fit", validation_fraction=fraction)
        for stream in (corpus.train.stream, corpus.validation.stream):
            plain = packing.TokenStream(stream.parts, stream.end_id)
            assert stream.document_ends().tolist() == plain.document_ends().tolist()


def test_a_changed_file_is_read_again_at_once(path):
    before = opened(path).fingerprint
    ids = np.fromfile(path, "<u2")
    for place in (3, 5, 8):  # as fast as it goes: within a tick of the clock of files
        ids[place] += 1
        ids.tofile(path)
        assert opened(path).fingerprint != before
        before = opened(path).fingerprint
    ids[0] = 999
    ids.tofile(path)
    with pytest.raises(UserError, match="contains id 999 at token 0"):
        opened(path)
    with pytest.raises(UserError, match="contains id 999 at token 0"):
        opened(path)


def test_the_ids_of_a_file_that_has_just_changed_are_read_a_tick_later(path, monkeypatch):
    """Another change in the same tick of the clock would leave the time in the index true."""
    waits = []
    monkeypatch.setattr(token_files.time, "sleep", waits.append)
    for seconds, wanted in ((10, [0.02]), (-10, [0.02])):
        os.utime(path, ns=(time.time_ns() + seconds * 10**9,) * 2)
        opened(path)
        assert waits == wanted


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]\n", b"null\n", b"{}\n", b"\xff\n", b"[" * 100_000, b"9" * 5000],
)
def test_a_broken_index_is_made_again(path, content):
    right = pathlib.Path(f"{path}.index").read_bytes()
    pathlib.Path(f"{path}.index").write_bytes(content)
    assert read_index(path) is None
    opened(path, packing="first_fit")
    assert pathlib.Path(f"{path}.index").read_bytes() == right


@pytest.mark.parametrize("facts", [{"lengths": "O"}, {"largest_id": "3"}, {"digest": 3}, {"more": 1}, {"size": 3}])
def test_an_index_with_another_entry_is_none(path, facts):
    head, _, lengths = pathlib.Path(f"{path}.index").read_bytes().partition(b"\n")
    pathlib.Path(f"{path}.index").write_bytes(json.dumps(json.loads(head) | facts).encode() + b"\n" + lengths)
    assert read_index(path) is None


def test_ends_past_the_ids_are_looked_for_again(path):
    right = read_index(path)
    write_index(path, Index(**vars(right) | {"lengths": np.full(50, 10**9, np.uint32)}))
    assert document_ends([path]).tolist() == np.cumsum(right.lengths, dtype=np.int64).tolist()


def test_a_pipe_is_not_opened_and_a_folder_that_may_only_be_read_serves(path):
    before = opened(path, packing="first_fit").fingerprint
    os.unlink(f"{path}.index")
    os.mkfifo(f"{path}.index")
    assert read_index(path) is None
    os.unlink(f"{path}.index")
    path.parent.chmod(0o500)
    try:
        with unprivileged():
            assert opened(path, packing="first_fit").fingerprint == before
    finally:
        path.parent.chmod(0o700)
    assert not os.path.exists(f"{path}.index")


def test_verify_hashes_a_token_file(path, capsys):
    assert verify.main([str(path)]) == 0
    ids = np.fromfile(path, "<u2")
    ids[7] += 1
    about = path.stat()
    ids.tofile(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # as a disk damages it
    assert verify.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert f"{path}: undamaged\n{path}: damaged: " in said
    described = json.loads(sidecar_path(path).read_text())
    del described["sha256"]
    sidecar_path(path).write_text(json.dumps(described))
    opened(path)
    with pytest.raises(UserError, match="got no sha256 in its description"):
        verify.main([str(path)])


@pytest.mark.parametrize("kind", ["stream", "first_fit"])
def test_ten_billion_tokens_start_at_once(tmp_path, reads, monkeypatch, kind):
    """On a file with holes, which takes no room; its index says where documents end."""
    path, num_tokens, lengths = tmp_path / "huge.bin", 10**10, np.full(1000, 10**7 - 3, np.uint32)
    with path.open("wb") as file:
        file.truncate(2 * num_tokens)
    sidecar_path(path).write_text(
        json.dumps(vars(TokenFile("uint16", 50_257, num_tokens, 1000, 50_256, "bytes", "", "")))
    )
    about = path.stat()
    write_index(path, Index(about.st_size, about.st_mtime_ns, "0" * 64, 50_256, True, lengths))
    corpus = opened(path, length=1 << 20, vocab_size=50_257, packing=kind)
    assert reads == []
    assert 9500 <= len(corpus.train) <= 10_001
    monkeypatch.undo()
    corpus = opened(path, length=4096, vocab_size=50_257, packing="stream")
    for index in (0, len(corpus.train) // 2, len(corpus.train) - 1):
        assert corpus.train[index]["tokens"].tolist() == [0] * 4096
