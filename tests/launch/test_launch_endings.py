"""One process ends with an error: what the others print, with which code, and who ends last."""

import json
import subprocess
import sys
import threading

import pytest

from meshtrain import errors
from meshtrain.errors import TooFew, UserError
from meshtrain.launch import endings, peers
from tests.launch.test_launch_peers import ROOT, two_processes

LINE = "meshtrain: error: data.path: got b; allowed: a; nearest: a"


class Store:
    """What endings use of the coordination service's client; each waits for the others in another process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite, "a process may publish twice"
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


@pytest.fixture
def job(monkeypatch):
    """A function number -> makes this process the one of three with this number; returns their store."""

    def become(number):
        monkeypatch.setattr(peers, "own_number", lambda: number)
        return store

    store = Store()
    monkeypatch.setattr(peers, "_service", lambda: store)
    monkeypatch.setattr(peers, "num_connected", lambda: 3)
    monkeypatch.setattr(peers, "is_connected", lambda: True)
    monkeypatch.setattr(endings, "_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(endings, "_LAST_SECONDS", 0.001)
    monkeypatch.setattr(endings, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(endings, "_OWN_SECONDS", 0.001)
    return become


def of(code, lines=LINE, has_printed=True):
    return {"code": code, "lines": lines, "has_printed": has_printed}


@pytest.mark.parametrize("code", [2, 4, 69, 74, 75])
def test_what_one_process_reports_all_report_with_its_code(code):
    assert endings.ending_of_others({1: of(code)}, 0) == (code, LINE)


@pytest.mark.parametrize("code", [1, 130, 141])
def test_a_bug_or_a_second_interrupt_of_one_process_is_a_lost_process_to_the_others(code):
    lines = "Traceback (most recent call last):\n  File ...\nKeyError: 'x'"
    expected = f"meshtrain: lost: process 1 has ended with code {code}: KeyError: 'x'"
    assert endings.ending_of_others({1: of(code, lines)}, 0) == (4, expected)
    assert endings.ending_of_others({1: of(code, "")}, 0) == (4, expected.replace("KeyError: 'x'", "no message"))


@pytest.mark.parametrize("published", [{}, {0: of(2)}, {1: of(0)}, {1: of(3)}])
def test_own_endings_and_those_that_all_find_end_nobody(published):
    assert endings.ending_of_others(published, 0) is None


def test_a_user_error_of_a_block_is_published_before_the_block_ends(job):
    store = job(1)
    with pytest.raises(TooFew), endings.publish_errors():
        raise TooFew("mesh: got 3")
    assert json.loads(store.values["meshtrain/ending/1"]) == of(69, "meshtrain: error: mesh: got 3", False)
    with pytest.raises(ZeroDivisionError), endings.publish_errors():
        _ = 1 / 0
    assert len(store.values) == 1


def test_the_thread_of_another_process_ends_it_with_the_same_lines_and_undoes_its_files(job, monkeypatch):
    ended, undone, store = threading.Event(), [], job(2)
    said = []

    def leave(code, lines):
        said.append((code, lines))
        ended.set()
        ends.set()

    monkeypatch.setattr(errors, "leave_at_once", leave)
    monkeypatch.setattr(errors, "_before_leaving", [])
    monkeypatch.setattr(endings.signals, "undo", lambda: undone.append(True))
    ends = threading.Event()
    listener = threading.Thread(target=endings._listen, args=(ends,))
    listener.start()
    store.values["meshtrain/ending/1"] = json.dumps(of(2))
    assert ended.wait(60)
    listener.join(60)
    assert (said[0], undone[0]) == ((2, LINE), True)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_process_0_ends_once_all_have_printed_and_others_once_all_know(job, number):
    store, over = job(number), threading.Event()
    thread = threading.Thread(target=lambda: (endings._say_farewell(2, LINE), over.set()))
    thread.start()
    others = sorted({0, 1, 2} - {number})
    store.values[f"meshtrain/ending/{others[0]}"] = json.dumps(of(2))
    assert not over.wait(0.05)
    store.values[f"meshtrain/ending/{others[1]}"] = json.dumps(of(2, has_printed=False))
    assert over.wait(0.05 if number == 0 else 60) == (number != 0)
    store.values[f"meshtrain/ending/{others[1]}"] = json.dumps(of(2))
    assert over.wait(60)
    assert json.loads(store.values[f"meshtrain/ending/{number}"]) == of(2)


# Process 0 is inside C, in a wait for a message that never comes; process 1 finds an error.
FINDS = """
from meshtrain import errors
from meshtrain.launch import distributed, peers
distributed.start(2)
def main():
    if peers.index() == {finder}:
        raise errors.UserError("data.path: got b; allowed: a; nearest: a")
    peers._service().blocking_key_value_get("never", 600_000)
errors.run(main)
"""


@pytest.mark.parametrize("finder", [0, 1])
def test_the_error_of_one_process_ends_both_though_the_other_waits_for_a_message(finder):
    done = two_processes(FINDS.format(finder=finder))
    assert done.returncode == 2
    assert [f"[{number}] {LINE}" in done.stderr for number in (0, 1)] == [True, True], done.stderr


def test_a_user_error_alone_is_not_told_to_anybody(capsys):
    with pytest.raises(UserError), endings.publish_errors():
        raise UserError("a: got b")
    words = "from meshtrain.errors import run, UserError\ndef main(): raise UserError('a: got b')\nrun(main)"
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "meshtrain: error: a: got b\n")
