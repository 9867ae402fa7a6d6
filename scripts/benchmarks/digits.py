"""Measures accuracy on held-out digits by batch size and learning-rate scaling (docs/results/training.md).

Each run is configs/digits.py in a separate process. All settings train on the same number of images. Seconds are the
CPU time of all threads divided by two: the time on two cores, independent of other programs. Start and compilation are
included.
"""

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshtrain.errors import run

ROOT = Path(__file__).parents[2]
NUM_HELD_OUT = 359
BASE_BATCH, NUM_STEPS, PEAK, WARMUP_STEPS = 128, 300, 3e-3, 20  # of configs/digits.py
NUM_CORES = 2
HEADER = (
    "| batch | steps | `batch_scaling` | peak learning rate | correct images, each seed | lowest accuracy | seconds |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A batch size and the scaling of the learning rate.

    Attributes:
      batch_size: images in a step.
      scaling: `learning_rate.batch_scaling`.
    """

    batch_size: int
    scaling: str

    @property
    def num_steps(self) -> int:
        """Steps for the same number of images as a run with the base batch."""
        return NUM_STEPS * BASE_BATCH // self.batch_size

    @property
    def peak(self) -> float:
        """The peak learning rate, after scaling."""
        return PEAK * (self.batch_size / BASE_BATCH) ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.scaling]

    def words(self) -> list[str]:
        """Returns the setting as arguments of the command line."""
        fields = {"batch_size": self.batch_size, "num_steps": self.num_steps}
        fields["learning_rate.warmup_steps"] = WARMUP_STEPS * BASE_BATCH // self.batch_size
        scaling = {"learning_rate.batch_scaling": self.scaling, "learning_rate.base_batch_size": BASE_BATCH}
        return [f"--config.{name}={value}" for name, value in (fields | scaling).items()]


SETTINGS = (Setting(BASE_BATCH, "none"), *(Setting(1024, scaling) for scaling in ("none", "sqrt", "linear")))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
      num_right: the number of correctly classified held-out images after the last step.
      seconds: CPU seconds of its process divided by the cores.
    """

    num_right: int
    seconds: float


def trained(setting: Setting, seed: int, workdir: Path, *changes: str) -> Outcome:
    """Trains in a separate process.

    Args:
      setting: the batch and learning rate.
      seed: the run's seed.
      workdir: the run's folder.
      *changes: further arguments of the command line.

    Raises:
      RuntimeError: the run failed; the message is the end of its output.
    """
    command = [sys.executable, "-m", "meshtrain", "train", "--config=configs/digits.py", f"--workdir={workdir}"]
    quiet = ["--config.eval_every=0", "--config.observe.progress=no", "--config.observe.tensorboard=no"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    before = _cpu_seconds()
    done = subprocess.run(
        [*command, *setting.words(), f"--config.seed={seed}", *quiet, *changes],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{setting} ended with {done.returncode}:\n{done.stdout[-5000:]}")
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    accuracy = next(row["eval_accuracy"] for row in reversed(rows) if "eval_accuracy" in row)
    return Outcome(round(accuracy * NUM_HELD_OUT), (_cpu_seconds() - before) / NUM_CORES)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def line(setting: Setting, outcomes: Sequence[Outcome]) -> str:
    """Returns a setting's row."""
    right = ", ".join(str(one.num_right) for one in outcomes)
    least = min(one.num_right for one in outcomes) / NUM_HELD_OUT
    seconds = max(one.seconds for one in outcomes)
    cells = (setting.batch_size, setting.num_steps, setting.scaling, f"{setting.peak:.4g}", right, f"{least:.1%}")
    return f"| {' | '.join(map(str, cells))} | {seconds:.0f} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="scripts/bench digits", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting, with seeds from 0 on")
    given = parser.parse_args(argv)
    print(*HEADER, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as work:
        for number, setting in enumerate(SETTINGS):
            folders = {seed: Path(work) / f"{number}.{seed}" for seed in range(given.seeds)}
            print(line(setting, [trained(setting, seed, folder) for seed, folder in folders.items()]), flush=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
