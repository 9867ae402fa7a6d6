"""The roll call between threads of this process: who answers, who is missing, and what a stranger can do."""

import concurrent.futures
import json
import socket
import time

import pytest

from meshtrain.launch.cluster import Meeting
from meshtrain.probe.rollcall import Hub, Member, Single, Unreachable, clock_offset


@pytest.fixture
def meetings():
    """A function (number of processes) -> the meeting of each, at a free port of this machine."""

    def at_a_free_port(count):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        return [Meeting(f"127.0.0.1:{port}", count, index) for index in range(count)]

    return at_a_free_port


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


def once(meeting, value):
    with Member(meeting, 20) as call:
        return call.exchange("a", value, 20)


def test_all_learn_what_all_have_said(meetings, threads):
    first, *others = meetings(3)
    calls = [threads.submit(once, one, f"from {one.index}") for one in others]
    with Hub(first, {}) as hub:  # after the others have begun to try
        wanted = {0: "from 0", 1: "from 1", 2: "from 2"}
        assert hub.exchange("a", "from 0", 20) == wanted
        assert [call.result(20) for call in calls] == [wanted] * 2


def test_a_missing_process_is_not_waited_for_twice(meetings, threads):
    first, second, _ = meetings(3)

    def member():
        with Member(second, 20) as call:
            return [call.exchange(name, 1, 20) for name in ("a", "b")]

    heard = threads.submit(member)
    with Hub(first, {}) as hub:
        assert hub.exchange("a", 0, 2.0) == {0: 0, 1: 1}
        hub.stop_listening()
        start = time.monotonic()
        assert hub.exchange("b", 0, 60) == {0: 0, 1: 1}
        assert time.monotonic() - start < 30
        assert heard.result(20) == [{0: 0, 1: 1}] * 2


def test_connections_stay_when_the_port_is_free_again(meetings, threads):
    first, second = meetings(2)

    def member():
        with Member(second, 20) as call:
            return [call.exchange(name, 1, 20) for name in ("a", "b")][1]

    heard = threads.submit(member)
    with Hub(first, {}) as hub:
        hub.exchange("a", 0, 20)
        hub.stop_listening()
        with socket.create_server(("", first.port)):  # as JAX does next
            assert hub.exchange("b", 0, 20) == {0: 0, 1: 1}
        assert heard.result(20) == {0: 0, 1: 1}


def test_who_has_ended_is_named_and_not_waited_for(meetings, threads):
    first, second = meetings(2)

    gone = threads.submit(once, second, 1)
    with Hub(first, {}) as hub:
        hub.exchange("a", 0, 20)
        gone.result(20)
        start = time.monotonic()
        assert hub.exchange("b", 0, 60) == {0: 0}
        assert time.monotonic() - start < 30
        assert hub.ended() == [1]


def test_the_others_learn_that_process_0_has_ended(meetings, threads):
    first, second = meetings(2)

    def member():
        with Member(second, 20) as call:
            call.exchange("a", 1, 20)
            with pytest.raises(Unreachable, match="process 0 has ended"):
                call.exchange("b", 1, 20)

    heard = threads.submit(member)
    with Hub(first, {}) as hub:
        hub.exchange("a", 0, 20)
    heard.result(20)


def test_a_wrong_number_is_refused_and_a_stranger_is_hung_up_on(meetings, threads):
    first, second, _ = meetings(3)
    wrong = [second, Meeting(first.address, 3, 0), Meeting(first.address, 4, 2)]

    def refused(one):
        with pytest.raises(Unreachable) as refusal:
            once(one, 1)
        return str(refusal.value)

    with Hub(first, {}) as hub, socket.create_connection(("127.0.0.1", first.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + json.dumps({"name": "a"}).encode() + b"\n")
        right = threads.submit(once, second, 1)
        while not hub._own:
            hub._pump(time.monotonic() + 0.1, lambda: False)
        calls = [threads.submit(refused, one) for one in wrong]
        assert hub.exchange("a", 0, 2.0) == {0: 0, 1: 1}
        assert right.result(20) == {0: 0, 1: 1}
        said = [call.result(20) for call in calls]
        assert "says that it is process 1, and so does another process" in said[0]
        assert "says that it is process 0, and so does another process" in said[1]
        assert "one of 4 processes, process 0 as one of 3" in said[2]
        assert sorted(hub.refused) == sorted(said)
        assert stranger.recv(1) == b""


def test_nothing_at_the_port_ends_after_the_limit(meetings):
    _, second = meetings(2)
    with pytest.raises(Unreachable, match="refuses the connection: nothing listens there"):
        Member(second, 0.3)


def test_another_program_at_the_port_is_told_from_process_0(meetings, threads):
    _, second = meetings(2)
    with socket.create_server(("127.0.0.1", second.port)) as server:

        def other_program():
            connected, _ = server.accept()
            connected.sendall(b"SSH-2.0-OpenSSH\n")
            return connected

        accepted = threads.submit(other_program)
        with pytest.raises(Unreachable, match=r"another program's: b'SSH-2\.0"):
            once(second, 1)
        accepted.result(20).close()


def test_process_0_cannot_listen_where_another_program_does(meetings):
    first, _ = meetings(2)
    with socket.create_server(("", first.port)), pytest.raises(OSError, match="in use"):
        Hub(first, {})


def test_the_fastest_answer_tells_the_offset_of_a_clock():
    """A clock that is 5 s ahead; of four round trips one is quick, and the others wait on their way back."""
    ours = iter([100.0, 100.9, 200.0, 200.2, 300.0, 300.8, 400.0, 401.0])
    theirs = iter([105.1, 205.1, 305.1, 405.1])
    offset, uncertain = clock_offset(lambda: next(theirs), lambda: next(ours), 4)
    assert offset == pytest.approx(5.0)
    assert uncertain == pytest.approx(0.1)
    assert clock_offset(lambda: None) is None


def test_clocks_of_one_machine_agree(meetings, threads):
    first, second = meetings(2)

    def member():
        with Member(second, 20) as call:
            return [call.exchange(name, 1, 20) for name in ("a", "b")]

    heard = threads.submit(member)
    with Hub(first, {}) as hub:
        hub.exchange("a", 0, 20)
        [(process, (offset, uncertain))] = hub.offsets().items()
        assert process == 1
        assert abs(offset) <= uncertain + 1e-3
        hub.exchange("b", 0, 20)
        heard.result(20)


def test_a_single_process_hears_itself():
    assert Single().exchange("a", {"x": 1}, 0) == {0: {"x": 1}}
