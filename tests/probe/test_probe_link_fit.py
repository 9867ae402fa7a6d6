"""Latency and bandwidth: planted lines are found again, and times that are no line give none."""

import pytest

from meshtrain.hardware.links import Link
from meshtrain.probe.bench.link_fit import fit
from meshtrain.probe.bench.timed import Timed

SIZES = [2**power for power in range(10, 31, 2)]
NOISE = (1.02, 0.98, 1.0, 1.03, 0.97, 1.01, 0.99, 0.98, 1.02, 1.0, 0.97)


def rows(seconds_of, sizes=SIZES, spread=1.1, **changed):
    """One row a size; the times of its rounds have this spread."""
    made = []
    for size in sizes:
        seconds = seconds_of(size * 1.75)  # wire bytes of an all-reduce over eight devices
        made.append(Timed("data", "all-reduce", 8, size, (seconds * spread, seconds, seconds * spread), **changed))
    return made


@pytest.mark.parametrize("latency, bandwidth", [(3e-6, 300e9), (30e-6, 40e9), (500e-6, 1e9)])
def test_a_planted_line_is_found_again_within_five_percent(latency, bandwidth):
    noise = dict(zip([size * 1.75 for size in SIZES], NOISE, strict=True))
    found = fit(rows(lambda wire: (latency + wire / bandwidth) * noise[wire]), 2)
    assert found.why_not == ""
    assert found.link == Link(
        "data", "all-reduce", 8, 2, pytest.approx(latency, rel=0.05), pytest.approx(bandwidth, rel=0.05)
    )
    assert 0 < found.error < 0.03


def line(wire):
    return 30e-6 + wire / 40e9


@pytest.mark.parametrize(
    "measured, said",
    [
        (rows(line, spread=1.6), "the machine was busy: at 11 of 11 sizes the median round took more than 1.5 times"),
        (rows(line)[:-1] + rows(line, SIZES[-1:], spread=2.5), "at 1 of 11 sizes the median round took more than 1.5 "
         "times the fastest, 2.50 times at 1 GiB"),
        (rows(line, wrong=("process 0: ...",)), "the results are wrong"),
        (rows(line, SIZES[:2]), "a fit needs 3 sizes, and 2 were measured"),
        (rows(lambda wire: 1e-3 / wire), "the times are not linear in the bytes"),
        (rows(lambda wire: 1e-12 * wire**2, SIZES[:4]), "the times are not linear in the bytes"),
        (rows(lambda wire: 1e-6 if wire < 1e6 else 1.0), "the times are not linear in the bytes"),
    ],
)  # fmt: skip
def test_times_that_are_no_line_give_none(measured, said):
    found = fit(measured, 1)
    assert said in found.why_not
    assert found.link is None


def test_without_the_spread_the_same_times_are_a_line():
    assert fit(rows(line, spread=1.49), 1).link is not None
