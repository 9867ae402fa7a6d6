"""The command line: one table of commands, answers before JAX is imported, and the older ways of starting each."""

import contextlib
import importlib
import importlib.metadata
import pathlib
import runpy
import subprocess
import sys
import tomllib

import pytest

import meshtrain
from meshtrain.__main__ import COMMANDS, main
from meshtrain.errors import UserError

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
HEAVY = {"jax", "flax", "optax", "orbax", "grain", "numpy", "ml_collections"}
# Started with `python -m` before there was one table.
OLDER = {
    "train": "meshtrain.main",
    "explain": "meshtrain.explain",
    "plan": "meshtrain.plan",
    "pipeline": "meshtrain.pipeline",
    "generate": "meshtrain.generate",
    "evaluate": "meshtrain.evaluate",
    "agree": "meshtrain.agree",
    "report": "meshtrain.report",
    "prepare": "meshtrain.data.prepare",
    "verify": "meshtrain.verify",
    "bench-collectives": "meshtrain.probe.bench_collectives",
    "doctor": "meshtrain.probe.doctor",
    "hf": "meshtrain.hugging_face",
    "launch": "meshtrain.launch",
    "config": "meshtrain.config",
}
QUESTIONS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from meshtrain.__main__ import main
for words in (["--help"], ["--version"], ["train", "--help"], ["launch", "--help"]):
    try:
        assert main(words) == 0
    except SystemExit as end:
        assert not end.code
assert not {HEAVY} & set(sys.modules)
import meshtrain.__main__
sys.argv[1:] = ["tran", "--config=x"]
meshtrain.__main__.console()
"""


def test_help_and_a_misspelt_command_are_answered_without_jax():
    done = subprocess.run([sys.executable, "-c", QUESTIONS], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr == f"meshtrain: error: command: got 'tran'; allowed: {', '.join(COMMANDS)}; did you mean 'train'?\n"
    )
    for command, (_, text) in COMMANDS.items():
        assert any(line.split(maxsplit=1) == [command, text] for line in done.stdout.splitlines()), command
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        assert f"\n{name} {importlib.metadata.version(name)}\n" in done.stdout, "the versions"
    assert f"\nmeshtrain {meshtrain.__version__}\n" in done.stdout
    assert "--workdir" in done.stdout, "the help of train"
    assert "--restarts" in done.stdout, "the help of launch"


@pytest.mark.parametrize("words", [["--config=configs/3d.py"], ["qqqq"]])
def test_without_a_command_the_line_shows_one(words):
    with pytest.raises(UserError, match=r"^command: got '.*'; allowed: train, .*; nearest: train --config=3d$"):
        main(words)


def forget_program(name, monkeypatch):
    """Takes the module that `python -m NAME` runs out of `sys.modules`, until the test ends: runpy warns of one there.

    A package stays: what runs is its `__main__`, and a second package of the same name would lack the submodules.
    """
    for module in (name, f"{name}.__main__"):
        if module in sys.modules and not hasattr(sys.modules[module], "__path__"):
            parent, _, leaf = module.rpartition(".")
            monkeypatch.setattr(sys.modules[parent], leaf, sys.modules[module])  # bound again when the test ends
            monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_its_usage_and_runs_the_older_way_too(command, capsys, monkeypatch):
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m meshtrain {command} ")
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    forget_program(OLDER[command], monkeypatch)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(OLDER[command], run_name="__main__")
    assert not end.value.code
    assert capsys.readouterr().out == said


def test_an_installation_brings_the_program():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["meshtrain"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
