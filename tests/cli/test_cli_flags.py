import argparse
import contextlib
import dataclasses
import pathlib
import subprocess
import sys
from fractions import Fraction

import pytest

from meshtrain import __main__, user_functions
from meshtrain.cli import flags, output_files
from meshtrain.errors import UserError
from meshtrain.options import option

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = option(1, "a size", minimum=1)
    name: str = option("a", "a name", choices=("a", "b"))


@dataclasses.dataclass(frozen=True)
class Outer:
    rate: float = option(0.5, "a rate")
    on: bool = option(False, "a switch")
    inner: Inner = dataclasses.field(default_factory=Inner)


@dataclasses.dataclass(frozen=True)
class Bounded:
    size: int = option(8, "a size", minimum=8, maximum=64)


ENTRIES = flags.schema(Outer())
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("-1", int, -1), ("1_000", int, 1000), ("1e3", int, 1000), ("12345678901234567", int, 12345678901234567),
        ("3e-4", float, 3e-4), ("2", float, 2.0), ("-.5", float, -0.5),
        ("true", bool, True), ("False", bool, False), ("1", bool, True), ("no", bool, False),
        ("", str, ""), ("10,13", str, "10,13"),
    ],
)  # fmt: skip
def test_texts_of_a_command_line(text, kind, value):
    got = flags.convert(text, kind, is_text=True)
    assert got == value
    assert type(got) is kind


@pytest.mark.parametrize(
    "text, kind, message",
    [
        ("two", int, "got 'two'; allowed: a whole number (int)"),
        ("2.6", int, "got '2.6'; allowed: a whole number (int); nearest: 3"),
        ("", int, "got ''; allowed: a whole number (int)"),
        ("nan", float, "got 'nan'; allowed: a number (float)"),
        ("inf", int, "got 'inf'; allowed: a whole number (int)"),
        ("maybe", bool, "got 'maybe'; allowed: true or false (bool)"),
        ("0.4", int, "got '0.4'; allowed: a whole number (int); nearest: 1"),
        ("9999999999.5", int, "got '9999999999.5'; allowed: a whole number (int); nearest: 2147483647"),
    ],
)
def test_texts_that_are_no_value(text, kind, message):
    with pytest.raises(ValueError) as caught:
        flags.convert(text, kind, is_text=True)
    assert str(caught.value) == message


@pytest.mark.parametrize("text, near", [("0.4", 8), ("-3.5", 8), ("9.5", 10), ("70.5", 64), ("-1e-9", 8)])
def test_a_whole_number_that_is_suggested_is_legal(text, near):
    entries = flags.schema(Bounded())
    assert flags.collect(entries, {}, {"size": text})[1] == [
        f"size: got '{text}'; allowed: a whole number (int); nearest: {near}"
    ]


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("num_digits", [310, 4300, 5000])
def test_numbers_beyond_float64_are_refused(num_digits, kind):
    for value, is_text in (("9" * num_digits, True), (10**num_digits, False), (Fraction(-(10**num_digits)), False)):
        with pytest.raises(ValueError, match="allowed: a "):
            flags.convert(value, kind, is_text=is_text)


def test_more_unknown_keys_than_there_are_fields_are_ten_lines_and_their_number():
    _, problems = flags.collect(ENTRIES, {f"inner.s{number}": 1 for number in range(4)}, {})
    assert len(problems) == 4, "of four fields all can be misspelt"
    _, problems = flags.collect(ENTRIES, {f"inner.s{number}": 1 for number in range(100_000)}, {})
    assert problems[9].startswith("inner.s9: unknown key; allowed: inner.size, inner.name")
    assert problems[10:] == ["... and 99990 more keys like these"]


@pytest.mark.parametrize(
    "value, kind", [(True, int), (1, bool), (3, str), ("3", int), (None, float), ([1], int), (1.5, int)]
)
def test_python_values_of_another_type(value, kind):
    with pytest.raises(ValueError, match="allowed"):
        flags.convert(value, kind)


def test_python_values_that_fit():
    assert flags.convert(1e3, int) == 1000
    assert type(flags.convert(1, float)) is float


def test_schema_and_construct_are_inverse():
    assert list(ENTRIES) == ["rate", "on", "inner.size", "inner.name"]
    assert ENTRIES["inner.name"] == flags.Entry(str, "a", "a name", ("a", "b"))
    values, problems = flags.collect(ENTRIES, {"inner.size": 3}, {"on": "true"})
    assert not problems
    assert flags.construct(Outer(), values) == Outer(on=True, inner=Inner(size=3))


def test_a_wrong_text_leaves_the_value_of_the_file():
    values, problems = flags.collect(ENTRIES, {"inner.size": 3}, {"inner.size": "x"})
    assert values["inner.size"] == 3
    assert problems == ["inner.size: got 'x'; allowed: a whole number (int); nearest: 1, the default"]


def test_a_right_text_makes_up_for_a_wrong_value_of_the_file():
    values, problems = flags.collect(ENTRIES, {"inner.size": "x"}, {"inner.size": "3"})
    assert values["inner.size"] == 3
    assert not problems


@pytest.mark.parametrize(
    "key, message",
    [
        ("inner.sise", "inner.sise: unknown key; allowed: inner.size, inner.name; did you mean 'inner.size'?"),
        (
            "size",
            (
                "size: unknown key; allowed: the keys that `python -m meshtrain config` lists; did you mean "
                "'inner.size'?"
            ),
        ),
        (
            "iner.size",
            (
                "iner.size: unknown key; allowed: the keys that `python -m meshtrain config` lists; did you mean "
                "'inner.size'?"
            ),
        ),
        (
            "inner",
            "inner: got '1'; allowed: a value for one of its fields: inner.size, inner.name; nearest: inner.size=1",
        ),
        (
            "rate.size",
            "rate.size: unknown key; allowed: 'rate', which is a value and has no fields; did you mean 'rate'?",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(key, message):
    assert flags.collect(ENTRIES, {}, {key: "1"})[1] == [message]


def test_every_problem_is_collected():
    _, problems = flags.collect(ENTRIES, {"x.y": 1, "rate": "x"}, {"on": "2", "inner.size": "1.5"})
    assert [line.partition(":")[0] for line in problems] == ["x.y", "rate", "on", "inner.size"]


def test_flatten():
    assert flags.flatten({"a": {"b": 1, "c": {"d": 2}}, "e": {}}) == {"a.b": 1, "a.c.d": 2, "e": {}}


def test_arguments():
    extra = argparse.ArgumentParser(prog="program", add_help=False)
    extra.add_argument("--prompt", default="")
    words = "--config=configs/3d.py --prompt a --config.mesh.data -1 --config.seed=1 --config.seed=2"
    got = flags.arguments(words.split(), extra)
    assert (got.config, got.prompt, got.problems) == ("configs/3d.py", "a", [])
    assert got.workdir == pathlib.Path("runs/3d")
    assert got.overrides == {"mesh.data": "-1", "seed": "2"}
    assert flags.arguments(["--workdir=~/x"]).workdir == pathlib.Path.home() / "x"


@pytest.mark.parametrize(
    "word, message",
    [
        ("--confg=3", "arguments: got '--confg'; allowed: -h, --help, --config, --workdir; did you mean '--config'?"),
        ("--mesh.data=2", "arguments: got '--mesh.data=2'; allowed: -h, --help, --config, --workdir; "
                          "did you mean '--config.mesh.data=2'?"),
        ("stray", "arguments: got 'stray'; allowed: -h, --help, --config, --workdir; nearest: --help"),
        ("--config.seed", "seed: got no value; allowed: --config.seed=VALUE; nearest: leave it out"),
        ("--workdir=", "--workdir: got ''; allowed: a folder's path in UTF-8; nearest: runs/default"),
    ],
)  # fmt: skip
def test_arguments_that_are_wrong(word, message):
    assert flags.arguments([word]).problems == [message]


def test_a_missing_value_is_a_users_mistake():
    with pytest.raises(UserError, match="--config: expected one argument"):
        flags.arguments(["--config"])


@pytest.mark.parametrize("typed, said", [("/opt/bin/meshtrain", "meshtrain"), ("x/__main__.py", "python -m meshtrain")])
def test_a_usage_names_the_program_as_it_was_typed(typed, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [typed])
    assert __main__.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: {said} COMMAND ")
    assert flags.Parser(prog="python -m meshtrain report").prog == f"{said} report"


def test_help_says_where_the_fields_are_listed_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom meshtrain.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = {'jax', 'flax', 'optax', 'orbax', 'grain', 'numpy', 'ml_collections'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m meshtrain config" in done.stdout
    assert "--workdir" in done.stdout


UNSPEAKABLE = "class Unspeakable(Exception):\n    def __str__(self): raise ValueError\n"


def load(path, text):
    path.write_text(text)
    return flags.load(str(path), ["mesh.tensor", "seed"])


def test_load_runs_the_file(tmp_path):
    assert load(tmp_path / "3d.py", "def get_config():\n    return {'a': __name__}") == {"a": "3d"}
    assert [path.name for path in tmp_path.iterdir()] == ["3d.py"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("def get_config(:", r":1: SyntaxError: invalid syntax"),
        ("def get_confg():\n    return 1", "has no get_config.*did you mean 'get_confg'"),
        ("def get_config():\n    return 1 / 0", ":2: ZeroDivisionError: division by zero"),
        ("import no_such_module", ":1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def get_config():\n    return [].seed", ":2: AttributeError: 'list' object has no attribute 'seed'"),
        ("def get_config():\n    raise RuntimeError", ":2: RuntimeError: no message"),
        ("\0", ": SyntaxError: "),
        (f"{UNSPEAKABLE}def get_config():\n    raise Unspeakable", ":4: Unspeakable: a message that cannot be printed"),
    ],
)
def test_a_file_that_cannot_be_run_is_one_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / "x.py", text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("line", ["config.mash.tensor = 2", "config['mash']", "config.mash", "config.lock().mash = 2"])
def test_a_misspelt_group_is_named_with_the_nearest(tmp_path, line):
    text = f"import ml_collections\ndef get_config():\n    config = ml_collections.ConfigDict()\n    {line}"
    with pytest.raises(UserError, match=r"x.py:4: unknown key 'mash'; allowed: .*; did you mean 'mesh'\?$"):
        load(tmp_path / "x.py", text)


def test_so_is_a_module_whose_exception_cannot_be_shown(tmp_path, monkeypatch):
    (tmp_path / "unspeakable.py").write_text(f"{UNSPEAKABLE}raise Unspeakable")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"Unspeakable: a message that cannot be printed \(.*unspeakable.py:3\)"):
        user_functions.import_function("task", "unspeakable:f", ["decoder"])


def test_meshtrain_s_own_configurations_have_names_in_any_folder(tmp_path, monkeypatch):
    """An installation has no folder configs: what a line suggests runs there too."""
    assert {*flags.example_files()} == {path.stem for path in CONFIGS.glob("*.py")}
    own = flags.load(str(CONFIGS / "3d.py"), [])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"allowed: .*, or 3d, data, .*; nearest: {flags.EXAMPLE}$"):
        flags.load("zzz.py", [])
    with pytest.raises(UserError, match=r"did you mean '3d'\?$"):
        flags.load("configs/3d.py", [])
    assert flags.EXAMPLE == "--config=3d"
    assert flags.load("3d", []) == own
    (tmp_path / "tiny").write_text("def get_config():\n    return {'seed': 7}")
    assert flags.load("tiny", []) == {"seed": 7}, "a file of one's own comes first"
    assert flags.default_workdir("3d") == flags.default_workdir("configs/3d.py")


@pytest.mark.parametrize(("typed", "program"), [("/a/bin/meshtrain", "meshtrain"), ("-m", "python -m meshtrain")])
def test_usage_says_what_was_typed(typed, program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [typed])
    for words, mark in ((["train", "--help"], f"`{program} config`"), (["launch", "--help"], ""), (["--help"], "")):
        with contextlib.suppress(SystemExit):
            __main__.main(words)
        said = capsys.readouterr().out
        assert said.startswith(f"usage: {program} "), words
        assert mark in said


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "tiny.py").touch()
    with pytest.raises(UserError, match=r"tinny.py' does not exist.*did you mean '.*tiny.py'"):
        flags.load(str(tmp_path / "tinny.py"), [])
    with pytest.raises(UserError, match="is not a file"):
        flags.load(str(tmp_path), [])


def test_unwritable(tmp_path):
    assert output_files.unwritable(tmp_path / "a" / "b") == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    [line] = output_files.unwritable(tmp_path / "file" / "b")
    assert "is not a folder" in line
    # A file system that takes no new folders, not even from root.
    [line] = output_files.unwritable(pathlib.Path("/proc/run"))
    assert line.startswith("--workdir: got '/proc/run', which is not writable")
