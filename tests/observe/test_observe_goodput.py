"""The share of a run's time that went into its steps, over restarts and with clocks that are set back."""

import json

from meshtrain.observe.goodput import Done, Goodput
from meshtrain.observe.trackers import MetricsFile


def test_the_first_step_counts_as_time_and_not_as_use():
    goodput = Goodput(100.0, now=lambda: 110.0)
    for seconds in (0.0, 2.0, 3.0):  # the first one compiles
        goodput.add(seconds)
    assert goodput.values() == {"useful_seconds": 5.0, "timed_steps": 2, "goodput": 0.5}


def test_it_goes_on_where_the_process_before_stopped():
    goodput = Goodput(-90.0, Done(useful_seconds=20.0, timed_steps=4, passed_seconds=80.0), now=lambda: 10.0)
    goodput.add(5.0)
    assert goodput.values() == {"useful_seconds": 25.0, "timed_steps": 5, "goodput": 0.25}


def test_of_several_processes_it_says_how_many_there_are():
    assert "processes" not in Goodput(0.0).values()
    assert Goodput(0.0, num_processes=3).values()["processes"] == 3


def test_rows_say_what_was_done_and_how_old_the_run_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "loss": 3.0},
        {"step": 5, "useful_seconds": 20.0, "timed_steps": 4, "goodput": 0.5},
        {"step": 5, "eval_loss": 3.0},
        {"step": 8, "useful_seconds": 30.0, "timed_steps": 7, "goodput": 0.25},  # will be done again: lost time
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = MetricsFile(path, resume_step=5)
    assert file.done == Done(useful_seconds=20.0, timed_steps=4, passed_seconds=120.0)
    file.close()


def test_rows_without_goodput_say_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "useful_seconds": 3.0}\n{"step": 2, "useful_seconds": 3.0, "goodput": 0.0}\n')
    file = MetricsFile(path, resume_step=2)
    assert file.done == Done()
    file.close()
