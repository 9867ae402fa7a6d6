"""Storage fails under a run, or the run is killed while it reads what it has saved: it ends as if nothing had been."""

import gc
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from meshtrain.store.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
FSDP = ("mesh.fsdp=2",)
SAVES = (*FSDP, "checkpoint.every=3", "log_every=1")  # after steps 3, 6, 9 and 10
# A save of Orbax that fails says so a second time, as exceptions of threads and coroutines that nobody awaits.
ORBAX_LEAVES_THREADS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
ORBAX_LEAVES_COROUTINES = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def around_saves(monkeypatch):
    """A function (before, after), each (number of the save, its folder) -> None, that are called around each save."""

    def install(before, after):
        original, seen = Checkpoints.save, []

        def save(checkpoints, step, *given):
            seen.append(step)
            before(len(seen), checkpoints.directory)
            try:
                return original(checkpoints, step, *given)
            finally:
                after(len(seen), checkpoints.directory)

        monkeypatch.setattr(Checkpoints, "save", save)
        return seen

    yield install
    gc.collect()  # what is left of a failed save is complained about here, and not in somebody else's test


def failures(ran):
    return sum(row.get("failed_saves", 0) for row in ran.rows)


@pytest.mark.timeout(180)  # a save that is not told of its failure waits for ever
@ORBAX_LEAVES_THREADS
@ORBAX_LEAVES_COROUTINES
def test_a_full_disk_is_said_counted_and_tried_again_while_the_run_goes_on(
    run, straight, around_saves, tmp_path, capfd
):
    free = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(number, _):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, free[1]) if number == 2 else free)

    saves = around_saves(fill, lambda *_: None)
    try:
        ran = run(tmp_path / "run", *SAVES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
    assert saves == [3, 6, 9, 10]
    assert failures(ran) == 1
    assert f"{ran.directory / 'checkpoints' / '6'}: not written: " in capfd.readouterr().err
    assert ran.losses == straight.losses
    with Checkpoints(ran.directory / "checkpoints", None) as checkpoints:
        assert checkpoints.steps() == [3, 9, 10]


@pytest.mark.timeout(180)  # a save that is not told of its failure waits for ever
@ORBAX_LEAVES_THREADS
@ORBAX_LEAVES_COROUTINES
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_folder_that_vanishes_during_a_save_does_not_end_the_run(run, straight, around_saves, tmp_path, moment):
    def vanish(number, directory):
        if number == 2:
            shutil.rmtree(directory, ignore_errors=True)

    nothing = lambda *_: None  # noqa: E731
    around_saves(*((vanish, nothing) if moment == "before" else (nothing, vanish)))
    ran = run(tmp_path / "run", *SAVES)
    assert ran.losses == straight.losses
    with Checkpoints(ran.directory / "checkpoints", None) as checkpoints:
        assert {9, 10} <= set(checkpoints.steps())
        assert 3 not in checkpoints.steps()
        assert checkpoints.newest_whole() == (10, [])


# Kills itself, as SIGKILL would, at one of the calls of the way from the folder to the first step.
KILLED_AT = """
import os, signal, sys
from meshtrain.store.checkpoint import Checkpoints
from meshtrain.main import main

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

name, when = sys.argv[1:3]
original = getattr(Checkpoints, name)

def call(*given, **named):
    if when == "before":
        kill()
    original(*given, **named)
    kill()

setattr(Checkpoints, name, call)
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.slow
def test_kills_while_a_checkpoint_is_read_lose_nothing(run, stopped, straight, command, written):
    directory = stopped(*FSDP)
    saved = written(directory / "checkpoints")
    for name, when in (("newest_whole", "before"), ("restore", "before"), ("_read", "after")):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED_AT, name, when, *command(directory, *FSDP)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert written(directory / "checkpoints") == saved
    assert run(directory, *FSDP).losses == straight.losses
