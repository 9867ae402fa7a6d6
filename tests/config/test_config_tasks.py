"""Tasks by name: what is found, what is refused, and whose options `config.model` holds."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from meshtrain.config.build import default
from meshtrain.config.mesh_checks import check
from meshtrain.config.resolve import resolve, to_json
from meshtrain.config.resume import difference, from_json
from meshtrain.config.schema import Config
from meshtrain.config.tasks import find, name_of
from meshtrain.errors import UserError
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
MODULE = '''
import dataclasses
from meshtrain.models.task import Task, token_batch
from meshtrain.options import option

@dataclasses.dataclass(frozen=True)
class Options:
    """Options."""
    width: int = option(8, "width", minimum=1)
    num_layers: int = option(2, "layers", minimum=1)
    kind: str = option("plain", "a choice", choices=("plain", "other"))
    attention: str = option("auto", "the decoder's option of this name may change on resume, this one may not")

@dataclasses.dataclass
class Thawed:
    width: int = option(8, "width")

@dataclasses.dataclass(frozen=True)
class Bare:
    width: int = 8

def task(config, placement):
    return Task(lambda rng: {}, len, token_batch(config.batch_size, config.sequence_length), width=config.model.width)

task.options = Options
task.check = lambda config, shape: ["model.width: got 7; nearest: 8"] * (config.model.width == 7)

def bare(config, placement): ...
def thawed(config, placement): ...
def fields(config, placement): ...
def listed(config, placement): ...
thawed.options, fields.options, listed.options, number = Thawed, Bare, [1], 3
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tests.py").write_text(MODULE)
    (tmp_path / "broken_for_tests.py").write_text("import json\n\nx = 1 / 0\n")
    (tmp_path / "lacking_for_tests.py").write_text("import no_such_thing_at_all\n")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine_for_tests", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


OWN = "mine_for_tests:task"


def lines(given, overrides=None, **keywords):
    try:
        resolve(given, overrides, **keywords)
    except UserError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "name, said, fix",
    [
        ("decodr", "got 'decodr'; allowed: decoder", "did you mean 'decoder'?"),
        ("mine_for_tests", "or package.module:function; nearest: decoder", "nearest: decoder"),
        (":task", "or package.module:function; nearest: decoder", "nearest: decoder"),
        ("nowhere_at_all.x:task", "there is no module 'nowhere_at_all'", "nearest: decoder"),
        ("lacking_for_tests:task", "cannot be imported: ModuleNotFoundError", "import lacking_for_tests"),
        ("broken_for_tests:task", "ZeroDivisionError: division by zero", "broken_for_tests.py:3)"),
        ("mine_for_tests:tusk", "mine_for_tests has no 'tusk'", "did you mean 'task'?"),
        ("mine_for_tests:number", "not a function but int", "def number(...)"),
        ("mine_for_tests:bare", "no attribute 'options'", "bare.options = MyOptions"),
        ("mine_for_tests:listed", "options are [1]", "@dataclass(frozen=True)"),
        ("mine_for_tests:thawed", "Thawed'>", "@dataclass(frozen=True)"),
        ("mine_for_tests:fields", "option 'width' is not an option(default, text)", "width: int = option(1, "),
    ],
)
def test_a_task_that_cannot_be_found_is_one_line(name, said, fix):
    wrong = {"task": name, "model": {"anything": 3}, "seed": -1}
    task_line, seed = lines(wrong)
    assert task_line.startswith("task: got '")
    assert said in task_line
    assert fix in task_line
    assert "allowed: " in task_line
    assert seed.startswith("seed: ")
    assert lines({}, {"task": name, "model.anything": "3"}) == [task_line]


def test_a_named_task_has_its_own_options():
    given = default(task=OWN)
    assert sorted(given.model) == ["attention", "kind", "num_layers", "width"]
    given.model.num_layers = 4  # the decoder's default, and chosen here
    config = resolve(given, {"model.width": "16"})
    assert (config.task, config.model.width, config.model.num_layers) == (OWN, 16, 4)
    assert type(config.model) is find(OWN).options
    assert resolve(config) == config
    assert from_json(to_json(config)) == config


def test_options_of_a_named_task_are_checked_like_all_others():
    got = lines({"task": OWN, "model": {"widht": 3, "kind": "oter", "num_layers": "two"}}, {"model.width": "0"})
    assert [line.partition(":")[0] for line in got] == ["model.widht", "model.num_layers", "model.width", "model.kind"]
    assert "did you mean 'model.width'?" in got[0]
    assert "did you mean 'other'?" in got[3]
    assert lines({"task": OWN, "model": {"width": 7}}) == ["model.width: got 7; nearest: 8"]
    assert lines({"task": OWN, "mesh": {"tensor": 3}, "batch_size": 3}) == [], "the decoder's heads do not count"


def test_another_task_than_that_of_the_defaults_is_one_line():
    given = default()
    wanted = (
        f"task: got '{OWN}' in a configuration that starts with default(), which has the model options of task "
        f"'decoder'; allowed: default(task='{OWN}'), which has the model options of this task; "
        f"nearest: default(task='{OWN}')"
    )
    assert lines(given, {"task": OWN, "model.num_layers": "3"}) == [wanted]
    assert lines(given, {"task": "seq2seq", "data.source": "numbers", "seed": "-1"})[0] == wanted.replace(
        OWN, "seq2seq"
    )
    given.task, given.model.num_heads = OWN, 8
    assert lines(given) == [wanted]
    assert resolve({}, {"task": OWN, "model.num_layers": "3"}).model.num_layers == 3


def test_a_pipeline_needs_a_task_with_stages():
    [line] = lines({"task": OWN, "mesh": {"pipeline": 2}})
    assert line.startswith("mesh.pipeline: got 2, but this task has no pipeline stages")
    config = resolve({"task": OWN, "mesh": {"pipeline": -1}})
    assert check(config, dict.fromkeys(AXES, 1) | {"pipeline": 2}) == [line]


def test_a_function_given_by_hand_is_recorded_under_its_name():
    task = find(OWN)
    config = resolve({"model": {"width": 16}}, make_task=task)
    assert (config.task, config.model.width) == (OWN, 16) == (name_of(task), 16)
    assert resolve(config, make_task=task) == config
    plain = lambda config, placement: None  # noqa: E731
    config = resolve({"model": {"num_heads": 2}}, make_task=plain)
    assert config.task.endswith("<locals>:<lambda>") or "<lambda>" in config.task
    assert isinstance(config.model, DecoderOptions)
    assert resolve(config, make_task=plain) == config
    task.options = list
    [line] = lines({}, make_task=task)
    assert "options are <class 'list'>" in line


def test_a_task_may_have_no_options():
    function = lambda config, placement: None  # noqa: E731
    function.options = dataclasses.make_dataclass("Options", [], frozen=True)
    config = resolve({}, make_task=function)
    assert resolve(json.loads(to_json(config)), make_task=function) == config
    [line] = lines({"model": {"width": 3}}, make_task=function)
    assert line.startswith("model.width: unknown key")


def test_a_run_of_another_task_is_another_run():
    old, new = json.loads(to_json(Config())), json.loads(to_json(resolve({"task": OWN})))
    assert difference(new, new) == []
    assert f'task: was "decoder", now "{OWN}"' in difference(old, new)
    wider = json.loads(to_json(resolve({"task": OWN, "model": {"width": 16}})))
    narrow = json.loads(to_json(resolve({"task": OWN, "model": {"attention": "narrow"}})))
    assert difference(new, narrow) == ['model.attention: was "auto", now "narrow"']
    del new["model"]["width"]
    assert difference(new, wider) == ["model.width: was 8, now 16"]
    before_tasks = json.loads(to_json(Config()))
    del before_tasks["task"]
    assert difference(before_tasks, json.loads(to_json(Config()))) == []


def test_an_abstract_task_touches_no_device():
    # JAX refuses another number of CPU devices once it has looked for them.
    code = (
        "import jax\nfrom meshtrain.config.resolve import resolve\nfrom meshtrain.config.tasks import abstract_task\n"
        "assert abstract_task(resolve({})).vocab_size == 257\njax.config.update('jax_num_cpu_devices', 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
