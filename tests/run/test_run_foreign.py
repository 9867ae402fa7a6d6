"""A run's folder may be a stranger's: no command runs a function that its config.json alone names."""

import json
import pathlib
import shlex
import sys

import pytest

from meshtrain import evaluate, generate, harness, hugging_face, user_functions, verify
from meshtrain import main as train
from meshtrain.cli import flags
from meshtrain.config import Config, default, resolve
from meshtrain.config.resolve import to_json
from meshtrain.errors import UserError
from meshtrain.report import __main__ as report

OURS, THEIRS = "docs.guide.own_model:eight_bytes", "foreign.helper:main"
NO_WEIGHTS = "allowed: a workdir with at least one complete checkpoint"
OPTIONS = (
    "task", "reduction.name", "pipeline.schedule", "optimizer.name", "learning_rate.name", "data.source",
    "observe.tracker",
)  # fmt: skip
DOOR = "import pathlib\npathlib.Path('ran').touch()\ndef main(*_): raise SystemExit('it ran')\n"
USER_S = (
    "from meshtrain.config import default\ndef get_config():\n    config = default({!r})\n    {}\n    return config\n"
)
READERS = {
    "evaluate": (evaluate.main, []),
    "generate": (generate.main, ["--prompt=a b"]),
    "hf export": (hugging_face.main, ["export", "--to=exported"]),
}


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A folder `foreign` with a run's files and a module beside them, and a function that names the module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "helper.py").write_text(DOOR)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')

    def naming(**functions):
        values = {name: value for name, value in json.loads(to_json(resolve(default()))).items() if name != "model"}
        if "task" not in functions:
            values["model"] = {"vocab_size": 257}
        for key, name in functions.items():
            group, _, field = key.rpartition(".")
            (values[group] if group else values)[field] = name
        (folder / "config.json").write_text(json.dumps(values))
        return f"--workdir={folder}"

    yield naming
    for name in [name for name in sys.modules if name.partition(".")[0] == "foreign"]:
        del sys.modules[name]


def refusal(main, words):
    with pytest.raises(UserError) as caught:
        main(words)
    (line,) = caught.value.problems
    return line


def test_every_option_that_may_name_a_function_is_one_of_these():
    entries = flags.schema(Config())
    assert tuple(key for key, entry in entries.items() if entry.names.startswith("function")) == OPTIONS
    assert {key for key, entry in entries.items() if user_functions.FORM in entry.text} == set(OPTIONS)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("keys", [(key,) for key in OPTIONS] + [OPTIONS], ids="+".join)
def test_a_function_of_a_stranger_s_is_refused_with_the_command_that_runs_it(foreign, reader, keys):
    main, words = READERS[reader]
    workdir = foreign(**dict.fromkeys(keys, THEIRS))
    line = refusal(main, [*words, workdir])
    assert line.startswith("/")
    assert all(f"{key}: got '{THEIRS}'" in line for key in keys)
    assert not pathlib.Path("ran").exists()
    command = shlex.split(line.partition("; nearest: ")[2])
    assert command[:4] == [sys.orig_argv[0], "-m", "meshtrain", reader.partition(" ")[0]]
    assert command[4:] == [*words, workdir, *(f"--config.{key}={THEIRS}" for key in keys)]
    with pytest.raises((SystemExit, UserError)) as caught:
        main(command[4:])
    assert NO_WEIGHTS in str(caught.value) or pathlib.Path("ran").exists(), "the pasted command goes on"


@pytest.mark.parametrize("key", OPTIONS)
def test_the_harness_refuses_it_too(foreign, key):
    folder = foreign(**{key: THEIRS}).removeprefix("--workdir=")
    line = refusal(harness.open_requests, folder)
    assert line.endswith(f"; nearest: --config.{key}={THEIRS}")
    assert not pathlib.Path("ran").exists()


@pytest.mark.parametrize("key", OPTIONS)
def test_another_name_on_the_command_line_is_taken_and_theirs_is_not_imported(foreign, key):
    other = flags.schema(Config())[key].default
    with pytest.raises(UserError) as caught:
        generate.main([foreign(**{key: THEIRS}), f"--config.{key}={other}"])
    assert not pathlib.Path("ran").exists()
    assert NO_WEIGHTS in str(caught.value), "the configuration is accepted"


@pytest.mark.parametrize("same", [True, False])
def test_a_file_of_the_user_s_that_names_the_same_is_enough(foreign, same):
    workdir = foreign(task=OURS if same else THEIRS)
    pathlib.Path("mine.py").write_text(USER_S.format(OURS, "pass"))
    sys.path.append(str(pathlib.Path(__file__).parents[2]))
    with pytest.raises(UserError) as caught:
        generate.main([workdir, "--config=mine.py"])
    assert (NO_WEIGHTS in str(caught.value)) == same
    assert (f"task: got '{THEIRS}'" in str(caught.value)) != same
    assert not pathlib.Path("ran").exists()


@pytest.mark.parametrize("given", ["[]", "{", "nul", '{"task": ["a:b"]}', '{"task": 3}'])
def test_a_broken_file_is_the_user_s_error_as_before(foreign, given):
    workdir = foreign()
    pathlib.Path("foreign/config.json").write_text(given)
    with pytest.raises(UserError):
        generate.main([workdir])


def test_report_and_verify_import_nothing(foreign):
    workdir = foreign(**dict.fromkeys(OPTIONS, THEIRS)).removeprefix("--workdir=")
    report.main([workdir, "--html=page.html"])
    with pytest.raises(UserError, match="no checkpoint in it"):
        verify.main([workdir])
    assert not pathlib.Path("ran").exists()


@pytest.mark.parametrize("words", [["WORKDIR"], ["--workdir=mine", "--config.init_from=foreign"]])
def test_training_there_or_from_its_weights_imports_nothing_of_it(foreign, words):
    workdir = foreign(**dict.fromkeys(OPTIONS, THEIRS))
    pathlib.Path("mine.py").write_text(USER_S.format("decoder", "config.data.source = 'synthetic'"))
    with pytest.raises(UserError):
        train.main(["--config=mine.py", *(word.replace("WORKDIR", workdir) for word in words)])
    assert not pathlib.Path("ran").exists()
