"""Each row of the table: exit code 2, the key, what is allowed, nothing written; and the fix that is named works."""

import functools
import pathlib
import re
import shlex

import pytest

from meshtrain.assembly.assemble import assemble
from tests.messages import refused
from tests.messages.desk import desk
from tests.messages.table import TABLE, TOGETHER

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
FIRST = {
    "train": ["--config=small.py", "--workdir=run"],
    "plan": ["--config=small.py"],
    "generate": ["--config=small.py"],
}
NINES = {"{400 nines}": "9" * 400, "{5000 nines}": "9" * 5000}
ROWS = [(command, *row) for command, rows in TABLE.items() for row in rows]
SEVERAL = [(command, *row) for command, rows in TOGETHER.items() for row in rows]


def words_of(command, text):
    """The words of a row; those without dashes that set something are fields of the configuration."""
    for name, digits in NINES.items():
        text = text.replace(name, digits)
    words = shlex.split(text.replace("{ROOT}", str(ROOT)))
    fields = command not in ("report", "launch")
    return FIRST.get(command, []) + [
        f"--config.{word}" if fields and "=" in word and word[0] != "-" else word for word in words
    ]


def case_of(command, text):
    """The case of a row, on a desk with files."""

    def prepare(folder):
        desk(folder)
        return words_of(command, text)

    name = f"{command} {text}".encode("ascii", "backslashreplace").decode()
    return refused.Case(name, prepare, command=command, unprivileged=True)


def lines_of(command, text, folder, monkeypatch):
    return bare(refused.assert_refused(case_of(command, text), folder, monkeypatch), folder)


def bare(lines, folder):
    return [
        line.removeprefix("meshtrain: error: ").replace(f"{folder}/", "").replace(str(folder), ".") for line in lines
    ]


@pytest.mark.parametrize("command, text, key, said", ROWS, ids=[f"{row[0]} {row[1]}"[:80] for row in ROWS])
def test_a_mistake_is_one_line_whose_fix_is_accepted(command, text, key, said, tmp_path, monkeypatch):
    def assembled(config, shape, devices, also):
        return assembled_once(config, tuple(shape.items()), tuple(devices), tuple(also))

    monkeypatch.setattr("meshtrain.run.existing_run.assemble", assembled)
    [line] = lines_of(command, text, tmp_path, monkeypatch)
    assert line.startswith(f"{key}: ")
    assert said in line
    for fixed in mended(line, key, words_of(command, text)):
        assert (key, asked(line)) not in again(command, tuple(fixed)), fixed


@pytest.mark.parametrize("command, text, keys", SEVERAL, ids=[f"{row[0]} {row[1]}"[:80] for row in SEVERAL])
def test_several_mistakes_are_told_at_once(command, text, keys, tmp_path, monkeypatch):
    lines = lines_of(command, text, tmp_path, monkeypatch)
    assert [line[: len(key) + 2] for line, key in zip(lines, keys, strict=True)] == [f"{key}: " for key in keys]


def test_what_is_right_goes_on_to_the_weights(tmp_path, monkeypatch):
    right = "--prompts=prompts.jsonl --top-p=1 --top-k=0 --stop=x --seed=0 --out=new.jsonl"
    with pytest.raises(refused.Accepted):
        lines_of("generate", right, tmp_path, monkeypatch)


def asked(line):
    """What a line asks for."""
    return re.search(r"; (allowed[^;]*)|$", line)[1]


@functools.cache
def assembled_once(config, axes, devices, also):
    """Many rows of `generate` differ in what is drawn from one and the same model."""
    return assemble(config, dict(axes), devices, also=also)


@functools.cache
def again(command, words):
    """(key, what is asked for) of each line that a command refuses these words with, on a desk as every row has it."""
    try:
        with refused.unprivileged():
            _, lines = refused.outcome(command, words)
    except refused.Accepted:
        return []
    return [(line.partition(": ")[0], asked(line)) for line in bare(lines, pathlib.Path.cwd())]


def mended(line, key, words):
    """The words with each fix of a line that can be typed: another name, another value, another flag, or none."""
    if name := re.search(r"; did you mean '(.*)'\?$", line):
        if wrong := re.match(r"arguments: got '(.*?)'", line):
            return [[word.replace(wrong[1], name[1]) for word in words]]
        if ": unknown" in line:
            return [[re.sub(rf"^(--config\.)?{re.escape(key)}=", rf"\g<1>{name[1]}=", word) for word in words]]
        flag, _, value = name[1].rpartition("=")
        module = re.match(r".*: got '([\w.]+:)\w*', and .* has no ", line)
        return [given(words, flag or key, (module[1] if module else "") + value)]
    fixes = re.split(r", or ", line.partition("; nearest: ")[2])
    found = []
    for fix in fixes:
        if fix == "leave it out":
            found.append([word for word in words if not is_set(word, key)])
        elif flag := re.fullmatch(r"(--[a-z-]+)='?([^'\s]*[^A-Z'\s][^'\s]*)'?", fix):  # not --html=FILE
            found.append(given(words, flag[1], flag[2]))
        elif field := re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)=([^\s(]+)( \(.*\))?", fix):
            instead = field[1].startswith(f"{key}.") or ": unknown key" in line  # of the option that was set
            kept = [word for word in words if not (instead and is_set(word, key))]
            found.append(given(kept, field[1], field[2]))
        elif key != "arguments" and (value := re.fullmatch(r"'?([^'\s-][^'\s]*|-\d+)'?(, the default)?", fix)):
            found.append(given(words, key, value[1]))
    return found


def is_set(word, key):
    return word.partition("=")[0] in (key, f"--config.{key}")


def given(words, key, value):
    """The words with another value of a flag or a field, wherever they had one."""
    name = key if key.startswith("--") else f"--config.{key}"
    return [f"{name}={value}", *(word for word in words if not is_set(word, key))]
