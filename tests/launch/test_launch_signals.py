"""Signals before the first step, and a terminal that goes away."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from meshtrain.launch import signals

ROOT = pathlib.Path(__file__).parents[2]
# As a compiler does, PBKDF2 keeps the main thread in C, where no handler in Python runs, and lets other threads run.
BUSY = """
import hashlib, pathlib, sys
from meshtrain.launch import signals
with signals.stops_at_signals(), signals.undone(pathlib.Path(sys.argv[1]).unlink):
    if sys.argv[2] == "over":
        signals.over()
    print("started", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def stopped(tmp_path, number, moment="starting", **options):
    """Returns (exit code, what it printed on standard error) of a busy process that got a signal."""
    (tmp_path / "litter").touch()
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path / "litter"), moment],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        return process.wait(timeout=60), process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_busy_start_at_once_and_undoes_what_it_made(tmp_path, number):
    code, said = stopped(tmp_path, number)
    assert code == 75
    assert said == (
        "meshtrain: interrupted: before the first step, so nothing is lost; the same command starts the run again\n"
    )
    assert not (tmp_path / "litter").exists()


def test_once_steps_begin_signals_are_left_to_others(tmp_path):
    assert stopped(tmp_path, signal.SIGTERM, "over") == (-signal.SIGTERM, "")
    assert (tmp_path / "litter").exists()


def test_handlers_and_descriptor_are_what_they_were_afterwards():
    before = [signal.getsignal(number) for number in signals.STOPPING], len(os.listdir("/proc/self/fd"))
    with signals.stops_at_signals():
        assert signal.getsignal(signal.SIGINT) != before[0][0]
    assert ([signal.getsignal(number) for number in signals.STOPPING], len(os.listdir("/proc/self/fd"))) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.stops_at_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_test_starts_heeds_signals_that_the_tests_ignore():
    """Under `nohup scripts/test &` they do: programs inherit that signals are ignored."""
    start = "subprocess.run([sys.executable, '-c', 'import signal; print(int(signal.getsignal(signal.SIGHUP)))'])"
    code = f"import os, signal, subprocess, sys; from tests import signals\n{start}\n"
    code += f"signals.handled_instead_of_ignored()\n{start}\nos.kill(os.getpid(), signal.SIGHUP); print('alive')"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-u", "-c", code], cwd=ROOT, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.stdout.split() == [str(int(signal.SIG_IGN)), str(int(signal.SIG_DFL)), "alive"], done.stderr


def test_a_block_that_fails_is_undone_and_one_that_ends_is_not():
    did = []
    with signals.undone(lambda: did.append("ended")):
        pass
    with contextlib.suppress(ZeroDivisionError), signals.undone(lambda: did.append("failed")):
        raise ZeroDivisionError
    assert did == ["failed"]


TALKS = """
import fcntl, pathlib, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal belongs to this session, which gets SIGHUP when it goes
from meshtrain.launch.signals import interruptions
with interruptions() as interrupted:
    step = 0
    print("started", flush=True)
    while not interrupted(step):
        step += 1
        time.sleep(0.01)
    for _ in range(100):
        print("a line that nobody can read any more", flush=True)
    print("nor this one", file=sys.stderr, flush=True)
    pathlib.Path(sys.argv[1]).write_text("saved")
"""


def test_a_terminal_that_goes_away_does_not_keep_a_run_from_saving(tmp_path):
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TALKS, str(tmp_path / "checkpoint")],
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        assert b"started" in os.read(master, 100)
        os.close(master)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "checkpoint").read_text() == "saved"


FORKS = """
import multiprocessing, sys, time
from meshtrain.launch import signals
fork = multiprocessing.get_context("fork")
block = signals.stops_at_signals() if sys.argv[1] == "starting" else signals.interruptions()
with block as interrupted:
    helper = fork.Process(target=time.sleep, args=(600,))
    helper.start()
    helper.terminate()
    helper.join()
    if interrupted:
        assert not interrupted(1)
print(helper.exitcode)
"""


@pytest.mark.parametrize("moment", ["starting", "in its steps"])
def test_a_forked_process_has_signals_of_its_own(moment):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, moment], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n"), done.stderr


IMPORTS = """
import sys
from meshtrain.cli import first_signals
first_signals.begin(is_training=sys.argv[1] == "train")
print("started", flush=True)
while True:  # as the imports of a program do
    sum(range(1000))
"""


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("train", signal.SIGINT, 75),
        ("train", signal.SIGTERM, 75),
        ("train", signal.SIGHUP, 75),
        ("plan", signal.SIGINT, 130),
        ("plan", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_a_signal_during_imports_ends_with_a_documented_code_and_no_traceback(command, number, code):
    words = [sys.executable, "-c", IMPORTS, command]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    line = "meshtrain: interrupted: before the first step, so nothing is lost; the same command starts the run again\n"
    assert (process.returncode, said) == (code, line if command == "train" else "")


STEPS = """
import signal, sys
from meshtrain import errors
from meshtrain.launch import signals

class Swallows:
    def __del__(self):  # an exception inside of it would be printed and ignored
        signal.raise_signal(signal.SIGINT)

def main():
    with signals.stops_at_signals():
        with signals.interruptions() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert interrupted(1)
            if sys.argv[1] == "second":
                Swallows()
                raise AssertionError
        if sys.argv[1] == "after":
            signal.raise_signal(signal.SIGTERM)
            signal.pause()
        raise errors.Interrupted("saved at step 1 of 2")

errors.run(main)
"""
AFTER = "meshtrain: interrupted: after the last step, whose state is saved; the same command completes the run\n"


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("first", (75, "meshtrain: interrupted: saved at step 1 of 2\n")),
        ("second", (130, "")),
        ("after", (75, AFTER)),
    ],
)
def test_a_second_interrupt_leaves_at_once_and_a_signal_after_the_last_step_ends_with_75(moment, expected):
    done = subprocess.run([sys.executable, "-c", STEPS, moment], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == expected


def test_a_signal_while_python_ends_has_the_code_of_the_program():
    code = (
        "import atexit, signal\nfrom meshtrain.errors import run\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\nrun(lambda: 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")
