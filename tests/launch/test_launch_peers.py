"""Reports between processes, with a store in this process in place of JAX's service."""

import threading

import pytest

from meshtrain.launch import peers


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


def test_a_service_that_is_gone_ends_the_thread(store, monkeypatch):
    def gone(*_):
        raise RuntimeError("UNAVAILABLE: the coordination service is gone")

    monkeypatch.setattr(store, "key_value_set", gone)
    with peers.Exchange("own", lambda *_: None) as opened:
        opened.publish(10, lambda: "a")
        opened.publish(20, lambda: "b")
    assert store.values == {}
