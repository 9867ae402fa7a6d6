"""Plants faults in copies of the repository, one after the other, and runs the tests that have to notice each.

    scripts/test --faults [TABLE ...]    those of these tables; without one, all

A fault is noticed when its tests fail with it and pass without it: before the first fault, all tests that are named run
unchanged. The tables are beside this file: models, sharding, pipeline, step, and the promises of README.
"""

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

from tests.faults import models, pipeline, promises, sharding, step
from tests.faults.fault import Fault

ROOT = pathlib.Path(__file__).parents[2]
FAULTS: dict[str, tuple[Fault, ...]] = {
    "models": models.FAULTS,
    "sharding": sharding.FAULTS,
    "pipeline": pipeline.FAULTS,
    "step": step.FAULTS,
    "promises": promises.FAULTS,  # of README, kept by other packages
}
NUM_COPIES = 2
SECONDS_A_TEST = 300  # a fault that makes a test hang is noticed by this limit
SECONDS_A_RUN = 3600  # of all tests together; what hangs outside of a test is not taken for noticed
TESTS_FAILED = 1  # pytest's exit code; 2 to 5: they could not be run


def copy_repository(folder: pathlib.Path) -> None:
    """Copies the repository into an empty folder, the files that git does not track yet among them."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in (name for name in listed if name and (ROOT / name).is_file()):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def run_tests(folder: pathlib.Path, tests: Sequence[str]) -> tuple[int, str]:
    """Runs tests in a copy until the first failure; returns pytest's exit code and its last lines."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", f"--timeout={SECONDS_A_TEST}",
         *(f"tests/{test}" for test in tests)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_A_RUN,
        check=False,
    )  # fmt: skip
    return done.returncode, "\n".join(done.stdout.strip().splitlines()[-12:])


def is_noticed(fault: Fault, folder: pathlib.Path) -> bool:
    """Plants a fault in a copy, runs its tests, takes it out again, and prints what became of it."""
    path = folder / "meshtrain" / fault.path
    original = path.read_text(encoding="utf-8")
    path.write_text(fault.planted(original), encoding="utf-8")
    start_seconds = time.monotonic()
    code, said = run_tests(folder, fault.tests)
    path.write_text(original, encoding="utf-8")
    verdict = "noticed" if code == TESTS_FAILED else "NOT NOTICED"
    print(f"{verdict:<12} {time.monotonic() - start_seconds:4.0f} s  {fault.path}: {fault.wrong}", flush=True)
    if code not in (0, TESTS_FAILED):
        print(f"its tests could not be run (code {code}):\n{said}", flush=True)
    return code == TESTS_FAILED


def num_noticed(faults: Sequence[Fault], folder: pathlib.Path) -> int:
    """Tries faults one after the other in a copy of the repository; returns how many were noticed.

    Raises:
      RuntimeError: the tests do not pass without any fault.
    """
    copy_repository(folder)
    code, said = run_tests(folder, sorted({test for fault in faults for test in fault.tests}))
    if code:
        raise RuntimeError(f"code {code} without any fault:\n{said}")
    return sum(is_noticed(fault, folder) for fault in faults)


def main(tables: Sequence[str]) -> int:
    """Tries the faults of these tables, or of all; returns 1 where one goes unnoticed."""
    if unknown := [table for table in tables if table not in FAULTS]:
        print(f"meshtrain: error: TABLE: got '{unknown[0]}'; allowed: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    faults = [fault for table in tables or FAULTS for fault in FAULTS[table]]
    shares = [share for number in range(NUM_COPIES) if (share := faults[number::NUM_COPIES])]
    with (
        tempfile.TemporaryDirectory(prefix="meshtrain-faults-") as parent,
        concurrent.futures.ThreadPoolExecutor(NUM_COPIES) as pool,
    ):
        folders = [pathlib.Path(parent, str(number)) for number in range(NUM_COPIES)]
        count = sum(pool.map(num_noticed, shares, folders))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{count} of {len(faults)} noticed, {(used.ru_utime + used.ru_stime) / 120:.1f} minutes of two cores")
    return int(count < len(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
