"""Broken data in bulk: text, .jsonl, token files and their descriptions, tokenizers, and what is no file at all."""

import json
import socket

import numpy as np
import pytest

from tests.messages.refused import ODD, Accepted, Case, assert_refused, odd_things, small

GOOD = b"".join(b"line %d\n" % i for i in range(2000))
DOCUMENT = b'{"text": "' + b"word " * 2000 + b'"}'
HUGE = 20_000_000  # bytes in a line

TEXTS = {
    "cut in a character": GOOD + "é".encode()[:1],
    "white space": b" \n" * 3,
    "one letter": b"a",
    "a huge line, cut": b"x" * HUGE + b"\xc3",
}
LINES = {
    "numbers": b"3\n",
    "a number as text": b'{"text": 3}\n',
    "deep object": b'{"text":' * 100_000 + b"\n",
    "10000 digits": b'{"text": "a", "n": ' + b"9" * 10_000 + b"}\n",
    "empty texts": b'{"text": ""}\n' * 3,
    "carriage returns": DOCUMENT + b"\r" + DOCUMENT,
    "a huge line, cut": b'{"text": "' + b"x" * HUGE,
}
IDS = (np.arange(1000) % 257).astype("<u2").tobytes()
DESCRIBED = {"dtype": "uint16", "vocab_size": 257, "num_tokens": 1000, "num_documents": 1, "end_id": 256}
DESCRIBED |= {"tokenizer": "bytes", "tokenizer_sha256": "", "end_token": ""}
TOKENS = {
    "another dtype": np.arange(1000, dtype="<u4").tobytes(),
    "an id past the vocabulary": np.full(1000, 257, "<u2").tobytes(),
}
DESCRIPTIONS = {
    "float16": DESCRIBED | {"dtype": "float16"},
    "a large vocabulary": DESCRIBED | {"vocab_size": 100_000},
    "no vocabulary": DESCRIBED | {"vocab_size": 0},
    "fewer tokens": DESCRIBED | {"num_tokens": 999},
    "negative tokens": DESCRIBED | {"num_tokens": -5},
    "tokens as text": DESCRIBED | {"num_tokens": "1000"},
    "an end that is true": DESCRIBED | {"end_id": True},
    "an end below all ids": DESCRIBED | {"end_id": -7},
    "an end past the vocabulary": DESCRIBED | {"end_id": 10**12},
    **{f"tokenizer {name!r}": DESCRIBED | {"tokenizer": name} for name in ("", "../x", "a\0")},
    **{f"tokenizer {name}": DESCRIBED | {"tokenizer": name} for name in ("pipe", "words.txt")},
}
WORDS = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}})
TOKENIZERS = {
    "an object": b"{}",
    "a negative id": WORDS.replace('"b": 1', '"b": -1').encode(),
    "an id past the vocabulary": WORDS.replace('"b": 1', '"b": 9999').encode(),
    "no token for what it does not know": WORDS.replace('"unk_token": "a"', '"unk_token": "c"').encode(),
}


def content_cases():
    for suffix, contents in (("txt", TEXTS), ("jsonl", LINES), ("weird", {"white space": TEXTS["white space"]})):
        for name, content in contents.items():

            def prepare(folder, content=content, suffix=suffix):
                (folder / f"data.{suffix}").write_bytes(content)
                return small(folder, f"data.path=data.{suffix}")

            yield Case(f"{suffix}: {name}", prepare, ("data",))
    for name, content in TOKENIZERS.items():

        def prepare(folder, content=content):
            (folder / "tokenizer.json").write_bytes(content)
            return small(folder, "data.tokenizer=tokenizer.json", "model.vocab_size=1000")

        yield Case(f"tokenizer: {name}", prepare)


def token_cases():
    def tokens(folder, ids, described):
        words = small(folder, "data.source=tokens", "data.path=ids.bin")
        odd_things(folder)
        (folder / "ids.bin").write_bytes(ids)
        (folder / "ids.bin.json").write_text(json.dumps(described))
        return words

    for name, ids in TOKENS.items():
        yield Case(f"tokens: {name}", lambda folder, ids=ids: tokens(folder, ids, DESCRIBED))
    for name, described in DESCRIPTIONS.items():
        yield Case(f"description: {name}", lambda folder, described=described: tokens(folder, IDS, described))


def place_cases():
    for key, what in [*(("data.path", what) for what in ODD), ("data.tokenizer", "pipe"), ("data.tokenizer", "folder")]:

        def prepare(folder, what=what, key=key):
            words = small(folder)
            return [*words, f"--config.{key}={odd_things(folder)[what]}"]

        yield Case(f"{key}: {what}", prepare, (f"{key}: ",))
    for glob in ("*.none", "[", "pip*", ",,", "words.txt,missing.txt"):

        def matching(folder, glob=glob):
            odd_things(folder)
            return small(folder, f"data.path={glob}")

        yield Case(f"glob: {glob}", matching, ("data.path: ",))

    def listening(folder):
        with socket.socket(socket.AF_UNIX) as open_socket:
            open_socket.bind("socket.txt")
        return small(folder, "data.path=socket.txt")

    yield Case("data.path: socket", listening, ("data.path: ",))


CASES = [*content_cases(), *token_cases(), *place_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.encode("unicode_escape").decode())
def test_broken_data_are_refused(case, tmp_path, monkeypatch):
    assert_refused(case, tmp_path, monkeypatch)


def test_there_are_many_and_each_is_its_own():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("name, content", [("txt", b"x" * HUGE), ("jsonl", b'{"text": "' + b"x" * HUGE + b'"}\n')])
def test_a_huge_line_in_order_is_read(name, content, tmp_path, monkeypatch):
    """The counterpart: what is merely large is no mistake."""

    def prepare(folder):
        (folder / f"data.{name}").write_bytes(content)
        return small(folder, f"data.path=data.{name}")

    with pytest.raises(Accepted):
        assert_refused(Case(name, prepare), tmp_path, monkeypatch)
