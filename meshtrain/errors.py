"""A user's mistake: one line for each problem, exit code 2. Every entry point runs through `run`."""

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

EXIT_FINISHED = 0
EXIT_USER_ERROR = 2
EXIT_STOPPED_ITSELF = 3
EXIT_LOST_PEER = 4
EXIT_START_AGAIN = 75
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """What a user can mend. Each problem is one line: what it got, what is allowed, the nearest fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TrainingStopped(Exception):
    """Training cannot go on by itself (not-a-number, diverged): exit code 3."""


class Interrupted(Exception):
    """A signal arrived and everything is saved: exit code 75, start me again."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the closest of `allowed`, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown(what: str, got: str, allowed: Sequence[str]) -> str:
    """Returns the one line for a name that is not in a list of names."""
    return f"{what}: got '{got}'; allowed: {', '.join(allowed)}{nearest(got, allowed)}"


def run(entry: Callable[[], int | None]) -> NoReturn:
    """Runs a program to its exit code. A UserError becomes one line a problem; our own bugs keep their traceback."""
    try:
        code = entry() or EXIT_FINISHED
    except UserError as error:
        for problem in error.problems:
            print(f"meshtrain: error: {' '.join(problem.split())}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except TrainingStopped as error:
        print(f"meshtrain: stopped: {error}", file=sys.stderr)
        code = EXIT_STOPPED_ITSELF
    except Interrupted as error:
        print(f"meshtrain: interrupted: {error}", file=sys.stderr)
        code = EXIT_START_AGAIN
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.stdout.flush()
    sys.exit(code)
