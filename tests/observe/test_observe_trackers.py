"""metrics.jsonl and TensorBoard: whole rows, resumes, and disks that fail."""

import gc
import importlib.machinery
import json
import os
import pathlib
import re
import subprocess
import sys
import types
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from meshtrain.errors import UserError
from meshtrain.observe import trackers


def rows(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def write_steps(path, *steps, resume_step=0):
    file = trackers.MetricsFile(path, resume_step)
    for step in steps:
        file.write(step, {"loss": step / 10})
    file.close()


def test_rows_are_unrounded_and_legal_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    loss = float(np.float32(1.2345678))
    file = trackers.MetricsFile(path)
    file.write(7, {"loss": loss, "tokens": 10**12, "grad_norm": float("nan"), "scale": float("inf"), "mfu": None})
    # Before it is closed: whoever looks while the run goes on sees every row.
    assert rows(path) == [{"step": 7, "loss": loss, "tokens": 10**12, "grad_norm": None, "scale": None, "mfu": None}]
    assert path.read_text().startswith('{"step": 7, "loss"')
    assert '"tokens": 1000000000000,' in path.read_text()
    file.close()
    file.close()


def test_array_scalars_become_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = trackers.MetricsFile(path)
    file.write(1, {"loss": jnp.float32(0.5), "num": np.int64(3), "step": 99})
    file.close()
    assert rows(path) == [{"step": 1, "loss": 0.5, "num": 3}]


def test_a_new_run_continues_no_old_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20)
    write_steps(path, 10)
    assert [row["step"] for row in rows(path)] == [10]


def test_a_resume_replaces_the_rows_it_does_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20, 30, 40)
    write_steps(path, 30, 35, resume_step=20)
    assert [row["step"] for row in rows(path)] == [10, 20, 30, 35]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 30, "lo', '{"step": 30}', '{"step": 1', "\x00\x00"])
def test_a_torn_last_line_is_removed(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20)
    with path.open("a") as file:
        file.write(torn)
    write_steps(path, 40, resume_step=30)
    assert [row["step"] for row in rows(path)] == [10, 20, 40]


@pytest.mark.parametrize("junk", ["9" * 400, "9" * 5000, "-1e400", "NaN", "true", "[1]"])
@pytest.mark.parametrize("name", ["useful_seconds", "timed_steps", "goodput"])
def test_a_resume_reads_over_times_that_are_no_numbers(tmp_path, name, junk):
    path = tmp_path / "metrics.jsonl"
    times = [
        {"step": step, "useful_seconds": step / 2, "timed_steps": step, "goodput": 0.5, name: value}
        for step, value in ((10, 1), (20, "junk"))
    ]
    path.write_text("".join(json.dumps(row).replace('"junk"', junk) + "\n" for row in times))
    with closing(trackers.MetricsFile(path, resume_step=20)) as file:
        assert (file.done.useful_seconds, file.done.timed_steps) == (
            times[0]["useful_seconds"],
            times[0]["timed_steps"],
        )


def test_a_failed_replacement_leaves_the_old_rows(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20)
    before = path.read_text()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", fail)
    with pytest.raises(UserError, match="No space left on device"):
        trackers.MetricsFile(path, resume_step=10)
    assert path.read_text() == before


def test_an_untouched_file_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20)
    inode = path.stat().st_ino
    write_steps(path, 30, resume_step=20)
    assert path.stat().st_ino == inode


def test_a_missing_folder_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"metrics file: cannot write .*choose another workdir"):
        trackers.MetricsFile(tmp_path / "missing" / "metrics.jsonl")


def test_a_full_disk_is_said_once_and_tears_no_row(tmp_path):
    # In a process of its own, whose files may not grow past 100 bytes: the third row arrives in part.
    path = tmp_path / "metrics.jsonl"
    script = f"""
import resource
from meshtrain.observe.trackers import MetricsFile
file = MetricsFile({str(path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for step in range(1, 6):
    file.write(step, {{"loss": 0.123456789012345678}})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write(6, {{"loss": 0.5}})
file.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.count("WARNING") == 1
    assert str(path) in done.stderr
    assert [row["step"] for row in rows(path)] == [1, 2, 6]


def events(directory):
    found = []
    for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            # A record: length (8 bytes), its checksum (4), the event, its checksum (4).
            num_bytes = int.from_bytes(data[:8], "little")
            found.append(event_pb2.Event.FromString(data[12 : 12 + num_bytes]))
            data = data[16 + num_bytes :]
    return found


def points(directory):
    return [(event.step, v.tag, v.simple_value) for event in events(directory) for v in event.summary.value]


def test_tensorboard_points(tmp_path):
    board = trackers.TensorBoard(tmp_path / "a" / "tensorboard")
    board.write(10, {"step": 10, "loss": 2.5, "mfu": None})
    board.write(20, {"loss": 1.5, "eval_loss": 1.75})
    board.close()
    board.close()
    assert points(tmp_path / "a" / "tensorboard") == [(10, "loss", 2.5), (20, "loss", 1.5), (20, "eval_loss", 1.75)]


def test_tensorboard_flushes_while_the_run_goes_on(tmp_path):
    seconds = [0.0]
    board = trackers.TensorBoard(tmp_path, now=lambda: seconds[0])
    board.write(1, {"loss": 1.0})
    assert len(points(tmp_path)) == 1
    board.write(2, {"loss": 1.0})
    assert len(points(tmp_path)) == 1
    seconds[0] = 60.0
    board.write(3, {"loss": 1.0})
    assert len(points(tmp_path)) == 3
    board.close()


def test_tensorboard_resume_hides_later_points_and_keeps_the_old_file(tmp_path):
    for resume_step, steps in ((0, (10, 20, 30)), (20, (30,))):
        board = trackers.TensorBoard(tmp_path, resume_step)
        for step in steps:
            board.write(step, {"loss": 1.0})
        board.close()
    assert [step for step, _, _ in points(tmp_path)] == [10, 20, 30, 30]
    starts = [event.step for event in events(tmp_path) if event.session_log.status == event_pb2.SessionLog.START]
    assert starts == [21]


def test_tensorboard_survives_the_disk(tmp_path, capsys, monkeypatch):
    board = trackers.TensorBoard(tmp_path)
    writer = board._writer

    def fail(event):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_event", fail)
    for step in range(5):
        board.write(step, {"loss": 1.0})
    board.close()
    writer.close()
    assert capsys.readouterr().err.count("WARNING") == 1


def test_tensorboard_in_a_file_is_a_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"observe\.tensorboard=False"):
        trackers.TensorBoard(tmp_path / "file" / "tensorboard")


def test_all_trackers_of_a_run(tmp_path):
    with closing(trackers.Trackers(trackers.ObserveOptions(), tmp_path)) as run:
        run.write(10, {"loss": 2.5})
        run.write(20, {"loss": 1.5})
    run.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 2.5}, {"step": 20, "loss": 1.5}]
    assert points(tmp_path / "tensorboard") == [(10, "loss", 2.5), (20, "loss", 1.5)]
    with closing(trackers.Trackers(trackers.ObserveOptions(), tmp_path, 10)) as run:
        run.write(20, {"loss": 1.25})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 2.5}, {"step": 20, "loss": 1.25}]
    assert [event.step for event in events(tmp_path / "tensorboard") if event.HasField("session_log")] == [11]


class FakeWandb(types.ModuleType):
    """Takes the place of the package; writes down its calls."""

    class Error(Exception):
        pass

    def __init__(self, fails=()):
        super().__init__("wandb")
        self.calls, self.fails, self.__spec__ = [], fails, importlib.machinery.ModuleSpec("wandb", None)

    def _called(self, call, /, **given):
        self.calls.append((call, given))
        if call in self.fails:
            raise self.Error(f"no {call}")
        return self

    def init(self, **given):
        return self._called("init", **given)

    def define_metric(self, name, step_metric):
        return self._called("define_metric", name=name, over=step_metric)

    def log(self, row):
        return self._called("log", **row)

    def finish(self):
        return self._called("finish")


@pytest.fixture
def wandb(monkeypatch):
    """A function (names of calls that fail) -> the package's fake, in its place."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)

    def installed(*fails):
        monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails))
        return sys.modules["wandb"]

    return installed


WANDB = trackers.ObserveOptions(tensorboard=False, tracker="wandb")


def test_weights_and_biases_get_every_row(tmp_path, wandb):
    fake = wandb()
    (tmp_path / "config.json").write_text('{"mesh": {"data": 2}}')
    with closing(trackers.Trackers(WANDB, tmp_path)) as run:
        run.write(10, {"loss": np.float32(2.5), "mfu": None})
    run.close()
    (_, given), *rest = fake.calls
    assert given.pop("id") == (tmp_path / "wandb" / "meshtrain-run-id").read_text()
    config = {"mesh": {"data": 2}}
    assert given == {
        "project": "meshtrain", "name": tmp_path.name, "resume": "allow", "dir": tmp_path, "config": config
    }  # fmt: skip
    assert rest == [
        ("define_metric", {"name": "*", "over": "step"}),
        ("log", {"step": 10, "loss": 2.5}),
        ("finish", {}),
    ]
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 10, "loss": 2.5, "mfu": None}]


def test_a_resumed_run_goes_on_and_a_new_one_is_another(tmp_path, wandb):
    fake = wandb()
    for resume_step in (0, 20, 0):
        trackers.Trackers(WANDB, tmp_path, resume_step).close()
    first, second, third = (given["id"] for name, given in fake.calls if name == "init")
    assert first == second != third


def test_what_the_environment_says_of_a_run_is_left_to_it(tmp_path, wandb, monkeypatch):
    fake = wandb()
    for name in ("PROJECT", "NAME", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "mine")
    trackers.Trackers(WANDB, tmp_path).close()
    assert [fake.calls[0][1][name] for name in ("project", "name", "id")] == [None, None, None]


def test_a_service_that_does_not_start_is_one_line(tmp_path, wandb):
    wandb("init")
    with pytest.raises(UserError, match=r"observe\.tracker: got 'wandb', which cannot start: no init; allowed: "):
        trackers.Trackers(WANDB, tmp_path)
    gc.collect()  # an open file that nobody closes would be a warning here, and warnings are errors


def test_a_service_that_fails_later_is_one_warning(tmp_path, wandb, capsys):
    wandb("log", "finish")
    with closing(trackers.Trackers(WANDB, tmp_path)) as run:
        for step in range(3):
            run.write(step, {"loss": 1.0})
    assert capsys.readouterr().err.count("WARNING: wandb: Error: no log; training continues") == 1
    assert len(rows(tmp_path / "metrics.jsonl")) == 3


def test_a_package_that_is_missing_is_one_line_and_only_where_it_is_chosen(monkeypatch, wandb):
    wandb()
    assert trackers.missing(WANDB) == []
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert trackers.missing(trackers.ObserveOptions()) == []
    assert trackers.missing(WANDB) == [
        "observe.tracker: got 'wandb', whose package is not installed; allowed: none, or wandb with the extra 'wandb'; "
        "nearest: pip install wandb"
    ]


OFFLINE = """
import sys, time
from meshtrain.observe.trackers import ObserveOptions, Trackers
for start, steps in ((0, (10, 20, 30)), (20, (30, 40))):
    run = Trackers(ObserveOptions(tensorboard=False, tracker="wandb"), sys.argv[1], start)
    for step in steps:
        run.write(step, {"loss": step / 16, "mfu": None})
    run.close()
    time.sleep(1.1)  # the folder of a start is named by the second
"""


@pytest.mark.slow
def test_the_package_itself_writes_rows_without_a_network(tmp_path):
    """Needs the extra wandb, which `scripts/test --slow` installs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", OFFLINE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    own_id = (tmp_path / "wandb" / "meshtrain-run-id").read_text()
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert own_id in first.name
    assert own_id in second.name, "one run, continued"
    for path, steps in ((first, (10, 20, 30)), (second, (30, 40))):
        content = path.read_bytes()
        # A row is a protocol buffer: names and values, the values as JSON.
        assert {int(step) for step in re.findall(rb"\x04step.{0,3}?\x02(\d\d)", content)} == set(steps)
        assert all(str(step / 16).encode() in content for step in steps)


def test_tensorboard_is_an_option(tmp_path):
    with closing(trackers.Trackers(trackers.ObserveOptions(tensorboard=False), tmp_path)) as run:
        run.write(10, {"loss": 2.5})
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_other_processes_write_nothing(tmp_path):
    with closing(trackers.Trackers(trackers.ObserveOptions(), tmp_path / "missing", is_main=False)) as run:
        run.write(10, {"loss": 2.5})
    assert os.listdir(tmp_path) == []


def test_a_tracker_that_cannot_open_leaves_none_open(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(UserError, match="tensorboard: cannot write"):
        trackers.Trackers(trackers.ObserveOptions(), tmp_path)
    # An open file that nobody closes would be a warning here, and warnings are errors.
    gc.collect()
