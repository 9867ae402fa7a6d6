"""A folder of checkpoints has one owner, as a bucket has: another run is refused, one that has ended is replaced."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from meshtrain.checkpoint import owner
from meshtrain.errors import EXIT_LOST_PEER, UserError
from meshtrain.launch import peers

HERE = socket.gethostname()
ME = f"process {os.getpid()} on {HERE}"


DEAD = f"process {2**22 + 1} on {HERE}"  # a number that Linux gives to no process


def plant(folder, run="another", host="process 7 on far", silent=0.0, **more):
    (folder / owner.OWNER).write_text(json.dumps({"run": run, "host": host, "seconds": time.time() - silent, **more}))


def refusal(folder, run="mine"):
    """The line with which a run is refused; '' for one that gets the folder, and leaves it without an owner."""
    before = (folder / owner.OWNER).read_text() if (folder / owner.OWNER).exists() else ""
    try:
        with owner.own_folder(str(folder), run):
            assert json.loads((folder / owner.OWNER).read_text())["host"] == ME
        assert not (folder / owner.OWNER).exists()
    except UserError as error:
        assert (folder / owner.OWNER).read_text() == before
        return "\n".join(error.problems)
    return ""


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (
            {"silent": 42},
            r"used by process 7 on far 42 s ago; .*; nearest: another directory, or the same directory in 5\d\d s",
        ),
        ({"silent": 601}, ""),
        ({"silent": -601}, ""),
        ({"run": "mine"}, ""),
        ({"host": DEAD}, ""),
        ({"host": DEAD, "machine": "another container's"}, "the same directory in 600 s"),
        ({"host": DEAD, "machine": owner._machine()}, ""),
        ({"host": ME}, f"used by {ME} 0 s ago; .*, or the same directory after that run has ended"),
        ({"host": ME, "silent": 601}, f"used by {ME} 601 s ago"),
        ({"host": ME, "started": "1"}, ""),
        ({"host": f"process {os.getppid()} on {HERE}", "run": "mine"}, "the same directory after that run has ended"),
        ({"host": "process of nobody's", "silent": 9}, "used by process of nobody's 9 s ago"),
    ],
    # Without numbers of processes: the workers of a test run must collect the same names.
    ids=[
        *("silent for 42 s", "silent for 601 s", "42 s in the future", "the same run", "ended", "ended elsewhere"),
        *(
            "ended in this container",
            "this process",
            "this process, silent",
            "another start",
            "the parent",
            "no number",
        ),
    ],
)
def test_an_owner_is_replaced_once_its_process_has_ended_or_is_silent(planted, said, tmp_path):
    plant(tmp_path, **planted)
    line = refusal(tmp_path)
    assert bool(line) == bool(said), line
    assert re.search(said, line)
    assert "\n" not in line


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"run": 1, "host": "a", "seconds": 1e999}', "\0"])
def test_a_damaged_file_is_nobody_s(content, tmp_path):
    (tmp_path / owner.OWNER).write_text(content)
    assert refusal(tmp_path) == ""


def test_a_process_that_waits_to_be_reaped_has_ended(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    plant(tmp_path, host=f"process {process.pid} on {HERE}")
    assert refusal(tmp_path) == ""
    process.wait()


def test_of_two_runs_the_first_stays(tmp_path):
    link = tmp_path / "link"
    (tmp_path / "checkpoints").mkdir()
    link.symlink_to("checkpoints")
    with owner.own_folder(str(tmp_path / "checkpoints"), "first") as lost:
        assert f"got {link}, used by {ME}" in refusal(link, "second")
        assert lost() == ""
    assert refusal(link, "second") == ""


def test_of_two_that_begin_at_once_one_is_let_through(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "_owner", lambda place: {})  # both look before either has written
    with owner.own_folder(str(tmp_path), "one"):
        assert "where another run is starting" in refusal(tmp_path, "two")


def test_a_folder_that_cannot_be_made_or_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="allowed: a directory that can be written"),
        owner.own_folder(tmp_path / "file", "a"),
    ):
        pass

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner.buckets, "write", full)
    with (
        pytest.raises(UserError, match="got No space left on device; allowed: "),
        owner.own_folder(tmp_path / "new", "a"),
    ):
        pass


def test_one_process_owns_it_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "is_main_process", lambda: False)
    with owner.own_folder(str(tmp_path / "elsewhere"), "a") as lost:
        assert lost() == ""
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("may_vanish", [False, True])
def test_a_folder_that_is_deleted_or_replaced_is_noticed(may_vanish, tmp_path):
    folder = tmp_path / "checkpoints"
    with owner.own_folder(str(folder), "a", may_vanish=may_vanish) as lost:
        assert lost() == ""
        shutil.rmtree(folder)
        assert bool(lost()) != may_vanish
        assert not folder.exists()
        folder.mkdir()
        assert lost() == ("" if may_vanish else (
            f"checkpoint.directory: got a folder without {owner.OWNER} at {folder} instead of this run's folder; "
            "allowed: the run's own folder until the end"))  # fmt: skip
        assert (folder / owner.OWNER).exists() == may_vanish
    assert not list(folder.iterdir())


def test_an_owner_that_was_taken_over_leaves_at_once_and_keeps_the_other_s_file(tmp_path, monkeypatch):
    said, left = [], threading.Event()

    def leave(code, line):
        said.append((code, line))
        left.set()
        raise OSError("it has left")

    monkeypatch.setattr(owner, "_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(owner, "leave_at_once", leave)
    with owner.own_folder(str(tmp_path), "mine") as lost:
        plant(tmp_path, run="mine")  # the same run on another machine: this one was asleep
        assert left.wait(20)
        with pytest.raises(OSError, match="it has left"):
            lost()
    assert set(said) == {(EXIT_LOST_PEER, f"meshtrain: lost: {tmp_path} was taken over by process 7 on far")}
    assert (tmp_path / owner.OWNER).exists()
