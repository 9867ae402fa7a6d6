"""What data.path and data.validation_path name, and what is opened of it."""

import json

import numpy as np
import pytest

from meshtrain.data.corpus import SOURCES, bigram_loss
from meshtrain.data.packing import Parts
from meshtrain.data.prepare import prepare
from meshtrain.data.sources import DataOptions, DataRequest, check
from meshtrain.data.weighted_paths import named_parts
from meshtrain.errors import UserError

CHAT = '{"prompt": "2 + 2 = ", "completion": "4"}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Texts of three kinds, as text, as tokens and as lines of chat; and files with names like weights and names."""
    monkeypatch.chdir(tmp_path)
    for name, word in (("web", "word "), ("code", "x = 1\n"), ("held", "held ")):
        (tmp_path / f"{name}.txt").write_text(word * 200)
        prepare(f"{name}.txt", f"{name}.bin")
        (tmp_path / f"{name}.jsonl").write_text(CHAT.replace("2", word[0]) * 20)
    (tmp_path / "many").mkdir()
    for number in range(2):
        (tmp_path / "many" / f"{number}.txt").write_text(f"many {number} " * 100)
    for name in ("a:1", "b=c.txt"):
        (tmp_path / name).write_text("some text " * 50)
    return tmp_path


def opened(source, path, sequence_length=16, **options):
    given = DataOptions(source=source, path=path, **options)
    return SOURCES[source].open(given, DataRequest({"weights": None}, {}, sequence_length, 257, 0))


def problems(path, validation_path="", source="text"):
    return check(DataOptions(source=source, path=path, validation_path=validation_path))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("web.txt", [("", "web.txt", 1)]),
        ("web.txt, code.txt", [("", "web.txt, code.txt", 1)]),
        ("web.txt:3", [("", "web.txt", 1)]),
        ("web.txt:0.7, code.txt:0.3", [("web", "web.txt", 7), ("code", "code.txt", 3)]),
        ("many/*.txt:1e2,./code.txt:50", [("many", "many/*.txt", 2), ("code", "./code.txt", 1)]),
        ("*.bin:1,x=*.txt:1", [("*.bin", "*.bin", 1), ("x", "*.txt", 1)]),
        ("web.txt:0.1, code.txt:0.2, held.txt:0.3",
         [("web", "web.txt", 1), ("code", "code.txt", 2), ("held", "held.txt", 3)]),
        ("a:1", [("", "a:1", 1)]),
        ("a:1:0.5, b=c.txt:0.5", [("a:1", "a:1", 1), ("b=c", "b=c.txt", 1)]),
    ],
)  # fmt: skip
def test_what_a_path_names(folder, path, found):
    parts, lines = named_parts(path, "")
    assert not lines
    assert [(part.name, part.paths, part.weight) for part in parts] == found


def test_weights_of_which_all_are_wrong_are_a_line_each(folder):
    found = problems("web.txt:-1, code.txt:0, held.txt:many, a:1:nan, many/*.txt, none.txt:inf")
    assert [line.partition(";")[0] for line in found[1:]] == [
        f"data.path: got weight '{weight}' of '{paths}'"
        for paths, weight in (("web.txt", "-1"), ("code.txt", "0"), ("held.txt", "many"), ("a:1", "nan"),
                              ("many/*.txt", ""), ("none.txt", "inf"))
    ]  # fmt: skip
    assert "'none.txt', which does not exist" in found[0]


def test_shares_that_would_take_too_long_have_near_ones_that_are_accepted(folder):
    [line] = problems("web.txt:4217893442, code.txt:83293481, held.txt:1")
    fix = line.partition("nearest: ")[2]
    assert fix == "web.txt:0.9806, code.txt:0.0194, held.txt:0.0001"
    assert not problems(fix)


@pytest.mark.parametrize("weight", ["1e300", "1e-300", "9" * 300, f"0.{'3' * 300}", "7e307"])
def test_weights_of_many_digits_have_a_short_line_and_a_fix_that_is_accepted(folder, weight):
    [line] = problems(f"web.txt:{weight}, code.txt:3")
    assert len(line) < 200
    assert (
        "; allowed: a common denominator of at most 100,000, as for shares with four digits; nearest: web.txt:"
    ) in line
    assert not problems(line.rpartition("nearest: ")[2])


def test_names_that_stand_twice_and_files_of_both_kinds(folder):
    found = problems("web.txt:1, web.bin:2", "code.txt, x=many/*.txt, x=held.txt, web.txt, none.txt")
    assert found == [
        "data.path: got 'web' as the name of two sets; allowed: a different name for each; nearest: web2=web.bin",
        (
            "data.validation_path: got 'x' as the name of two sets; allowed: a different name for each; nearest: "
            "x3=held.txt"
        ),
        found[2],
        "data.validation_path: got 'web.txt', which data.path also lists; allowed: files that are not in the training "
        "data; "
        "nearest: leave it out",
    ]
    assert found[2].startswith("data.validation_path: got 'none.txt', which does not exist")
    assert "data.validation_path: got 'web.bin', which contains tokens" in problems("web.txt", "web.bin")[0]


@pytest.mark.parametrize(("source", "ending"), [("text", "txt"), ("tokens", "bin"), ("chat", "jsonl")])
def test_sources_are_mixed_and_validation_has_files_of_its_own(folder, source, ending):
    web, code, held = (f"{name}.{ending}" for name in ("web", "code", "held"))
    data = opened(source, f"{web}:0.75, {code}:0.25", validation_path=f"own={held}", validation_fraction=0.5)
    alone = [opened(source, path, validation_fraction=0.0) for path in (web, code, held)]
    assert data.train.weights == (3, 1)
    for number, example in enumerate([one.train[0] for one in alone[:2]]):
        np.testing.assert_equal(data.train[(0, len(alone[0].train))[number]], example)
    assert len(data.train) == len(alone[0].train) + len(alone[1].train), "nothing is held out"
    np.testing.assert_equal(data.validation[0], alone[2].train[0])
    cut = opened(source, f"{web}:0.75, {code}:0.25", validation_fraction=0.2)
    assert list(cut.validation.parts) == ["web", "code"]
    assert all(len(part) for part in cut.validation.parts.values())
    fingerprints = [opened(source, path, **more).fingerprint for path, more in (
        (f"{web}:0.75, {code}:0.25", {}), (f"{web}:0.7, {code}:0.3", {}), (f"{code}:0.75, {web}:0.25", {}),
        (f"{web},{code}", {}), (web, {}), (web, {"validation_path": held}),
    )]  # fmt: skip
    assert len(set(fingerprints)) == len(fingerprints)
    assert opened(source, f"x={web}:3, {code}:1").fingerprint == fingerprints[0], "the same shares, another name"
    assert opened(source, f"{web}:3").fingerprint == fingerprints[4], "one source is no mixture"


def test_the_line_at_the_start_says_sequences_and_tokens(folder):
    (folder / "short.txt").write_text("no")
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": "y" * 9}) + "\n" for _ in range(40)))
    data = opened("text", "web.txt:0.5, lines.jsonl:0.5", packing="first_fit", validation_fraction=0.0)
    rows = [len(part) for part in data.train.parts.values()]
    # A row of `lines` has one document of nine inputs in sixteen places, one of `web` has all sixteen but in the last.
    tokens = [1000 / rows[0], 9 * 40 / rows[1]]
    web, lines = data.summary.split("; ")
    assert web.startswith(f"web 50.00% of sequences, {tokens[0] / sum(tokens):.2%} of tokens, text of web.txt: 1,001 ")
    assert lines.startswith(f"lines 50.00% of sequences, {tokens[1] / sum(tokens):.2%} of tokens, text of lines.jsonl")
    with pytest.raises(UserError, match=r"^data: only 3 tokens for training"):
        opened("text", "web.txt:1, short.txt:1", validation_fraction=0.0)


def test_a_bigram_model_learns_from_all_sources(folder):
    data = opened("text", "web.txt:0.9, code.txt:0.1", validation_path="held.txt")
    assert isinstance(data.train, Parts)
    together = opened("text", "web.txt, code.txt", validation_fraction=0.0)
    assert bigram_loss(data.train, data.validation) == pytest.approx(
        bigram_loss(together.train, data.validation), rel=0.05
    )


def test_token_files_of_two_tokenizers_are_no_mixture(folder):
    described = json.loads((folder / "held.bin.json").read_text())
    (folder / "held.bin.json").write_text(json.dumps(described | {"end_id": 255}))
    with pytest.raises(UserError) as caught:
        opened("tokens", "web.bin:1, code.bin:1", validation_path="held.bin")
    assert caught.value.problems[0].startswith(
        "data.validation_path: got 'held.bin', prepared with another tokenizer than 'web.bin'"
    )


def test_an_evaluation_by_file_has_no_weights(folder):
    asked = DataRequest({}, {}, 16, 257, 0)
    with pytest.raises(UserError, match=r"this command scores each file separately; .* nearest: web.txt,code.txt"):
        SOURCES["text"].open_files(DataOptions(source="text", path="web.txt:1, code.txt:2"), asked)
    whole = SOURCES["text"].open_files(DataOptions(source="text", path="web.txt", validation_path="held.txt"), asked)
    assert list(whole) == ["web.txt"]
