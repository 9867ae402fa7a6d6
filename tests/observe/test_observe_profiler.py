"""Which steps are traced, and that the trace always ends."""

import contextlib
from contextlib import closing

import jax
import jax.numpy as jnp
import pytest

from meshtrain.observe import profiler


@pytest.fixture
def calls(monkeypatch):
    """Records what the profiler asks of JAX, in order."""
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: made.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    monkeypatch.setattr(jax, "block_until_ready", lambda result: made.append(f"wait {result}"))
    return made


def run(tracer, calls, steps):
    for step in steps:
        tracer.before(step)
        calls.append(step)
        tracer.after(step, f"result {step}")


def test_a_trace_holds_the_named_steps_and_their_results(tmp_path, calls):
    with closing(profiler.Profiler(profiler.ProfileOptions("3,4"), tmp_path)) as tracer:
        run(tracer, calls, range(1, 7))
    assert calls == [1, 2, "wait result 2", "start", 3, 4, "wait result 4", "stop", 5, 6]


def test_traced_steps_carry_their_number(tmp_path, calls, monkeypatch):
    @contextlib.contextmanager
    def annotation(name, step_num):
        calls.append(f"{name} {step_num} begins")
        yield
        calls.append(f"{name} {step_num} ends")

    monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", annotation)
    with closing(profiler.Profiler(profiler.ProfileOptions("2,3"), tmp_path)) as tracer:
        run(tracer, [], range(1, 5))
    assert [call for call in calls if call.startswith("step")] == [
        "step 2 begins",
        "step 2 ends",
        "step 3 begins",
        "step 3 ends",
    ]


def test_one_step(tmp_path, calls):
    with closing(profiler.Profiler(profiler.ProfileOptions("1"), tmp_path)) as tracer:
        run(tracer, calls, range(1, 4))
    assert calls == ["wait None", "start", 1, "wait result 1", "stop", 2, 3]


def test_a_resumed_run_traces_what_is_left(tmp_path, calls):
    with closing(profiler.Profiler(profiler.ProfileOptions("3,6"), tmp_path)) as tracer:
        run(tracer, calls, range(5, 9))
    assert calls == ["wait None", "start", 5, 6, "wait result 6", "stop", 7, 8]


@pytest.mark.parametrize("steps", ["", "10,13"])
def test_no_trace(tmp_path, calls, steps):
    with closing(profiler.Profiler(profiler.ProfileOptions(steps), tmp_path)) as tracer:
        run(tracer, calls, [1, 2, 14])
    assert calls == [1, 2, 14]
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_within_the_trace_closes_it(tmp_path, calls):
    with closing(profiler.Profiler(profiler.ProfileOptions("2,9"), tmp_path)) as tracer:
        run(tracer, calls, range(1, 4))
    tracer.close()
    assert calls == [1, "wait result 1", "start", 2, 3, "stop"]


def test_an_exception_within_the_trace_closes_it(tmp_path, calls):
    def fail():
        with closing(profiler.Profiler(profiler.ProfileOptions("1,9"), tmp_path)) as tracer:
            run(tracer, calls, range(1, 3))
            tracer.before(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert calls[-1] == "stop"
    assert calls.count("stop") == 1


@pytest.mark.parametrize("call", ["start_trace", "stop_trace"])
def test_a_failing_profiler_does_not_end_the_run(tmp_path, calls, capsys, monkeypatch, call):
    def fail(*arguments):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, call, fail)
    with closing(profiler.Profiler(profiler.ProfileOptions("2,3"), tmp_path)) as tracer:
        run(tracer, calls, range(1, 6))
    assert capsys.readouterr().err.count("WARNING") == 1
    assert [call for call in calls if isinstance(call, int)] == [1, 2, 3, 4, 5]


def test_a_real_trace(tmp_path, capsys):
    step = jax.jit(lambda x: x @ x)
    x = jnp.ones((8, 8))
    with closing(profiler.Profiler(profiler.ProfileOptions("2,3"), tmp_path)) as tracer:
        for number in range(1, 5):
            tracer.before(number)
            result = step(x)
            tracer.after(number, result)
    traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1
    assert b"step_num" in traces[0].read_bytes()
    assert str(tmp_path / "profile") in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, steps",
    [("", None), (" ", None), ("10,13", (10, 13)), (" 10 , 13 ", (10, 13)), ("(10, 13)", (10, 13)), ("7", (7, 7))],
)
def test_legal_steps(text, steps):
    options = profiler.ProfileOptions(text)
    assert profiler.check(options) == []
    assert profiler.first_and_last_step(options) == steps
