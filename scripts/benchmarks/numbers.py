"""Measures exact match of configs/numbers.py on held-out numbers, by range and spelling (docs/results/training.md).

Each run is a separate process. Seconds are the CPU time of all threads divided by two: the time on two cores,
independent of other programs. Start and compilation are also measured separately, as the time of a run that ends after
its first step. The exit code is 1 if a run misses a bound.
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
NUM_CORES = 2
METRIC = "eval_exact_match"
HEADER = (
    "| numbers | spelling | held-out numbers | correct after the last step, each seed | "
    "correct at best, each seed | seconds | seconds of start |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A training task and its required results.

    Attributes:
      numbers_below: `data.numbers_below`.
      spelling: `data.spelling`.
      num_held_out: the number of held-out numbers.
      num_seeds: the number of runs, with seeds from 0 on.
      least_last: required share of correct held-out numbers at the last step, in each run.
      least_best: the same at the best evaluation.
      most_seconds: maximum time of a run, without its start.
    """

    numbers_below: int
    spelling: str
    num_held_out: int
    num_seeds: int
    least_last: float
    least_best: float
    most_seconds: float

    def words(self) -> list[str]:
        """Returns the setting as arguments of the command line."""
        return [f"--config.data.numbers_below={self.numbers_below}", f"--config.data.spelling={self.spelling}"]


SETTINGS = (
    Setting(1_000, "digits", 100, 3, 0.99, 1.0, 60),
    Setting(1_000_000, "digits", 1_000, 1, 0.995, 0.995, 180),
    Setting(1_000, "english", 100, 1, 0.95, 0.95, 60),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
      shares: share of correct held-out numbers at each evaluation.
      seconds: CPU seconds of its process divided by the cores.
    """

    shares: tuple[float, ...]
    seconds: float


def trained(setting: Setting, seed: int, workdir: Path, *changes: str) -> Outcome:
    """Trains in a separate process.

    Args:
      setting: the training task.
      seed: the run's seed.
      workdir: the run's folder.
      *changes: further arguments of the command line.

    Raises:
      RuntimeError: the run failed; the message is the end of its output.
    """
    command = [sys.executable, "-m", "meshtrain", "train", "--config=configs/numbers.py", f"--workdir={workdir}"]
    quiet = ["--config.observe.progress=no", "--config.observe.tensorboard=no"]
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
    shares = tuple(row[METRIC] for row in rows if METRIC in row)
    return Outcome(shares, (_cpu_seconds() - before) / NUM_CORES)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def line(setting: Setting, outcomes: Sequence[Outcome], start_seconds: float) -> str:
    """Returns a setting's row."""
    last, best = (
        ", ".join(f"{pick(one.shares) * setting.num_held_out:.0f}" for one in outcomes)
        for pick in (lambda shares: shares[-1], max)
    )
    seconds = max(one.seconds for one in outcomes)
    cells = (f"0 to {setting.numbers_below - 1:,}", setting.spelling, f"{setting.num_held_out:,}", last, best)
    return f"| {' | '.join(cells)} | {seconds:.0f} | {start_seconds:.0f} |"


def missed(setting: Setting, outcomes: Sequence[Outcome], start_seconds: float) -> list[str]:
    """Returns one line for each bound that a run misses."""
    found = []
    for seed, one in enumerate(outcomes):
        for what, got, least in (
            ("last step", one.shares[-1], setting.least_last),
            ("best", max(one.shares), setting.least_best),
        ):
            if got < least - 1e-6:
                found.append(f"seed {seed}: {got:.1%} right at the {what}, wanted {least:.1%}")
        if one.seconds - start_seconds > setting.most_seconds:
            found.append(f"seed {seed}: {one.seconds - start_seconds:.0f} s, wanted {setting.most_seconds:.0f}")
    return found


def main(argv: Sequence[str]) -> int:
    """Prints the table, and a line for each missed bound."""
    parser = argparse.ArgumentParser(prog="scripts/bench numbers", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=0, help="runs of each setting; 0: 3, or 1 for larger settings")
    parser.add_argument("--num-steps", type=int, default=0, help="steps of each run; 0: as configured")
    given = parser.parse_args(argv)
    steps = [f"--config.num_steps={given.num_steps}"] if given.num_steps else []
    print(*HEADER, sep="\n", flush=True)
    problems = []
    with tempfile.TemporaryDirectory() as work:
        for number, setting in enumerate(SETTINGS):
            folder = Path(work) / str(number)
            start_seconds = trained(setting, 0, folder / "start", "--config.num_steps=1").seconds
            seeds = range(given.seeds or setting.num_seeds)
            outcomes = [trained(setting, seed, folder / str(seed), *steps) for seed in seeds]
            print(line(setting, outcomes, start_seconds), flush=True)
            problems += [f"{' '.join(setting.words())}: {text}" for text in missed(setting, outcomes, start_seconds)]
    print(*(problems or ["all bars are met"]), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
