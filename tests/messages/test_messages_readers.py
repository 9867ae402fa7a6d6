"""Readers of JSON, headers and indexes: each one in the source is in the table, and changed files end in a line."""

import ast
import json
import pathlib
import random

import pytest

import meshtrain
from meshtrain.checkpoint import other_runs
from meshtrain.data.text import find_files
from meshtrain.errors import UserError, one_line
from meshtrain.files import expand_user, identities, read_json
from meshtrain.store import buckets
from scripts.benchmarks import readers as script
from tests.messages.readers import ELSEWHERE, READERS, TOKEN_DATA, of_tokens, opened_corpus, saved

PACKAGE = pathlib.Path(meshtrain.__file__).parent
NUM_CASES = 50  # of each reader
# Names of functions and methods that read or decode content.
READING = {
    "json.load", "json.loads", "read_json", "_read_json", "read_text", "read_bytes", "frombuffer", "fromfile", "memmap",
    "np.load", "np.loadtxt", "safe_open", "from_str", "from_file", "ParquetFile", "read_table", "pread", "from_bytes",
    "item_metadata", "restore", "struct.unpack", "struct.unpack_from", "struct.iter_unpack", "pickle.load",
    "pickle.loads",
}  # fmt: skip


def reads(call: ast.Call) -> bool:
    """Returns whether a call reads: one of `READING`, or an `open` whose mode is not one to write."""
    function = call.func
    last = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    of = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    if last not in ("open", "fdopen"):
        return last in READING or f"{of}.{last}" in READING
    modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return of != "os" and ("rb" in modes or not modes)


def reading_functions(path: pathlib.Path, name: str) -> set[str]:
    """Returns `name:function` of each function of a file that reads; `name:` for the module itself."""
    found = set[str]()

    def visit(node: ast.AST, inside: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, (*inside, child.name))
                continue
            if isinstance(child, ast.Call) and reads(child):
                found.add(f"{name}:{'.'.join(inside)}")
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), ())
    return found


def test_every_function_that_reads_is_in_the_table():
    found = set[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        found |= reading_functions(path, path.relative_to(PACKAGE).as_posix())
    named = {function for reader in READERS for function in reader.functions} | ELSEWHERE.keys()
    assert not found - named, "add these to the table, with files to change"
    assert not named - found, "these are gone"


def test_a_function_that_reads_is_found(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "import json\n\n\nclass A:\n    def b(self, p):\n        def c():\n            return json.loads(p)\n"
        '        with p.open("rb") as file:\n            pass\n\n\n'
        'def d(p):\n    with p.open("wb") as file:\n        file.write(b"")\n    return p.read_bytes()\n'
    )
    assert reading_functions(path, "a.py") == {"a.py:A.b.c", "a.py:A.b", "a.py:d"}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_changed_files_are_read_or_end_in_lines(reader):
    found = script.wrong(reader, NUM_CASES, seed=0)
    assert not found, found[0][-3000:]


def test_an_exception_is_shown_with_its_case(capsys, monkeypatch):
    def broken(folder):
        if json.loads((folder / "metrics.jsonl").read_bytes().splitlines()[0])["step_seconds"] != 0.5:
            raise KeyError("step")

    [reader] = (one for one in READERS if one.name == "metrics.jsonl as a measurement")
    monkeypatch.setattr(script, "READERS", [script.Reader(reader.name, (), reader.files, reader.write, broken)])
    assert script.main(["--cases=20"]) == 1
    *shown, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("KeyError") for line in shown)
    assert last.startswith("20 cases of 1 readers: ")
    assert last.endswith(" exceptions other than user errors")


def test_a_seed_changes_files_in_the_same_way():
    content = b'{"a": [1, {"b": null}], "c": "d"}'
    made = [[script.changed(content, "json", chance) for _ in range(20)] for chance in map(random.Random, (3, 3, 4))]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000 + "]" * 50_000,
        '{"a":' * 120 + "1" + "}" * 120,
        b'["\xed\xa0\xbd"]',
        b"\xff",
        "",
        "{",
    ],
    ids=["50,000 brackets", "120 objects", "half a pair in bytes", "no UTF-8", "empty", "cut"],
)
def test_json_that_would_raise_later_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"nested|half|codec|Expecting"):
        read_json(text)


def test_json_in_order_is_read_as_before():
    assert read_json('{"a": ["\\ud83d\\ude00", 1e999, 5]}') == {"a": ["\U0001f600", float("inf"), 5]}
    assert read_json(b"\xef\xbb\xbf[1]") == [1]
    assert read_json("[" * 100 + "]" * 100)
    assert read_json("9" * 400) == float("inf")


FOR_ORBAX = ("_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding", "extra/metadata")


def test_metadata_of_a_checkpoint_are_refused_before_orbax_reads_them(tmp_path):
    saved(tmp_path)
    for name in FOR_ORBAX:
        file = tmp_path / "checkpoints" / "5" / name
        right = file.read_bytes()
        file.write_text("[" * 50_000)
        with other_runs.find(tmp_path) as checkpoints:
            for use in (checkpoints.shapes, checkpoints.refuse_damaged):
                with pytest.raises(UserError, match=f"checkpoints/5: {name}: 50,000 bytes instead of "):
                    use(5)
        file.write_bytes(right)


def test_half_a_pair_as_digest_of_an_index_makes_the_index_anew(tmp_path):
    of_tokens(tmp_path)
    index = tmp_path / "ids.bin.index"
    right = index.read_bytes()
    head, _, lengths = right.partition(b"\n")
    index.write_bytes(json.dumps(json.loads(head) | {"digest": "\ud83d"}).encode() + b"\n" + lengths)
    opened_corpus(TOKEN_DATA)(tmp_path)
    assert index.read_bytes() == right


@pytest.mark.parametrize("name", ["a\0b", "~a\0b", "a\0*", "~\ud800", "\ud800*"])
def test_a_name_that_no_file_can_have_is_a_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found, [line] = find_files(name)
    assert not found
    assert one_line(line).isprintable()
    assert identities(name)
    assert expand_user(name)
    assert buckets.place(name)
    with pytest.raises(UserError):
        meshtrain.train({"data": {"source": "synthetic"}}, name)
