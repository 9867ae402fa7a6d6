"""Storage fails under a run, or the run is killed while it reads what it has saved: it ends as if nothing had been."""

import gc
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

from meshtrain import errors
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.launch.local_processes import NEVER_RETRIED
from meshtrain.run import saving

ROOT = pathlib.Path(__file__).parents[2]
FSDP = ("mesh.fsdp=2",)
SAVES = (*FSDP, "checkpoint.every=3", "log_every=1")  # after steps 3, 6, 9 and 10


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
def test_a_full_disk_is_one_line_for_each_save_and_the_same_command_goes_on(
    run, straight, around_saves, tmp_path, capfd
):
    free, directory = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "run"

    def fill(number, _):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, free[1]) if number in (2, 4) else free)

    saves = around_saves(fill, lambda *_: None)
    try:
        with pytest.raises(SystemExit) as ended:
            errors.run(lambda: run(directory, *SAVES) and 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
    assert ended.value.code == errors.EXIT_NOT_SAVED
    assert ended.value.code not in NEVER_RETRIED
    assert saves == [3, 6, 9, 10]
    gc.collect()  # what asyncio says of tasks and futures, it says when they go
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    for line, start, step in zip(lines, ("WARNING", "not saved"), (6, 10), strict=True):
        where = directory / "checkpoints" / str(step)
        assert line.startswith(f"meshtrain: {start}: checkpoint {where}: not written: File too large (")
        assert " free on /" in line
        assert len(line) < 500
    assert lines[1].endswith("; the same command resumes from step 9")
    again = run(directory, *SAVES)
    assert again.losses == straight.losses
    assert failures(again) == 1
    with Checkpoints(directory / "checkpoints", None) as checkpoints:
        assert checkpoints.steps() == [3, 9, 10]


def test_a_last_save_that_cannot_be_started_is_not_taken_for_one(tmp_path):
    (tmp_path / "run").mkdir()
    with Checkpoints(tmp_path / "run" / "checkpoints", CheckpointOptions()) as checkpoints:
        checkpoints.save(3, {"params": {"w": jnp.zeros(3)}}, {})
        checkpoints.wait()
        saving.finish(checkpoints)
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").touch()  # no folder can be made there now
        with pytest.raises(errors.SaveFailed):
            checkpoints.save(4, {"params": {"w": jnp.zeros(3)}}, {})
        with pytest.raises(
            errors.SaveFailed, match=r"/4: not written: .*; the same command starts from the beginning$"
        ):
            saving.finish(checkpoints)


@pytest.mark.timeout(180)  # a save that is not told of its failure waits for ever
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
from meshtrain.main import main
from meshtrain.checkpoint.checkpoint import Checkpoints

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
        (directory / "checkpoints/owner.json").unlink(missing_ok=True)  # of the killed process; a start replaces it
        assert written(directory / "checkpoints") == saved
    assert run(directory, *FSDP).losses == straight.losses
