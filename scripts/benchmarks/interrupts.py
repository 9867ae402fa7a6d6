"""Tests the exit codes of programs that get signals at random times: imports, start, steps and end."""

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from meshtrain.errors import EXIT_CODES, EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_START_AGAIN

SMALL = (
    "--config.data.source=synthetic", "--config.batch_size=2", "--config.sequence_length=8",
    "--config.model.num_layers=1", "--config.model.embed_dim=8", "--config.model.mlp_dim=8",
    "--config.model.num_heads=1", "--config.model.num_kv_heads=1", "--config.sample_tokens=0",
    "--config.num_eval_batches=1", "--config.num_steps=2000", "--config.checkpoint.every=500",
)  # fmt: skip
SIGNALS = {"train": (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), "explain": (signal.SIGINT,)}
GAPS_SECONDS = (0.0, 0.02, 0.2)


def tried(command: str, numbers: list[signal.Signals], delay_seconds: float, folder: Path) -> tuple[int, str]:
    """Returns the exit code and standard error of a command that gets signals.

    Args:
      command: `train` or `explain`.
      numbers: the signals.
      delay_seconds: time from the start to the first signal.
      folder: folder for its configuration and run.
    """
    config = folder / "config.py"
    config.write_text("from meshtrain.config.build import default\n\ndef get_config():\n    return default()\n")
    words = ["-m", "meshtrain", command, f"--config={config}", *SMALL]
    words += [f"--workdir={folder / 'run'}"] if command == "train" else []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        time.sleep(delay_seconds)
        for number in numbers:
            process.send_signal(number)
            time.sleep(random.choice(GAPS_SECONDS))
        _, errors = process.communicate(timeout=600)
    return process.returncode, errors


def main() -> int:
    """Prints how often each command ended with each code; returns 1 if one had a traceback or an unknown code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=100, help="number of programs to start")
    parser.add_argument("--seconds", type=float, default=10.0, help="latest time of the first signal")
    parser.add_argument(
        "--first",
        type=float,
        default=0.3,
        help="earliest time of the first signal; before, Python's own handler is active",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    counts, num_failed = collections.Counter[tuple[str, str, int]](), 0
    for _ in range(arguments.tries):
        command = random.choice(list(SIGNALS))
        numbers = [random.choice(SIGNALS[command])] * random.choice((1, 2))
        delay_seconds = random.uniform(arguments.first, arguments.seconds)
        with tempfile.TemporaryDirectory() as folder:
            code, errors = tried(command, numbers, delay_seconds, Path(folder))
        allowed = (EXIT_FINISHED, EXIT_START_AGAIN, EXIT_INTERRUPTED)
        if code not in allowed or "Traceback" in errors or "Exception ignored" in errors:
            num_failed += 1
            print(f"{command}, {numbers[0].name} x {len(numbers)} after {delay_seconds:.3f} s: code {code}\n{errors}")
        counts[command, f"{numbers[0].name} x {len(numbers)}", code] += 1
    for (command, what, code), count in sorted(counts.items()):
        print(f"{command:8} {what:12} code {code:4} {count:4} x  {EXIT_CODES.get(code, 'not documented')}")
    print(f"{num_failed} of {arguments.tries} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
