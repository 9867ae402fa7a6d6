"""An error before the processes of a job connect: who learns of it, with which lines and code, who waits how long."""

import concurrent.futures
import contextlib
import socket
import threading

import pytest

from meshtrain import errors, evaluate, explain, generate, main
from meshtrain.errors import LostPeer, UserError
from meshtrain.launch import early_errors, endings, rendezvous
from meshtrain.launch.rendezvous import Member, meet, tell
from tests.launch.meetings import meetings
from tests.launch.test_launch_peers import two_processes

LINE = "meshtrain: error: arguments: got '--a'; allowed: --b; did you mean '--b'?"
ENDING = {"code": 2, "lines": LINE}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "set", "JAX_PROCESS_ID": "set"}
COMMANDS = [main, evaluate, generate, explain]


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "TRY_SECONDS", 0.1)
    monkeypatch.setattr(early_errors, "TELL_SECONDS", 0.2)


def job_of(meeting):
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    return dict(zip(names, (meeting.address, str(meeting.num_processes), str(meeting.index)), strict=True))


@pytest.fixture
def process(monkeypatch):
    """A function that makes this process the one of a meeting, and returns what ends it, which prints nothing."""
    monkeypatch.setattr(errors, "_before_leaving", [])
    monkeypatch.setattr(early_errors, "_meetings", [])

    def become(meeting):
        early_errors.tell_before_meeting(job_of(meeting))
        [ends] = errors._before_leaving
        return ends

    return become


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_error_of_any_process_reaches_all_that_meet(threads, number):
    places = meetings(3)
    others = [threads.submit(meet, one, BY_HAND) for one in places if one.index != number]
    tell(places[number], BY_HAND, ENDING, 60)
    assert [call.result(20) for call in others] == [{0: None, 1: None, 2: None} | {number: ENDING}] * 2


def test_if_all_have_an_error_none_waits_for_long(threads):
    calls = [threads.submit(tell, one, BY_HAND, ENDING, 60) for one in meetings(3)]
    assert [call.result(20) for call in calls] == [None] * 3


def test_an_error_is_known_though_its_process_has_ended_and_another_does_not_come(threads, soon):
    first, second, _ = meetings(3)
    call = threads.submit(meet, first, BY_HAND)
    with Member(second, 20) as erring:
        erring._connection.send("meet", ENDING)
    assert call.result(20) == {0: None, 1: ENDING}


def test_without_an_error_one_that_ends_is_lost_as_before(threads, soon):
    first, second, _ = meetings(3)
    call = threads.submit(meet, first, BY_HAND)
    with Member(second, 20) as gone:
        gone._connection.send("meet", None)
    with pytest.raises(LostPeer, match="process 1 has ended"):
        call.result(20)


def test_the_end_of_a_process_tells_its_lines_once(threads, process):
    first, second = meetings(2)
    ends = process(second)
    call = threads.submit(meet, first, BY_HAND)
    ends(2, LINE)
    assert call.result(20) == {0: None, 1: ENDING}
    ends(2, LINE)  # alone: it would wait


@pytest.mark.parametrize("code", [4, 74, 75, 130, 141])
def test_a_process_that_a_signal_ends_waits_for_nobody(process, monkeypatch, code):
    told = []
    monkeypatch.setattr(rendezvous, "tell", lambda *given: told.append(given))
    process(meetings(2)[0])(code, LINE)
    assert not told


def test_an_error_of_the_rendezvous_itself_is_not_told_there(threads, process, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_SECONDS", 0.1)
    _, second = meetings(2)
    ends = process(second)
    with pytest.raises(LostPeer):
        early_errors.meet(second, BY_HAND)
    told = []
    monkeypatch.setattr(rendezvous, "tell", lambda *given: told.append(given))
    ends(2, LINE)
    assert not told


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("is_taken", [False, True], ids=["nobody", "another program"])
def test_who_cannot_be_told_adds_no_error_and_the_wait_has_an_end(process, capfd, soon, number, is_taken):
    place = meetings(2)[number]
    with socket.create_server(("", place.port)) if is_taken else contextlib.nullcontext():
        process(place)(2, LINE)
    assert "error" not in capfd.readouterr().err


def test_an_interrupt_ends_the_wait(process, monkeypatch):
    waits = []

    def interrupted(self, timeout):
        waits.append(timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(rendezvous, "tell", lambda *_: None)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    process(meetings(2)[1])(2, LINE)
    assert len(waits) == 1


@pytest.mark.parametrize("environ", [{}, {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, {"JAX_NUM_PROCESSES": "2"}])
def test_a_single_process_and_one_that_cannot_know_the_others_tell_nobody(monkeypatch, environ):
    monkeypatch.setattr(errors, "_before_leaving", [])
    early_errors.tell_before_meeting(environ)
    assert errors._before_leaving == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_commands_that_connect_processes_tell_a_wrong_flag(process, monkeypatch, command):
    for name, value in job_of(meetings(2)[1]).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError):
        command.main(["--config"])
    assert len(errors._before_leaving) == 1
    assert errors._others_may_wait()


@pytest.mark.parametrize("told", [{0: None, 1: ENDING}, {0: None, 1: None}])
def test_a_process_that_is_told_an_error_ends_with_its_lines_and_code(monkeypatch, told):
    ends = []
    monkeypatch.setattr(errors, "leave_at_once", lambda *ending: ends.append(ending))
    monkeypatch.setattr(errors, "_before_leaving", [])
    endings.end_if_told(told, 0)
    assert ends == [(2, LINE)] * bool(told[1])


# The other process is in the rendezvous.
FINDS = """
import os
from meshtrain import errors
from meshtrain.launch.early_errors import tell_before_meeting
def main():
    tell_before_meeting(os.environ)
    if os.environ["JAX_PROCESS_ID"] == "{finder}":
        raise errors.UserError("arguments: got '--a'; allowed: --b; did you mean '--b'?")
    from meshtrain.launch import distributed
    distributed.start(2)
errors.run(main)
"""


@pytest.mark.parametrize("finder", [0, 1])
def test_an_error_before_the_processes_connect_ends_both(finder):
    done = two_processes(FINDS.format(finder=finder))
    assert done.returncode == 2
    assert [f"[{number}] {LINE}" in done.stderr for number in (0, 1)] == [True, True], done.stderr
    assert "ended first, with code 2; its last output:" in done.stderr
