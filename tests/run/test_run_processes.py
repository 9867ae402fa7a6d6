"""Several real processes: the same numbers for any number of them, and nothing lost where they are killed."""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
THREE_AXES = ("mesh.data=2", "mesh.tensor=2", "mesh.pipeline=2")
SIX_STEPS = ("num_steps=6", "sample_tokens=8")
STEADY = ("learning_rate.name=constant", "learning_rate.warmup_steps=0", "learning_rate.peak=1e-3")
# Steps of 3 ms, so that a run saves dozens of times in a few seconds.
SMALL = (
    "batch_size=2", "sequence_length=16", "model.num_layers=1", "model.embed_dim=16", "model.mlp_dim=16",
    "model.num_heads=2", "model.num_kv_heads=2",
)  # fmt: skip
LIMIT_SECONDS = 400
PROGRAM = ("-m", "meshtrain.main")
# The same, where process 0 compiles for all.
SHARING = """
import sys
from meshtrain import main
from meshtrain import errors
from scripts.benchmarks.witness import sharing_compilations
with sharing_compilations():
    errors.run(lambda: main.main(sys.argv[1:]))
"""

# Of two processes, the second has to wait for each batch.
ONE_LOADS_SLOWLY = """
import os, time
from meshtrain.run import dataset
original = dataset.batches
def slow(*given, **named):
    for batch in original(*given, **named):
        time.sleep(0.2)
        yield batch
if os.environ["JAX_PROCESS_ID"] == "1":
    dataset.batches = slow
"""

# Of two processes, the second gets a signal before the first step, which neither begins before both know it.
SIGNAL_BEFORE_THE_FIRST_STEP = """
import os, signal, time
from meshtrain.run import dataset
original = dataset.batches
def late(*given, **named):
    if os.environ["JAX_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(4)
    yield from original(*given, **named)
dataset.batches = late
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The programs that the processes of all tests have compiled."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def launched(command, cache):
    """A function (directory, changes, processes, devices, words before the program's) -> the started launcher."""
    started = []

    def start(directory, *changes, processes=2, devices=1, program=("-c", SHARING), launch=()):
        words = ["--processes", str(processes), "--devices", str(devices), *launch]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache)}
        process = subprocess.Popen(
            [sys.executable, "-m", "meshtrain.launch", *words, "--", *program, *command(directory, *changes)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def finished(launched):
    """As `launched`, waits for the end and returns {step: loss}."""

    def finish(directory, *changes, **options):
        process = launched(directory, *changes, **options)
        out, _ = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, out
        return losses(directory)

    return finish


def losses(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def wait_for_step(process, step):
    for line in process.stdout:
        if re.search(rf"step +{step}/", line):
            return
    raise AssertionError(f"it ended with {process.wait()} before step {step}")


def worker(launcher, index):
    """The process id of one of a launcher's workers, once it has started; None: the launcher has ended."""
    while launcher.poll() is None:
        children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                if f"JAX_PROCESS_ID={index}\0" in pathlib.Path(f"/proc/{child}/environ").read_text():
                    return int(child)
        time.sleep(0.05)
    return None


@pytest.mark.long
def test_any_number_of_processes_gives_the_same_numbers_and_goes_on_with_what_another_has_saved(finished, tmp_path):
    """Two compile on their own, as users' processes do; process 0 compiles for the four."""
    alone = finished(tmp_path / "1", *THREE_AXES, *STEADY, *SIX_STEPS, processes=1, devices=8)
    assert list(alone) == list(range(1, 7))
    half = finished(tmp_path / "2", *THREE_AXES, *STEADY, "num_steps=3", processes=4, devices=2)
    np.testing.assert_allclose(list(half.values()), [alone[step] for step in half], rtol=1e-5)
    # Half of it here, half of it elsewhere: other processes, another mesh.
    whole = finished(tmp_path / "2", "mesh.fsdp=4", *STEADY, "num_steps=6", processes=2, devices=2, program=PROGRAM)
    assert list(whole) == list(alone)
    np.testing.assert_allclose(list(whole.values()), list(alone.values()), rtol=1e-5)
    two = finished(tmp_path / "4", *THREE_AXES, *STEADY, *SIX_STEPS, processes=4, devices=2)
    np.testing.assert_allclose(list(two.values()), list(alone.values()), rtol=1e-5)
    samples = [(tmp_path / name / "samples.txt").read_text() for name in ("1", "4")]
    assert samples[0] == samples[1]
    assert "the pipeline of 2 is folded into tensor" in samples[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGSTOP, 4)])
def test_a_worker_that_is_gone_or_stands_still_ends_all(launched, tmp_path, number, code):
    process = launched(tmp_path / "run", "mesh.data=2", "num_steps=100000", "eval_every=0")
    wait_for_step(process, 2)
    os.kill(worker(process, 1), number)
    begun = time.monotonic()
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == code, out
    assert time.monotonic() - begun < 55, "the watchdog's own limit is a minute"
    if code == 4:
        assert "meshtrain: hang: process 1 has sent no heartbeat for" in out
        assert "in _complete" in out, "the stacks say where it stood"


def test_a_slow_loader_is_named_and_a_signal_to_one_worker_stops_all_after_the_same_step_and_saves(launched, tmp_path):
    changes = ("mesh.data=2", "num_steps=100000", "eval_every=0", "log_every=1")
    process = launched(tmp_path / "run", *changes, program=("-c", ONE_LOADS_SLOWLY + SHARING))
    lines = iter(process.stdout)
    assert " s a step on waiting for data" in next(line for line in lines if "process 1 is slow" in line)
    next(line for line in lines if "step" in line and "slow process 1" in line)
    os.kill(worker(process, 1), signal.SIGTERM)
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 75, out
    saved = {line.split("saved at step ")[1].split()[0] for line in out.splitlines() if "] meshtrain: interr" in line}
    assert len(saved) == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == list(saved)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    named = [row for row in rows if "slow_process" in row]
    assert {row["slow_process"] for row in named} == {1}
    assert all(row["step"] > 4 for row in named), "three logged steps running, the first step not among them"
    assert named[-1]["slow_process_data_seconds"] > 0.1
    resumed = launched(tmp_path / "run", *changes, program=("-c", SIGNAL_BEFORE_THE_FIRST_STEP + SHARING))
    out, _ = resumed.communicate(timeout=LIMIT_SECONDS)
    assert resumed.returncode == 75, out
    assert f"saved at step {int(*saved) + 1} of" in out, "JAX counts the steps of a start"


# A disk that is full for a moment under one of two processes, as it writes the checksums of its second save.
ONE_FULL_DISK = """
import errno, os
from meshtrain.checkpoint import integrity
original, number = integrity._write, 0
def write(*given):
    global number
    number += 1
    if number == 2:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    original(*given)
if os.environ["JAX_PROCESS_ID"] == "1":
    integrity._write = write
"""


def test_a_save_that_fails_in_one_process_fails_in_all_and_the_next_one_succeeds(launched, tmp_path):
    changes = ("mesh.data=2", "num_steps=9", "checkpoint.every=3", "eval_every=0", *SMALL)
    process = launched(tmp_path / "run", *changes, program=("-c", ONE_FULL_DISK + SHARING))
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, out
    assert "checkpoints/6: not written: No space left on device" in out
    assert "checkpoints/6: not written: another process could not write its part" in out
    manifests = (tmp_path / "run" / "checkpoints").glob("*/manifest.json")
    assert sorted(path.parent.name for path in manifests) == ["3", "9"]


def test_processes_started_for_different_things_are_refused_alike(command, tmp_path):
    words = [command(tmp_path / "run", "mesh.data=2", f"seed={seed}") for seed in (1, 2)]
    own = f"words = {words!r}[int(os.environ['JAX_PROCESS_ID'])]"
    code = f"import os, sys; from meshtrain import main; from meshtrain import errors; {own}"
    launch = [sys.executable, "-m", "meshtrain.launch", "--processes=2", "--devices=1", "--", "-c"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*launch, f"{code}; errors.run(lambda: main.main(words))"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 2
    said = "meshtrain: error: processes: configuration differs: seed is 2 in process 1 and 1 in process 0"
    assert all(f"[{process}] {said}" in done.stderr for process in (0, 1))
    assert not (tmp_path / "run").exists()


def test_a_workdir_in_use_is_refused_and_one_that_was_left_is_not(launched, command, tmp_path):
    process = launched(tmp_path / "run", "num_steps=100000", processes=1)
    wait_for_step(process, 1)
    owner = worker(process, 0)
    second = subprocess.run(
        [sys.executable, "-m", "meshtrain.main", *command(tmp_path / "run", "num_steps=100000")],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert second.returncode == 2
    assert f"in use by process {owner} on " in second.stderr
    os.kill(owner, signal.SIGKILL)
    process.communicate(timeout=LIMIT_SECONDS)
    third = launched(tmp_path / "run", "num_steps=100000", processes=1)
    wait_for_step(third, 1)


def test_killed_four_times_it_ends_with_the_weights_of_a_run_that_was_not(launched, finished, tmp_path):
    last = "260"
    changes = ("mesh.fsdp=2", *STEADY, *SMALL, f"num_steps={last}", "checkpoint.every=20", "eval_every=0")
    straight = finished(tmp_path / "straight", *changes, processes=1, devices=2)  # and fills the cache
    begun = time.monotonic()
    process = launched(tmp_path / "killed", *changes, processes=1, devices=2)
    wait_for_step(process, 1)
    seconds = time.monotonic() - begun
    chance, steps = random.Random(4), []
    for number in range(4):
        if number % 2:
            # Somewhere before its first step. On a machine that was busy, and is not now, not long after it.
            ends = time.monotonic() + chance.uniform(0.3, 1.0) * seconds
            while time.monotonic() < ends and newest_save(tmp_path / "killed" / "checkpoints") == steps[-1]:
                time.sleep(0.01)
        else:
            while number and newest_save(tmp_path / "killed" / "checkpoints") <= steps[-1]:
                time.sleep(0.01)  # on a busy machine, too, two kills come after another save
            # Somewhere in its steps and their saves: a save every twenty steps takes as long as twenty steps.
            shown = (line for line in process.stdout if re.search(r"step +\d+/", line))
            collections.deque(itertools.islice(shown, chance.randint(1, 50)), maxlen=0)
            time.sleep(chance.uniform(0, 0.05))
        if alive := worker(process, 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(alive, signal.SIGKILL)
        process.communicate(timeout=LIMIT_SECONDS)
        steps.append(newest_save(tmp_path / "killed" / "checkpoints"))
        process = launched(tmp_path / "killed", *changes, processes=1, devices=2)
    out, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, out
    assert steps == sorted(steps)
    assert len(set(steps)) > 1, "the kills came before anything was saved, or after everything was"
    assert losses(tmp_path / "killed") == straight
    weights = [final_weights(tmp_path / run / "checkpoints" / last) for run in ("straight", "killed")]
    assert weights[0] == weights[1]


def test_killed_three_times_it_goes_on_with_those_that_are_left_and_with_all_again(launched, finished, tmp_path):
    changes = ("mesh.data=-1", *STEADY, *SMALL, "batch_size=12", "num_steps=120", "checkpoint.every=5", "log_every=1")
    straight = finished(tmp_path / "straight", *changes, "mesh.data=3", processes=1, devices=3)
    options = {"processes": 3, "launch": ("--min-processes=1", "--restarts=9", "--back-seconds=600")}
    process = launched(tmp_path / "killed", *changes, **options)
    for count in (3, 2, 1):
        wait_for_step(process, 20 * (4 - count))  # several saves each
        victim = worker(process, count - 1) if count > 1 else process.pid
        os.kill(victim, signal.SIGKILL)
    process.communicate(timeout=LIMIT_SECONDS)
    found = finished(tmp_path / "killed", *changes, **options)
    assert list(found) == list(straight)
    np.testing.assert_allclose(list(found.values()), list(straight.values()), rtol=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert {row.get("processes", 1) for row in rows if "loss" in row} == {1, 2, 3}


def newest_save(directory):
    """The newest step that counts: without a manifest a save was not finished, and gives way to the one before it.

    A kill amid a deletion leaves a folder with a manifest and a name that is no number.
    """
    sealed = [path.parent.name for path in directory.glob("[0-9]*/manifest.json")]
    return max((int(name) for name in sealed if name.isdecimal()), default=0)


def final_weights(directory):
    """{path: bytes} of every array of a checkpoint, the optimizer's too."""
    import jax
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    stored = reader.metadata(directory / "state").item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
    tree = reader.restore(directory / "state", restore_args=as_numpy)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert len(leaves) > 20
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
