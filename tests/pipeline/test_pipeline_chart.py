import json
import pathlib
import subprocess
import sys
from fractions import Fraction

import pytest

from meshtrain.errors import UserError
from meshtrain.pipeline import __main__ as program
from meshtrain.pipeline.chart import as_text, figure
from meshtrain.pipeline.check import Costs
from meshtrain.pipeline.schedules import NAMES, build

pytestmark = pytest.mark.quick

CHARTS = pathlib.Path(__file__).parent / "charts"


@pytest.fixture
def printed(capsys):
    def call(*flags):
        program.main(flags)
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", NAMES)
def test_charts_are_as_committed(name, printed):
    """A change to a schedule shows here: `python -m meshtrain pipeline --schedule=... > tests/pipeline/charts/...`."""
    chunks = "--chunks=2" if name == "interleaved_1f1b" else "--chunks=1"
    chart = printed(f"--schedule={name}", "--stages=4", "--microbatches=8", chunks)
    assert chart == (CHARTS / f"{name}.txt").read_text()
    assert max(len(line) for line in chart.splitlines()) <= 120


def test_a_chart_in_step_lets_everybody_wait_for_each_row():
    schedule = build("1f1b", num_stages=2, num_microbatches=2)
    chart = as_text(schedule, Costs(transfer=Fraction(1)), in_step=False).splitlines()
    assert [line.rstrip() for line in chart[1:3]] == ["stage 0  F0 F1          B0    B1", "stage 1        F0 B0 F1 B1"]
    slow = as_text(schedule, Costs(transfer=Fraction(1)), in_step=True).splitlines()
    assert [line.rstrip() for line in slow[1:3]] == [
        "stage 0  F0    F1                B0    B1",
        "stage 1        F0    B0    F1    B1",
    ]


def test_json_holds_exactly_the_table_and_its_numbers(printed):
    flags = ["--schedule=1f1b", "--stages=2", "--microbatches=2", "--forward=1", "--backward=1", "--json"]
    numbers = json.loads(printed(*flags))
    assert numbers["rows"] == [
        [["F", 0, 0], None],
        [["F", 1, 0], ["F", 0, 0]],
        [None, ["B", 0, 0]],
        [None, ["F", 1, 0]],
        [["B", 0, 0], ["B", 1, 0]],
        [["B", 1, 0], None],
    ]
    assert numbers["bubble_fraction"] == numbers["bubble_fraction_in_step"] == 1 / 3
    assert numbers["peak_in_flight"] == [2, 1]


def test_times_are_exact(printed):
    flags = ["--schedule=1f1b", "--stages=4", "--microbatches=8", "--json"]
    times = ["--forward=0.7", "--backward=0.7", "--transfer=0.2"]
    # Tenths as floating point numbers would miss both in the last digit.
    numbers = json.loads(printed(*flags, *times))
    assert (numbers["bubble_fraction"], numbers["bubble_fraction_in_step"]) == (27 / 83, 3 / 7)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_are_written(suffix, printed, tmp_path):
    path = tmp_path / f"chart{suffix}"
    text = printed("--schedule=interleaved_1f1b", "--stages=2", "--microbatches=4", "--chunks=2", f"--out={path}")
    assert "bubble" in text
    content = path.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    if suffix == ".svg":
        words = [
            b"2 chunks a stage",
            b"bubble",
            b"memory",
            b"stage 1",
            b"forward",
            b"backward",
            b"lighter: later chunks",
        ]
        assert all(word in content for word in words)


def test_schedules_with_the_same_work_are_drawn_on_one_time_scale():
    """A stage's forward takes 1 and its backward 3; with two chunks, each of them takes half."""
    numbers, costs = {"num_stages": 4, "num_microbatches": 8}, Costs(Fraction(1), Fraction(3))
    halves = Costs(Fraction(1, 2), Fraction(3, 2))
    drawn = [figure(build(name, **numbers), costs) for name in ("gpipe", "1f1b")]
    drawn.append(figure(build("interleaved_1f1b", **numbers, num_chunks=2), halves))
    assert [one.get_figwidth() for one in drawn] == pytest.approx([44 * 0.28] * 3)
    assert {one.axes[0].get_xlim() for one in drawn} == {(0, 44)}
    assert [one.axes[0].get_xlabel() for one in drawn] == ["time", "time", "time, to the end of gpipe"]
    slow = figure(build("1f1b", **numbers), Costs(Fraction(1), Fraction(3), transfer=Fraction(9)))
    assert slow.axes[0].get_xlim()[1] > 44
    assert slow.axes[0].get_xlabel() == "time", "it takes longer than gpipe"


def test_the_legend_stands_between_title_and_chart_and_says_what_lighter_means():
    drawn = figure(build("interleaved_1f1b", num_stages=2, num_microbatches=4, num_chunks=2), Costs())
    drawn.canvas.draw()
    axes = drawn.axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "forward",
        "backward",
        "lighter: later chunks",
    ]
    legend, chart, title = (one.get_window_extent() for one in (axes.get_legend(), axes.patch, axes._left_title))
    assert chart.y1 - 1 <= legend.y0 < legend.y1 <= title.y0 + 1
    assert 0 <= title.x0 < title.x1 <= drawn.bbox.x1, "the title is inside of the picture"


def test_a_mistake_is_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "meshtrain.pipeline", "--schedule=gpip", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("meshtrain: error: pipeline.schedule: got 'gpip'")
    assert done.stderr.count("\n") == 1


def test_tables_and_charts_need_no_jax():
    code = "import meshtrain.pipeline.__main__, meshtrain.pipeline.program, sys; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_all_wrong_flags_are_reported_together():
    with pytest.raises(UserError) as caught:
        program.main(["--forward=x", "--transfer=-1", "--stages=0", "--columns=1"])
    assert [problem.key for problem in caught.value.problems] == ["--forward", "--transfer", "pipeline", "--columns"]
