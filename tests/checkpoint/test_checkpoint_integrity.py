"""A checkpoint is as it was written, or it is not used; what need not stay goes, and only that."""

import contextlib
import json
import math
import os
import resource
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from meshtrain import verify
from meshtrain.checkpoint import integrity
from meshtrain.checkpoint.checkpoint import CHECKPOINTS, Checkpoints
from meshtrain.checkpoint.other_runs import restore_params
from meshtrain.checkpoint.retention import (
    RATINGS,
    CheckpointOptions,
    checkpoint_steps,
    rate,
    read_ratings,
    steps_to_keep,
)
from meshtrain.errors import SaveFailed, UserError
from tests.messages.test_messages_files import CONTENTS


def state(value):
    return {"params": {"w": jnp.full(1000, float(value))}}


def wanted():
    return {
        "params": {"w": jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[0]))}
    }


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The checkpoints of a run with saves at steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("three") / CHECKPOINTS
    with Checkpoints(folder, CheckpointOptions()) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {"step": step})
    return folder


@pytest.fixture
def saved(three, tmp_path):
    """A copy of these that a test may damage."""
    return shutil.copytree(three, tmp_path / CHECKPOINTS)


def data_file(directory, step):
    """The file that holds the array."""
    files = [path for path in (directory / str(step) / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    path.unlink()


def test_each_file_is_in_the_manifest(saved):
    manifest = json.loads((saved / "3" / integrity.MANIFEST).read_text())
    files = {path.relative_to(saved / "3").as_posix() for path in (saved / "3").rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {integrity.MANIFEST}
    assert integrity.damage(saved / "3") == []


@pytest.mark.parametrize(
    ("damage", "said"), [(flip, "its bytes have changed"), (cut, "bytes instead of"), (remove, "missing")]
)
def test_a_damaged_save_is_named_set_aside_and_the_one_before_is_used(saved, damage, said):
    name = data_file(saved, 3).relative_to(saved / "3").as_posix()
    damage(data_file(saved, 3))
    with Checkpoints(saved, CheckpointOptions()) as checkpoints:
        step, lines = checkpoints.newest_whole()
        assert step == 2
        [line] = lines
        assert f"checkpoint {saved / '3'}: {name}: " in line
        assert said in line
        restored = checkpoints.restore(step, wanted())
        np.testing.assert_array_equal(restored["params"]["w"], state(2)["params"]["w"])
        assert checkpoints.save(3, state(30), {}), "the step is done again, and saved again"
    assert (saved.parent / "damaged" / "3").is_dir()
    with Checkpoints(saved, None) as checkpoints:
        assert checkpoints.newest_whole() == (3, [])
        np.testing.assert_array_equal(checkpoints.restore(3, wanted())["params"]["w"], state(30)["params"]["w"])


@pytest.mark.parametrize("what", CONTENTS)
def test_a_manifest_that_is_broken_in_any_way_is_damage(what, tmp_path):
    (tmp_path / "data").write_bytes(b"weights")
    assert integrity.seal(tmp_path, 0, 1, lambda: False)
    manifest = tmp_path / integrity.MANIFEST
    manifest.write_bytes(CONTENTS[what](manifest.read_bytes()))
    assert integrity.damage(tmp_path) == ([] if what == "as it is" else [f"{manifest.name}: its bytes have changed"])


@pytest.mark.parametrize("name", [integrity.MANIFEST, "data"])
def test_what_is_no_file_is_not_waited_for(name, tmp_path, capsys):
    step = tmp_path / CHECKPOINTS / "1"
    step.mkdir(parents=True)
    (step / "data").touch()
    assert integrity.seal(step, 0, 1, lambda: False)
    (step / name).unlink()
    os.mkfifo(step / name)
    assert verify.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{step}: damaged: {name}: not a file but a pipe\n"


@pytest.mark.parametrize("damage", [flip, remove])
def test_so_is_one_whose_manifest_is_damaged(saved, damage):
    damage(saved / "3" / integrity.MANIFEST)
    with Checkpoints(saved, None) as checkpoints:
        step, [line] = checkpoints.newest_whole()
    assert step == 2
    assert integrity.MANIFEST in line
    assert (saved / "3").is_dir(), "who only reads moves nothing"


def test_two_damaged_copies_of_a_step_are_both_kept(saved):
    for number in range(2):
        flip(data_file(saved, 3))
        with Checkpoints(saved, CheckpointOptions()) as checkpoints:
            assert checkpoints.newest_whole()[0] == 2
            checkpoints.save(3, state(number), {})
    assert {path.name for path in (saved.parent / "damaged").iterdir()} == {"3", "3-2"}


def test_none_whole_is_an_error_and_nothing_is_moved_or_deleted(saved):
    for step in (1, 2, 3):
        flip(data_file(saved, step))
    with Checkpoints(saved, CheckpointOptions()) as checkpoints, pytest.raises(UserError) as caught:
        checkpoints.newest_whole()
    assert len(caught.value.problems) == 4
    assert "got no undamaged checkpoint" in caught.value.problems[-1]
    assert {path.name for path in saved.iterdir()} == {"1", "2", "3"}
    with pytest.raises(UserError, match="got no undamaged checkpoint"):
        restore_params(saved, None, wanted()["params"])


def test_saves_that_were_never_finished_are_a_run_not_begun(saved):
    for step in (1, 2, 3):
        (saved / str(step) / integrity.MANIFEST).unlink()
    with Checkpoints(saved, CheckpointOptions()) as checkpoints:
        step, lines = checkpoints.newest_whole()
        assert step is None
        assert all("the save was not finished" in line for line in lines)
        assert checkpoints.save(1, state(1), {})


def test_weights_are_taken_from_the_newest_whole_save(saved, capsys):
    flip(data_file(saved, 3))
    got, step = restore_params(saved, None, wanted()["params"])
    assert step == 2
    np.testing.assert_array_equal(got["w"], state(2)["params"]["w"])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"meshtrain: WARNING: checkpoint {saved / '3'}: ")


def test_verify_says_what_is_whole(saved, capsys):
    flip(data_file(saved, 2))
    assert verify.main([str(saved.parent)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{saved / '1'}: undamaged"
    assert lines[1].startswith(f"{saved / '2'}: damaged: state/")
    assert lines[2] == f"{saved / '3'}: undamaged"
    assert verify.main([str(saved / "3")]) == 0
    with pytest.raises(UserError, match="got nothing there"):
        verify.main([str(saved / "4")])


@pytest.mark.parametrize(("place", "newest"), [(shutil.move, 1), (os.symlink, 2), (shutil.copytree, 2)])
def test_a_save_under_the_name_of_another_step_is_treated_as_damaged(place, newest, tmp_path, capsys):
    directory = tmp_path / CHECKPOINTS
    with Checkpoints(directory, CheckpointOptions()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step) | {"step": jnp.int32(step)}, {})
    place(directory / "2", directory / "4")
    said = "it contains the state of step 2: the folder was renamed, copied or linked"
    assert verify.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{directory / '4'}: damaged: {said}"
    with Checkpoints(directory, None) as checkpoints, pytest.raises(UserError, match=f"{said}; allowed: .*nearest"):
        checkpoints.refuse_damaged(4)
    restore_params(tmp_path, None, wanted()["params"])
    assert f"WARNING: checkpoint {directory / '4'}: {said}" in capsys.readouterr().err
    with Checkpoints(directory, CheckpointOptions()) as checkpoints:
        assert checkpoints.newest_whole() == (newest, [f"checkpoint {directory / '4'}: {said}"])
    assert (tmp_path / "damaged" / "4").is_dir()
    assert checkpoint_steps(directory)[-1] == newest


def test_each_process_adds_up_its_own_files_and_the_first_puts_them_together(tmp_path):
    """Three processes on one file system, as threads; the third folder belongs to nobody."""
    step = tmp_path / "7"
    for process in range(4):
        folder = step / "state" / f"ocdbt.process_{process}"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(bytes([process]) * 100)
    (step / "metadata").write_text("{}")
    results = {}

    def seal(index):
        results[index] = integrity.seal(step, index, 3, lambda: False)

    threads = [threading.Thread(target=seal, args=(index,)) for index in range(3)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True}
    manifest = json.loads((step / integrity.MANIFEST).read_text())
    assert set(manifest["files"]) == {"metadata", *(f"state/ocdbt.process_{i}/data" for i in range(4))}
    assert not list(step.glob("*.part"))
    flip(step / "state" / "ocdbt.process_1" / "data")
    found = [integrity.damage(step, index, 3) for index in range(3)]
    assert sum(map(len, found)) == 1, "each reads its share, and together they read everything"


def test_a_save_that_is_never_committed_is_not_waited_for(tmp_path):
    assert not integrity.seal(tmp_path / "7", 0, 1, lambda: True)
    assert not (tmp_path / "7").exists()


@contextlib.contextmanager
def full_disk():
    """Files may not grow beyond a few bytes: writing fails as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.timeout(120)  # a save that is not told of its failure waits for ever
def test_a_full_disk_is_told_the_last_good_save_stays_and_the_next_may_succeed(saved):
    large = {"params": {"w": jax.random.normal(jax.random.key(0), (100_000,))}}
    with Checkpoints(saved, CheckpointOptions(keep_last=1)) as checkpoints:
        with full_disk():
            checkpoints.save(4, large, {})
            with pytest.raises(SaveFailed) as caught:
                checkpoints.wait()
        assert str(caught.value).startswith(f"checkpoint {saved / '4'}: not written: ")
        assert "nearest: free some space" in str(caught.value)
        assert checkpoint_steps(saved) == [1, 2, 3], "nothing goes before the new save is whole"
        # At once, before the thread that seals can have looked whether the last one failed.
        assert checkpoints.save(5, large, {})
        assert checkpoints.steps() == [5]
    with Checkpoints(saved, CheckpointOptions()) as checkpoints:
        assert checkpoints.newest_whole() == (5, [])


def test_a_thread_that_still_writes_to_a_save_that_failed_does_not_disturb_the_next(saved):
    stop, left = threading.Event(), saved / "4.orbax-checkpoint-tmp" / "state"

    def keep_writing():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                left.mkdir(parents=True, exist_ok=True)
                (left / str(time.monotonic_ns())).write_bytes(b"half")

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for step in range(5, 9):
            with Checkpoints(saved, CheckpointOptions()) as checkpoints:
                assert checkpoints.save(step, state(step), {})
                assert step in checkpoints.steps()
    finally:
        stop.set()
        writer.join()


def test_a_second_ctrl_c_does_not_wait_for_a_save(saved, monkeypatch):
    ends = threading.Event()
    monkeypatch.setattr(integrity, "checksums", lambda *_: ends.wait(60) and {})

    def interrupted():
        with Checkpoints(saved, CheckpointOptions()) as checkpoints:
            checkpoints.save(4, state(4), {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not integrity.is_sealed(saved / "4")
    ends.set()


@pytest.mark.parametrize("moment", ["committed", "read"])
def test_a_save_that_vanishes_before_it_is_sealed_is_told_and_the_next_may_succeed(saved, monkeypatch, moment):
    name = {"committed": "_wait", "read": "checksums"}[moment]
    original = getattr(integrity, name)

    def vanish(*given):
        monkeypatch.setattr(integrity, name, original)
        while not (saved / "4").is_dir():
            time.sleep(0.01)
        shutil.rmtree(saved)
        return original(*given)

    with Checkpoints(saved, CheckpointOptions()) as checkpoints:
        monkeypatch.setattr(integrity, name, vanish)
        assert checkpoints.save(4, state(4), {})
        with pytest.raises(SaveFailed):
            checkpoints.wait()
        assert checkpoints.save(5, state(5), {})
        assert checkpoints.steps() == [5]


def test_a_folder_that_has_vanished_is_made_again(saved):
    with Checkpoints(saved, CheckpointOptions()) as checkpoints:
        shutil.rmtree(saved)
        assert checkpoints.save(5, state(5), {})
        assert checkpoints.steps() == [5]


@pytest.mark.parametrize(
    ("options", "stay"),
    [
        ({"keep_last": 2}, {50, 60}),
        ({"keep_last": 1, "keep_every": 20}, {20, 40, 60}),
        ({"keep_last": 1, "keep_best": 2}, {10, 40, 60}),
        ({"keep_last": 1, "keep_best": 1, "keep_every": 30}, {30, 40, 60}),
        ({"keep_last": 1, "keep_best": 1, "best_metric": "eval_accuracy"}, {30, 60}),
        ({"keep_last": 1, "keep_best": 2, "best_metric": "eval_accuracy"}, {20, 30, 60}),
        ({"keep_last": 1, "keep_best": 9, "best_metric": "eval_unknown"}, {60}),
    ],
)
def test_what_stays(options, stay):
    """The accuracy, of which more is better, is best where the loss is not; 50 is no number, 60 is unrated."""
    losses = {10: 0.5, 20: 0.7, 30: 0.9, 40: 0.5, 50: math.nan}
    accuracies = {10: 0.7, 20: 0.9, 30: 0.9, 40: 0.8, 50: math.inf}
    ratings = {step: {"eval_loss": losses[step], "eval_accuracy": accuracies[step]} for step in losses}
    checked = CheckpointOptions(**options)
    is_higher = checked.best_metric == "eval_accuracy"
    assert steps_to_keep(range(10, 70, 10), checked, ratings, higher_is_better=is_higher) == stay


@pytest.mark.parametrize("higher_is_better, best", [(False, 2), (True, 1)])
def test_old_saves_go_once_the_new_one_is_sealed_and_the_best_stays(higher_is_better, best, tmp_path):
    options = CheckpointOptions(keep_last=1, keep_best=1)
    with Checkpoints(tmp_path, options, higher_is_better=higher_is_better) as checkpoints:
        for step, loss in ((1, 0.9), (2, 0.3), (3, 0.6), (4, 0.8)):
            checkpoints.save(step, state(step), {})
            checkpoints.rate(step, {"eval_loss": loss})
        assert checkpoints.steps() == [best, 4]
    assert read_ratings(tmp_path)[2] == {"eval_loss": 0.3}


def test_a_rating_after_the_seal_deletes_what_was_best_before(tmp_path):
    options = CheckpointOptions(keep_last=1, keep_best=1)
    with Checkpoints(tmp_path, options) as checkpoints:
        for step, loss in ((1, 0.9), (2, 0.8)):
            checkpoints.save(step, state(step), {})
            checkpoints.wait()
            checkpoints.rate(step, {"eval_loss": loss})
    assert checkpoint_steps(tmp_path) == [2]


@pytest.mark.parametrize("content", ["[" * 200_000, "", "[1]", '{"x": 1}', '{"1": "low"}'])
def test_damaged_ratings_are_none(content, tmp_path):
    (tmp_path / RATINGS).write_text(content)
    assert read_ratings(tmp_path) == {}


def test_ratings_beyond_float64_are_no_best_ones(tmp_path):
    (tmp_path / RATINGS).write_text('{"1": -1' + "0" * 400 + ', "2": 0.5, "3": 0.6}')
    options = CheckpointOptions(keep_last=1, keep_best=1)
    assert steps_to_keep([1, 2, 3], options, read_ratings(tmp_path), higher_is_better=False) == {2, 3}


def test_ratings_of_one_metric_are_read(tmp_path):
    (tmp_path / RATINGS).write_text('{"10": 0.5, "20": 0.25}')
    assert read_ratings(tmp_path) == {10: {"eval_loss": 0.5}, 20: {"eval_loss": 0.25}}


def test_a_step_that_is_evaluated_again_has_its_new_rating(tmp_path):
    for step, value in ((2, 1.0), (4, 2.0), (2, 3.0)):
        rate(tmp_path, step, {"eval_loss": value})
    assert read_ratings(tmp_path) == {2: {"eval_loss": 3.0}, 4: {"eval_loss": 2.0}}
