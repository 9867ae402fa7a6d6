"""Exact match of configs/numbers.py on held-out numbers, by range and spelling; docs/results/training.md has the table.

Each run is a process of its own. Seconds are those of all of the CPU's threads over two, so that they hold for two
cores and do not depend on what else the machine does. Start and compilation are counted apart, as the seconds of a run
that ends after its first step. The exit code is 1 where a bar is missed.
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
    "| numbers | spelling | held out | right at the last step, each seed | right at best | seconds | of start |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, and what it has to reach.

    Attributes:
      numbers_below: `data.numbers_below`.
      spelling: `data.spelling`.
      num_held_out: how many numbers that holds out.
      num_seeds: runs, with the seeds from 0 on.
      least_last: share of held-out numbers right at the last step, in each run.
      least_best: the same at the best evaluation.
      most_seconds: of a run, without its start.
    """

    numbers_below: int
    spelling: str
    num_held_out: int
    num_seeds: int
    least_last: float
    least_best: float
    most_seconds: float

    def words(self) -> list[str]:
        """Returns the command line's fields of the configuration."""
        return [f"--config.data.numbers_below={self.numbers_below}", f"--config.data.spelling={self.spelling}"]


SETTINGS = (
    Setting(1_000, "digits", 100, 3, 0.99, 1.0, 60),
    Setting(1_000_000, "digits", 1_000, 1, 0.995, 0.995, 180),
    Setting(1_000, "english", 100, 1, 0.95, 0.95, 60),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run came to.

    Attributes:
      shares: of held-out numbers that are right, at each evaluation.
      seconds: CPU seconds of its process over the cores.
    """

    shares: tuple[float, ...]
    seconds: float


def trained(setting: Setting, seed: int, workdir: Path, *changes: str) -> Outcome:
    """Trains in a process of its own.

    Args:
      setting: what is trained.
      seed: of the run.
      workdir: its folder.
      *changes: further words of the command line.

    Raises:
      RuntimeError: the run failed; with the end of its output.
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
    """Returns one line for each bar that a run misses."""
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
    """Prints the table, and a line for each bar that is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench numbers", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=0, help="runs of each setting; 0: 3, and 1 of the larger ones")
    parser.add_argument("--num-steps", type=int, default=0, help="steps of each run; 0: those of the configuration")
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
