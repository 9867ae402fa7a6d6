"""The command `report`: its arguments, and the pictures that it draws."""

import re
import sys

import pytest

from meshtrain.errors import UserError
from meshtrain.report import __main__ as report
from meshtrain.report.runs import open_runs
from tests.messages.refused import deadline
from tests.report.folders import CONFIG, DEVICE, folder


@pytest.fixture
def runs(tmp_path):
    """A function (changes of the configuration) -> one run with them."""

    def made(**changes):
        found, problems = open_runs([str(folder(tmp_path / "run", device=None, config=CONFIG | changes))])
        assert problems == []
        return found

    return made


def test_the_schedule_is_that_of_the_configuration(runs):
    [_, drawn] = report.schedules(runs())
    assert ">1f1b: 2 stages, 6 microbatches; forward 1, backward 3<" in drawn


def test_chunks_share_the_time_of_their_stage(tmp_path):
    """So charts of runs can be compared: half as many layers take half as long."""
    chunked = CONFIG["pipeline"] | {"schedule": "interleaved_1f1b", "num_microbatches": 4, "num_chunks": 2}
    whole = CONFIG["pipeline"] | {"num_microbatches": 4}
    configs = {"whole": CONFIG | {"pipeline": whole}, "chunked": CONFIG | {"pipeline": chunked}}
    found, _ = open_runs([str(folder(tmp_path / name, config=config)) for name, config in configs.items()])
    _, _, first, _, second = report.schedules(found)
    assert "2 chunks a stage; forward 0.5, backward 1.5<" in second
    widths = [re.search(r'width="([\d.]+)pt"', drawn)[1] for drawn in (first, second)]
    assert widths[0] == widths[1]


def test_a_schedule_too_large_to_draw_is_named(runs):
    pipeline = CONFIG["pipeline"] | {"num_microbatches": 300}
    [_, said] = report.schedules(runs(pipeline=pipeline))
    assert said == "<p>1f1b: 2 stages and 600 microbatches, too many to draw here</p>"


def test_a_schedule_of_one_s_own_is_named_and_not_imported(runs):
    [_, said] = report.schedules(runs(pipeline=CONFIG["pipeline"] | {"schedule": "no.such:rows"}))
    assert said.startswith("<p>no.such:rows: 2 stages and 6 microbatches, a custom function")


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": CONFIG["mesh"] | {"pipeline": 1}},
        {"mesh": {"data": -1}},
        {"pipeline": CONFIG["pipeline"] | {"schedule": "of another version"}},
    ],
    ids=["no pipeline", "no sizes", "another version"],
)
def test_without_a_schedule_there_is_no_chart(runs, changes):
    assert report.schedules(runs(**changes)) == []


@pytest.mark.parametrize("pipeline", [None, 3, {"num_microbatches": "many", "depth": 3}])
def test_odd_values_of_a_pipeline_are_those_of_the_defaults(runs, pipeline):
    [_, drawn] = report.schedules(runs(pipeline=pipeline, accumulation_steps=1))
    assert ">1f1b: 2 stages, 4 microbatches; forward 1, backward 3<" in drawn


@pytest.mark.parametrize(("axes", "num_pictures"), [({}, 1), ({"ring": 2}, 0)])
def test_a_mesh_of_other_axes_is_not_drawn(runs, axes, num_pictures):
    text = "".join(report.meshes(runs(mesh=CONFIG["mesh"] | axes)))
    assert text.count("<svg") == num_pictures


def test_runs_on_the_same_mesh_share_a_picture(tmp_path):
    meshes = [DEVICE["mesh"], DEVICE["mesh"] | {"data": 4}, DEVICE["mesh"]]
    paths = [str(folder(tmp_path / f"{i}", device={"mesh": mesh})) for i, mesh in enumerate(meshes)]
    text = "".join(report.meshes(open_runs(paths)[0]))
    assert (text.count("<svg"), "<h3>0, 2</h3>" in text, "<h3>1</h3>" in text) == (2, True, True)


JUNK = ("9" * 400, "9" * 5000, "-1e400", "9" * 300, '"\\ud800"', "[]")


@pytest.mark.parametrize("name", ["metrics.jsonl", "device.json", "config.json"])
def test_values_that_no_run_writes_are_no_reason_to_give_up(name, tmp_path):
    """In each run all numbers of the file's last line are others; the page shows what is left."""
    for number, junk in enumerate(JUNK):
        path = folder(tmp_path / f"{number}", device=None if name == "config.json" else DEVICE) / name
        before, found, last = path.read_text().rpartition('{"step": 30' if name == "metrics.jsonl" else "{")
        path.write_text(before + found + re.sub(r"(?<=: )[\d.]+", lambda _, junk=junk: junk, last))
    page = tmp_path / "page.html"
    assert report.main([*(str(tmp_path / f"{number}") for number in range(len(JUNK))), f"--html={page}"]) == 0
    assert "<h1>" in page.read_text()


@pytest.mark.parametrize(
    "sizes", [{"tensor": 10**18}, {"pipeline": 10**9}, {"fsdp": 10**7}, {"data": 1 << 17}, {"pipeline": 1 << 16}]
)
def test_a_mesh_of_any_size_is_answered_at_once(runs, sizes):
    with deadline(5):
        found = runs(mesh=dict.fromkeys(CONFIG["mesh"], 1) | sizes)
        drawn = "".join(report.schedules(found))
        assert drawn.endswith("65536 stages and 6 microbatches, too many to draw here</p>") == (
            sizes == {"pipeline": 1 << 16}
        )
        assert "<svg" not in drawn
        assert len(report.meshes(found)) == (2 if sizes == {"data": 1 << 17} or sizes == {"pipeline": 1 << 16} else 0)


def test_without_plotly_the_line_names_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UserError) as caught:
        report.main([str(folder(tmp_path / "run")), f"--html={tmp_path / 'x.html'}"])
    assert caught.value.problems == (
        "plotly: not installed; allowed: the extra 'report'; nearest: pip install 'meshtrain[report]'",
    )
    assert not (tmp_path / "x.html").exists()
