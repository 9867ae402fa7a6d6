"""Folders of runs: what is read, how runs are called, and what is said of a folder that holds none."""

import os

import pytest

from meshtrain.report.runs import open_runs
from tests.report.folders import CONFIG, folder


def test_a_folder_is_read_whole(tmp_path):
    path = folder(tmp_path / "3d", sample="def f\xe4(x)")
    ([run], problems) = open_runs([str(path)])
    assert problems == []
    assert (run.name, run.config, run.sample) == ("3d", CONFIG, "def f\xe4(x)")
    assert run.device["peak_bytes"] == 15 << 20
    assert run.log.curves["eval_loss"].values.tolist() == [3.25]


def test_what_older_runs_do_not_have_is_left_out(tmp_path):
    ([run], problems) = open_runs([str(folder(tmp_path / "3d", device=None))])
    assert problems == []
    assert (run.device, run.sample) == ({}, "")


def test_runs_of_the_same_name_get_longer_ones(tmp_path, monkeypatch):
    for path in ("new/3d", "old/3d", "new/tiny"):
        folder(tmp_path / path)
    monkeypatch.chdir(tmp_path)
    runs, problems = open_runs(["new/3d", "old/3d/", "new/tiny"])
    assert problems == []
    assert [run.name for run in runs] == ["new/3d", "old/3d", "tiny"]


def nothing_given(tmp_path):
    return []


def missing(tmp_path):
    folder(tmp_path / "3d-long")
    return [str(tmp_path / "3d-lang")]


def missing_where_nothing_is(tmp_path):
    return [str(tmp_path / "no" / "3d")]


def a_file(tmp_path):
    return [str(folder(tmp_path / "3d") / "metrics.jsonl")]


def a_pipe(tmp_path):
    path = folder(tmp_path / "3d")
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    return [str(path)]


def all_runs(tmp_path):
    return [str(folder(tmp_path / "runs" / "3d").parent)]


def not_begun(tmp_path):
    path = folder(tmp_path / "3d")
    (path / "metrics.jsonl").unlink()
    return [str(path)]


def no_configuration(tmp_path):
    path = folder(tmp_path / "3d")
    (path / "config.json").unlink()
    return [str(path)]


def twice(tmp_path):
    path = folder(tmp_path / "3d")
    return [str(path), f"{path}/../3d/"]


def not_in_utf8(tmp_path):
    return [os.fsdecode(os.fsencode(tmp_path) + b"/\xff")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nothing_given, ["RUN: got nothing", "nearest: runs/3d"]),
        (missing, ["nothing there", "did you mean '/", "/3d-long'?"]),
        (missing_where_nothing_is, ["nothing there", "nearest: runs/3d"]),
        (a_file, ["a file;"]),
        (a_pipe, ["with a pipe at metrics.jsonl"]),
        (all_runs, ["with nothing there at config.json", "runs/3d"]),
        (not_begun, ["with nothing there at metrics.jsonl", "has started"]),
        (no_configuration, ["with nothing there at config.json"]),
        (twice, ["twice; allowed: each run once"]),
        (not_in_utf8, ["a path in UTF-8"]),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_folder_that_holds_no_run_is_one_line(tmp_path, given, words):
    _, problems = open_runs(given(tmp_path))
    [line] = problems
    assert "\n" not in line
    assert "; allowed: " in line
    assert [word for word in words if word not in line] == [], line


NO_ROW, NO_JSON = "whose metrics.jsonl has no row", "got no JSON object"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b"", f"{NO_ROW}; allowed: a workdir of meshtrain that has logged a step; nearest: wait for"),
        ("metrics.jsonl", b'{"step": 1, "lo', NO_ROW),
        ("metrics.jsonl", b"\x89PNG\r\n\x1a\n\0\0\n", NO_ROW),
        ("metrics.jsonl", b'{"step": 1}\n', NO_ROW),
        ("config.json", b'{"seed": 0', f"config.json: {NO_JSON}"),
        ("config.json", b"[1, 2]", f"config.json: {NO_JSON} (not an object)"),
        ("config.json", b"\xff\xfe{", f"config.json: {NO_JSON}"),
        ("device.json", b"{", f"device.json: {NO_JSON}"),
    ],
)
def test_a_file_that_no_run_writes_is_one_line(tmp_path, name, content, said):
    path = folder(tmp_path / "run")
    (path / name).write_bytes(content)
    _, [line] = open_runs([str(path)])
    assert said in line
    assert "; allowed: " in line


def test_what_is_suggested_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/3d", "README"):
        folder(tmp_path / name)
    for name in ("README.md", "readme"):
        (tmp_path / name).touch()
    for given, wanted in (("README.md", "README"), ("runs/3e", "runs/3d"), ("./runs/3dd", "runs/3d")):
        assert open_runs([given])[1][0].endswith(f"; did you mean '{wanted}'?")
        assert open_runs([wanted])[1] == []


def test_problems_of_all_runs_are_reported_together(tmp_path):
    good = folder(tmp_path / "good")
    _, problems = open_runs([str(tmp_path / "a"), str(good), str(tmp_path / "b")])
    assert [line.split("'")[1] for line in problems] == [str(tmp_path / "a"), str(tmp_path / "b")]
