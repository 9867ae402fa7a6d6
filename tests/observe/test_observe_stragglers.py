"""Which process is named as slow, and why, by times that are given here."""

import dataclasses

import pytest

from meshtrain.observe.process_times import Judgement, Times, lost_seconds

EVEN = Times(step_seconds=1.0, data_seconds=0.25, host_seconds=0.125, device_wait_seconds=0.0, probe_seconds=0.002)


def row(number=4, **changes):
    """The times of so many processes; process 2 differs."""
    return dict.fromkeys(range(number), EVEN) | {2: dataclasses.replace(EVEN, **changes)}


def judged(*rows):
    judgement = Judgement()
    return [judgement.of(times) for times in rows]


@pytest.mark.parametrize(
    ("changes", "cause", "seconds"),
    [
        ({"data_seconds": 0.5}, "data", 0.25),
        ({"host_seconds": 0.25}, "host", 0.125),
        ({"probe_seconds": 0.003}, "device", 0.5),
    ],
)
def test_it_is_named_with_its_cause_at_the_third_logged_step_running(changes, cause, seconds):
    slow, even = row(**changes), row()
    found = judged(slow, slow, slow, slow, even, slow, slow, even, slow, slow, slow)
    assert [one is not None for one in found] == [False, False, True, True, *[False] * 6, True]
    assert found[2].process == 2
    assert found[2].lost_seconds == {cause: pytest.approx(seconds)}
    assert found[2].values() == {"slow_process": 2.0, f"slow_process_{cause}_seconds": pytest.approx(seconds)}
    assert (
        found[2].line().startswith("meshtrain: WARNING: process 2 is slow: compared with the median of the other proc")
    )
    assert f"{seconds:.3g} s a step on " in found[2].line()


@pytest.mark.parametrize(
    "changes",
    [
        {"data_seconds": 0.3},  # 20 %, not over
        {"probe_seconds": 0.0024},
        {"data_seconds": 0.0},  # faster is not slow
        {"probe_seconds": 0.001},
    ],
)
def test_twenty_percent_is_allowed(changes):
    assert judged(*[row(**changes)] * 5) == [None] * 5


def test_what_nobody_waits_for_is_not_named():
    """Ten times as long as the others, and a hundredth of the step."""
    even = dataclasses.replace(EVEN, data_seconds=0.001)
    times = dict.fromkeys(range(4), even) | {2: dataclasses.replace(even, data_seconds=0.011)}
    assert judged(*[times] * 5) == [None] * 5
    times[2] = dataclasses.replace(even, data_seconds=0.056)
    assert judged(*[times] * 3)[-1].lost_seconds == {"data": pytest.approx(0.055)}


def test_what_the_devices_hide_is_not_lost():
    assert judged(*[row(data_seconds=0.5, device_wait_seconds=0.05)] * 5) == [None] * 5
    assert judged(*[row(data_seconds=0.5, device_wait_seconds=0.049)] * 3)[-1].lost_seconds == {"data": 0.25}
    assert judged(*[row(probe_seconds=0.004, device_wait_seconds=0.9)] * 3)[-1].lost_seconds == {"device": 1.0}


def test_the_median_is_that_of_the_others():
    """Of two processes, the other one; three slow ones of four are the rule, and the fast one is no exception."""
    assert lost_seconds({0: EVEN, 1: dataclasses.replace(EVEN, data_seconds=0.5)}, {}) == {(1, "data"): 0.25}
    slow = dataclasses.replace(EVEN, data_seconds=0.5)
    assert lost_seconds({0: slow, 1: slow, 2: slow, 3: EVEN}, {}) == {}


def test_the_one_that_loses_most_is_named_with_all_its_causes():
    times = row(data_seconds=0.5, host_seconds=0.5) | {1: dataclasses.replace(EVEN, data_seconds=0.525)}
    found = judged(*[times] * 3)[-1]
    assert found.process == 2
    assert list(found.lost_seconds.items()) == [("host", 0.375), ("data", 0.25)]


def test_a_product_counts_once():
    """Measured once, and reported at one of six logged steps: two more have to say the same."""
    measured, silent = row(probe_seconds=0.003), row(probe_seconds=None)
    assert judged(measured, *[silent] * 5) == [None] * 6
    found = judged(measured, silent, measured, silent, measured, silent)
    assert [one is not None for one in found] == [False] * 4 + [True] * 2
    assert judged(measured, silent, row(), measured, measured) == [None] * 5
