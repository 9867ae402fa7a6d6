"""The loop by itself: when it saves, evaluates and stops, and what signals do. Steps are plain Python here."""

import contextlib
import itertools
import math
import signal
import threading

import pytest

from meshtrain import loop
from meshtrain.errors import Interrupted, TrainingStopped
from meshtrain.observe.profiler import ProfileOptions, Profiler
from meshtrain.observe.progress import Progress


class Run:
    """A run of ten steps that notes what the loop does; `at` maps a step to what happens while it is computed."""

    def __init__(self, directory, start_step=0, losses=None, at=None, **plan):
        self.did, self.rows, self.start_step = [], [], start_step
        self.losses, self.at, self.directory = losses or {}, at or {}, directory
        options = {"num_steps": 10, "log_every": 100, "eval_every": 0, "save_every": 0} | plan
        self.plan = loop.Plan(
            **options, num_tokens_per_step=7, flops_per_token=0.0, num_devices=1, peak_flops_per_second=None
        )

    def step(self, state, batch):
        step = state + 1
        assert batch == step
        self.at.get(step, int)()
        return step, {"loss": self.losses.get(step, 1.0 / step), "grad_norm": 1.0}

    def evaluate(self, state):
        self.did.append(f"evaluate {state}")
        return {"eval_loss": 0.5}

    def save(self, step, state):
        assert step == state
        self.did.append(f"save {step}")

    def go(self):
        actions = loop.Actions(self.step, self.evaluate, self.save, lambda step, row: self.rows.append((step, row)))
        batches = itertools.count(self.start_step + 1)
        with (
            Progress(self.plan.num_steps, self.start_step, show_bar=False) as progress,
            Profiler(ProfileOptions(), self.directory) as profiler,
        ):
            return loop.run(self.start_step, self.start_step, batches, self.plan, actions, progress, profiler)


def test_the_last_step_saves_and_evaluates(tmp_path):
    run = Run(tmp_path)
    state, values = run.go()
    assert state == 10
    assert run.did == ["save 10", "evaluate 10"]
    assert [(step, set(row) >= {"loss"}) for step, row in run.rows] == [(1, True), (10, True), (10, False)]
    assert (values["loss"], values["eval_loss"], values["tokens"]) == (0.1, 0.5, 70)


def test_what_happens_every_so_many_steps(tmp_path):
    run = Run(tmp_path, start_step=3, eval_every=4, save_every=3, log_every=2)
    run.go()
    assert run.did == ["evaluate 4", "save 6", "evaluate 8", "save 9", "save 10", "evaluate 10"]
    assert [step for step, row in run.rows if "loss" in row] == [4, 6, 8, 10]


def test_nothing_left_to_do_is_evaluated_and_not_saved(tmp_path):
    run = Run(tmp_path, start_step=10)
    assert run.go() == (10, {"eval_loss": 0.5})
    assert run.did == ["evaluate 10"]
    assert run.rows == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_once_and_does_not_wait_for_an_evaluation(tmp_path, number):
    run = Run(tmp_path, at={4: lambda: signal.raise_signal(number)}, eval_every=2, save_every=2)
    with pytest.raises(Interrupted, match=r"saved at step 4 of 10; the same command goes on from there"):
        run.go()
    assert run.did == ["save 2", "evaluate 2", "save 4"]


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
        with loop.interruptions() as arrived:
            seen.append((arrived, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [([], before)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stops_the_run_and_is_not_saved(tmp_path, loss):
    run = Run(tmp_path, losses={7: loss, 8: loss}, save_every=4)
    with pytest.raises(TrainingStopped, match=rf"loss is {loss} at step 8; the checkpoints before it stay"):
        run.go()
    assert run.did == ["save 4"]
    run = Run(tmp_path, losses={7: loss}, log_every=7)
    with pytest.raises(TrainingStopped, match=r"at step 7"):
        run.go()
    assert run.rows[-1][0] == 7, "the row that shows it is written"
