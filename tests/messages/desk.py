"""A folder with the files that command lines of the table name: some right, most not."""

import json
import os
import pathlib

from tests.messages.refused import odd_things, small
from tests.report.folders import folder as run_folder

TOKENS = {
    "dtype": "uint16", "vocab_size": 257, "num_tokens": 2, "num_documents": 1, "end_id": 256, "tokenizer": "bytes",
    "tokenizer_sha256": "", "end_token": "",
}  # fmt: skip
BAD_PROMPTS = b"""{"prompt": "def "}
{"prompt": "def "
{"text": "def "}

{"prompt": ""}
{"prompt": 7}
["def "]
\xff
{}
{"prompt": "\\ud83d"}
"""
LONG_PROMPTS = [{"prompt": "x" * 40}, {"prompt": "def "}, {"prompt": "y" * 50}]
FILES = {
    "a.txt": b"a",
    "a.bin": b"a",
    "a.json": b"a",
    "a.jsonl": b"a",
    "good.txt": b"good text " * 20,
    "nothing.txt": b"",
    "latin.txt": b"abc\xff",
    "short.txt": b"too short",
    "raw.bin": b"\xff\xfe",
    "torn.jsonl": b'{"text": "a"}\n{"text": \n',
    "field.jsonl": b'{"texts": "a", "id": 3}',
    "list.jsonl": b"[1]",
    "half.jsonl": b'{"text": "\\ud800"}',
    "right.jsonl": b'{"text": "good"}\n',
    "right.jsonl.gz": b'{"text": "good"}\n',
    "right.parquet": b"PAR1",
    "blank.jsonl": b"\n",
    "prompts.jsonl": b'{"prompt": "def "}\n',
    "locked.jsonl": b'{"prompt": "def "}\n',
    "bad.jsonl": BAD_PROMPTS,
    "long.jsonl": "".join(json.dumps(line) + "\n" for line in LONG_PROMPTS).encode(),
    "seconds.jsonl": b'{"step": 1, "step_seconds": 1' + b"0" * 400 + b"}\n",
    "ids.bin": b"a\0z\0",
    "ids.bin.json": json.dumps(TOKENS).encode(),
}


def desk(folder: pathlib.Path) -> None:
    """Writes the files, a small configuration with its text, a run's folder, and what is no file at all."""
    small(folder)
    odd_things(folder)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "locked.jsonl").chmod(0)
    (folder / "folder.html").mkdir()
    os.mkfifo(folder / "pipe.png")
    run_folder(folder / "RUN")
