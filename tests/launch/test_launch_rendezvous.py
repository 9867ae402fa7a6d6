"""Meetings between threads of this process: who answers, who is missing, and what a stranger can do."""

import concurrent.futures
import contextlib
import json
import socket
import time

import pytest

from meshtrain.errors import LostPeer, UserError
from meshtrain.launch import rendezvous
from meshtrain.launch.cluster import Meeting
from meshtrain.launch.rendezvous import Hub, Member, Unreachable, meet
from tests.launch.meetings import meetings

BY_HAND = {"JAX_COORDINATOR_ADDRESS": "set", "JAX_PROCESS_ID": "set"}


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 2.0)


def once(meeting, value):
    with Member(meeting, 20) as call:
        return call.exchange("a", value, 20)


def test_all_learn_what_all_have_said(threads):
    first, *others = meetings(3)
    calls = [threads.submit(once, one, f"from {one.index}") for one in others]
    with Hub(first, {}) as hub:  # after the others have begun to try
        wanted = {0: "from 0", 1: "from 1", 2: "from 2"}
        assert hub.exchange("a", "from 0", 20) == wanted
        assert [call.result(20) for call in calls] == [wanted] * 2


def test_a_missing_process_is_not_waited_for_twice(threads):
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


def test_connections_stay_when_the_port_is_free_again(threads):
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


def test_who_has_ended_is_named_and_not_waited_for(threads):
    first, second = meetings(2)

    gone = threads.submit(once, second, 1)
    with Hub(first, {}) as hub:
        hub.exchange("a", 0, 20)
        gone.result(20)
        start = time.monotonic()
        assert hub.exchange("b", 0, 60) == {0: 0}
        assert time.monotonic() - start < 30
        assert hub.ended() == [1]


def test_the_others_learn_that_process_0_has_ended(threads):
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


def test_a_wrong_number_is_refused_and_a_stranger_is_hung_up_on(threads):
    first, second, _ = meetings(3)
    wrong = [second, Meeting(first.address, 3, 0), Meeting(first.address, 4, 2)]

    def refused(one):
        with pytest.raises(Unreachable) as refusal:
            once(one, 1)
        return str(refusal.value)

    with Hub(first, {}) as hub, socket.create_connection(("127.0.0.1", first.port)) as stranger:
        stranger.sendall(b"[" * 10_000 + b"\nGET / HTTP/1.1\r\n\r\n" + json.dumps({"name": "a"}).encode() + b"\n")
        right = threads.submit(once, second, 1)
        while not hub._own:
            hub._pump(time.monotonic() + 0.1, lambda: False)
        calls = [threads.submit(refused, one) for one in wrong]
        assert hub.exchange("a", 0, 2.0) == {0: 0, 1: 1}
        assert right.result(20) == {0: 0, 1: 1}
        said = [call.result(20) for call in calls]
        assert "and another process both report that they are process 1" in said[0]
        assert "and another process both report that they are process 0" in said[1]
        assert "one of 4 processes, but process 0 as one of 3" in said[2]
        assert sorted(hub.refused) == sorted(said)
        assert stranger.recv(1) == b""


def test_a_name_that_cannot_be_one_is_not_reached():
    with pytest.raises(Unreachable, match=r"no\.\.name:1: .*label"):
        Member(Meeting("no..name:1", 2, 1), 0.3)


def test_another_program_at_the_port_is_told_from_process_0(threads):
    _, second = meetings(2)
    with socket.create_server(("127.0.0.1", second.port)) as server:

        def other_program():
            connected, _ = server.accept()
            connected.sendall(b"SSH-2.0-OpenSSH\n")
            return connected

        accepted = threads.submit(other_program)
        with pytest.raises(Unreachable, match=r"belongs to another program: b'SSH-2\.0"):
            once(second, 1)
        accepted.result(20).close()


@pytest.mark.parametrize("bound", ["localhost:http", ":99999", "localhost"])
def test_process_0_listens_at_an_address_alone(bound):
    first, _ = meetings(2)
    with pytest.raises(UserError, match="and JAX_COORDINATOR_BIND_ADDRESS; nearest: localhost:9901"):
        Hub(first, {"JAX_COORDINATOR_BIND_ADDRESS": bound})


def refusal(one):
    with pytest.raises((UserError, LostPeer)) as caught:
        meet(one, BY_HAND)
    return str(caught.value)


def test_all_meet_without_a_word_and_leave_the_port_free(threads, capsys):
    first, *others = meetings(4)
    calls = [threads.submit(meet, one, BY_HAND) for one in others]
    meet(first, BY_HAND)
    for call in calls:
        call.result(20)
    assert capsys.readouterr().err == ""
    with socket.create_server(("", first.port)):
        pass  # as JAX does next


def test_who_is_awaited_is_said_again_and_again(threads, capsys, soon):
    first, second, third = meetings(3)
    calls = [threads.submit(meet, one, BY_HAND) for one in (second, first)]
    said = ""
    while said.count(f" s for process 2 of 3 at {first.address} (JAX_COORDINATOR_ADDRESS)\n") < 4:
        said += capsys.readouterr().err
    assert all(line.startswith("meshtrain: waiting: ") for line in said.splitlines())
    meet(third, BY_HAND)
    for call in calls:
        call.result(20)


def test_those_that_have_registered_learn_who_is_awaited(threads, soon):
    first, second, _ = meetings(3)
    heard = []

    def member():
        with Member(second, 20) as call:
            call.exchange("meet", 1, 20, heard.append)

    done = threads.submit(member)
    with Hub(first, {}) as hub:
        assert hub.wait_for_all(time.monotonic() + 3.0, lambda _: None) == [2]
        hub.exchange("meet", 0, 0)
        done.result(20)
    assert heard[0] == [2]


def test_without_process_0_the_line_says_what_is_seen_and_the_wait_has_an_end(capsys, soon, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.5)
    _, second = meetings(2)
    assert "s for process 0 of 2 at 127.0.0.1:" in refusal(second)
    assert "(JAX_COORDINATOR_ADDRESS): 127.0.0.1:" in (said := capsys.readouterr().err)
    assert "refuses the connection: nothing listens there\n" in said


@pytest.mark.parametrize(("address", "index"), [("no.such.host.invalid:9917", 0), ("no..name:9917", 1)])
def test_a_name_that_does_not_resolve_is_one_line(address, index, soon):
    said = refusal(Meeting(address, 2, index))
    assert said.startswith(f"JAX_COORDINATOR_ADDRESS: got {address}, which does not resolve (")
    assert said.endswith("; allowed: host:port of process 0; nearest: the IP address, or correct the DNS entry")


def test_pods_wait_for_a_name(capsys, soon, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.5)
    with pytest.raises(LostPeer, match=r"for process 0 of 2 at no\.such\.host\.invalid:9917"):
        meet(Meeting("no.such.host.invalid:9917", 2, 1), {**BY_HAND, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_a_taken_port_and_a_second_process_0_are_one_line(soon):
    first, _ = meetings(2)
    with Hub(first, {}):
        said = refusal(first)
    assert f"JAX_COORDINATOR_ADDRESS: got {first.address}, where process 0 cannot listen (Address already in" in said
    assert "; nearest: another port, or JAX_PROCESS_ID=1 if process 0 is already running" in said


def test_two_processes_0_are_named_as_such(threads, soon):
    first, _ = meetings(2)
    calls = [threads.submit(refusal, first) for _ in range(2)]
    for call in calls:
        assert "and another process both report that they are process 0; allowed: each number" in call.result(20)


def test_two_with_one_number_are_refused_and_named_by_its_variable(threads, soon):
    first, second, _ = meetings(3)
    slurm = {"SLURM_STEP_NODELIST": "node[1-3]", "SLURM_PROCID": "1"}
    calls = [threads.submit(meet, second, slurm) for _ in range(2)]
    said = refusal(first)
    assert "and another process both report that they are process 1; allowed: each number once" in said
    ends = [call.exception(20) for call in calls]
    assert sorted(type(end).__name__ for end in ends) == ["LostPeer", "UserError"]
    assert any("nearest: start each process once, with its own SLURM_PROCID" in str(end) for end in ends)


def test_one_that_comes_when_all_have_met_says_so_and_disturbs_nobody(capsys, soon, monkeypatch, threads):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.5)
    _, second = meetings(2)
    with socket.create_server(("127.0.0.1", second.port)) as server:

        def hangs_up():
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threads.submit(hangs_up)
        said = refusal(second)
        server.shutdown(socket.SHUT_RDWR)
    assert "another program answers, or a job that already has JAX_PROCESS_ID=1" in said


def test_one_that_ends_meanwhile_ends_all(threads, soon):
    first, second, third, _ = meetings(4)

    def leaves():
        with Member(third, 20) as call:
            call._connection.send("meet", None)

    calls = [threads.submit(refusal, second), threads.submit(leaves)]
    assert refusal(first) == "process 2 has ended, before all processes were connected"
    assert "process 0 has ended" in calls[0].result(20)
    calls[1].result(20)


def test_one_that_has_ended_when_the_last_one_comes_ends_all(threads):
    first, second, third = meetings(3)
    call = threads.submit(refusal, first)
    with Member(second, 20) as gone:
        gone._connection.send("meet", None)
    time.sleep(0.5)  # process 0 reads that it is gone
    assert refusal(third) == "process 0 has ended, before all processes were connected"
    assert call.result(20) == "process 1 has ended, before all processes were connected"
