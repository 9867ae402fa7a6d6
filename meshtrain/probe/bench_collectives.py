"""Times every collective along every axis of a mesh, on the devices that a run would use.

python -m meshtrain bench-collectives --config.mesh.data=2 --config.mesh.fsdp=4 [--json=FILE] [--out=FILE.png]
"""

import argparse
import importlib
import math
import re
import sys
from collections.abc import Sequence

from meshtrain.cli import flags, output_files
from meshtrain.errors import Problem, refuse, run
from meshtrain.files import target_problems

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SIZE = re.compile(r"(\d+)([KMG]?)$", re.IGNORECASE)
LEAST_BYTES, MOST_BYTES = 2**6, 2**34


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the arguments that only this command has, without the arguments of a configuration."""
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain bench-collectives",
        description="Times every collective along every axis of the mesh, and compares each result with numpy. The "
        "mesh comes from --config or from --config.mesh.NAME=SIZE; by default all devices are on its first axis.",
        add_help=False,
    )
    extra.add_argument(
        "--smallest", metavar="BYTES", default="1K", help="smallest size of a device's array (default 1K)"
    )
    extra.add_argument(
        "--largest", metavar="BYTES", default="1G", help="largest size (default 1G, less if a device has less memory)"
    )
    extra.add_argument(
        "--limit", metavar="SECONDS", default="30", help="skip sizes that would take more seconds (default 30)"
    )
    extra.add_argument("--json", metavar="FILE", default="", help="also write the file that plan --links reads")
    extra.add_argument("--out", metavar="FILE.png", default="", help="also draw a chart (.png, .svg or .pdf)")
    return extra


def main(argv: Sequence[str]) -> int:
    """Measures and prints the collectives; returns exit code 0, or 1 if the result of a collective was wrong.

    Raises:
      UserError: all problems of the arguments, or a mesh that does not fit the devices.
    """
    given = flags.arguments(argv, arguments())
    problems = [*given.problems, *_problems(given)]
    refuse(problems)
    # Imported here, by name: JAX takes seconds to load, and `--help` must be fast.
    collectives = importlib.import_module("meshtrain.probe.bench.benchmark")
    all_bytes = (_num_bytes(given.smallest), _num_bytes(given.largest))
    is_right: bool = collectives.measured(given, all_bytes, float(given.limit))
    return 0 if is_right else 1


def _problems(given: argparse.Namespace) -> list[Problem]:
    problems = []
    allowed = "a number of bytes from 64 to 16G, such as 4096, 64K, 16M or 1G"
    for name, fix in (("smallest", "1K"), ("largest", "1G")):
        text = getattr(given, name)
        if not LEAST_BYTES <= _num_bytes(text) <= MOST_BYTES:
            problems.append(Problem(f"--{name}", got=f"'{text}'", allowed=allowed, nearest=f"--{name}={fix}"))
    if not problems and _num_bytes(given.smallest) > _num_bytes(given.largest):
        problems.append(
            Problem(
                "--smallest",
                got=f"{given.smallest} with --largest={given.largest}",
                allowed="at most --largest",
                nearest=f"--smallest={given.largest}",
            )
        )
    try:
        limit = float(given.limit)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        problems.append(
            Problem("--limit", got=f"'{given.limit}'", allowed="a number of seconds above 0", nearest="--limit=30")
        )
    if given.json:
        problems += target_problems("--json", given.json, "links.json")
    if given.out:
        problems += target_problems("--out", given.out, "collectives.png", output_files.PICTURES)
    return problems


def _num_bytes(text: str) -> int:
    """Parses a number of bytes such as 64K (65,536); returns -1 if the text is invalid."""
    match = SIZE.match(text)
    # Truncated: a number with more digits is above the limit anyway.
    return int(match[1][:20]) * UNITS[match[2].upper()] if match else -1


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
