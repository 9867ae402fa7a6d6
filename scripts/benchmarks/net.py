"""Records the program's decisions, numbers and messages, and compares two records to detect accidental changes.

    scripts/bench net record FOLDER [--parts=placements,charts,...] [--like=OLDER]
    scripts/bench net compare OLDER FOLDER [--relative=1e-6]

A record is a folder of text files, one folder a part:

    placements   the placement of each configuration's weights, as in tests/golden
    charts       every pipeline schedule in a few sizes
    losses       loss and gradient norm of 20 steps of each configuration that fits eight devices
    errors       the error lines of the broken configurations, data, runs and command lines of the tests, and of random
                 configurations; --like reuses the random configurations of an older record, because new options would
                 lead to others
    tests        the names of all tests
    plans        bytes by axis, peak, and a hash of the scheduled program's collectives (kind, axes, count, bytes,
                 overlap with products, in the program's order) of the large configurations; needs the extra plan-gpu,
                 and far more time than the other parts

`compare` prints each difference and returns 1 if there is a difference; it names and skips parts that only one record
has. No file contains a time. Both records must come from the same version of JAX on the same kind of machine.

Extras: dev plan-gpu
"""

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import pytest

from meshtrain import explain
from meshtrain.__main__ import main as meshtrain
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.errors import UserError, run
from meshtrain.launch import distributed
from meshtrain.pipeline.schedules import NAMES
from meshtrain.plan import planner, text_report
from meshtrain.plan.cluster import clusters
from meshtrain.plan.cluster.compile import program_of
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.plan.timing.streams import Assumptions
from scripts.benchmarks import fuzz
from scripts.benchmarks.plan import LARGE
from tests.golden import test_golden_placements as golden
from tests.messages import (
    refused,
    test_messages_configurations,
    test_messages_data,
    test_messages_files,
    test_messages_places,
)
from tests.messages.test_messages_table import ROWS, SEVERAL, case_of

ROOT = Path(__file__).parents[2]
NUM_DEVICES, NUM_STEPS, NUM_RANDOM = 8, 20, 200
SMALL = (
    "3d", "data", "digits", "experts", "fsdp", "hybrid", "long", "numbers", "pipeline", "tensor", "tiny",
)  # fmt: skip
SIZES = ((2, 2, 1), (4, 8, 1), (4, 8, 2), (2, 4, 3), (3, 5, 1))  # stages, microbatches, chunks
HOSTILE = {
    "configurations": test_messages_configurations.CASES,
    "data": test_messages_data.CASES,
    "files": test_messages_files.CASES,
    "places": test_messages_places.CASES,
    "table": [case_of(command, text) for command, text, *_ in (*ROWS, *SEVERAL)],
}
RANDOM = "random.json"
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
Texts = dict[str, str]  # file's name -> content


def placements() -> Texts:
    """Returns the placements in tests/golden/placements for each configuration."""
    return {f"{name}.txt": golden.text(golden.assembled(name)) for name in golden.CONFIGS}


def charts() -> Texts:
    """Returns the chart and the numbers of each schedule, or the reason if it has none."""
    found = {}
    for name in NAMES:
        for stages, microbatches, chunks in SIZES:
            flags = [f"--stages={stages}", f"--microbatches={microbatches}", f"--chunks={chunks}"]
            with contextlib.redirect_stdout(io.StringIO()) as said:
                try:
                    meshtrain(["pipeline", f"--schedule={name}", *flags])
                except UserError as error:
                    print(error)
            found[f"{name}_{stages}_{microbatches}_{chunks}.txt"] = said.getvalue()
    return found


def losses() -> Texts:
    """Returns a line for each of 20 steps of each small configuration: step, loss, gradient norm, with all digits."""
    return {f"{name}.txt": _losses(name) for name in SMALL}


def _losses(name: str) -> str:
    changes = {"num_steps": NUM_STEPS, "log_every": 1, "num_eval_batches": 1, "sample_tokens": 0}
    words = [f"--config.{key}={value}" for key, value in changes.items()]
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            meshtrain(["train", f"--config={ROOT}/configs/{name}.py", f"--workdir={folder}/run", *words])
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return "".join(f"{row['step']} {row['loss']!r} {row['grad_norm']!r}\n" for row in rows if "loss" in row)


def errors(like: Path | None) -> Texts:
    """Returns the error lines of hostile inputs.

    Args:
      like: an older record, whose random configurations are used; None: new random configurations.
    """
    found = {}
    for name, cases in HOSTILE.items():
        lines = [line for case in cases for line in (f"# {case.name}", *_refusal(case))]
        found[f"{name}.txt"] = ADDRESS.sub("0x", "\n".join(lines)) + "\n"
    drawn = json.loads((like / "errors" / RANDOM).read_text(encoding="utf-8")) if like else _drawn()
    said = [line for i, case in enumerate(drawn) for line in (f"# case {i}", *_said(case["words"], case["file"]))]
    return {**found, RANDOM: json.dumps(drawn, indent=1), "random.txt": ADDRESS.sub("0x", "\n".join(said)) + "\n"}


def _refusal(case: refused.Case) -> list[str]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        try:
            lines = refused.assert_refused(case, Path(folder), patch)
        except refused.Accepted:
            lines = ["read"]
        patch.undo()  # the working directory, before its folder is deleted
        return [line.replace(folder, "FOLDER") for line in lines]


def _drawn() -> list[dict[str, object]]:
    """Returns random configurations: the arguments in addition to --config, and the text of the file."""
    chance, known = random.Random(0), list(fuzz.fields(Config()))
    cases = [fuzz.drawn_case(chance, known, Path("file.py"), 1 + i % fuzz.MOST_FIELDS) for i in range(NUM_RANDOM)]
    return [{"words": case.words[1:], "file": case.file} for case in cases]


def _said(words: Sequence[str], text: str) -> list[str]:
    """Returns the error lines of `explain` for a configuration; none if it accepts it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder, "file.py")
        file.write_text(text, encoding="utf-8")
        try:
            explain.main([f"--config={file}", *words])
        except UserError as error:
            return [line.replace(folder, "FOLDER").encode("unicode_escape").decode() for line in error.problems]
    return []


def tests() -> Texts:
    """Returns the names of all tests, with any marks."""
    words = ["-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    return {"names.txt": "\n".join(sorted(names)) + "\n"}


def plans() -> Texts:
    """Returns the plan of each large configuration, without modelled times."""
    jax.config.update("jax_enable_compilation_cache", False)  # no run here would read these programs
    found = {}
    for words in LARGE:
        name, _, cluster = words.partition("=")
        config, _ = parse([f"--config={ROOT}/configs/{name}.py"], reads_data=False)
        target = clusters.open_cluster(cluster)
        shape = planner.shape_on(config, target)
        made = planner.plan(config, shape, target, Assumptions())
        program, stats = program_of(made.compiled), made.memory.compiler
        assert program
        assert stats
        sent = [
            (one.kind, one.axes, one.count, one.logical_bytes, one.wire_bytes, one.is_asynchronous, one.is_overlapped)
            for one in collectives(program, shape)
        ]
        row = {
            "cluster": cluster,
            "held_bytes": stats.arguments_bytes,
            "peak_bytes": stats.peak_bytes,
            "sent_bytes": {axis: text_report.sent_along(made, axis) for axis in sorted(made.minimum)},
            "least_bytes": dict(sorted(made.minimum.items())),
            "num_collectives": len(sent),
            "collectives": hashlib.sha256(json.dumps(sent).encode()).hexdigest(),
        }
        found[f"{name}.txt"] = json.dumps(row, indent=1) + "\n"
    return found


def parts(like: Path | None) -> Mapping[str, Callable[[], Texts]]:
    """Returns part -> the function that makes its files."""
    return {
        "placements": placements,
        "charts": charts,
        "losses": losses,
        "errors": lambda: errors(like),
        "tests": tests,
        "plans": plans,
    }


def record(folder: Path, names: Sequence[str], like: Path | None) -> None:
    """Writes the files of these parts, and the versions of the packages."""
    distributed.start(NUM_DEVICES)
    folder.mkdir(parents=True, exist_ok=True)
    python = ".".join(map(str, sys.version_info[:2]))
    (folder / "versions.txt").write_text(f"python {python}\njax {jax.__version__}\n", encoding="utf-8")
    for name in names:
        texts = parts(like)[name]()
        (folder / name).mkdir(exist_ok=True)
        for file, text in texts.items():
            (folder / name / file).write_text(text, encoding="utf-8")
        print(f"{len(texts):4} files  {name}", flush=True)


def compare(older: Path, newer: Path, relative: float) -> int:
    """Prints each difference of two records and returns the number of files that differ.

    Args:
      older: a record.
      newer: another record.
      relative: numbers of losses that differ by at most this share of the larger one are equal.
    """
    mine, other = ({path.name for path in folder.iterdir()} for folder in (older, newer))
    for name in sorted(mine ^ other):
        print(f"only in one record, not compared: {name}")
    found = {path.relative_to(folder) for folder in (older, newer) for path in folder.rglob("*") if path.is_file()}
    count = 0
    if "errors" in mine & other:
        count += _compare_errors(older / "errors", newer / "errors")
    for file in sorted(file for file in found if file.parts[0] in mine & other - {"errors"}):
        before, now = (_lines(folder / file) for folder in (older, newer))
        if before != now and not (file.parts[0] == "losses" and _are_near(before, now, relative)):
            print(*difflib.unified_diff(before, now, f"{older / file}", f"{newer / file}", "", "", 0, ""), sep="\n")
            count += 1
    print(f"{count} files differ")
    return count


def _compare_errors(older: Path, newer: Path) -> int:
    """Prints each case whose lines differ, in any file, and returns the number of these cases."""
    before, now = (_cases(folder) for folder in (older, newer))
    if odd := len(before.keys() ^ now.keys()):
        print(f"only in one record, not compared: {odd} broken inputs")
    differ = [name for name in before.keys() & now.keys() if before[name] != now[name]]
    for name in sorted(differ):
        print(
            *difflib.unified_diff(before[name], now[name], f"{older}: {name}", f"{newer}: {name}", "", "", 0, ""),
            sep="\n",
        )
    return len(differ)


def _cases(folder: Path) -> dict[str, list[str]]:
    """Returns name of a broken input -> its error lines."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    parts = [part.splitlines() for text in texts for part in text.removeprefix("# ").split("\n# ") if part]
    return {name: lines for name, *lines in parts}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _are_near(before: Sequence[str], now: Sequence[str], relative: float) -> bool:
    rows = [[[float(word) for word in line.split()] for line in lines] for lines in (before, now)]
    numbers = [[number for row in some for number in row] for some in rows]
    return len(numbers[0]) == len(numbers[1]) and all(
        math.isclose(a, b, rel_tol=relative, abs_tol=0) for a, b in zip(*numbers, strict=True)
    )


def main(argv: Sequence[str]) -> int:
    """Records or compares; returns 1 if two records differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    recording, comparing = commands.add_parser("record"), commands.add_parser("compare")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--parts", default=",".join(parts(None)), help="parts, separated by commas (default: all)")
    recording.add_argument("--like", type=Path, metavar="OLDER", help="reuse the random configurations of this record")
    comparing.add_argument("older", type=Path)
    comparing.add_argument("newer", type=Path)
    comparing.add_argument(
        "--relative", type=float, default=0.0, help="allowed relative difference of losses (default: 0)"
    )
    given = parser.parse_args(argv)
    if given.command == "compare":
        return int(compare(given.older, given.newer, given.relative) > 0)
    names = given.parts.split(",")
    if unknown := set(names) - set(parts(None)):
        parser.error(f"--parts: got {', '.join(sorted(unknown))}; allowed: {', '.join(parts(None))}")
    record(given.folder, names, given.like)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
