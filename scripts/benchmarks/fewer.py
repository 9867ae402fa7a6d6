"""Kills processes of an elastic run, and compares its losses with an uninterrupted run.

`launch --min-processes` restarts without the killed process, and restarts with all processes some seconds after the
last kill. A random fourth of the kills wait for that restart, so the run shrinks and grows.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from meshtrain.errors import run

ROOT = Path(__file__).parents[2]
EVERY = 5  # steps between saves
BACK_SECONDS = 10
CONFIG = """
from meshtrain.config import default

def get_config():
    config = default()
    config.num_steps, config.batch_size, config.sequence_length, config.sample_tokens = {steps}, 24, 64, 0
    config.model.num_layers, config.model.embed_dim, config.model.mlp_dim = 1, 16, 16
    config.model.num_heads = config.model.num_kv_heads = 2
    config.learning_rate.name, config.learning_rate.warmup_steps, config.learning_rate.peak = "constant", 0, 3e-5
    config.checkpoint.every, config.log_every, config.mesh.data = {every}, 1, -1
    config.data.source, config.data.path = "text", "{text}"
    config.observe.tensorboard = False
    return config
"""


def launched(folder: Path, config: Path, num_processes: int, *words: str) -> subprocess.Popen[str]:
    """Starts a run of several processes with a simulated device each, in a separate folder."""
    environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(config.parent / "cache")}
    launch = ["-m", "meshtrain.launch", f"--processes={num_processes}", "--devices=1", *words, "--"]
    train = ["-m", "meshtrain.main", f"--config={config}", f"--workdir={folder}"]
    return subprocess.Popen(
        [sys.executable, *launch, *train],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows(folder: Path) -> dict[int, dict[str, float]]:
    """Returns step -> row of metrics of the steps of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row for row in lines if "loss" in row}


def killed(process: subprocess.Popen[str], number: int, chance: random.Random) -> list[str]:
    """Kills random processes, each some steps after a start or during it; returns all lines of output.

    Raises:
      AssertionError: the run ended before.
    """
    said: list[str] = []
    assert process.stdout is not None
    lines: Iterator[str] = iter(process.stdout)
    are_all, bar = True, tqdm(total=number, desc="kills")
    while number:
        wanted = chance.randint(0, 2 * EVERY)  # 0: during the start
        waits = chance.random() < 1 / 4
        for line in lines:
            said.append(line)
            if found := re.search(r"launch: starting (\d+) of \d+ processes|launch: all processes are restarted", line):
                are_all = not found[1]
            if waits and not are_all:
                continue
            wanted -= bool(re.search(r"\] step +\d+/", line))
            if wanted <= 0 and line.startswith("[0]"):
                break
        assert process.poll() is None, "".join(said[-20:])
        time.sleep(chance.uniform(0, 0.5))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        if children:
            with suppress(ProcessLookupError):
                os.kill(int(chance.choice(children)), signal.SIGKILL)
                number -= 1
                bar.update()
    bar.close()
    said.extend(lines)
    assert process.wait() == 0, "".join(said[-20:])
    return said


def main(argv: Sequence[str]) -> int:
    """Prints one line: the number of kills, steps by number of processes, and the difference of losses."""
    parser = argparse.ArgumentParser(prog="scripts/bench fewer", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder, number = Path(name), arguments.kills
        text = folder / "text.txt"
        text.write_text("".join(f"def f{i % 7}(x):\n    return x + {i * i % 13}\n" for i in range(500)))
        config = folder / "config.py"
        config.write_text(CONFIG.format(steps=12 * EVERY * (number + 1), every=EVERY, text=text))
        peaceful = launched(folder / "whole", config, arguments.processes)
        said, _ = peaceful.communicate()
        assert peaceful.returncode == 0, said
        words = ("--min-processes=2", f"--restarts={2 * number}", f"--back-seconds={BACK_SECONDS}")
        process = launched(folder / "killed", config, arguments.processes, *words)
        said = "".join(killed(process, number, random.Random(arguments.seed)))
        whole, other = rows(folder / "whole"), rows(folder / "killed")
        assert list(whole) == list(other)
        worst = max(abs(other[step]["loss"] / whole[step]["loss"] - 1) for step in whole)
        steps = Counter(int(row["processes"]) for row in other.values())
        assert worst < 1e-5, worst
        ran = ", ".join(f"{count} on {num_processes}" for num_processes, count in sorted(steps.items(), reverse=True))
        print(
            f"{number} kills of a process (of {arguments.processes}), {said.count('all processes are restarted')} "
            f"starts with all again: of {len(whole)} steps {ran}; every loss within {worst:.0e} of the undisturbed run"
        )
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
