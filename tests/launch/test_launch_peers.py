"""Messages and reports between processes: with a store in this process in place of JAX's service, and through it."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from meshtrain.errors import Interrupted
from meshtrain.launch import peers

ROOT = pathlib.Path(__file__).parents[2]


class Store:
    """What the exchange uses of the coordination service's client."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        if key in self.values:
            raise RuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def key_value_delete(self, key):
        for one in [one for one in self.values if one.startswith(key)]:
            del self.values[one]


@pytest.fixture
def store(monkeypatch):
    """The store of two processes; this one is process 0."""
    store = Store()
    monkeypatch.setattr(peers, "_service", lambda: store)
    monkeypatch.setattr(peers, "index", lambda: 0)
    monkeypatch.setattr(peers, "count", lambda: 2)
    monkeypatch.setattr(peers, "_exchanges", iter(range(9)))
    return store


def test_a_report_is_known_once_all_have_published_it_and_then_leaves_the_store(store):
    found = []
    with peers.Exchange("own", lambda number, reports: found.append((number, reports))) as opened:
        opened.publish(10, lambda: "a")
        opened.do(lambda: store.key_value_set("meshtrain/own/0/10/1", '"b"'))
        opened.do(lambda: store.key_value_set("meshtrain/own/0/20/1", '"d"'))  # ahead of this process
        opened.publish(20, lambda: "c")
        opened.publish(30, lambda: "e")
    assert found == [(10, {0: "a", 1: "b"}), (20, {0: "c", 1: "d"})]
    assert store.values == {"meshtrain/own/0/30/0": '"e"'}


def test_the_next_run_of_a_program_has_reports_of_its_own(store):
    for letter in ("a", "b"):
        with peers.Exchange("own", lambda *_: None) as opened:
            opened.publish(10, lambda letter=letter: letter)
    assert list(store.values.values()) == ['"a"', '"b"']


def test_nobody_waits_for_a_report(store):
    """Neither the loop while a report is made, nor the end of a run that has failed."""
    made = threading.Event()

    def late():
        made.wait(60)
        raise RuntimeError("the device is gone")

    def fails():
        with peers.Exchange("own", lambda *_: None) as opened:
            opened.publish(10, late)
            assert not made.is_set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert store.values == {}
    made.set()


def test_a_run_that_all_processes_interrupt_ends_after_its_last_report(store):
    def late():
        time.sleep(0.3)
        return "a"

    def interrupted():
        with peers.Exchange("own", lambda *_: None) as opened:
            opened.publish(10, late)
            raise Interrupted("saved")

    with pytest.raises(Interrupted):
        interrupted()
    assert list(store.values.values()) == ['"a"']


def test_a_service_that_is_gone_ends_the_thread(store, monkeypatch):
    def gone(*_):
        raise RuntimeError("UNAVAILABLE: the coordination service is gone")

    monkeypatch.setattr(store, "key_value_set", gone)
    with peers.Exchange("own", lambda *_: None) as opened:
        opened.publish(10, lambda: "a")
        opened.publish(20, lambda: "b")
    assert store.values == {}


def test_differences_between_processes_are_named_by_process():
    facts = [{"jax": "1", "a": 1}, {"jax": "1", "a": 1}, {"jax": "2", "b": 1}]
    lines = peers.differences("versions", facts)
    assert [line.split(";")[0] for line in lines] == [
        "processes: versions differs: a is nothing in process 2 and 1 in process 0",
        "processes: versions differs: b is 1 in process 2 and nothing in process 0",
        "processes: versions differs: jax is '2' in process 2 and '1' in process 0",
    ]


def test_who_is_alone_gets_its_own_words_back():
    assert peers.gather_values("something", {"a": [1]}) == [{"a": [1]}]
    assert peers.share_problems("something", ["one", "one", "two"]) == ["one", "two"]


TALK = """
from meshtrain import errors
from meshtrain.launch import distributed, peers
distributed.start(2)
assert peers.gather_values("a", peers.index()) == [0, 1]
assert peers.gather_values("a", f"{peers.index()} again") == ["0 again", "1 again"]
peers.beat(5)
peers.gather_values("both have", None)
assert {process: sign.split()[0] for process, sign in peers.signs_of_life().items()} == {0: "5", 1: "5"}
peers.gather_values("both have looked", None)
peers.say_finished()
errors.run(lambda: peers.refuse_differences("start", {"x": peers.index()}))
"""


def two_processes(code):
    command = [sys.executable, "-m", "meshtrain.launch", "--processes=2", "--devices=1", "--", "-c", code]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


def test_an_error_of_ours_ends_all_at_once_though_others_wait_for_its_farewell():
    code = (
        "from meshtrain import errors\nfrom meshtrain.launch import distributed, peers\ndistributed.start(2)\n"
        "errors.run(lambda: peers.gather_values('a', None) if peers.index() else 1 / 0)"
    )
    done = two_processes(code)
    assert done.returncode == 1
    assert "[0] ZeroDivisionError: division by zero" in done.stderr
    assert "process 0 ended first, with code 1" in done.stderr


def test_processes_talk_through_the_service_that_jax_keeps():
    """Tells when JAX has moved what `peers` reaches for."""
    done = two_processes(TALK)
    assert done.returncode == 2, done.stderr
    # XLA may add a word of its own about the one that has left first.
    said = sorted(line for line in done.stderr.splitlines() if line.startswith("[") and "meshtrain: " in line)
    difference = "meshtrain: error: processes: start differs: x is 1 in process 1 and 0 in process 0; allowed: "
    assert [line.partition("the same")[0] for line in said] == [f"[0] {difference}", f"[1] {difference}"]
