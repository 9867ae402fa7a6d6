"""The loop by itself: when it saves, evaluates and stops, and what signals do. Steps are plain Python here."""

import contextlib
import itertools
import math
import signal
import threading

import pytest

from meshtrain import loop
from meshtrain.errors import Interrupted, TrainingStopped
from meshtrain.launch.watchdog import Watchdog
from meshtrain.observe.goodput import Done, Goodput
from meshtrain.observe.profiler import ProfileOptions, Profiler
from meshtrain.observe.progress import Progress
from meshtrain.observe.throughput import Throughput
from meshtrain.step.guard import FIRST_NOT_FINITE, IN_A_ROW

pytestmark = pytest.mark.quick

KINDS = ("loss", "save_blocking_seconds", "eval_loss")


class Run:
    """A run of ten steps that notes what the loop does; `at` maps a step to what happens while it is computed."""

    def __init__(self, directory, start_step=0, losses=None, at=None, own_times=None, **when):
        self.did, self.also, self.rows, self.start_step = [], [], [], start_step
        self.losses, self.at, self.directory, self.own_times = losses or {}, at or {}, directory, own_times
        options = {
            "num_steps": 10,
            "log_every": 100,
            "eval_every": 0,
            "save_every": 0,
            "max_skipped_in_a_row": 2,
        } | when
        self.in_a_row, self.limits_seconds, self.ends_at = 0, set(), None
        self.when = loop.Timetable(**options)
        self.throughput = Throughput("tokens", 7, flops_per_unit=0.0, num_devices=1, peak_flops_per_second=None)

    def step(self, step, state, batch):
        assert batch == step == state + 1
        self.at.get(step, int)()
        loss = self.losses.get(step, 1.0 / step)
        self.in_a_row = 0 if math.isfinite(loss) else self.in_a_row + 1
        return step, {"loss": loss, "grad_norm": 1.0, IN_A_ROW: self.in_a_row, FIRST_NOT_FINITE: 0}

    def evaluate(self, state):
        self.did.append(f"evaluate {state}")
        self.limits_seconds.add(self.watchdog.limit_seconds())
        return {"eval_loss": 0.5}

    def save(self, step, state):
        assert step == state
        self.did.append(f"save {step}")
        self.limits_seconds.add(self.watchdog.limit_seconds())
        return {"save_blocking_seconds": 0.25}

    def rate(self, step, values):
        self.also.append(f"rate {step} {values['eval_loss']}")

    def diagnose(self, state, number, layer):
        return f"array {number}, seen at step {state}"

    def reason(self, step, values):
        return f"enough at {step}" if step == self.ends_at else ""

    def go(self):
        write = lambda step, row: self.rows.append((step, row))  # noqa: E731
        finish = lambda: self.also.append("finish")  # noqa: E731
        actions = loop.Actions(self.step, self.evaluate, self.save, finish, self.rate, write, self.diagnose,
                               reason=self.reason)  # fmt: skip
        batches = itertools.count(self.start_step + 1)
        with (
            contextlib.closing(Progress(self.when.num_steps, self.start_step, show_bar=False)) as progress,
            contextlib.closing(Profiler(ProfileOptions(), self.directory)) as profiler,
            Watchdog(0.0) as self.watchdog,
        ):
            goodput = Goodput(0.0, Done(useful_seconds=3.0, timed_steps=2), now=lambda: 6.0)
            observers = loop.Observers(progress, profiler, self.watchdog, goodput, self.own_times)
            return loop.run(self.start_step, self.start_step, batches, self.when, self.throughput, actions, observers)


def test_the_last_step_saves_and_evaluates(tmp_path):
    run = Run(tmp_path)
    state, values = run.go()
    assert state == 10
    assert run.did == ["save 10", "evaluate 10"]
    assert run.also == ["rate 10 0.5", "finish"]
    kinds = [(step, next(name for name in KINDS if name in row)) for step, row in run.rows]
    assert kinds == [(1, "loss"), (10, "loss"), (10, "save_blocking_seconds"), (10, "eval_loss")]
    assert (values["loss"], values["eval_loss"], values["tokens"]) == (0.1, 0.5, 70)
    assert values["goodput"] == pytest.approx(0.5, abs=0.1)
    assert run.limits_seconds == {1800}, "saves and evaluations take longer than steps"
    assert run.watchdog.limit_seconds() == 60


def test_what_happens_every_so_many_steps(tmp_path):
    run = Run(tmp_path, start_step=3, eval_every=4, save_every=3, log_every=2)
    run.go()
    assert run.did == ["evaluate 4", "save 6", "evaluate 8", "save 9", "save 10", "evaluate 10"]
    assert [step for step, row in run.rows if "loss" in row] == [4, 6, 8, 10]


def test_a_skipped_step_says_what_was_not_finite(tmp_path, capsys):
    Run(tmp_path, losses={3: math.nan}).go()
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert lines == ["step 3 was skipped; first array that is not finite: array 0"]


@pytest.mark.parametrize("save_every, saves", [(0, []), (4, ["save 4"]), (3, ["save 3", "save 6"])])
def test_an_evaluation_may_end_the_run_which_saves_first(save_every, saves, tmp_path, capsys):
    run = Run(tmp_path, eval_every=4, save_every=save_every, can_stop=True)
    run.ends_at = 8
    state, values = run.go()
    assert (state, values["eval_loss"]) == (8, 0.5)
    assert [did for did in run.did if did.startswith("save")][-1] == "save 8"
    assert [did for did in run.did if did.startswith("evaluate")] == ["evaluate 4", "evaluate 8"]
    assert run.also[-1] == "finish"
    assert set(saves) < set(run.did)
    assert capsys.readouterr().out.endswith("enough at 8\n")


def test_a_run_that_has_ended_evaluates_and_says_so_again(tmp_path, capsys):
    for start_step, can_stop, did in ((8, True, ["evaluate 8"]), (6, True, ["evaluate 8", "save 8"])):
        run = Run(tmp_path, start_step=start_step, eval_every=4, can_stop=can_stop)
        run.ends_at = 8
        assert run.go()[0] == 8
        assert run.did == did
        assert "enough at 8" in capsys.readouterr().out
    run = Run(tmp_path, start_step=8, eval_every=4)
    assert run.go()[0] == 10
    assert run.did == ["save 10", "evaluate 10"]


def test_experts_that_are_uneven_for_a_hundred_steps_are_named_once(tmp_path, capsys, monkeypatch):
    run = Run(tmp_path, num_steps=400, log_every=10)
    parts = lambda step: 1.0 if step == 100 else 3.0  # noqa: E731
    taken = run.step
    run.step = lambda step, state, batch: (step, {**taken(step, state, batch)[1], "expert_parts": parts(state + 1)})
    run.go()
    lines = capsys.readouterr().out.splitlines()
    [at] = [at for at, line in enumerate(lines) if "above 1 since step 110" in line]
    assert lines[at - 1].startswith("step 210/400")


class OwnTimes:
    """Names process 1 in the row of step 8."""

    def __init__(self):
        self.did = []

    def probe(self, norm):
        self.did.append(f"probe {norm:g}")

    def exchange(self, step, values, say):
        own = ("step_seconds", "data_seconds", "host_seconds", "device_wait_seconds")
        self.did.append(f"exchange {step}" + "".join(f" {name}" for name in own if name in values and values[name] > 0))
        return {"slow_process": 1.0} if step == 8 else {}


def test_processes_exchange_their_times_at_logged_steps(tmp_path):
    """The product stands behind the step that is logged, and the times of that step are known one step later."""
    run = Run(tmp_path, own_times=OwnTimes(), log_every=4)
    run.go()
    times = " step_seconds data_seconds host_seconds device_wait_seconds"
    wanted = ["exchange 1", "probe 1", f"exchange 4{times}", "probe 1", f"exchange 8{times}"]
    assert run.own_times.did == [*wanted, f"exchange 10{times}"]
    assert [step for step, row in run.rows if "slow_process" in row] == [8]


def test_nothing_left_to_do_is_evaluated_and_not_saved(tmp_path):
    run = Run(tmp_path, start_step=10)
    assert run.go() == (10, {"eval_loss": 0.5})
    assert run.did == ["evaluate 10"]
    assert run.rows == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_once_and_does_not_wait_for_an_evaluation(tmp_path, number):
    run = Run(tmp_path, at={4: lambda: signal.raise_signal(number)}, eval_every=2, save_every=2)
    with pytest.raises(Interrupted, match=r"saved at step 4 of 10; the same command resumes from there"):
        run.go()
    assert run.did == ["save 2", "evaluate 2", "save 4"]
    assert run.also == ["rate 2 0.5", "finish"], "it says that it has saved"


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    run = Run(tmp_path, at={10: lambda: signal.raise_signal(signal.SIGTERM)})
    run.go()
    assert run.did == ["save 10", "evaluate 10"]


def test_a_second_sigint_leaves_at_once(tmp_path):
    run = Run(tmp_path, at={4: lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]})
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert run.did == []


def test_a_sigint_after_a_sigterm_still_saves(tmp_path):
    run = Run(tmp_path, at={4: lambda: [signal.raise_signal(n) for n in (signal.SIGTERM, signal.SIGINT)]})
    with pytest.raises(Interrupted):
        run.go()
    assert run.did == ["save 4"]


def test_signals_are_whose_they_were_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with contextlib.suppress(ZeroDivisionError), loop.interruptions():
        assert signal.getsignal(signal.SIGINT) != before[1]
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_outside_the_main_thread_signals_are_somebody_elses():
    seen = []

    def block():
        with loop.interruptions() as interrupted:
            seen.append((interrupted(1), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_too_many_steps_that_go_wrong_stop_the_run(tmp_path, loss):
    run = Run(tmp_path, losses=dict.fromkeys((3, 4, 6, 7, 8), loss), save_every=1)
    said = rf"loss is {loss} and the gradient norm 1.0 at step 8; 3 steps in a row were skipped \(allowed: .* = 2\); "
    with pytest.raises(TrainingStopped, match=said + r"array 0, seen at step 8; try a lower learning rate"):
        run.go()
    assert run.did == ["save 1", "save 2", "save 5"], "weights in doubt push good ones out"
    assert run.rows[-1][0] == 8, "the row that shows it is written"
    assert set(run.rows[-1][1]) >= {"loss", "grad_norm"}
    assert not set(run.rows[-1][1]) & {IN_A_ROW, FIRST_NOT_FINITE}


def test_between_saves_it_is_noticed_one_step_later(tmp_path):
    """The loop waits for the step before the last: looking must not make it wait for more."""
    run = Run(tmp_path, losses=dict.fromkeys((3, 4, 5, 6, 7), math.nan))
    with pytest.raises(TrainingStopped, match=r"at step 5; 3 steps in a row .* seen at step 6"):
        run.go()
    assert run.did == []


def test_a_run_does_not_end_with_a_step_that_went_wrong(tmp_path):
    run = Run(tmp_path, losses={10: math.nan})
    with pytest.raises(TrainingStopped, match=r"at step 10; 1 steps? in a row .* = 2, but not the last step\)"):
        run.go()
    assert run.did == []
    run = Run(tmp_path, losses={8: math.nan, 9: math.nan})
    run.go()
    assert run.did == ["save 10", "evaluate 10"]


def test_a_signal_saves_even_then(tmp_path):
    run = Run(tmp_path, losses={4: math.nan}, at={4: lambda: signal.raise_signal(signal.SIGTERM)}, save_every=4)
    with pytest.raises(Interrupted):
        run.go()
    assert run.did == ["save 4"]
