"""Plans each large configuration twice: as `meshtrain plan` does, and with complete compilation of every program.

Prints the CPU seconds of both, with all their processes. The exit code is 1 if any digit of a report differs, or if a
plan ends without a report.

Extras: plan-gpu
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from scripts.benchmarks.plan import LARGE

PLAN = "import sys; from meshtrain.plan import __main__, scheduled_hlo; {}; __main__.main(sys.argv[1:])"
# Without the compiler's default, programs that are compiled completely anyway would fail.
WAYS = {"early": "scheduled_hlo.compile_step.__defaults__ = ()", "whole": "scheduled_hlo.COMPARED = None"}
HEADER = ("| configuration | cluster | peak, bytes | middle, s | early, s | whole, s | ratio |", "|" + " --- |" * 7)


def planned(way: str, name: str, cluster: str) -> tuple[dict[str, Any] | None, float]:
    """Returns (the JSON report without its compile time, or None if there is no report; CPU seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        words = [f"--config=configs/{name}.py", f"--cluster={cluster}", f"--json={file}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", PLAN.format(WAYS[way]), *words], stdout=subprocess.DEVNULL, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = json.loads(file.read_text()) if file.exists() else None
    if report:
        del report["compile_seconds"]
    return report, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: Sequence[str]) -> int:
    """Prints a row for each plan, and returns 0 if both reports agree for all plans."""
    parser = argparse.ArgumentParser(prog="scripts/bench plan_ratio", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "plans", metavar="CONFIG=CLUSTER", nargs="*", default=LARGE, help="default: the configurations of the table"
    )
    plans = parser.parse_args(argv).plans
    print(f"jax {jax.__version__}\n", *HEADER, sep="\n", flush=True)
    total, num_wrong = dict.fromkeys(WAYS, 0.0), 0
    for words in plans:
        name, _, cluster = words.partition("=")
        (early, early_seconds), (whole, whole_seconds) = (planned(way, name, cluster) for way in WAYS)
        if not (early and whole):
            num_wrong += 1
            print(f"| `{name}` | `{cluster}` | no report {'to the schedule' if whole else 'whole'} |", flush=True)
            continue
        different = [key for key in whole if early[key] != whole[key]]
        num_wrong += bool(different)
        total = {"early": total["early"] + early_seconds, "whole": total["whole"] + whole_seconds}
        peak, middle = whole["memory"]["peak_bytes"], whole["modelled"]["step_seconds"]
        cells = [f"`{name}`", f"`{cluster}`", f"{peak:,}", f"{middle!r}", f"{early_seconds:.1f}"]
        cells += [f"{whole_seconds:.1f}", f"{early_seconds / whole_seconds:.2f}"]
        print(f"| {' | '.join(cells)} |{' DIFFERENT: ' if different else ''}{', '.join(different)}", flush=True)
    seconds = f"{total['early']:.0f} of {total['whole']:.0f} processor seconds"
    print(f"\nall: {seconds}, {num_wrong} different or without report")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
