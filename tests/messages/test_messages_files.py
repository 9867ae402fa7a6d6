"""Files that a user can give, each broken in each way: refused in lines with exit code 2, or read without harm."""

import gzip
import json
import os
import pathlib
import struct

import pyarrow
import pyarrow.parquet
import pytest

from meshtrain.config.resolve import parse, to_json
from tests.messages.desk import TOKENS
from tests.messages.refused import Accepted, Case, assert_refused, small

FIXTURES = pathlib.Path(__file__).parents[1] / "hf" / "fixtures"
WORDS = {
    "version": "1.0",
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}
CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 60
TEMPLATE = b"{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
PIXELS = struct.pack(">IIII", 0x803, 300, 8, 8) + bytes(range(240)) * 80
LABELS = struct.pack(">II", 0x801, 300) + bytes(range(10)) * 30
CONVNET = b"""
from meshtrain.config import default

def get_config():
    config = default("convnet")
    config.batch_size = 8
    config.data.source, config.data.path = "idx", "a-images-idx3-ubyte"
    config.model.height = config.model.width = 8
    return config
"""
IMAGES = ["--config=convnet.py", "--workdir=run"]
TRAIN = ["--config=small.py", "--workdir=run"]
CHATS = [*TRAIN, "data.source=chat", "data.path=chat.jsonl", "data.chat_template=t.jinja"]
GENERATE = ["--workdir=model", "--prompt=1 2"]
LLAMA = {f"model/{name}": (FIXTURES / "llama" / name).read_bytes() for name in ("config.json", "model.safetensors")}
SHARDS = {f"model/{path.name}": path.read_bytes() for path in (FIXTURES / "llama-bf16-sharded").glob("*-of-*")}
INDEX = "model/model.safetensors.index.json"
RUN = {
    "run/corpus.json": b'{"begun_seconds": 1e9, "bigram_loss_on_16": 2.5}',
    "run/metrics.jsonl": b'{"step": 5, "loss": 3.5}\n{"step": 6, "loss": 3.25}\n',
}


DOCUMENTS = b'{"text": "some words of a line"}\n' * 60


def zst(content):
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, "zstd") as file:
        file.write(content)
    return out.getvalue().to_pybytes()


def parquet():
    out = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some words of a line"] * 60}), out)
    return out.getvalue().to_pybytes()


def edited(**facts):
    """A function content -> content with other entries of its JSON object."""
    return lambda content: json.dumps(json.loads(content) | facts).encode()


# Name -> (its content where it is right, the command that reads it, the words, the other files that this takes).
FILES = {
    "small.py": (None, "explain", ["--config=small.py"], {}),
    "words.txt": (None, "train", TRAIN, {}),
    "data.jsonl": (DOCUMENTS, "train", [*TRAIN, "data.path=data.jsonl"], {}),
    **{f"data{ending}": (content, "train", [*TRAIN, f"data.path=data{ending}"], {}) for ending, content in (
        (".jsonl.gz", gzip.compress(DOCUMENTS)), (".jsonl.zst", zst(DOCUMENTS)), (".parquet", parquet()))},
    "ids.bin": (bytes(4000), "train", [*TRAIN, "data.source=tokens", "data.path=ids.bin"],
                {"ids.bin.json": json.dumps(TOKENS | {"num_tokens": 2000}).encode()}),
    "ids.bin.json": (json.dumps(TOKENS | {"num_tokens": 2000}).encode(), "train",
                     [*TRAIN, "data.source=tokens", "data.path=ids.bin"], {"ids.bin": bytes(4000)}),
    "tokenizer.json": (json.dumps(WORDS).encode(), "train", [*TRAIN, "data.tokenizer=tokenizer.json"], {}),
    "chat.jsonl": (CHAT, "train", CHATS, {"t.jinja": TEMPLATE}),
    "t.jinja": (TEMPLATE, "train", CHATS, {"chat.jsonl": CHAT}),
    "a-images-idx3-ubyte": (PIXELS, "train", IMAGES, {"a-labels-idx1-ubyte": LABELS, "convnet.py": CONVNET}),
    "a-labels-idx1-ubyte": (LABELS, "train", IMAGES, {"a-images-idx3-ubyte": PIXELS, "convnet.py": CONVNET}),
    "prompts.jsonl": (b'{"prompt": "def "}\n', "generate", ["--config=small.py", "--prompts=prompts.jsonl"], {}),
    "metrics.jsonl": (b'{"step": 1, "step_seconds": 0.5}\n' * 9, "plan",
                      ["--config=small.py", "--cluster=cpu:8", "--calibrate=metrics.jsonl"], {}),
    "model/config.json": (LLAMA["model/config.json"], "hf", ["config", "model"], {}),
    "model/model.safetensors": (LLAMA["model/model.safetensors"], "generate", GENERATE, LLAMA),
    INDEX: ((FIXTURES / "llama-bf16-sharded" / pathlib.Path(INDEX).name).read_bytes(), "generate", GENERATE,
            {"model/config.json": LLAMA["model/config.json"]} | SHARDS),
    "run/config.json": (None, "train", TRAIN, {}),
    **{name: (content, "train", TRAIN, {}) for name, content in RUN.items()},
}  # fmt: skip
UNREAD = {"run/layout.txt": (b"a table", "train", TRAIN, {}), "run/.lock": (b"process 1", "train", TRAIN, {})}
FOLDERS = {name: (None, "train", TRAIN, {}) for name in ("run/checkpoints", "run/tensorboard", "run")}
CONTENTS = {
    "as it is": lambda content: content,
    "emptied": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2 + 1],
    "flipped": lambda content: bytes(byte ^ 0x55 for byte in content[:40]) + content[40:],
    "doubled": lambda content: content * 2,
    "not UTF-8": lambda content: content + b"\xff\xe9",
}
# What is no mistake of another kind in a file that is not text.
TEXTS = {
    "a list": lambda content: b"[1, 2]",
    "5000 digits": lambda content: b"9" * 5000,
    "nested": lambda content: b"[" * 100_000,
}
BINARY = (".gz", ".zst", ".parquet", ".bin", "-ubyte", ".safetensors")
PLACES = {
    "a folder": pathlib.Path.mkdir,
    "a pipe": os.mkfifo,
    "forbidden": lambda path: (path.write_bytes(b"x"), path.chmod(0)),
}
FOLDER_PLACES = {
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a loop": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a file": pathlib.Path.touch,
    "forbidden": lambda path: (path.mkdir(), path.chmod(0)),
    "not to be written": lambda path: (path.mkdir(), path.chmod(0o500)),
}
WRONG = (None, "text", -1, 10**400, 1.5, True, [], {}, [[[]]])
# File -> what else can be wrong with what is in it.
ALSO = {
    "run/config.json": {
        "another seed": edited(seed=4),
        "an unknown field": edited(sead=4),
        "a group that is a number": edited(model=3),
        "a field of 400 digits": edited(seed=10**400),
    },
    "run/corpus.json": {
        "another fingerprint": edited(fingerprint="0" * 64),
        "a fingerprint that is a number": edited(fingerprint=3),
    },
    "run/metrics.jsonl": {
        "without a line's end": lambda content: b"x" * 5_000_000,
        "without steps": lambda content: b'{"loss": 3}\n[1]\n',
        "a torn last line": lambda content: content + b'{"step": 6, "lo',
        "a last line without its end": lambda content: content + b'{"step": 7, "loss": 1}',
        "zeros at its end": lambda content: content + bytes(3),
    },
}


def values(content):
    """(what is wrong, content) for each entry of a JSON object, of another type or size, and without that entry."""
    found = json.loads(content)
    for index, key in enumerate(found):
        wrong = WRONG[index % len(WRONG)]
        yield f"{key} is {str(wrong)[:9]}", json.dumps(found | {key: wrong}).encode()
        yield f"no {key}", json.dumps({name: value for name, value in found.items() if name != key}).encode()


def begun(folder):
    """Makes the folder of a run that has saved nothing yet; its configuration is the small one."""
    config, _ = parse(["--config=small.py"], reads_data=False)
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text(to_json(config))
    for name, content in RUN.items():
        (folder / name).write_bytes(content)


def changed(name):
    """{what is wrong: a function (path, content) -> None that makes it so} of a file or a folder of a run."""
    if name in FOLDERS:
        return {what: lambda path, _, make=make: make(path) for what, make in FOLDER_PLACES.items()}
    places = {what: lambda path, _, make=make: make(path) for what, make in PLACES.items()}
    if name in UNREAD:
        return places
    contents = CONTENTS | ({} if name.endswith(BINARY) else TEXTS) | (ALSO[name] if name in ALSO else {})
    changes = {what: lambda path, content, of=of: path.write_bytes(of(content)) for what, of in contents.items()}
    if FILES[name][0] and name.endswith(".json"):
        pairs = values(FILES[name][0])
        changes |= {what: lambda path, _, broken=broken: path.write_bytes(broken) for what, broken in pairs}
    return changes | places


def cases():
    for name, (right, command, words, others) in (FILES | UNREAD | FOLDERS).items():

        def prepare(folder, change, name=name, right=right, words=words, others=others):
            small(folder)
            path = folder / name
            if name.startswith("run/"):
                begun(folder)
            path.parent.mkdir(exist_ok=True)
            for other, content in (others | ({name: right} if right else {})).items():
                (folder / other).write_bytes(content)
            content = path.read_bytes() if path.exists() else b""
            path.unlink(missing_ok=True)
            change(path, content)
            return [word if word[0] == "-" or "=" not in word else f"--config.{word}" for word in words]

        for what, change in changed(name).items():
            yield Case(
                f"{name}: {what}",
                lambda folder, prepare=prepare, change=change: prepare(folder, change),
                command=command,
                unprivileged=True,
            )


CASES = [*cases()]
# File -> what is wrong with it that does not keep a command from reading it; an entry of another type may not either.
READ = {
    "small.py": {"doubled"},
    "words.txt": {"cut", "flipped", "doubled", "5000 digits", "nested"},
    "data.parquet": {"doubled"},
    "t.jinja": {"doubled"},
    "prompts.jsonl": {"doubled"},
    "metrics.jsonl": {"doubled"},
    "run/metrics.jsonl": {
        "emptied", "cut", "doubled", "not UTF-8", "a torn last line", "a last line without its end", "zeros at its end",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_file_is_refused_and_what_is_right_or_torn_is_read(case, tmp_path, monkeypatch):
    name, what = case.name.split(": ")
    is_read = what == "as it is" or (name in READ and what in READ[name])
    never_read = {*CONTENTS, *TEXTS, *PLACES, *FOLDER_PLACES, *(ALSO[name] if name in ALSO else ())}
    try:
        assert_refused(case, tmp_path, monkeypatch)
    except Accepted:
        assert is_read or what not in never_read
    else:
        assert not is_read
