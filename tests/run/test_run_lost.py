"""Two runs with one place, checkpoints that are missing at a restart, and folders that vanish during a run."""

import json
import os
import shutil

import pytest

from meshtrain import errors
from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.owner import OWNER
from meshtrain.checkpoint.retention import checkpoint_steps
from meshtrain.errors import FolderLost, UserError
from meshtrain.run import session
from meshtrain.training import train
from tests.run.test_run_saving import GIVEN, line, points

SAVES = {"every": 1, "keep_last": 9}


def trained(run, steps=4, **checkpoint):
    return train({**GIVEN, "num_steps": steps, "eval_every": 2, "checkpoint": SAVES | checkpoint}, run, line, points)


def rows(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shown = [{key: value for key, value in row.items() if key in ("step", "loss", "eval_loss")} for row in found]
    return [row for row in shown if len(row) > 1]


@pytest.fixture
def during(monkeypatch):
    """A function (step, what) that calls `what` once, in the evaluation of a step."""

    def install(step, what):
        original, calls = session.evaluate_with_texts, []

        def evaluate(*given):
            if int(given[-1].step) == step and not calls:
                calls.append(step)
                what()
            return original(*given)

        monkeypatch.setattr(session, "evaluate_with_texts", evaluate)

    return install


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trained(run := tmp_path_factory.mktemp("straight") / "run")
    return rows(run)


@pytest.mark.parametrize("place", ["same", "link", "inside"])
def test_a_second_run_in_the_place_of_another_is_refused_and_the_first_goes_on(place, during, straight, tmp_path):
    run, other, elsewhere = tmp_path / "run", tmp_path / "other", tmp_path / "checkpoints"
    (tmp_path / "link").symlink_to("checkpoints")
    first = {} if place == "inside" else {"directory": str(elsewhere)}
    second = {"same": elsewhere, "link": tmp_path / "link", "inside": run / CHECKPOINTS}[place]
    said = []

    def begin():
        with pytest.raises(UserError) as caught:
            trained(other, directory=str(second))
        said.extend(caught.value.problems)

    during(2, begin)
    trained(run, **first)
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint.directory: got {second}, used by process {os.getpid()} on ")
    assert rows(run) == straight
    assert checkpoint_steps(second) == [1, 2, 3, 4]
    assert not (second / OWNER).exists()
    assert not other.exists(), "who is refused leaves nothing"


@pytest.mark.parametrize(
    ("how", "elsewhere"), [("unmounted", True), ("emptied", True), ("unfinished", True), ("unmounted", False)]
)
def test_checkpoints_that_are_missing_are_not_taken_for_a_new_run(how, elsewhere, tmp_path):
    run, place = tmp_path / "run", tmp_path / "disk" if elsewhere else tmp_path / "run" / CHECKPOINTS
    checkpoint = {"directory": str(place)} if elsewhere else {}
    trained(run, steps=2, **checkpoint)
    before = (run / "metrics.jsonl").read_bytes()
    if how == "unfinished":
        for manifest in place.glob("*/manifest.json"):
            manifest.rename(manifest.with_name("manifest.old"))
    else:
        place.rename(tmp_path / "away")
        if how == "emptied":
            place.mkdir()
    with pytest.raises(UserError) as caught:
        trained(run, **checkpoint)
    assert caught.value.problems == (
        f"workdir {run}: its run has saved step 1, but {place} has no complete checkpoint; allowed: its checkpoints "
        f"in this place; nearest: mount or copy them to this place, another --workdir, or `rm -r {run}` to start again",
    )
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_ended_before_its_first_save_begins_again(during, straight, tmp_path):
    during(2, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, every=0)
    assert len(rows(tmp_path)) == 2
    trained(tmp_path)
    assert rows(tmp_path) == straight


def test_a_run_that_resumes_notes_that_it_was_saved(tmp_path):
    """On a machine without any file of the run, or after a kill between a save and the note."""
    place = tmp_path / "disk"
    trained(tmp_path / "old", steps=2, directory=str(place))
    trained(tmp_path / "new", steps=2, directory=str(place))
    shutil.rmtree(place)
    with pytest.raises(UserError, match=r"its run has saved step 2, but"):
        trained(tmp_path / "new", directory=str(place))


def ended(capsys, work):
    """The lines with which a run ends by itself with code 74."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        errors.run(work)
    assert end.value.code == errors.EXIT_NOT_SAVED
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("what", "step"),
    [("workdir", 2), ("workdir replaced", 2), ("directory", 2), ("directory replaced", 2), ("workdir", 4)],
)
def test_a_folder_that_is_lost_ends_the_run_with_one_line_and_is_not_made_again(what, step, during, capsys, tmp_path):
    run, place = tmp_path / "run", tmp_path / "disk"
    lost = run if what.startswith("workdir") else place

    def lose():
        lost.rename(tmp_path / "old")
        if what.endswith("replaced"):
            lost.mkdir()
            (lost / "notes").touch()

    during(step, lose)
    checkpoint = {} if lost == run else {"directory": str(place)}
    lines = ended(capsys, lambda: trained(run, **checkpoint))
    assert len(lines) == 1, lines
    name = "workdir" if lost == run else "checkpoint.directory"
    assert lines[0].startswith(f"meshtrain: not saved: {name}")
    assert "instead of this run's folder; allowed: the run's own folder until the end" in lines[0]
    left = sorted(path.name for path in lost.iterdir()) if lost.exists() else None
    assert left == (["notes"] if what.endswith("replaced") else None)
    assert 1 in checkpoint_steps(tmp_path / "old" / CHECKPOINTS if lost == run else tmp_path / "old")


def test_what_a_save_in_flight_has_made_again_is_removed(during, capsys, tmp_path):
    run = tmp_path / "run"

    def lose():
        shutil.rmtree(run, ignore_errors=True)  # a save may be writing there
        for name in ("3.orbax-checkpoint-tmp/state", "3/state"):  # TensorStore makes folders that are missing
            (run / CHECKPOINTS / name).mkdir(parents=True, exist_ok=True)

    during(2, lose)
    [line] = ended(capsys, lambda: trained(run))
    assert line.startswith(f"meshtrain: not saved: workdir {run}: got ")
    assert not run.exists()


def test_a_lost_file_of_rows_stops_the_run_after_a_save(during, capsys, tmp_path):
    during(2, (tmp_path / "metrics.jsonl").unlink)
    [line] = ended(capsys, lambda: trained(tmp_path, steps=9, every=0))
    assert line.startswith(f"meshtrain: not saved: {tmp_path / 'metrics.jsonl'}: got nothing instead of the run's rows")
    assert line.endswith("; saved at step 3 of 9; the same command resumes from there")
    assert checkpoint_steps(tmp_path / CHECKPOINTS) == [3]
    assert trained(tmp_path, steps=9).state.step == 9
    during(9, (tmp_path / "metrics.jsonl").unlink)
    trained(tmp_path, steps=9)


def test_checkpoints_inside_a_workdir_may_be_deleted_and_are_owned_again(during, tmp_path):
    seen = []
    during(2, lambda: shutil.rmtree(tmp_path / CHECKPOINTS, ignore_errors=True))
    with pytest.MonkeyPatch.context() as patch:
        original = Checkpoints.rate

        def rate(*given):
            seen.append((tmp_path / CHECKPOINTS / OWNER).exists())
            original(*given)

        patch.setattr(Checkpoints, "rate", rate)
        trained(tmp_path)
    assert seen[-1]
    assert checkpoint_steps(tmp_path / CHECKPOINTS)[-2:] == [3, 4]


def test_the_line_is_a_failed_save(tmp_path):
    assert issubclass(FolderLost, errors.SaveFailed)
