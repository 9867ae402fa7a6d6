"""Compares checkpoints with their checksums: `python -m meshtrain verify DIR`; exit code 1 if one is damaged."""

import sys
from collections.abc import Sequence

from meshtrain.checkpoint import integrity, retention
from meshtrain.checkpoint.checkpoint import CHECKPOINTS
from meshtrain.checkpoint.manager import renamed
from meshtrain.cli import flags
from meshtrain.errors import UserError, run
from meshtrain.files import expanded, what_is_at


def main(argv: Sequence[str]) -> int:
    """Prints a line for each checkpoint of a workdir, or for a single one; returns 1 if one is damaged.

    Raises:
      UserError: there is no checkpoint.
    """
    parser = flags.Parser(
        prog="python -m meshtrain verify", description="Reads checkpoints and compares them with their checksums."
    )
    parser.add_argument("directory", metavar="DIR", help="a workdir, its checkpoints, or one of them")
    given = expanded(parser.parse_args(argv).directory).absolute()
    what = what_is_at(given)
    checkpoints = []
    if what == "a folder" and given.name.isdecimal():
        checkpoints = [given]
    elif what == "a folder":
        inner = given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given
        checkpoints = [inner / str(step) for step in retention.saved_steps(inner)]
    if not checkpoints:
        got = "no checkpoint in it" if what == "a folder" else what
        raise UserError(
            f"{given}: got {got}; allowed: a workdir, its directory '{CHECKPOINTS}', or one of the steps; nearest: "
            "runs/3d"
        )
    is_damaged = False
    for directory in checkpoints:
        damage = integrity.damage(directory) or renamed(directory)
        is_damaged |= bool(damage)
        print(f"{directory}: {f'damaged: {damage[0]}' if damage else 'whole'}", flush=True)
        for line in damage[1:]:
            print(f"    {line}")
    return int(is_damaged)


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
