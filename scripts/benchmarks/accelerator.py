"""Measures on one accelerator the figures that these pages only model or simulate, and writes them to a file.

    scripts/bench accelerator --out=accelerator.json

The most useful steps run first, each in a separate process. If a step fails, its error becomes a line, and the next
step runs. If the program starts again with the same file, it skips completed steps. At the end it prints the table of
docs/results/accelerator.md.

Extras: cuda
"""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import UserError, run
from meshtrain.files import JsonObject, target_problems, write_whole
from meshtrain.hardware.accelerators import FRACTION_VARIABLE, POOL_FRACTION
from scripts.benchmarks import accelerator_rates
from scripts.benchmarks import accelerator_steps as steps

ROOT = Path(__file__).parents[2]
LIMIT_MINUTES = 40.0
STEP_SECONDS = 600  # of one step; a hang must end
GIB = 2**30

Step = Callable[[bool, Mapping[str, Any]], JsonObject]  # (tiny, results of other steps) -> measurements


def alone(function: Callable[[Any, bool], JsonObject], subject: Any) -> Step:
    """Returns a step that measures one of several subjects and ignores the results of other steps."""
    return lambda tiny, before: function(subject, tiny)


COMPARED = ("gpt2_124m", "llama_1b")
STEPS: dict[str, Step] = {
    "versions": steps.versions,
    "rates": accelerator_rates.rates,
    **{model: alone(steps.speed, model) for model in steps.MODELS},
    **{f"{model} in plain JAX": alone(steps.bare, model) for model in COMPARED},
    **{f"attention {kernel}": alone(steps.attention, kernel) for kernel in steps.KERNELS},
    "experts": steps.experts,
    "fp8": steps.fp8,
    "kill and resume": steps.killed,
    "bits": alone(steps.bits, False),
    "bits, deterministic": alone(steps.bits, True),
    "collectives": steps.collectives,
    **{f"{model} planned": functools.partial(steps.planned, model) for model in steps.MODELS},
}


def table(found: Mapping[str, Any]) -> list[str]:
    """Returns the lines of the table of results, a row for each step; cells without a measurement are empty.

    Args:
      found: the name of a step -> its entry in the file.
    """
    lines = ["| step | measured |", "| --- | --- |"]
    for name in STEPS:
        entry = found.get(name, {})
        result = entry.get("result")
        lines.append(f"| {name} | {_cell(result) if result else entry.get('failed', '')} |")
    return lines


def _cell(result: Mapping[str, Any]) -> str:
    """Formats the numbers of a step: bytes in GiB, shares in percent, others with three digits."""
    parts = []
    for name, value in result.items():
        words = name.replace("_", " ")
        if isinstance(value, Mapping):
            parts.append(f"{words}: {_cell(value)}")
        elif name.endswith("_bytes"):
            parts.append(f"{words.removesuffix(' bytes')} {'-' if value is None else f'{value / GIB:.3g} GiB'}")
        elif isinstance(value, float):
            parts.append(f"{words} {value:,.3g}" if value < 1000 else f"{words} {value:,.0f}")
        elif "\n" not in str(value):
            parts.append(f"{words} {'-' if value in (None, '') else value}")
    return ", ".join(parts)


def performed(name: str, out: Path, tiny: bool, seconds: float) -> JsonObject:
    """Runs a step in a separate process, and returns its entry: the result, or one line of error."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "result.json")
        words = [f"--out={out}", f"--step={name}", f"--to={target}", *(["--tiny"] if tiny else [])]
        command = [sys.executable, "-m", "scripts.benchmarks.accelerator", *words]
        # The plan decides whether a step fits for this memory fraction.
        settings = {"JAX_TRACEBACK_FILTERING": "off", FRACTION_VARIABLE: str(POOL_FRACTION)}
        settings |= {"JAX_PLATFORMS": "cpu"} if tiny else {}
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=seconds)
            failed = "" if process.returncode == 0 else steps.last_line(said) or f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the runs that it has started, because they occupy the device
            process.communicate()
            failed = f"not completed within {seconds:.0f} seconds"
        outcome: JsonObject = {"failed": failed[:300]} if failed else {"result": json.loads(target.read_text())}
    return outcome | {"seconds": round(time.monotonic() - began, 1)}


def measured(out: Path, tiny: bool, limit_minutes: float) -> dict[str, Any]:
    """Runs the steps that are missing in the file, and returns all entries; the file is written after each step."""
    content: dict[str, Any] = {"tiny": tiny, "steps": {}}
    if out.exists():
        content = json.loads(out.read_text(encoding="utf-8"))
    if content["tiny"] != tiny:
        had = "with" if content["tiny"] else "without"
        fix = f"--out=new-{out.name}"
        raise UserError(f"--out: got {out}, from a run {had} --tiny; allowed: a file of the same kind; nearest: {fix}")
    found: dict[str, Any] = content["steps"]
    deadline = time.monotonic() + 60 * limit_minutes
    for number, name in enumerate(STEPS, 1):
        left = deadline - time.monotonic()
        if "result" in found.get(name, {}):
            continue
        if left <= 0:
            print(f"{limit_minutes:.0f} minutes have passed before '{name}'; the same command continues with it")
            break
        print(f"{number:>2} of {len(STEPS)}  {name:<28}", end="", flush=True)
        found[name] = performed(name, out, tiny, min(left, STEP_SECONDS))
        print(f"{found[name]['seconds']:>6} s  {found[name].get('failed') or 'done'}", flush=True)
        write_whole(out, json.dumps(content, indent=2) + "\n")
    return found


def main(argv: Sequence[str]) -> int:
    """Runs all steps and prints the table, or runs only the requested step; returns 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="scripts/bench accelerator", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", required=True, metavar="FILE.json", help="file for the results; existing results are reused"
    )
    parser.add_argument(
        "--minutes", type=float, default=LIMIT_MINUTES, help="no step starts after this time (default: 40)"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes on this machine's CPU, as a test")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    out = Path(given.out).resolve()
    if given.step:
        known = json.loads(out.read_text(encoding="utf-8"))["steps"] if out.exists() else {}
        results = {name: entry["result"] for name, entry in known.items() if "result" in entry}
        given.to.write_text(json.dumps(STEPS[given.step](given.tiny, results)), encoding="utf-8")
        return 0
    if problems := [] if out.exists() else target_problems("--out", given.out, "accelerator.json"):
        raise UserError(*problems)
    found = measured(out, given.tiny, given.minutes)
    print("", *table(found), sep="\n")
    return int(any("failed" in entry for entry in found.values()))


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
