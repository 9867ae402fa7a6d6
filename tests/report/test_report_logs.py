"""metrics.jsonl read back: torn lines, steps done twice, gaps, units and time."""

import json
import math

import numpy as np
import pytest

from meshtrain.observe.trackers import MetricsFile
from meshtrain.report import loads, logs


@pytest.fixture
def log(tmp_path):
    """A function (rows, end of the file) -> the log."""

    def read(written, end=""):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in written) + end)
        return logs.read(path)

    return read


def points(curve):
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def test_what_a_run_writes_is_read(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(10, {"loss": 2.5, "tokens": 40960, "tokens_per_second": 9.0})
    file.write(10, {"eval_loss": 2.25})
    file.write(20, {"loss": float("nan"), "tokens": 81920, "tokens_per_second": 9.5})
    file.close()
    read = logs.read(tmp_path / "metrics.jsonl")
    assert list(read.curves) == ["loss", "tokens", "tokens_per_second", "eval_loss"]
    assert points(read.curves["eval_loss"]) == {10: 2.25}
    assert read.curves["loss"].values[0] == 2.5
    assert math.isnan(read.curves["loss"].values[1]), "a gap, not a point that is left out"
    assert (read.unit, read.units_per_step) == ("tokens", 4096)
    assert read.units_at(np.array([10, 30])).tolist() == [40960, 122880]


@pytest.mark.parametrize(
    "torn", ['{"step": 30, "lo', '{"step": 30, "loss": 1}', '{"step": 1', "\x00\x00\n", "[1]\n", '{"a": 1}\n']
)
def test_lines_that_are_no_rows_are_left_out(log, torn):
    read = log([{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}], torn)
    assert points(read.curves["loss"]) == {10: 3.0, 20: 2.0}


def test_a_torn_line_in_the_middle_costs_that_row_alone(log, tmp_path):
    log([{"step": 10, "loss": 3.0}], '{"step": 20, "lo{"step": 21, "loss": 2.5}\n')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": 2.0}\n')
    assert points(logs.read(tmp_path / "metrics.jsonl").curves["loss"]) == {10: 3.0, 30: 2.0}


def test_steps_that_are_done_again_have_the_later_values(log):
    first = [{"step": step, "loss": float(step), "eval_loss": 1.0} for step in (10, 20, 30, 40)]
    again = [{"step": 20, "restore_seconds": 0.5}, {"step": 30, "loss": -3.0}, {"step": 50, "loss": -5.0}]
    read = log(first + again)
    assert points(read.curves["loss"]) == {10: 10.0, 20: 20.0, 30: -3.0, 50: -5.0}
    assert points(read.curves["eval_loss"]) == {10: 1.0, 20: 1.0}, "40, and the 30 before it, were not reached again"


def test_a_step_that_is_done_twice_in_a_row_has_the_later_value(log):
    assert points(log([{"step": 10, "loss": 1.0}, {"step": 10, "loss": 2.0}]).curves["loss"]) == {10: 2.0}


@pytest.mark.parametrize(
    "content", ["", "\n", '{"step": 1', "loss 3\n", '{"step": "1", "loss": 2}\n', '{"step": -1}\n']
)
def test_a_file_without_rows_is_none(log, content):
    assert log([], content) is None


def test_time_is_that_since_the_first_start(log):
    parts = {"timed_steps": 9}
    read = log(
        [
            {"step": 1, "loss": 3.0, "useful_seconds": 0.0, "goodput": 0.0, **parts},
            {"step": 10, "loss": 2.0, "useful_seconds": 10.0, "goodput": 0.5, **parts},
            {"step": 15, "eval_loss": 2.0},
            {"step": 20, "loss": 1.0, "useful_seconds": 20.0, "goodput": 0.5, **parts},
            {"step": 20, "eval_loss": 1.5},
        ]
    )
    seconds = read.seconds_at(np.array([1, 10, 15, 20]))
    assert math.isnan(seconds[0]), "nothing says when the first step ended"
    assert seconds[1:].tolist() == [20, 30, 40]


def test_rows_that_say_neither_unit_nor_time(log):
    read = log([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "model_flops_per_second": 1e9}])
    assert read.unit == ""
    assert np.isnan(read.units_at(read.curves["loss"].steps)).all()
    assert np.isnan(read.seconds_at(read.curves["loss"].steps)).all()


def test_values_that_are_no_numbers_are_no_points(log):
    read = log([{"step": 1, "mfu": None, "note": "text", "flag": True, "loss": 10**400, "accuracy": 1}])
    assert list(read.curves) == ["accuracy"]


@pytest.mark.parametrize("name", ["tokens", "useful_seconds", "timed_steps", "goodput", "load_each/" + "9" * 5000])
@pytest.mark.parametrize("digits", ["9" * 400, "9" * 5000, "1e400", "NaN"])
def test_a_row_with_a_number_beyond_float64_is_no_time_and_no_rate(log, name, digits):
    row = {"step": 4, "tokens": 8, "tokens_per_second": 8.0, "useful_seconds": 2.0, "timed_steps": 4, "goodput": 0.5}
    read = log([row], json.dumps({**row, "step": 8, name: "junk"}).replace('"junk"', digits) + "\n")
    assert (read.unit, read.units_per_step) == ("tokens", 1.0 if name != "tokens" else 2.0)
    assert np.isfinite(read.clock.values).all()
    assert loads.of_experts(read) == []


def test_any_unit_and_any_metric(log):
    read = log([{"step": 4, "images": 128, "images_per_second": 7.5, "accuracy": 0.5}])
    assert (read.unit, read.units_per_step) == ("images", 32)
    assert points(read.curves["accuracy"]) == {4: 0.5}
