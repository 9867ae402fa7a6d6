"""A user's mistake: one line for each problem, exit code 2. Every entry point runs through `run`."""

import difflib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

EXIT_FINISHED = 0
EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED_ITSELF = 3
EXIT_LOST_PEER = 4
EXIT_NOT_SAVED = 74  # EX_IOERR of sysexits.h
EXIT_START_AGAIN = 75  # EX_TEMPFAIL
EXIT_INTERRUPTED = 130

_LAST_WORDS_SECONDS = 1.0
_MOST_LINES = 10  # of problems that many inputs share
_ENOUGH = 1000  # such problems: whatever reads on would find more of them
_LONG = re.compile(r"\S{400,}")  # no path that anybody reads, but a file's content


class UserError(ValueError):
    """What a user can mend. Each problem is one line: what it got, what is allowed, the nearest fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Problems:
    """What is wrong with many inputs, such as the lines of files: the first few as lines, the others counted.

    Attributes:
      count: how many problems there are.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        """Starts with these problems."""
        self.count = 0
        self._first: list[str] = []
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        """Counts a problem, and keeps its line if it is one of the first."""
        self.count += 1
        if len(self._first) < _MOST_LINES:
            self._first.append(line)

    def is_enough(self) -> bool:
        """Returns whether there are so many that looking for more is a waste of time."""
        return self.count >= _ENOUGH

    def lines(self) -> list[str]:
        """Returns a line for each of the first problems, and one that counts the others."""
        num_more = self.count - len(self._first)
        if not num_more:
            return list(self._first)
        more = f"at least {num_more}" if self.is_enough() else f"{num_more}"
        return [*self._first, f"... and {more} more like these"]


class TrainingStopped(Exception):
    """Training cannot go on by itself (not-a-number, diverged): exit code 3."""


class Interrupted(Exception):
    """A signal arrived and everything is saved: exit code 75, start me again."""


class SaveFailed(Exception):
    """A checkpoint could not be written; where it was the run's last one, exit code 74: free space, start me again."""


class LostPeer(Exception):
    """Another process of the run is gone or stands still: exit code 4."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the closest of `allowed`, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown(what: str, got: str, allowed: Sequence[str]) -> str:
    """Returns the one line for a name that is not in a list of names."""
    names = ", ".join(name or "''" for name in allowed) or "none"
    return f"{what}: got '{got}'; allowed: {names}{nearest(got, allowed)}"


def one_line(problem: str) -> str:
    """Returns a problem as a terminal can show it: one line, nothing that cannot be printed, no endless word."""
    words = _LONG.sub(lambda word: f"{word[0][:150]}...{word[0][-50:]}", " ".join(problem.split()))
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in words)


def run(entry: Callable[[], int | None]) -> NoReturn:
    """Runs a program to its exit code. A UserError becomes one line a problem; our own bugs keep their traceback."""
    try:
        code = entry() or EXIT_FINISHED
    except UserError as error:
        for problem in error.problems:
            print(f"meshtrain: error: {one_line(problem)}", file=sys.stderr)
        code = EXIT_USER_ERROR
    except TrainingStopped as error:
        print(f"meshtrain: stopped: {error}", file=sys.stderr)
        code = EXIT_STOPPED_ITSELF
    except Interrupted as error:
        print(f"meshtrain: interrupted: {error}", file=sys.stderr)
        code = EXIT_START_AGAIN
    except SaveFailed as error:
        print(f"meshtrain: not saved: {one_line(str(error))}", file=sys.stderr)
        code = EXIT_NOT_SAVED
    except LostPeer as error:
        leave_at_once(EXIT_LOST_PEER, f"meshtrain: lost: {error}")
    except KeyboardInterrupt:
        leave_at_once(EXIT_INTERRUPTED)
    except Exception:
        if _others_may_wait():
            leave_at_once(EXIT_BUG, traceback.format_exc().rstrip())
        raise
    if code not in (EXIT_FINISHED, EXIT_START_AGAIN) and _others_may_wait():
        sys.stderr.flush()
        # Where process 0 goes, JAX aborts the others, which may be about to say the same.
        time.sleep(_LAST_WORDS_SECONDS)
        leave_at_once(code)
    sys.stdout.flush()
    sys.exit(code)


def _others_may_wait() -> bool:
    """Returns whether this is one of several processes: JAX's farewell would wait for those that wait for this one."""
    return "jax" in sys.modules and bool(sys.modules["jax"].distributed.is_initialized())


def warn(line: str) -> None:
    """Says on standard error what a user should know and need not act upon at once."""
    print(f"meshtrain: WARNING: {line}", file=sys.stderr, flush=True)


def leave_at_once(code: int, message: str = "") -> NoReturn:
    """Ends the process without its farewells, which would wait for threads and for processes that do not answer."""
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
