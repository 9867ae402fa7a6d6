"""What a run keeps in its folder besides its arrays."""

import errno
import json
import os
import time

import pytest

from meshtrain.errors import UserError
from meshtrain.run import workdir

CLOCKS_DIFFER = 0.01  # seconds between `time.time` and `time.monotonic`, which are read in turn


def begun(run, logged_seconds=0.0):
    own_seconds = time.monotonic() - 3.0  # this process began three seconds ago
    return own_seconds - workdir.start_seconds(run, own_seconds, logged_seconds)


def test_the_first_process_began_the_run(tmp_path):
    before = time.time()
    assert begun(tmp_path) == 0.0
    found = json.loads((tmp_path / "corpus.json").read_text())["begun_seconds"]
    assert before - 3 - CLOCKS_DIFFER <= found <= time.time() - 3 + CLOCKS_DIFFER


def test_a_full_disk_is_a_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(workdir.os, "write", full)
    with pytest.raises(UserError, match=r"cannot write \(No space left on device\)"), workdir.lock(tmp_path / "run"):
        pass


def test_time_between_two_processes_counts(tmp_path):
    before = time.time()
    (tmp_path / "corpus.json").write_text(json.dumps({"begun_seconds": before - 103}))
    assert 100 - CLOCKS_DIFFER <= begun(tmp_path) <= 100 + time.time() - before + CLOCKS_DIFFER


def test_a_clock_that_was_set_back_does_not_make_the_run_younger(tmp_path):
    (tmp_path / "corpus.json").write_text(json.dumps({"begun_seconds": time.time() + 1000}))
    assert begun(tmp_path, logged_seconds=50.0) == 50.0


def start(run, *files):
    """Begins a run that fails, after it has made some files and its folder of checkpoints."""

    def begin():
        with workdir.lock(run):
            (run / "checkpoints").mkdir(exist_ok=True)
            for name in files:
                (run / name).write_text("{}")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        begin()


def test_a_start_that_fails_before_its_first_step_leaves_nothing(tmp_path):
    start(tmp_path / "runs" / "new", "config.json", "layout.txt", "corpus.json")
    assert list(tmp_path.iterdir()) == []


def test_what_is_somebody_elses_stays(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "tensorboard").mkdir()
    start(tmp_path, "config.json")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "tensorboard"}


def test_a_run_that_has_logged_or_saved_a_step_stays(tmp_path):
    start(tmp_path / "logged", "config.json", "metrics.jsonl")
    start(tmp_path / "saved", "checkpoints/4")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").touch()
    start(tmp_path / "old")
    for name in ("logged", "saved", "old"):
        assert (tmp_path / name / ".lock").exists()
        assert (tmp_path / name / "checkpoints").exists()


def test_one_run_at_a_time_and_the_other_is_told_whose_it_is(tmp_path):
    run = tmp_path / "run"
    with workdir.lock(run):
        second = pytest.raises(UserError, match=rf"^workdir {run}: in use by process {os.getpid()} on .* since ")
        with second, workdir.lock(run):
            pass
    with workdir.lock(run):
        assert (run / ".lock").exists(), "who was refused has removed nothing"


def test_a_lock_whose_file_was_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Another start fails, and removes its files, between our opening the lock and our locking it."""
    flock, calls = workdir.fcntl.flock, []

    def removed_first(file, how):
        calls.append(how)
        if len(calls) == 1:
            (tmp_path / "run" / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(workdir.fcntl, "flock", removed_first)
    with workdir.lock(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text().startswith("process ")
    assert len(calls) == 2
