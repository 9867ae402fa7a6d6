"""Plans each large configuration twice: as `meshtrain plan` does, and with every program compiled whole.

    .venv-plan/bin/python -m scripts.plan_ratio [CONFIG=CLUSTER ...]

needs the extra plan-gpu (scripts/plan installs it). Prints the processor seconds of both, with all their processes, and
ends with 1 if a number of a report differs in its last digit.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from scripts.plan_table import LARGE

PLAN = "import sys; from meshtrain.plan import __main__, early; {}; __main__.main(sys.argv[1:])"
# Without its default, what compiles whole after all fails.
WAYS = {"early": "early.compile_step.__defaults__ = ()", "whole": "early.COMPARED = ()"}
HEADER = ("| configuration | cluster | peak, bytes | middle, s | early, s | whole, s | ratio |", "|" + " --- |" * 7)


def planned(way: str, name: str, cluster: str) -> tuple[dict[str, Any], float]:
    """Returns (the report for programs without the time it took, processor seconds)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.json")
        words = [f"--config=configs/{name}.py", f"--cluster={cluster}", f"--json={file}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", PLAN.format(WAYS[way]), *words], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        report = json.loads(file.read_text())
    del report["compile_seconds"]
    return report, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: Sequence[str]) -> int:
    """Prints a row for each plan, and returns 0 if both ways agree on all of them."""
    print(f"jax {jax.__version__}\n", *HEADER, sep="\n", flush=True)
    total, num_different = dict.fromkeys(WAYS, 0.0), 0
    for words in argv or LARGE:
        name, _, cluster = words.partition("=")
        made = {way: planned(way, name, cluster) for way in WAYS}
        (early, seconds), (whole, whole_seconds) = made.values()
        different = [key for key in whole if early[key] != whole[key]]
        num_different += bool(different)
        for way in WAYS:
            total[way] += made[way][1]
        peak, middle = whole["memory"]["peak_bytes"], whole["modelled"]["step_seconds"]
        cells = (f"`{name}`", f"`{cluster}`", f"{peak:,}", f"{middle!r}", f"{seconds:.1f}", f"{whole_seconds:.1f}",
                 f"{seconds / whole_seconds:.2f}")  # fmt: skip
        print(f"| {' | '.join(cells)} |{' DIFFERENT: ' if different else ''}{', '.join(different)}", flush=True)
    print(f"\nall: {total['early']:.0f} of {total['whole']:.0f} processor seconds, {num_different} different")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
