"""Waiting for the compiler returns what it made and raises what it raised, whenever it finishes."""

import concurrent.futures

import pytest

from meshtrain.plan.cluster.compile_thread import waiting_for


def test_a_result_that_comes_as_the_wait_times_out_is_returned(monkeypatch):
    result = concurrent.futures.Future.result

    def times_out_as_it_finishes(future, timeout=None):
        value = result(future)
        if timeout is not None:
            raise concurrent.futures.TimeoutError
        return value

    monkeypatch.setattr(concurrent.futures.Future, "result", times_out_as_it_finishes)
    assert waiting_for("work", lambda: 42) == 42


@pytest.mark.parametrize("error", [TimeoutError("of its own"), ValueError("wrong")])
def test_what_the_work_raises_is_raised(error):
    def work():
        raise error

    with pytest.raises(type(error), match=str(error)):
        waiting_for("work", work)
