"""The examples in docstrings run and show what comes out."""

import doctest
import importlib
import inspect
import pathlib
import textwrap

import pytest

import meshtrain
from meshtrain.config.resolve import resolve
from meshtrain.training import train

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
FILES = [*(ROOT / "meshtrain").rglob("*.py"), *(ROOT / "scripts" / "benchmarks").glob("*.py")]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in FILES
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_show_what_comes_out(name):
    module = importlib.import_module(name)
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test, out=said.append)
    assert runner.tries, "no example"
    assert not runner.failures, "".join(said)


def test_the_example_of_train_is_a_run(monkeypatch):
    """As far as training itself, which other tests do: its names exist and its configuration is a right one."""
    runs = []

    class Result:
        values = {"eval_loss": 0.5}  # noqa: RUF012

    def stand_in(config, directory):
        runs.append((resolve(config), directory))
        return Result

    monkeypatch.setattr(meshtrain, "train", stand_in, raising=False)
    inspect.signature(train).bind("config", "directory")
    example = inspect.getdoc(train).split("::\n\n", maxsplit=1)[1].split("Args:")[0]
    exec(textwrap.dedent(example), {})
    [(config, directory)] = runs
    assert (config.mesh.data, config.num_steps, directory) == (2, 100, "runs/mine")
