"""How a program ends whose output nobody reads, or that finds no room for it; and what a line of it contains."""

import os
import pathlib
import subprocess
import sys

import pytest

from meshtrain.__main__ import COMMANDS
from meshtrain.errors import Problem, Problems, one_line

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parents[2]
MANY_LINES = "print('a line of output\\n' * 20_000)"  # more than a pipe or a buffer holds
IN_A_GROUP = """
import sys, types
alone = types.SimpleNamespace(is_initialized=lambda: True)
sys.modules['jax'] = types.SimpleNamespace(distributed=alone)  # as if this were one of several processes
"""
FULL = (
    "meshtrain: error: <stdout>: cannot be written (No space left on device); allowed: a disk with free space; "
    "nearest: another file\n"
)


def program(statement, before=""):
    return [
        "-c",
        f"{before}\nfrom meshtrain.errors import run, UserError\ndef main():\n    {statement}\nrun(main)",
    ]


PROGRAMS = {
    "one line": program("print('a line')"),
    "many lines": program(MANY_LINES),
    "many lines, one of several processes": program(MANY_LINES, IN_A_GROUP),
    "doctor's end": program("print('a line'); from meshtrain.errors import leave_at_once; leave_at_once(0)"),
    "table of commands": ["-m", "meshtrain", "--help"],
    "help of train": ["-m", "meshtrain", "train", "--help"],
}


def ended(words, unbuffered="", **streams):
    """Returns (exit code, what standard error got) of a Python program with these streams."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    given = {"stderr": subprocess.PIPE, **streams}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False, **given)
    return done.returncode, (done.stderr or b"").decode()


@pytest.fixture
def closed():
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS)
def test_a_closed_pipe_ends_a_program_without_a_word(words, closed):
    assert ended(words, stdout=closed) == (141, "")


@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS)
def test_a_full_disk_is_one_line(words):
    with open("/dev/full", "wb") as full:
        assert ended(words, stdout=full) == (74, FULL)


@pytest.mark.parametrize("name", ["one line", "many lines"])
def test_a_stream_without_a_buffer_ends_alike(name, closed):
    assert ended(PROGRAMS[name], unbuffered="1", stdout=closed) == (141, "")


def test_lines_of_errors_that_nobody_reads_leave_no_traceback(closed):
    words = program("raise UserError('a: got b')")
    assert ended(words, stdout=closed) == (2, "meshtrain: error: a: got b\n"), "its own code counts"
    assert ended(words, stdout=closed, stderr=closed) == (141, "")
    assert ended(program("print('a line'); return 3"), stdout=closed) == (3, "")


def test_a_program_without_standard_output_runs():
    words = [sys.executable, *program("import sys; sys.stdout.write('a line')")]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_error_of_the_system_keeps_its_traceback():
    code, said = ended(program("open('/no/such/file')"), stdout=subprocess.DEVNULL)
    assert code == 1
    assert said.startswith("Traceback")
    assert "FileNotFoundError" in said


def test_launch_ends_its_processes_when_nobody_reads(closed):
    lines = "import time\nfor _ in range(300): print('a line', flush=True); time.sleep(0.01)"
    code, said = ended(["-m", "meshtrain", "launch", "--processes=2", "--", "-c", lines], stdout=closed)
    assert (code, said) == (141, "")


def test_every_command_starts_in_the_program_that_heeds_its_output():
    """`run` ends them all: a command with an end of its own would bring the traceback back."""
    for module, _ in COMMANDS.values():
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert "run(lambda: main(sys.argv[1:]))" in text, module


def test_long_values_and_numbers_are_short_in_a_line():
    for value, most in (("9" * 500, 80), (f"-0.{'3' * 500}", 80), (f"{10**300:,}", 80), ("x" * 5000, 300)):
        assert len(one_line(f"seed: got {value}; allowed: a number; nearest: 0")) < most
    line = one_line(f"data.path: got '{'a file, ' * 500}'; allowed: files, as the model's 'text' has; nearest: 'a.txt'")
    assert len(line) < 300
    assert line.endswith("'; allowed: files, as the model's 'text' has; nearest: 'a.txt'")
    names = ", ".join(f"'name{number}'" for number in range(60))  # none of them is a long value
    assert one_line(f"mesh: got 'x'; allowed: {names}; nearest: 'name1'").count("name") == 61
    many = one_line(f"got {'many words ' * 5000}; allowed: few; nearest: 'a fix'")
    assert len(many) < 4100
    assert many.endswith("; allowed: few; nearest: 'a fix'")


def test_equal_problems_of_lines_share_a_line():
    problems = Problems([Problem.plain("first")])
    for number in range(30):
        problem = Problem("{where}", got=number % 2, allowed=2)
        problems.add_at(f"line {number}", problem, "3" if number % 2 else "")
    problems.add_at("line 99", Problem("{where}", got="{braces} {where}", allowed="x", nearest="y"))
    assert problems.lines() == [
        "first",
        "line 0 and others: got 0; allowed: 2; nearest: leave them out, or rewrite them",
        "line 1 and others: got 1; allowed: 2; nearest: 3",
        "line 99: got {braces} {where}; allowed: x; nearest: y",
    ]
    assert problems.count == 32
    for number in range(20):
        problems.add_at(f"line {number}", Problem("{where}", fault=f"other {number}"), None)
    assert problems.lines()[4:] == [
        *(f"line {number}: other {number}" for number in range(6)),
        "... and 14 more like these",
    ]
