"""Curves as a Plotly figure: thinned so that extremes stay, a panel for each metric, over steps, units or time."""

import html
import json
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from meshtrain.report import curves
from meshtrain.report.logs import Curve, Log

NAN = math.nan


def curve(values, every=1):
    return Curve(every * np.arange(1, len(values) + 1), np.array(values, np.float64))


def log(unit="tokens", per_step=4096.0, seconds=(), **found):
    return Log(found, unit, per_step, curve(seconds))


@hypothesis.given(
    strategies.lists(strategies.sampled_from([NAN, -2.0, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=90),
    strategies.integers(5, 40),
)
def test_thinning_keeps_ends_extremes_and_order(values, most):
    values = np.array(values)
    kept = curves.thin(values, most)
    assert len(kept) <= most or len(values) <= most
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    if not np.isnan(values).all():
        assert np.nanmin(values[kept]) == np.nanmin(values)
        assert np.nanmax(values[kept]) == np.nanmax(values)
    assert np.isnan(values[kept]).any() == np.isnan(values).any(), "a gap stays one"


def test_every_bucket_keeps_its_own_spike():
    values = np.zeros(100_000)
    spikes = np.arange(500, 100_000, 1000)
    values[spikes] = np.where(np.arange(100) % 2, 5.0, -5.0)
    kept = curves.thin(values, 4000)
    assert set(spikes) <= set(kept)
    assert len(kept) <= 4000


def test_few_points_all_stay():
    assert curves.thin(np.array([1.0, NAN, 3.0]), 5).tolist() == [0, 1, 2]


def test_panels_come_in_one_order_and_leave_out_what_others_say():
    found = {name: curve([1.0, 2.0]) for name in (
        "weight", "goodput", "accuracy", "images", "images_per_second", "grad_norm", "useful_seconds", "loss",
        "eval_accuracy", "learning_rate", "eval_loss", "model_flops_per_second", "first_step_seconds",
    )}  # fmt: skip
    assert curves.metrics([log("images", **found, skipped_steps=curve([0.0, 0.0]))]) == [
        "loss", "eval_loss", "accuracy", "eval_accuracy", "learning_rate", "grad_norm", "images_per_second", "goodput",
    ]  # fmt: skip
    assert curves.metrics([log(loss=curve([1.0]), skipped_steps=curve([0.0, 3.0]))]) == ["loss", "skipped_steps"]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("images_per_second", "throughput, images/s"),
        ("eval_loss", "evaluation loss"),
        ("eval_exact_match", "evaluation exact match"),
    ],
)
def test_titles(metric, said):
    assert curves.title(metric) == said


def test_a_run_is_one_entry_of_the_legend_in_all_panels():
    runs = {"a": log(loss=curve([3.0, 2.0]), eval_loss=curve([2.5])), "<b>": log(loss=curve([4.0], every=10))}
    drawn = curves.figure(runs)
    said = [(one["name"], one["legendgroup"], one["yaxis"], one["showlegend"]) for one in drawn["data"]]
    assert said == [("a", "a", "y", True), ("&lt;b&gt;", "<b>", "y", True), ("a", "a", "y2", False)]
    assert [one["x"] for one in drawn["data"]] == [[1, 2], [10], [1]]
    assert [one["y"] for one in drawn["data"]] == [[3, 2], [4], [2.5]]
    first, second, third = (one["line"]["color"] for one in drawn["data"])
    assert first == third != second
    layout = drawn["layout"]
    assert [one["text"] for one in layout["annotations"]] == ["loss", "evaluation loss"]
    assert layout["xaxis2"]["matches"] == "x", "panels zoom together"


def test_a_title_stands_over_its_panel_in_lines_as_wide_as_it():
    name = "a_metric_<b>_whose_name_would_not_fit_into_" + "two_lines_of_" * 4
    layout = curves.figure({"a": log(loss=curve([1.0]), expert_load=curve([2.0]), **{name: curve([1.0])})})["layout"]
    first, load, long = layout["annotations"]
    assert (first["text"], first["xref"], first["yref"]) == ("loss", "x domain", "y domain")
    assert load["text"] == curves.title("expert_load")
    assert (load["xref"], load["yref"]) == ("x2 domain", "y2 domain")
    lines = [html.unescape(line) for line in long["text"].split("<br>")]
    assert len(lines) == 2
    assert lines[0].startswith("a metric <b> whose")
    assert lines[1].endswith(" ...")
    assert max(map(len, lines)) <= curves.TITLE_CHARACTERS
    above = layout["template"]["layout"]["annotationdefaults"]
    assert (above["y"], above["yanchor"]) == (1, "bottom")
    assert not any("title" in layout[axis] for axis in layout if axis.startswith("yaxis"))


def test_only_the_lowest_panels_name_what_they_are_drawn_over():
    names = [f"metric_{number}" for number in range(5)]
    layout = curves.figure({"a": log(**{name: curve([1.0]) for name in names})})["layout"]
    assert [axis for axis in layout if axis.startswith("xaxis") and "title" in layout[axis]] == [
        "xaxis3",
        "xaxis4",
        "xaxis5",
    ]
    for button in layout["updatemenus"][0]["buttons"]:
        named = {key for key in button["args"][1] if "title" in key}
        assert named == {"xaxis3.title.text", "xaxis4.title.text", "xaxis5.title.text"}


def test_a_constant_is_one_number_on_its_axis():
    found = {"loss": curve([3.0, 2.0]), "loss_scale": curve([65536.0, NAN, 65536.0])}
    layout = curves.figure({"a": log(**found, seconds=[0.0]), "b": log(**found, seconds=[0.0])})["layout"]
    assert (layout["yaxis2"]["tickvals"], layout["yaxis2"]["ticktext"]) == ([65536], ["65,536"])
    assert "tickvals" not in layout["yaxis"]
    assert (layout["yaxis"]["minexponent"], layout["yaxis"]["separatethousands"]) == (5, True), "98,304 as well"


def test_rates_come_in_the_order_of_their_runs():
    units = ["images", "tokens", "rows", "pairs", "frames"]
    runs = [log(unit, loss=curve([1.0]), **{f"{unit}_per_second": curve([9.0])}) for unit in units]
    assert curves.metrics(runs) == ["loss", *(f"{unit}_per_second" for unit in units)]


def test_the_number_of_processes_is_drawn_where_it_has_changed():
    steady, shrunk = (log(loss=curve([3.0, 2.0]), processes=curve(numbers)) for numbers in ([4, 4], [4, 3]))
    assert curves.metrics([steady]) == ["loss"]
    assert curves.metrics([steady, shrunk]) == ["loss", "processes"]


def test_a_run_that_saved_once_has_no_panel_of_saves():
    once, twice = (log(loss=curve([3.0, 2.0]), save_blocking_seconds=curve(saves)) for saves in ([0.1], [0.1, 0.2]))
    assert curves.metrics([once, once]) == ["loss"]
    assert curves.metrics([once, twice]) == ["loss", "save_blocking_seconds"]


def test_gaps_are_null_and_numbers_keep_seven_digits():
    (one,) = curves.figure({"a": log(loss=curve([2.123456789, NAN, 1e-12]))})["data"]
    assert one["y"] == [2.123457, None, 1e-12]


def test_buttons_hold_each_trace_over_steps_units_and_time():
    runs = {
        "a": log(loss=curve([3.0, 2.0]), seconds=[NAN, 1.5]),
        "b": log("images", 32.0, accuracy=curve([0.5], every=4)),
    }
    over, scale = curves.figure(runs)["layout"]["updatemenus"]
    assert [button["label"] for button in over["buttons"]] == ["steps", "tokens or images", "time"]
    steps, units, seconds = (button["args"][0]["x"] for button in over["buttons"])
    assert steps == [[1, 2], [4]]
    assert units == [[4096, 8192], [128]]
    assert seconds == [[None, 1.5], [None]]
    axes = over["buttons"][2]["args"][1]
    assert axes["xaxis2.title.text"] == "seconds since the start"
    assert axes["xaxis2.autorange"] is True, "what was zoomed into is elsewhere now"
    assert scale["buttons"][1]["args"][0]["yaxis.type"] == "log"
    assert "yaxis2.type" not in scale["buttons"][1]["args"][0], "accuracy is no loss"


def test_what_no_run_knows_has_no_button():
    (over,) = curves.figure({"a": log("", 0.0, accuracy=curve([0.5]))})["layout"]["updatemenus"]
    assert [button["label"] for button in over["buttons"]] == ["steps"]


@pytest.mark.parametrize(("num_runs", "fewest_points"), [(1, 3000), (12, 300), (60, 25)])
def test_many_long_runs_leave_room_for_plotly_itself(num_runs, fewest_points):
    """A page has 8 MB, of which the script takes 4.9: at 100,000 steps, with numbers as long as they get."""
    chance = np.random.default_rng(0)
    names = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "goodput", "step_seconds", "data_share", "mfu")
    one = log(seconds=np.arange(100_000) / 3, **{name: curve(-chance.random(100_000)) for name in names})
    drawn = curves.figure({f"run {number}": one for number in range(num_runs)})
    assert all(len(trace["x"]) >= fewest_points for trace in drawn["data"])
    assert len(json.dumps(drawn)) < 3_000_000
