"""Tests checkpoints in a bucket: kills two processes during saves, and compares the time of saves with a disk.

The bucket is the emulator of the tests, in a separate process on this machine. The two processes share no folder. They
are killed together, repeatedly, and resume from the newest complete save. Losses and last state must equal an
uninterrupted run bitwise. Finally one process resumes in an empty folder, on another mesh. The run has experts, draws
from two sources by weight, and averages its weights.

Extras: gcs buckets-test
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.integrity import MANIFEST, is_sealed
from meshtrain.checkpoint.retention import CheckpointOptions, checkpoint_steps
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.store import buckets
from scripts.benchmarks.save import example_state
from tests import bucket_process

ROOT = Path(__file__).parents[2]
EVERY = 10  # steps between saves
CONFIG = """
from meshtrain.config import default

def get_config():
    config = default()
    config.num_steps, config.batch_size, config.sequence_length, config.sample_tokens = {steps}, 4, 16, 0
    config.model.num_layers, config.model.embed_dim, config.model.mlp_dim = 1, 16, 16
    config.model.num_heads = config.model.num_kv_heads = 2
    config.model.moe.num_experts, config.model.moe.experts_per_token, config.optimizer.average = 4, 2, 0.99
    config.learning_rate.name, config.learning_rate.warmup_steps, config.learning_rate.peak = "constant", 0, 1e-3
    config.checkpoint.every = {every}
    config.data.source, config.data.path, config.log_every = "text", "{mixture}", 1
    config.observe.tensorboard = False
    return config
"""


class Job:
    """Processes on this machine, each in its own folder; `lines` is the output of process 0."""

    def __init__(
        self, folders: Sequence[Path], server: bucket_process.Server, words: Sequence[str], devices: int
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.processes = []
        for index, folder in enumerate(folders):
            folder.mkdir(exist_ok=True)
            own = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(len(folders)),
                "JAX_PROCESS_ID": str(index),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(devices),
                "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
                "PYTHONPATH": str(ROOT),
                **server.environment,
            }
            if len(folders) == 1:
                del own["JAX_COORDINATOR_ADDRESS"]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "meshtrain.main", "--workdir=run", *words],
                    cwd=folder,
                    env={**os.environ, **own},
                    stdout=subprocess.PIPE if index == 0 else subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        assert self.processes[0].stdout is not None
        self.lines: Iterator[str] = iter(self.processes[0].stdout)

    def finish(self) -> None:
        """Waits for the end; raises AssertionError with the output if a process failed."""
        said = "".join(self.lines)
        codes = [process.wait() for process in self.processes]
        self._close()
        assert not any(codes), f"{codes}\n{said}"

    def kill(self) -> None:
        """Kills all processes at once, and reads the output of process 0."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self._close()

    def _close(self) -> None:
        assert self.processes[0].stdout is not None
        self.processes[0].stdout.close()


def sealed(prefix: str) -> list[int]:
    """Returns the steps with complete saves."""
    place = buckets.place(prefix)
    return [step for step in checkpoint_steps(place) if is_sealed(place / str(step))]


def arrays(prefix: str, step: int) -> dict[str, bytes]:
    """Returns the bytes of each array of a checkpoint, by path."""
    with ocp.PyTreeCheckpointer() as reader:
        where = buckets.place(prefix) / str(step) / "state"
        as_numpy = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(where).item_metadata.tree
        )
        tree = reader.restore(where, restore_args=as_numpy)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def losses(folder: Path) -> dict[int, float]:
    """Returns step -> loss of a run."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def written(folder: Path, num_steps: int) -> Path:
    """Writes the job's configuration and its two texts, and returns the path of the configuration."""
    texts = [folder / "additions.txt", folder / "products.txt"]
    for text, sign in zip(texts, "+*", strict=True):
        text.write_text("".join(f"def f{i % 7}(x):\n    return x {sign} {i * i % 13}\n" for i in range(500)))
    config = folder / "config.py"
    config.write_text(CONFIG.format(steps=num_steps, every=EVERY, mixture=f"{texts[0]}:0.7,{texts[1]}:0.3"))
    return config


def kills(number: int, longest_seconds: float, folder: Path, server: bucket_process.Server) -> str:
    """Kills a job `number` times, compares it with an uninterrupted job, and returns a line with the result.

    Args:
      number: the number of kills.
      longest_seconds: maximum time from the start of a save to a kill; about the duration of a save.
      folder: an empty folder.
      server: the bucket's server.

    Raises:
      AssertionError: a loss or the last state differs from the other run, or more than the unfinished save was lost.
    """
    num_steps = EVERY * (4 * number + 2)
    config = written(folder, num_steps)
    straight, killed = server.prefix(), server.prefix()
    words = [f"--config={config}", "--config.mesh.fsdp=2", "--config.checkpoint.directory="]
    own = {name: [folder / f"{name}{index}" for index in range(2)] for name in ("straight", "killed")}
    # The last two saves have the usual distance, for the run on another mesh.
    rarely = f"--config.checkpoint.every={num_steps - EVERY}"
    Job(own["straight"], server, [*words[:2], words[2] + straight, rarely], 1).finish()
    for one, other in zip(own["straight"], own["killed"], strict=True):  # compiled programs, for a quick start
        shutil.copytree(one / "cache", other / "cache")
    chance, newest, amid_saves, resumes = random.Random(4), 0, 0, set[int]()
    for _ in tqdm(range(number), desc="kills"):
        job = Job(own["killed"], server, [*words[:2], words[2] + killed], 1)
        stop = newest + chance.randint(EVERY, 2 * EVERY)  # training continues while a save is written
        for line in job.lines:
            if found := re.search(r"^(?:restore|init) .*step (\d+)", line):
                assert int(found[1]) == newest, f"resumed at step {found[1]}; {newest} was saved"
            if (found := re.search(r"^step +(\d+)/", line)) and int(found[1]) >= stop:
                break
        time.sleep(chance.uniform(0, longest_seconds))
        assert job.processes[0].poll() is None, "it ended before the kill"
        job.kill()
        steps = sealed(killed)
        amid_saves += len(checkpoint_steps(buckets.place(killed))) > len(steps)
        before, newest = newest, max(steps, default=0)
        assert newest >= before, f"step {before} was saved, but it is lost"
        resumes.add(newest)
    Job(own["killed"], server, [*words[:2], words[2] + killed, rarely], 1).finish()
    assert arrays(killed, num_steps) == arrays(straight, num_steps)
    whole = losses(own["straight"][0])
    assert losses(own["killed"][0]) == whole
    last = buckets.place(killed) / str(num_steps)
    assert not isinstance(last, Path)
    buckets.delete(last, MANIFEST)
    alone = [f"--config={config}", "--config.mesh.data=2", "--config.mesh.tensor=2", words[2] + killed]
    Job([folder / "alone"], server, alone, 4).finish()
    there = losses(folder / "alone")
    worst = max(abs(loss / whole[step] - 1) for step, loss in there.items())
    assert list(there) == list(range(num_steps - EVERY + 1, num_steps + 1))
    assert worst < 1e-5, worst
    return (
        f"{number} kills of two processes, {amid_saves} of them during a save, resumed from {len(resumes - {0})} "
        "steps: "
        "all losses and the last state bitwise equal, only the unfinished save lost; one process on another mesh "
        "without local files: within {worst:.0e}"
    )


def times(place: str, num_bytes: float, num_saves: int) -> tuple[float, float, float]:
    """Returns median seconds: blocking by a save, a complete save (without the first), and a restore."""
    state = example_state(num_bytes, jax.devices())
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    found, restores = [], []
    with Checkpoints(place, CheckpointOptions(keep_last=1)) as checkpoints:
        for step in range(num_saves + 1):
            start = time.perf_counter()
            checkpoints.save(step, state, {})
            held = time.perf_counter() - start
            checkpoints.wait()
            found.append((held, time.perf_counter() - start))
        for _ in range(num_saves):
            start = time.perf_counter()
            jax.block_until_ready(checkpoints.restore(num_saves, wanted))
            restores.append(time.perf_counter() - start)
    held, whole = (statistics.median(one[side] for one in found[1:]) for side in (0, 1))
    return held, whole, statistics.median(restores)


def main(argv: Sequence[str]) -> int:
    """Prints the result of the kills, and a table of times."""
    parser = argparse.ArgumentParser(prog="scripts/bench buckets", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5, help="maximum time from a save to the kill")
    parser.add_argument("--mebibytes", type=float, default=256.0, help="size of the state for timing saves")
    parser.add_argument("--saves", type=int, default=5)
    arguments = parser.parse_args(argv)
    with bucket_process.started() as server, tempfile.TemporaryDirectory() as folder:
        os.environ.update(server.environment)
        distributed.start(8)
        if arguments.saves:
            print(f"{arguments.mebibytes:.0f} MiB  blocking  complete save  restore")
            for name, place in (("disk", f"{folder}/disk"), ("bucket", server.prefix())):
                held, whole, restore = times(place, arguments.mebibytes * 2**20, arguments.saves)
                print(f"{name:8} {held:6.2f} s  {whole:11.2f} s {restore:6.2f} s", flush=True)
        if arguments.kills:
            print(kills(arguments.kills, arguments.seconds, Path(folder), server))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
