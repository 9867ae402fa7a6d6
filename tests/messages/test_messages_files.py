"""Files that a user can give, each broken in each way: refused in lines with exit code 2, or read."""

import gzip
import json
import os
import pathlib
import struct

import pytest

from tests.messages.desk import TOKENS
from tests.messages.refused import Accepted, Case, assert_refused, small

FIXTURES = pathlib.Path(__file__).parents[1] / "hf" / "fixtures"
WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 60
TEMPLATE = b"{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
PIXELS = struct.pack(">IIII", 0x803, 30, 8, 8) + bytes(30 * 64)
LABELS = struct.pack(">II", 0x801, 30) + bytes(range(10)) * 3
IMAGES = ("task=convnet", "data.source=idx", "data.path=a-images-idx3-ubyte", "model.height=8", "model.width=8")
CHATS = ("data.source=chat", "data.path=chat.jsonl", "data.chat_template=t.jinja")

# Name -> (its content where it is right, the command that reads it, the words, the other files that this takes).
FILES = {
    "small.py": (None, "explain", ["--config=small.py"], {}),
    "words.txt": (None, "train", [], {}),
    "data.jsonl": (b'{"text": "some words of a line"}\n' * 60, "train", ["data.path=data.jsonl"], {}),
    "ids.bin": (bytes(4000), "train", ["data.source=tokens", "data.path=ids.bin"],
                {"ids.bin.json": json.dumps(TOKENS | {"num_tokens": 2000}).encode()}),
    "ids.bin.json": (json.dumps(TOKENS | {"num_tokens": 2000}).encode(), "train",
                     ["data.source=tokens", "data.path=ids.bin"], {"ids.bin": bytes(4000)}),
    "tokenizer.json": (json.dumps(WORDS).encode(), "train", ["data.tokenizer=tokenizer.json"], {}),
    "chat.jsonl": (CHAT, "train", CHATS, {"t.jinja": TEMPLATE}),
    "t.jinja": (TEMPLATE, "train", CHATS, {"chat.jsonl": CHAT}),
    "a-images-idx3-ubyte": (PIXELS, "train", IMAGES, {"a-labels-idx1-ubyte": LABELS}),
    "a-labels-idx1-ubyte": (LABELS, "train", IMAGES, {"a-images-idx3-ubyte": PIXELS}),
    "prompts.jsonl": (b'{"prompt": "def "}\n', "generate", ["--config=small.py", "--prompts=prompts.jsonl"], {}),
    "metrics.jsonl": (b'{"step": 1, "step_seconds": 0.5}\n' * 9, "plan",
                      ["--config=small.py", "--cluster=cpu:8", "--calibrate=metrics.jsonl"], {}),
    "model/config.json": ((FIXTURES / "llama" / "config.json").read_bytes(), "hf", ["config", "model"], {}),
}  # fmt: skip
CONTENTS = {
    "emptied": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2 + 1],
    "without its last byte": lambda content: content[:-1],
    "flipped": lambda content: bytes(byte ^ 0x55 for byte in content[:40]) + content[40:],
    "zeros": lambda content: bytes(len(content)),
    "doubled": lambda content: content * 2,
    "every byte": lambda content: bytes(range(256)) * 20,
    "compressed": lambda content: gzip.compress(content, mtime=0),
    "utf-16": lambda content: content.decode("latin-1").encode("utf-16"),
    "not UTF-8": lambda content: content + b"\xff\xe9",
    "a list": lambda content: b"[1, 2]",
    "null": lambda content: b"null",
    "5000 digits": lambda content: b"9" * 5000,
    "nested": lambda content: b"[" * 100_000,
}
PLACES = {
    "a folder": pathlib.Path.mkdir,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "forbidden": lambda path: (path.write_bytes(b"x"), path.chmod(0)),
}
WRONG = (None, "text", -1, 10**400, 1.5, True, [], {}, [[[]]])


def values(content):
    """(what is wrong, content) for each entry of a JSON object, of another type or size, and for each that is gone."""
    found = json.loads(content)
    for index, key in enumerate(found):
        for wrong in (WRONG[index % len(WRONG)], WRONG[(index + 3) % len(WRONG)]):
            yield f"{key} is {str(wrong)[:9]}", json.dumps(found | {key: wrong}).encode()
        yield f"no {key}", json.dumps({name: value for name, value in found.items() if name != key}).encode()


def cases():
    for name, (right, command, words, others) in FILES.items():

        def prepare(folder, change, name=name, right=right, command=command, words=words, others=others):
            base = small(folder)
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            for other, content in (others | ({name: right} if right else {})).items():
                (folder / other).write_bytes(content)
            content = path.read_bytes()
            path.unlink()
            change(path, content)
            fields = [word if word[0] == "-" or "=" not in word else f"--config.{word}" for word in words]
            return [*base, *fields] if command == "train" else fields

        changes = {what: lambda path, content, of=of: path.write_bytes(of(content)) for what, of in CONTENTS.items()}
        changes |= {what: lambda path, content, make=make: make(path) for what, make in PLACES.items()}
        if name.endswith(".json"):
            changes |= {what: lambda path, _, broken=broken: path.write_bytes(broken) for what, broken in values(right)}
        for what, change in changes.items():
            yield Case(
                f"{name}: {what}",
                lambda folder, prepare=prepare, change=change: prepare(folder, change),
                command=command,
                unprivileged=True,
            )


CASES = [*cases()]
NEVER_READ = ("emptied", *PLACES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_broken_file_is_refused_or_read(case, tmp_path, monkeypatch):
    try:
        assert_refused(case, tmp_path, monkeypatch)
    except Accepted:
        assert not case.name.endswith(NEVER_READ), "read although it is no such file"
