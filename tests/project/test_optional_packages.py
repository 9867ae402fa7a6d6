"""Optional packages: the core runs without their folders, and their names are in one table."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

from meshtrain.user_functions import EXTENSION_POINTS, FLAGS

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ["agree", "examples", "lab", "probe", "report"]
# In one process: explain a run, train two steps of it, evaluate it; and what the names of the packages come to.
CORE = """
import re
import sys
# An installation that is edited in place finds the folder that is missing here.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
from meshtrain.__main__ import COMMANDS, main
from meshtrain.config.resolve import resolve
from meshtrain.errors import UserError
from meshtrain.user_functions import FLAGS

packages, names = (words.split(",") for words in sys.argv[1:])
for command, (module, _) in COMMANDS.items():
    if (package := module.split(".")[1]) in packages:
        try:
            main([command])
        except UserError as error:
            start = f"command: got '{command}', but the folder meshtrain/{package} is missing; allowed: "
            assert str(error).startswith(start)
        else:
            raise AssertionError(command)
for flag, module in FLAGS.items():
    if (package := module.split(".")[1]) in packages:
        value = {"--scaling": "8,16", "--html": "plan.html"}[flag]
        try:
            main(["plan", "--config=small.py", "--cluster=cpu:8", f"{flag}={value}"])
        except UserError as error:
            [line] = error.problems
            start = f"{flag}: got '{value}', but the folder meshtrain/{package} is missing; allowed: "
            assert line.startswith(start), line
        else:
            raise AssertionError(flag)
run = ["--workdir=run", "--config=small.py", "--config.num_steps=2", "--config.sample_tokens=0"]
for words in (["explain", *run[1:]], ["train", *run], ["evaluate", *run[:2], "--config.num_eval_batches=1"]):
    assert main(words) == 0, words
for name in names:
    try:
        resolve({}, dict([name.split("=")]))
    except UserError as error:
        [line] = error.problems
        assert re.match(name.replace("=", ": got '?") + "'?; allowed: ", line), line
    else:
        raise AssertionError(name)
assert not [name for name in sys.modules if name.startswith(tuple(f"meshtrain.{package}" for package in packages))]
"""

SMALL = """
from meshtrain.config import default

def get_config():
    config = default()
    config.batch_size, config.sequence_length, config.num_eval_batches = 8, 32, 1
    config.model.num_layers, config.model.embed_dim, config.model.mlp_dim = 1, 32, 64
    config.data.source, config.model.vocab_size = "synthetic", 64
    return config
"""


@pytest.mark.parametrize(
    "key, name", [(key, name) for key in EXTENSION_POINTS for name in EXTENSION_POINTS[key].optional_names]
)
def test_a_name_in_an_optional_package_is_a_function(key, name):
    module, _, attribute = EXTENSION_POINTS[key].optional_names[name].partition(":")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("module", FLAGS.values())
def test_a_flag_of_an_optional_package_names_a_module(module):
    assert importlib.util.find_spec(module)


def test_the_core_trains_without_the_folders_of_optional_packages(tmp_path):
    """Without all of them at once: none imports another, see below."""
    shutil.copytree(ROOT / "meshtrain", tmp_path / "meshtrain", ignore=shutil.ignore_patterns(*PACKAGES, "__pycache__"))
    assert not [package for package in PACKAGES if (tmp_path / "meshtrain" / package).exists()]
    (tmp_path / "small.py").write_text(SMALL)
    names = [
        f"{key}={10 if key == 'local_steps.period' else name}"
        for key, place_of in EXTENSION_POINTS.items()
        for name in place_of.optional_names
    ]
    # The package is found in the current folder first.
    command = [sys.executable, "-c", CORE, ",".join(PACKAGES), ",".join(names)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_they_are_the_packages_that_no_other_may_import():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [order] = [contract for contract in contracts if contract["id"] == "order"]
    assert [package.strip(" ()") for package in order["layers"][0].split("|")] == PACKAGES
