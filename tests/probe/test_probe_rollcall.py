"""Clocks of processes, and a process that is alone."""

import concurrent.futures

import pytest

from meshtrain.launch.meeting import Hub, Member
from meshtrain.probe.rollcall import Single, clock_offset, offsets
from tests.launch.meetings import meetings


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


def test_the_fastest_answer_tells_the_offset_of_a_clock():
    """A clock that is 5 s ahead; of four round trips one is quick, and the others wait on their way back."""
    ours = iter([100.0, 100.9, 200.0, 200.2, 300.0, 300.8, 400.0, 401.0])
    theirs = iter([105.1, 205.1, 305.1, 405.1])
    offset, uncertain = clock_offset(lambda: next(theirs), lambda: next(ours), 4)
    assert offset == pytest.approx(5.0)
    assert uncertain == pytest.approx(0.1)
    assert clock_offset(lambda: None) is None


def test_clocks_of_one_machine_agree(threads):
    first, second = meetings(2)

    def member():
        with Member(second, 20) as call:
            return [call.exchange(name, 1, 20) for name in ("a", "b")]

    heard = threads.submit(member)
    with Hub(first, {}) as hub:
        hub.exchange("a", 0, 20)
        [(process, (offset, uncertain))] = offsets(hub).items()
        assert process == 1
        assert abs(offset) <= uncertain + 1e-3
        hub.exchange("b", 0, 20)
        heard.result(20)


def test_a_single_process_hears_itself():
    assert Single().exchange("a", {"x": 1}, 0) == {0: {"x": 1}}
