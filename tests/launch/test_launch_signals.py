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
        "meshtrain: interrupted: before the first step, so nothing is lost; the same command starts again\n"
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
