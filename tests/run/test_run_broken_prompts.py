"""Broken prompts and flags of generation in bulk: refused in one line each, before weights are read."""

import dataclasses
import json

import pytest

from meshtrain.data.token_files import TokenFile
from meshtrain.run import weights
from tests.run.broken import Accepted, Case, assert_refused, odd_things, small

LEARNED = ("model.positions=learned", "sequence_length=32")
PROMPT = "--prompt=def "

# name -> (flags, how the lines begin), where no run is needed to see what is wrong.
FLAGS = {
    "empty prompt": (["--prompt="], ["--prompt: got ''"]),
    "one of two prompts is empty": ([PROMPT, "--prompt="], ["--prompt: got ''"]),
    "prompt and prompts": (
        [PROMPT, "--prompts=good.jsonl"], ["--prompt, --prompts: got both; allowed: one of them; nearest: drop"],
    ),
    "temperature below 0": (["--temperature=-0.5"], ["--temperature: got -0.5; allowed: 0 to"]),
    "top-k negative": (["--top-k=-1"], ["--top-k: got -1; allowed: 0 to"]),
    "top-k no number": (["--top-k=many"], ["--top-k"]),
    "top-p 0": (["--top-p=0"], ["--top-p: got 0.0; allowed: above 0, at most 1; nearest: 1"]),
    "top-p above 1": (["--top-p=1.01"], ["--top-p: got 1.01; "]),
    "top-p negative": (["--top-p=-0.3"], ["--top-p: got -0.3; "]),
    "top-p nan": (["--top-p=nan"], ["--top-p: got nan; "]),
    "num-samples 0": (["--num-samples=0"], ["--num-samples: got 0; allowed: 1 to 100,000; nearest: 1"]),
    "seed negative": (["--seed=-1"], ["--seed: got -1; allowed: 0 to"]),
    "seed too large": (
        ["--seed=4294967296"], ["--seed: got 4294967296; allowed: 0 to 4,294,967,295; nearest: 4294967295"],
    ),
    "seed of 400 digits": ([f"--seed={'9' * 400}"], ["--seed: got 9"]),
    "seed of 5000 digits": ([f"--seed={'9' * 5000}"], ["--seed: invalid int value: '9"]),
    "seed no number": (["--seed=one"], ["--seed: invalid int value: 'one'"]),
    "too many tokens": (
        ["--num-tokens=2000000"], ["--num-tokens: got 2000000; allowed: 1 to 1,000,000; nearest: 1000000"],
    ),
    "temperature too high": (
        ["--temperature=1e300"], ["--temperature: got 1e+300; allowed: 0 to 1,000,000; nearest: 1000000"],
    ),
    "step negative": (["--step=-5"], ["--step: got -5; allowed: 0 to"]),
    "stop empty": (["--stop="], ["--stop: got ''; allowed: a text in UTF-8, not empty; nearest: leave it out"]),
    "out is empty": (["--out="], ["--out: got ''"]),
    "out in no folder": (["--out=nowhere/x.jsonl"], ["--out: got 'nowhere/x.jsonl', whose folder does not exist"]),
    "out is a folder": (["--out=folder"], ["--out: got 'folder', a folder; allowed: a file's name"]),
    "out is a pipe": (["--out=pipe"], ["--out: got 'pipe', a pipe; "]),
    "out may not be written": (["--out=locked.jsonl"], ["--out: got 'locked.jsonl', which this user may not write"]),
    "prompts are missing": (["--prompts=missing"], ["--prompts: got 'missing', nothing there; "]),
    "prompts are a folder": (["--prompts=folder"], ["--prompts: got 'folder', a folder; "]),
    "prompts are a pipe": (["--prompts=pipe"], ["--prompts: got 'pipe', a pipe; "]),
    "prompts may not be read": (["--prompts=locked.jsonl"], ["--prompts: got 'locked.jsonl', which cannot be read"]),
    "no prompts": (["--prompts=empty.jsonl"], ["--prompts: got 'empty.jsonl', which holds no prompt; "]),
    "bad lines": (
        ["--prompts=bad.jsonl"],
        [
            "--prompts: bad.jsonl, line 2: got no JSON in UTF-8",
            "--prompts: bad.jsonl, line 3: got text; allowed: a JSON object with 'prompt'",
            "--prompts: bad.jsonl, line 5: got '' for 'prompt'; ",
            "--prompts: bad.jsonl, line 6: got 7 for 'prompt'; ",
            "--prompts: bad.jsonl, line 7: got list; ",
            "--prompts: bad.jsonl, line 8: got no JSON in UTF-8",
            "--prompts: bad.jsonl, line 9: got no field; ",
            r"--prompts: bad.jsonl, line 10: got '\ud83d' for 'prompt'",
        ],
    ),
    "everything at once": (
        ["--top-p=2", "--top-k=-3", "--stop=", "--out=folder", "--prompt=", "--config.seed=x", "--num-sample=3"],
        ["--top-p: ", "--top-k: ", "--stop: ", "--out: ", "--prompt: ", "seed: ", "arguments: got '--num-sample'"],
    ),
}  # fmt: skip

BAD_LINES = b"""{"prompt": "def "}
{"prompt": "def "
{"text": "def "}

{"prompt": ""}
{"prompt": 7}
["def "]
\xff
{}
{"prompt": "\\ud83d"}
"""

# name -> (changes of the configuration, flags, how the lines begin), where the model is what they do not fit.
MODELS = {
    "a prompt longer than the positions": (
        LEARNED, [f"--prompt={'x' * 32}"],
        ["--prompt: got 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx', 32 tokens; allowed: at most 31, as the model has no more"],
    ),
    "two such lines of a file, and what they are": (
        LEARNED, ["--prompts=long.jsonl"], ["long.jsonl, line 1: got 'xxx", "long.jsonl, line 3: got 'yyy"],
    ),
    "more tokens than positions": (
        LEARNED, [PROMPT, "--num-tokens=29"],
        ["--num-tokens: got 29; allowed: at most 28, as the model has 32 positions and the longest prompt 4 tokens"],
    ),
    "a prompt of no number": (
        ("data.source=synthetic", "data.path=", "model.vocab_size=50"), ["--prompt=1 two"],
        ["--prompt: got 'two'; allowed without a tokenizer: token ids, numbers from 0 to 49; nearest: 0"],
    ),
    "a prompt without tokens": (
        ("data.source=synthetic", "data.path=", "model.vocab_size=50"), ["--prompt= "],
        ["--prompt: got ' ', which has no tokens; "],
    ),
    "a token that the model does not have": (
        ("data.source=tokens", "data.path=ids.bin", "model.vocab_size=60"), ["--prompt=az"],
        ["--prompt: got 'az', which has the token 122; allowed: below model.vocab_size = 60; "],
    ),
}  # fmt: skip


IDS = TokenFile("uint16", 257, 2, 1, 256, "bytes", "", "")


def prepared(folder, changes, words):
    odd_things(folder)
    (folder / "empty.jsonl").write_text("\n")
    (folder / "good.jsonl").write_text('{"prompt": "def "}\n')
    (folder / "bad.jsonl").write_bytes(BAD_LINES)
    (folder / "locked.jsonl").write_text('{"prompt": "def "}\n')
    (folder / "locked.jsonl").chmod(0)
    lines = [{"prompt": "x" * 40}, {"prompt": "def "}, {"prompt": "y" * 50}]
    (folder / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ids.bin").write_bytes(b"a\0z\0")
    (folder / "ids.bin.json").write_text(json.dumps(dataclasses.asdict(IDS)))
    return [*small(folder, *changes), *words]


@pytest.mark.parametrize("name", FLAGS)
def test_broken_flags_are_refused(name, tmp_path, monkeypatch):
    words, starts = FLAGS[name]
    case = Case(name, lambda folder: prepared(folder, (), words), tuple(starts), "meshtrain.generate", "may" in name)
    assert len(assert_refused(case, tmp_path, monkeypatch)) == len(starts)


@pytest.fixture
def with_a_run(monkeypatch):
    """As if the workdir had a checkpoint; its weights are never read."""
    monkeypatch.setattr(weights, "weights_problems", lambda config, workdir, step: [])


@pytest.mark.parametrize("name", MODELS)
def test_what_does_not_fit_the_model_is_refused(name, tmp_path, monkeypatch, with_a_run):
    changes, words, starts = MODELS[name]
    case = Case(name, lambda folder: prepared(folder, changes, words), tuple(starts), "meshtrain.generate")
    assert len(assert_refused(case, tmp_path, monkeypatch)) == len(starts)


def test_what_is_right_goes_on_to_the_weights(tmp_path, monkeypatch, with_a_run):
    right = ["--prompts=good.jsonl", "--top-p=1", "--top-k=0", "--stop=x", "--seed=0", "--out=new.jsonl"]
    case = Case("right", lambda folder: prepared(folder, (), right), module="meshtrain.generate")
    with pytest.raises(Accepted):
        assert_refused(case, tmp_path, monkeypatch)


def test_there_are_more_than_twenty():
    assert len(FLAGS) + len(MODELS) > 20
