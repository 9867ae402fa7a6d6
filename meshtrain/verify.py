"""Verifies the checksums of checkpoints or a token file: `python -m meshtrain verify DIR`; exit code 1 if damaged."""

import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.checkpoint import integrity, retention
from meshtrain.checkpoint.checkpoint import CHECKPOINTS
from meshtrain.checkpoint.manager import renaming_problems
from meshtrain.checkpoint.other_runs import place_of
from meshtrain.cli import flags
from meshtrain.data.token_files import is_intact, read_sidecar
from meshtrain.errors import Problem, UserError, run
from meshtrain.files import what_is_at


def main(argv: Sequence[str]) -> int:
    """Verifies all checkpoints of a workdir, a single checkpoint, or a token file; prints one result line for each.

    Returns:
      The exit code: 1 if a checkpoint or the token file is damaged, else 0.

    Raises:
      UserError: there is no checkpoint, or the description of a token file has no checksum.
    """
    parser = flags.Parser(
        prog="python -m meshtrain verify",
        description="Reads checkpoints or a token file, and compares them with their checksums.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a workdir, its checkpoints or their bucket, or one checkpoint; or a token file",
    )
    given = place_of(parser.parse_args(argv).directory, f"{flags.program()} verify ")
    what = what_is_at(given) if isinstance(given, Path) else "a folder"
    if isinstance(given, Path) and what == "a file" and given.suffix == ".bin":
        return _token_file(given)
    checkpoints = []
    if what == "a folder" and given.name.isdecimal():
        checkpoints = [given]
    elif what == "a folder":
        checkpoints = [given / str(step) for step in retention.checkpoint_steps(given)]
    if not checkpoints:
        got = "no checkpoint in it" if what == "a folder" else what
        raise UserError(
            Problem(
                given,
                got=got,
                allowed=f"a workdir, its directory '{CHECKPOINTS}', or one of the steps",
                nearest="runs/3d",
            )
        )
    is_damaged = False
    for directory in checkpoints:
        damage = integrity.damage(directory) or renaming_problems(directory)
        is_damaged |= bool(damage)
        print(f"{directory}: {f'damaged: {damage[0]}' if damage else 'undamaged'}", flush=True)
        for line in damage[1:]:
            print(f"    {line}")
    return int(is_damaged)


def _token_file(path: Path) -> int:
    described = read_sidecar(path)
    if not described.sha256:
        raise UserError(
            Problem(
                path,
                got="no sha256 in its description",
                allowed="a token file written by this version of python -m meshtrain prepare",
                nearest="prepare it again",
            )
        )
    is_whole = is_intact(path, described)
    print(f"{path}: {'undamaged' if is_whole else 'damaged: its ids differ from its checksum'}")
    return int(not is_whole)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
