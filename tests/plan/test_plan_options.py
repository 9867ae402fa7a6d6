"""Training and planning compile with the same options."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from meshtrain import hardware
from meshtrain.plan import compile as compiling

ROOT = pathlib.Path(__file__).parents[2]


def test_training_and_planning_read_the_same_table():
    training = importlib.import_module("meshtrain.assemble")  # the module, whatever the package calls so
    assert training.compiler_options is compiling.compiler_options is hardware.compiler_options


def test_gpus_have_options_with_typed_values_and_reasons_and_cpus_have_none():
    options = hardware.options_of("NVIDIA A100-SXM4-80GB")
    assert options
    assert all(option.reason and not isinstance(option.value, str) for option in options)
    assert hardware.compiler_options("cpu") == {}
    assert len({option.name for option in options}) == len(options)


@pytest.mark.parametrize(("version", "num_options"), [("0.10.2", 5), ("0.11.2", 1), ("0.12.0.1", 1), ("1.0", 1)])
def test_options_that_newer_compilers_refuse_are_left_out(monkeypatch, version, num_options):
    monkeypatch.setattr(hardware.importlib.metadata, "version", lambda name: version)
    assert len(hardware.options_of("NVIDIA H100 80GB HBM3")) == num_options


NOISE = """
import os, time
from meshtrain.launch.quiet import captured
with captured() as lines:
    os.write(2, b"I1121 nothing of interest\\n")
    if WHAT:
        os.write(2, WHAT)
        time.sleep(0.5)
        os._exit(134)
print(lines)
"""


@pytest.mark.parametrize(
    ("what", "printed", "errors"),
    [
        (b"", "['I1121 nothing of interest']\n", ""),
        (b"F1121 shape.h:847] Check failed\n    @ there\n", "", "F1121 shape.h:847] Check failed\n    @ there\n"),
    ],
)
def test_what_a_compiler_says_is_kept_unless_it_is_its_last_word(what, printed, errors):
    code = NOISE.replace("WHAT", repr(what))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (printed, errors)
