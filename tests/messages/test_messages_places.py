"""What is no file or folder, wherever a command asks for one; and a sample of everything in processes of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.messages import test_messages_configurations, test_messages_data, test_messages_files
from tests.messages.refused import (
    DAC_OVERRIDE,
    DAC_READ_SEARCH,
    ODD,
    Case,
    assert_refused,
    assert_same,
    assert_speaks,
    odd_things,
    small,
    snapshot,
)

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = {
    "verify": lambda path: [path],
    "generate": lambda path: [f"--workdir={path}"],
    "evaluate": lambda path: [f"--workdir={path}"],
    "explain": lambda path: [f"--config={path}"],
    "plan": lambda path: ["--config=small.py", "--cluster=cpu:8", f"--calibrate={path}"],
    "prepare": lambda path: [f"--path={path}", "--output=out.bin"],
}


def place_cases():
    for what in [*sorted(set(ODD) - {"folder", "missing"}), "words.txt"]:

        def prepare(folder, what=what):
            places = odd_things(folder) | {"words.txt": "words.txt"}
            return [*small(folder), f"--workdir={places[what]}"]

        yield Case(f"workdir: {what}", prepare, ("--workdir: ",))
    for command, words in COMMANDS.items():
        for what in ODD if command == "generate" else ("loop", "pipe", "folder"):

            def asked(folder, what=what, words=words):
                small(folder)
                return words(odd_things(folder)[what])

            yield Case(f"{command}: {what}", asked, command=command)


CASES = [*place_cases()]
MODULES = (test_messages_configurations, test_messages_data, test_messages_files)
EVERY = {case.name: case for case in (*CASES, *(case for module in MODULES for case in module.CASES))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_place_that_holds_something_else_is_refused(case, tmp_path, monkeypatch):
    assert_refused(case, tmp_path, monkeypatch)


WITHOUT_RIGHTS = f"""
import ctypes, os, sys
if os.geteuid() == 0:  # what is dropped from the bounding set does not come back with exec: prctl(2), 24
    for capability in ({DAC_OVERRIDE}, {DAC_READ_SEARCH}):
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mesh.data=many", "file: exits", "data.path: pipe", "words.txt: forbidden"])
def test_a_process_says_the_same(name, tmp_path, monkeypatch):
    """Exit code, lines and time as the system sees them."""
    case = EVERY[name]
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = case.prepare(folder)
    before = snapshot(folder)
    program = [sys.executable, "-c", WITHOUT_RIGHTS, "-m", "meshtrain", case.command, *words]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert_speaks(done.stderr.splitlines())
    assert_same(before, snapshot(folder))
