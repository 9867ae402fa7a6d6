"""Side rooms: the core runs without their folders, and their names stand in one table."""

import importlib
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

from meshtrain.options import FLAGS, SEAMS

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ["examples", "lab", "probe", "report"]
# In one process: explain a run, train two steps of it, evaluate it; and what the names of the rooms come to.
CORE = """
import re
import sys
# An installation that is edited in place finds the folder that is missing here.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
from meshtrain.__main__ import COMMANDS, main
from meshtrain.config.resolve import resolve
from meshtrain.config.former import FORMER, Gone
from meshtrain.errors import UserError
from meshtrain.options import FLAGS

rooms, names = (words.split(",") for words in sys.argv[1:])
for command, (module, _) in COMMANDS.items():
    if (room := module.split(".")[1]) in rooms:
        try:
            main([command])
        except UserError as error:
            assert str(error).startswith(f"command: got '{command}', and meshtrain/{room} is not here; allowed: ")
        else:
            raise AssertionError(command)
for flag, module in FLAGS.items():
    if (room := module.split(".")[1]) in rooms:
        value = {"--scaling": "8,16", "--html": "plan.html"}[flag]
        try:
            main(["plan", "--config=small.py", "--cluster=cpu:8", f"{flag}={value}"])
        except UserError as error:
            [line] = error.problems
            assert line.startswith(f"{flag}: got '{value}', and meshtrain/{room} is not here; allowed: "), line
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
gone = {key: one.default for key, one in FORMER.items() if isinstance(one, Gone)}
assert resolve(gone) == resolve({})
assert not [name for name in sys.modules if name.startswith(tuple(f"meshtrain.{room}" for room in rooms))]
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


@pytest.mark.parametrize("seam, name", [(seam, name) for seam in SEAMS for name in SEAMS[seam].side_rooms])
def test_a_name_of_a_side_room_stands_for_something(seam, name):
    module, _, attribute = SEAMS[seam].side_rooms[name].partition(":")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("module", FLAGS.values())
def test_a_flag_of_a_side_room_names_a_module(module):
    importlib.import_module(module)


def test_the_core_trains_without_the_folders_of_side_rooms(tmp_path):
    """Without all of them at once: none imports another, see below."""
    shutil.copytree(ROOT / "meshtrain", tmp_path / "meshtrain", ignore=shutil.ignore_patterns(*ROOMS, "__pycache__"))
    assert not [room for room in ROOMS if (tmp_path / "meshtrain" / room).exists()]
    (tmp_path / "small.py").write_text(SMALL)
    names = [
        f"{seam}={10 if seam == 'local_steps.period' else name}"
        for seam, place_of in SEAMS.items()
        for name in place_of.side_rooms
    ]
    # The package is found in the current folder first.
    command = [sys.executable, "-c", CORE, ",".join(ROOMS), ",".join(names)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_they_are_the_rooms_that_no_other_may_import():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [order] = [contract for contract in contracts if contract["id"] == "order"]
    assert [room.strip(" ()") for room in order["layers"][0].split("|")] == ROOMS
