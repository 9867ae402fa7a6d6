import json
import os

import numpy as np
import pytest
import tokenizers

from meshtrain.data import prepare as prepare_module
from meshtrain.data import token_files
from meshtrain.data.corpus import open_corpus, tokenizer_for
from meshtrain.data.prepare import main, prepare
from meshtrain.data.sources import DataOptions, DataRequest, check
from meshtrain.errors import UserError


def words_tokenizer(path, ids):
    """A tokenizer of whole words w<id>, for the ids given; the last one ends a document."""
    vocab = {f"w{number}": number for number in ids[:-1]} | {"</s>": ids[-1]}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return str(path)


def opened(path, vocab_size=257, **options):
    given = {"source": "tokens", "path": str(path), "validation_fraction": 0} | options
    return open_corpus(DataOptions(**given), DataRequest({}, {}, 4, vocab_size, 0))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("first document")
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n{"text": "third ☃"}\n')
    return f"{tmp_path}/a.txt,{tmp_path}/b.jsonl"


def test_prepared_tokens_are_the_text(tmp_path, text):
    described = prepare(text, str(tmp_path / "out.bin"))
    assert (described.dtype, described.num_documents, described.end_id) == ("uint16", 3, 256)
    direct, corpus = opened(text, source="text"), opened(tmp_path / "out.bin")
    assert len(corpus.train.stream) == described.num_tokens == len(direct.train.stream)
    for index in range(len(direct.train)):
        for name, array in direct.train[index].items():
            assert np.array_equal(corpus.train[index][name], array)
    assert isinstance(corpus.train.stream.parts[0], token_files.FileIds), "read where it is used"
    assert corpus.text.decode(corpus.text.encode("☃")) == "☃"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.jsonl", "out.bin", "out.bin.index", "out.bin.json"]


def test_several_files_are_one_stream(tmp_path, text):
    for name in ("one", "two"):
        prepare(text, str(tmp_path / f"{name}.bin"))
    one = opened(tmp_path / "one.bin")
    both = opened(f"{tmp_path}/*.bin")
    num_tokens = len(one.train.stream)
    assert len(both.train.stream) == 2 * num_tokens
    ids = both.train.stream.read(0, 2 * num_tokens)
    assert np.array_equal(ids[:num_tokens], ids[num_tokens:])
    assert both.fingerprint != one.fingerprint
    cut = opened(f"{tmp_path}/*.bin", validation_fraction=0.4, packing="first_fit")
    assert len(cut.validation.stream) == int(0.4 * 2 * num_tokens)


def test_large_vocabulary_takes_four_bytes_and_brings_its_tokenizer(tmp_path):
    ids = [0, 3, 4, 5, 7, 65_536, 69_999, 70_000]
    tokenizer = words_tokenizer(tmp_path / "tokenizer.json", ids)
    (tmp_path / "a.txt").write_text("w0 w69999 w5 w65536 w7")
    described = prepare(str(tmp_path / "a.txt"), str(tmp_path / "a.bin"), tokenizer=tokenizer)
    assert (described.dtype, described.vocab_size, described.end_id) == ("uint32", 70_001, 70_000)
    assert (tmp_path / "a.bin").stat().st_size == 6 * 4
    os.remove(tokenizer)
    corpus = opened(tmp_path / "a.bin", vocab_size=70_001)
    assert corpus.train[0]["tokens"].tolist() == [0, 69_999, 5, 65_536]
    assert corpus.text.encode("w3 w4") == [3, 4]
    options = DataOptions(source="tokens", path=str(tmp_path / "a.bin"))
    assert tokenizer_for(options, vocab_size=70_001).end_id == 70_000
    words_tokenizer(tmp_path / "a.bin.tokenizer.json", ids[1:])
    with pytest.raises(UserError, match="is not the tokenizer that wrote"):
        tokenizer_for(options, vocab_size=70_001)


def test_ids_past_the_vocabulary_name_file_id_place_and_need(tmp_path, text):
    path = tmp_path / "out.bin"
    prepare(text, str(path))
    with pytest.raises(UserError, match=r"out.bin' contains id 256 at token 14; .*below .*256; nearest: set it to 257"):
        opened(path, vocab_size=256)
    ids = np.fromfile(path, "<u2")
    ids[20] = 999
    ids.tofile(path)
    with pytest.raises(UserError, match=r"contains id 999 at token 20.*nearest: set it to 1000"):
        opened(path)
    ids[:] = 3
    ids.tofile(path)
    with pytest.raises(UserError, match=r"was written with a vocabulary of 257 ids.*nearest: set it to 257"):
        opened(path, vocab_size=100)


def test_scan_looks_at_every_chunk_and_samples_only_huge_files(tmp_path, text, monkeypatch):
    path = tmp_path / "out.bin"
    prepare(text, str(path))
    described = token_files.read_sidecar(path)
    monkeypatch.setattr(token_files, "_CHUNK_BYTES", 4)
    whole, problem = token_files.scan(path, described, 257)
    assert not problem
    ids = np.fromfile(path, "<u2")
    for place in range(len(ids)):
        changed = ids.copy()
        changed[place] = 300
        changed.tofile(path)
        digest, problem = token_files.scan(path, described, 257)
        assert f"contains id 300 at token {place};" in problem
        assert digest != whole
    monkeypatch.setattr(token_files, "_WHOLE_UP_TO_BYTES", 8)
    monkeypatch.setattr(token_files, "_NUM_SAMPLED_CHUNKS", 2)
    assert [(start, len(chunk)) for start, chunk in token_files._chunks(path, "uint16")] == [
        (0, 2),
        (len(ids) - 2, 2),
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda found: found | {"num_tokens": 7}, "its description has 7 tokens in 14 bytes"),
        (lambda found: found | {"dtype": "uint8"}, "got 'uint8'; allowed: uint16, uint32"),
        (lambda found: found | {"end_id": "256"}, "must be an object with dtype"),
        (lambda found: {}, "must be an object with"),
        (lambda found: [], "must be an object with"),
    ],
)
def test_wrong_descriptions_are_seen_without_reading_tokens(tmp_path, text, change, message):
    prepare(text, str(tmp_path / "out.bin"))
    sidecar = tmp_path / "out.bin.json"
    sidecar.write_text(json.dumps(change(json.loads(sidecar.read_text()))))
    problems = check(DataOptions(source="tokens", path=str(tmp_path / "out.bin")))
    with pytest.raises(UserError, match=message):
        raise UserError(*problems)
    sidecar.write_text("{")
    assert "is not JSON" in check(DataOptions(source="tokens", path=str(tmp_path / "out.bin")))[0]


def test_files_of_different_tokenizers_do_not_mix(tmp_path, text):
    prepare(text, str(tmp_path / "a.bin"))
    prepare(text, str(tmp_path / "b.bin"), tokenizer=words_tokenizer(tmp_path / "t.json", [0, 1, 2]))
    with pytest.raises(UserError, match=r"b.bin' has vocab_size 3, but the first file has 257"):
        opened(f"{tmp_path}/*.bin")


def test_prepare_does_not_overwrite_unasked(tmp_path, text):
    out = tmp_path / "out.bin"
    prepare(text, str(out))
    (tmp_path / "a.txt").write_text("another text")
    before = out.read_bytes()
    with pytest.raises(UserError, match=r"out.bin' already exists; .*nearest: --overwrite"):
        prepare(text, str(out))
    assert out.read_bytes() == before
    prepare(text, str(out), overwrite=True)
    assert opened(out).text.decode(opened(out).train[0]["tokens"]) == "anot"


def test_a_failed_prepare_leaves_nothing(tmp_path, text, monkeypatch):
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        prepare(f"{text},{tmp_path}/c.txt", str(tmp_path / "out.bin"))
    monkeypatch.setattr(prepare_module.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(UserError, match=r"cannot be written.*No space left"):
        prepare(text, str(tmp_path / "out.bin"))
    assert not list(tmp_path.glob("out.bin*"))
    with pytest.raises(UserError, match="does not exist; allowed: a file in an existing folder; nearest: create it"):
        prepare(text, str(tmp_path / "nowhere" / "out.bin"))
    with pytest.raises(UserError, match="is also an input file"):
        prepare(str(tmp_path / "a.txt"), str(tmp_path / "a.txt"), overwrite=True)
    assert (tmp_path / "a.txt").read_text() == "first document"


def test_documents_are_written_in_groups(tmp_path, text, monkeypatch):
    prepare(text, str(tmp_path / "whole.bin"))
    monkeypatch.setattr(prepare_module, "_GROUP_BYTES", 1)
    prepare(text, str(tmp_path / "single.bin"))
    assert (tmp_path / "single.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_command_line(tmp_path, text, capsys):
    main([f"--path={text}", f"--output={tmp_path}/out.bin"])
    printed = capsys.readouterr()
    assert "3 documents, uint16, vocabulary 257" in printed.out
    assert "--config.data.source=tokens" in printed.out
    assert printed.err == ""
