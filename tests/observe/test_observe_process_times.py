"""A process's own product and reports; other processes' reports are given here, and jobs run at once or when told."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.observe import process_times
from meshtrain.observe.process_times import OwnTimes

ROW = {"step_seconds": 1.0, "data_seconds": 0.25, "host_seconds": 0.125, "device_wait_seconds": 0.0}


class Exchange:
    """Keeps the jobs until `work`; the second process's reports are those of the first, but for what `other` says."""

    def __init__(self, _, complete):
        self.complete, self.jobs, self.reports, self.other = complete, [], [], {}

    def do(self, job):
        self.jobs.append(job)

    def publish(self, number, report):
        self.jobs.append(lambda: self.reports.append((number, report())))

    def work(self):
        for job in self.jobs:
            job()
        for number, report in self.reports[:]:
            self.complete(number, {0: report, 1: report | self.other})
        self.jobs, self.reports = [], []


@pytest.fixture
def own(monkeypatch):
    """Times of a process whose clock moves by a hundredth of a second when it is read."""
    monkeypatch.setattr(process_times, "Exchange", Exchange)
    now = iter(range(10**6))
    return OwnTimes(now=lambda: next(now) / 100)


def test_the_product_is_measured_from_the_end_of_the_step_and_reported_once(own):
    own.probe(jnp.float32(2.5))
    for step in (10, 20):
        assert own.exchange(step, ROW, print) == {}
    reports = own._exchange.reports
    for job in own._exchange.jobs:
        job()
    assert [number for number, _ in reports] == [10, 20]
    assert [report["probe_seconds"] for _, report in reports] == [pytest.approx(0.01), None]
    assert all(report.items() >= ROW.items() for _, report in reports)


def test_the_product_takes_a_thousandth_of_the_time_at_most(own):
    loss, taken = jnp.float32(2.5), []
    for _ in range(3000):  # of 0.01 s
        own.probe(loss)
        taken.append(len(own._exchange.jobs))
        own._exchange.work()
    first, second, third, *_ = [number for number, jobs in enumerate(taken) if jobs]
    assert first == 0
    assert 990 <= second <= 1001
    assert 990 <= third - second <= 1001


def test_nothing_waits_for_the_product_and_no_second_one_is_begun(own):
    for _ in range(5):
        own.probe(jnp.float32(2.5))
    assert len(own._exchange.jobs) == 1


def test_the_product_depends_on_the_step(own):
    """Otherwise a device could begin it before the step is done."""
    result = own._product(own._matrix, jnp.float32(2.5))
    np.testing.assert_allclose(result, own._matrix, rtol=1e-4)
    assert np.isnan(own._product(own._matrix, jnp.float32(jnp.inf))).all()


def test_a_slow_process_is_said_once_and_stands_in_each_row(own):
    own._exchange.other = {"data_seconds": 0.75}
    said, rows = [], []
    for step in range(1, 9):
        rows.append(own.exchange(step, ROW, said.append))
        own._exchange.work()
        if step == 6:
            own._exchange.other = {}
    assert rows[:3] == [{}] * 3
    assert rows[3:7] == [{"slow_process": 1.0, "slow_process_data_seconds": 0.5}] * 4
    assert rows[7] == {}
    [line] = said
    assert line.endswith("compared with the median of the other processes, it loses 0.5 s a step on waiting for data")


def test_a_row_without_times_is_not_reported(own):
    assert own.exchange(1, {"first_step_seconds": 9.0}, print) == {}
    assert own._exchange.jobs == []
