"""Plants each fault of `mutants_table.py` in a copy of the repository and runs the tests that have to notice it.

    scripts/mutants                       all of them, in two copies at a time
    scripts/mutants --only=wire,sealing   those whose names contain one of these words
    scripts/mutants --table               the table as Markdown, for docs/testing.md; nothing is run

A fault is noticed when the tests fail with it and pass without it. Each copy runs every named test once unchanged.
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from scripts.mutants_table import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parents[1]
SECONDS_A_TEST = 300  # a fault that makes a test hang is noticed by this limit
TESTS_FAILED = 1  # pytest's exit code; 2 to 5 mean that the tests themselves could not be run


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
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", f"--timeout={SECONDS_A_TEST}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, "\n".join(lines[-12:])


def try_mutant(mutant: Mutant, folder: pathlib.Path) -> str:
    """Returns an empty string where the tests notice the fault, otherwise what happened instead."""
    path = folder / mutant.path
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
    """Returns a row for each fault: its room, what it is, which tests notice it."""
    rows = ["| room | fault | noticed by |", "| --- | --- | --- |"]
    for mutant in MUTANTS:
        mark = " *" if mutant.was_unnoticed else ""
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in mutant.tests)
        rows.append(f"| {mutant.room} | {mutant.fault}{mark} | {tests} |")
    return "\n".join(rows)


def run_all(chosen: Sequence[Mutant], num_copies: int) -> int:
    """Tries the faults in `num_copies` copies at once; prints a line for each; returns how many were noticed."""
    with tempfile.TemporaryDirectory(prefix="meshtrain-mutants-") as parent:
        folders: queue.Queue[pathlib.Path] = queue.Queue()
        for number in range(num_copies):
            folder = pathlib.Path(parent, str(number))
            folder.mkdir()
            copy_repository(folder)
            folders.put(folder)
        every_test = sorted({test for mutant in chosen for test in mutant.tests})

        def unchanged(number: int) -> tuple[int, str]:
            folder = pathlib.Path(parent, str(number))
            return run_tests(folder, every_test)

        def one(mutant: Mutant) -> str:
            folder = folders.get()
            try:
                return try_mutant(mutant, folder)
            finally:
                folders.put(folder)

        num_noticed = 0
        with concurrent.futures.ThreadPoolExecutor(num_copies) as pool:
            for code, said in pool.map(unchanged, range(num_copies)):
                if code:
                    raise SystemExit(f"the tests fail without any fault:\n{said}")
            for mutant, problem in zip(chosen, pool.map(one, chosen), strict=True):
                num_noticed += not problem
                print(f"{'noticed' if not problem else 'NOT NOTICED'}  {mutant.room}: {mutant.name}", flush=True)
                if problem:
                    print(f"  {problem}", flush=True)
    return num_noticed


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
    num_noticed = run_all(chosen, arguments.copies)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes = sum(one.ru_utime + one.ru_stime for one in used) / 2 / 60
    print(f"{minutes:.1f} minutes (CPU seconds of all processes over two)")
    print(f"{num_noticed} of {len(chosen)} noticed")
    return int(num_noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
