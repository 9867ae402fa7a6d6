"""Passes changed files to each reader of JSON, headers and indexes; only user errors are allowed.

    scripts/bench readers [--cases=1000] [--seed=0] [--reader=NAME]

The readers are the table in tests/messages/readers.py. A case changes one file of a reader's folder: JSON values are
replaced, removed or doubled; bytes are removed, flipped, doubled or replaced. The reader returns, or raises UserError
with short lines. Any other exception is printed with the case, and the exit code is 1.
"""

import argparse
import contextlib
import copy
import io
import json
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import UserError, one_line
from tests.messages.readers import READERS, Reader

REFUSED = "refused: "
MOST_CHARACTERS = 1000  # length of an error line, without the folder's name
# JSON texts that replace a value.
NUMBERS = ("0", "-1", "-0.0", "1e999", "-1e999", "NaN", "-Infinity", "9" * 400, "-" + "9" * 5000, "1e-400", "1.5",
           "1e308", "9223372036854775808", "4294967295", "0.0", "2")  # fmt: skip
TEXTS = (
    '""',
    '"a\\u0000b"',
    '"\\ud83d"',
    '"\\udcff"',
    '"~a\\u0000"',
    '"..' + "/.." * 30 + '"',
    '"\\n\\n"',
    '"2"',
    '"gs://a/b"',
)
OTHERS = ("null", "true", "false", "[]", "{}", "[[]]", '[""]', '{"": null}', "[1, null]", "[-1]", '{"a": {"a": 0}}')
HUGE = (
    '"' + "x" * (1 << 20) + '"',
    "[" * 50_000 + "]" * 50_000,
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    "[" * 120 + "]" * 120,
)
_MARK = "\ufdd0"  # a character that no text has


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each value inside a JSON value, the value itself first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def changed_json(text: str, chance: random.Random) -> str:
    """Returns a JSON text with one value replaced, removed or doubled under its key."""
    content = copy.deepcopy(json.loads(text))
    path = chance.choice([*places(content)][:400])
    drawn = chance.random()
    kinds = (NUMBERS, TEXTS, OTHERS, HUGE)
    new = chance.choice(chance.choices(kinds, (10, 6, 6, 1))[0])
    if not path:
        return new if drawn < 0.8 else text + new
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if drawn < 0.1:
        del parent[path[-1]]
        return json.dumps(content)
    if drawn < 0.2 and isinstance(parent, dict):  # the same key twice
        parent[_MARK] = _MARK
        return json.dumps(content, ensure_ascii=False).replace(
            f'"{_MARK}": "{_MARK}"', f"{json.dumps(path[-1])}: {new}"
        )
    if drawn < 0.25 and isinstance(parent, dict):
        parent[_MARK] = _MARK
        key = chance.choice((*TEXTS, HUGE[0]))
        return json.dumps(content, ensure_ascii=False).replace(f'"{_MARK}": "{_MARK}"', f"{key}: {new}")
    parent[path[-1]] = _MARK
    return json.dumps(content, ensure_ascii=False).replace(f'"{_MARK}"', new)


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    """Returns bytes with some bytes truncated, flipped, doubled, removed or replaced, mostly near the start."""
    place = (
        min(int(chance.expovariate(1 / 40)), len(content)) if chance.random() < 0.6 else chance.randint(0, len(content))
    )
    length = chance.choice((1, 1, 2, 4, 8, 64))
    match chance.randrange(7):
        case 0:
            return content[:place]
        case 1:
            flipped = bytes(one ^ 1 << chance.randrange(8) for one in content[place : place + length])
            return content[:place] + flipped + content[place + length :]
        case 2:
            return (
                content[:place]
                + chance.choice((b"\xff", b"\0", b"\x7f", b"\n", b"[")) * length
                + content[place + length :]
            )
        case 3:
            return content[:place] + content[place + length :]
        case 4:
            return content + chance.choice((content[:place], b"\0", b"\n", content))
        case 5:
            return content[:place] + chance.randbytes(length) + content[place:]
        case _:
            return chance.choice(
                (b"", b"\0" * 100, b"\xff\xfe", b"PK\3\4", b"\x1f\x8b", chance.randbytes(64), b"\xef\xbb\xbf")
            )


def changed(content: bytes, kind: str, chance: random.Random) -> bytes:
    """Returns changed content of a file of one kind.

    Args:
      content: the valid content.
      kind: `json`, `lines` of JSON, `head` (a line of JSON before bytes), `safetensors`, or `bytes`.
      chance: the random number generator.
    """
    if kind == "bytes" or chance.random() < 0.1:
        return changed_bytes(content, chance)
    if kind == "json":
        return changed_json(content.decode(), chance).encode()
    if kind == "safetensors":
        length = int.from_bytes(content[:8], "little")
        header = changed_json(content[8 : 8 + length].decode(), chance).encode()
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    lines = content.splitlines(keepends=True)
    index = 0 if kind == "head" else chance.randrange(len(lines))
    lines[index] = changed_json(lines[index].decode(), chance).encode() + b"\n"
    return b"".join(lines)


def outcome(use: Callable[[Path], object], folder: Path) -> str:
    """Returns `passed`, `refused: ` and a line, or the fault: a traceback, or a line that is too long."""
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            use(folder)
    except UserError as error:
        lines = [one_line(problem).replace(str(folder), "") for problem in error.problems]
        return next((f"a long line: {line}" for line in lines if len(line) > MOST_CHARACTERS), f"{REFUSED}{lines[0]}")
    except (Exception, SystemExit):  # noqa: BLE001  this script searches for all exceptions
        return traceback.format_exc()
    return "passed"


def wrong(reader: Reader, num_cases: int, seed: int) -> list[str]:
    """Returns a text for each case with another exception than UserError; case 0 has the unchanged files."""
    found, chance = list[str](), random.Random(f"{seed} {reader.name}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        reader.write(folder)
        right = {name: (folder / name).read_bytes() for name in reader.files}
        if (result := outcome(reader.use, folder)) != "passed":
            found.append(f"{reader.name}, case 0: {result}")
        for number in range(1, num_cases + 1):
            for name, content in right.items():
                (folder / name).write_bytes(content)
            name = chance.choice([*right])
            broken = changed(right[name], reader.files[name], chance)
            (folder / name).write_bytes(broken)
            if (result := outcome(reader.use, folder)) != "passed" and not result.startswith(REFUSED):
                found.append(f"{reader.name}, case {number}, {name}: {broken[:300]!r}\n{result}")
    return found


def main(argv: Sequence[str]) -> int:
    """Runs the cases and returns 1 if a case raised another exception than UserError."""
    parser = argparse.ArgumentParser(prog="scripts/bench readers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", default="")
    given = parser.parse_args(argv)
    chosen = [reader for reader in READERS if given.reader in reader.name]
    found = list[str]()
    for reader in chosen:
        lines = wrong(reader, given.cases, given.seed)
        print(f"{reader.name}: {given.cases} cases, {len(lines)} wrong", *lines, sep="\n", flush=True)
        found += lines
    said = f"{len(found)} exceptions other than user errors" if found else "only user errors"
    print(f"{len(chosen) * given.cases:,} cases of {len(chosen)} readers: {said}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
