"""Plants faults in copies of the repository, one after the other, and runs the tests that have to notice each.

    scripts/mutants                       all of them, in two copies at a time
    scripts/mutants --only=wire,sealing   those whose names contain one of these words
    scripts/mutants --table               the table as Markdown, for docs/testing.md; nothing is run

A fault is noticed when its tests fail with it and pass without it: all tests that are named run once unchanged first.
The faults stand in the files beside this one whose names begin with `mutants_`.
"""

import argparse
import concurrent.futures
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from scripts.mutant import Mutant
from scripts.mutants_around import AROUND
from scripts.mutants_context import CONTEXT
from scripts.mutants_experts import EXPERTS
from scripts.mutants_files import FILES
from scripts.mutants_hf import HF
from scripts.mutants_models import MODELS
from scripts.mutants_optim import OPTIM
from scripts.mutants_plan import PLAN
from scripts.mutants_probe import PROBE
from scripts.mutants_step import STEP

ROOT = pathlib.Path(__file__).parents[1]
MUTANTS = (*MODELS, *OPTIM, *STEP, *FILES, *AROUND, *PLAN, *PROBE, *HF, *EXPERTS, *CONTEXT)
ROOMS = (
    "words",
    "config",
    "layout",
    "models",
    "optim",
    "pipeline",
    "step",
    "data",
    "store",
    "hf",
    "observe",
    "plan",
    "launch",
    "probe",
    "generation",
    "run",
    "root",
)
SECONDS_A_TEST = 300  # a fault that makes a test hang is noticed by this limit
SECONDS_A_RUN = 3600  # of all tests together; what hangs outside of a test is not taken for noticed
TESTS_FAILED, TESTS_HANG = 1, -1  # pytest's exit code; 2 to 5: they could not be run


def planted(mutant: Mutant, text: str) -> str:
    """Returns the text of the mutant's file with the fault in it.

    Raises:
      ValueError: the text to be replaced does not stand there exactly once.
    """
    count = text.count(mutant.before)
    if count != 1:
        raise ValueError(f"{mutant.name}: {mutant.path} has {count} places that read {mutant.before!r}; wanted: one")
    if mutant.before == mutant.after:
        raise ValueError(f"{mutant.name}: the replacement changes nothing")
    return text.replace(mutant.before, mutant.after)


def tracked_files() -> list[str]:
    """Returns the files of the repository, those that git does not track yet among them."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in listed if name and (ROOT / name).is_file()]


def copy_repository(folder: pathlib.Path) -> None:
    """Copies the repository into an empty folder."""
    for name in tracked_files():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def run_tests(folder: pathlib.Path, tests: Sequence[str]) -> tuple[int, str]:
    """Runs tests in a copy until the first failure; returns pytest's exit code and its last lines."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", f"--timeout={SECONDS_A_TEST}"]
    command += [f"tests/{test}" for test in tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, timeout=SECONDS_A_RUN, check=False, **streams)
    except subprocess.TimeoutExpired:
        return TESTS_HANG, f"not done after {SECONDS_A_RUN} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, "\n".join(lines[-12:])


def try_mutant(mutant: Mutant, folder: pathlib.Path) -> str:
    """Returns an empty string where the tests notice the fault, otherwise what happened instead."""
    path = folder / "meshtrain" / mutant.path
    original = path.read_text(encoding="utf-8")
    path.write_text(planted(mutant, original), encoding="utf-8")
    try:
        code, said = run_tests(folder, mutant.tests)
    finally:
        path.write_text(original, encoding="utf-8")
    if code == TESTS_FAILED:
        return ""
    return "the tests pass with the fault" if code == 0 else f"the tests could not be run (code {code}):\n{said}"


def table() -> str:
    """Returns a row for each fault: its room, what goes wrong, and the files of the tests that notice it."""
    rows = ["| room | fault | noticed by |", "|---|---|---|"]
    for mutant in sorted(MUTANTS, key=lambda mutant: ROOMS.index(mutant.room)):
        mark = " \\*" if mutant.was_unnoticed else ""
        files = dict.fromkeys(test.partition("::")[0] for test in mutant.tests)
        links = ", ".join(f"[{file}](../tests/{file})" for file in files)
        rows.append(f"| {mutant.room} | {mutant.fault}{mark} | {links} |")
    return "\n".join(rows)


def try_all(chosen: Sequence[Mutant], folder: pathlib.Path) -> int:
    """Tries faults one after the other in a copy of the repository; returns how many were noticed.

    Raises:
      RuntimeError: the tests do not pass without any fault.
    """
    copy_repository(folder)
    code, said = run_tests(folder, sorted({test for mutant in chosen for test in mutant.tests}))
    if code:
        raise RuntimeError(f"code {code} without any fault:\n{said}")
    num_noticed = 0
    for mutant in chosen:
        start_seconds = time.monotonic()
        problem = try_mutant(mutant, folder)
        num_noticed += not problem
        verdict = "NOT NOTICED" if problem else "noticed"
        seconds = time.monotonic() - start_seconds
        print(
            f"{verdict:<12} {seconds:5.0f} s  {mutant.room}: {mutant.name}" + f"\n{problem}" * bool(problem), flush=True
        )
    return num_noticed


def run_all(chosen: Sequence[Mutant], num_copies: int) -> int:
    """Shares faults out among `num_copies` copies of the repository at once; returns how many were noticed."""
    with (
        tempfile.TemporaryDirectory(prefix="meshtrain-mutants-") as parent,
        concurrent.futures.ThreadPoolExecutor(num_copies) as pool,
    ):
        folders = [pathlib.Path(parent, str(number)) for number in range(num_copies)]
        shares = [chosen[number::num_copies] for number in range(num_copies)]
        return sum(pool.map(try_all, shares, folders))


def main(argv: Sequence[str]) -> int:
    """Tries the faults; returns 1 where one goes unnoticed."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Shows that tests notice planted faults.")
    parser.add_argument("--only", default="", help="comma separated parts of names; default: all")
    parser.add_argument("--copies", type=int, default=2, help="copies of the repository at work at once")
    parser.add_argument("--table", action="store_true", help="print the table for docs/testing.md and stop")
    arguments = parser.parse_args(argv)
    if arguments.table:
        print(table())
        return 0
    words = [word for word in arguments.only.split(",") if word]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    if not chosen:
        names = ", ".join(mutant.name for mutant in MUTANTS)
        print(f"meshtrain: error: --only: got '{arguments.only}'; allowed: parts of {names}", file=sys.stderr)
        return 2
    num_noticed = run_all(chosen, min(max(arguments.copies, 1), len(chosen)))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes = sum(one.ru_utime + one.ru_stime for one in used) / 2 / 60
    print(f"{minutes:.1f} minutes (CPU seconds of all processes over two)")
    print(f"{num_noticed} of {len(chosen)} noticed")
    return int(num_noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
