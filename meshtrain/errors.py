"""Errors, exit codes and suggestions. A user error prints one line for each problem and ends with exit code 2.

All programs of this project are started by the function `run`.
"""

import atexit
import contextlib
import difflib
import errno
import functools
import json
import math
import numbers
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

EXIT_FINISHED = 0
EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_STOPPED_ITSELF = 3
EXIT_LOST_PEER = 4
EXIT_TOO_FEW = 69  # EX_UNAVAILABLE of sysexits.h
EXIT_NOT_SAVED = 74  # EX_IOERR of sysexits.h
EXIT_START_AGAIN = 75  # EX_TEMPFAIL
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # a shell's exit code for SIGPIPE
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # part of the message of XLA's exception
EXIT_CODES = {
    EXIT_FINISHED: "finished",
    EXIT_BUG: (
        "a bug, with its traceback; `verify`: a checkpoint is damaged; `bench-collectives`: a result is wrong; "
        "`agree`: meshes differ"
    ),
    EXIT_USER_ERROR: "a mistake in the input, or not enough memory; `doctor`: a job would fail",
    EXIT_STOPPED_ITSELF: "training stopped itself: too many steps in a row were skipped, or the last was not finite",
    EXIT_LOST_PEER: "a hang, or a lost process",
    EXIT_TOO_FEW: "the run does not fit the remaining processes: start fewer, or wait for the others",
    EXIT_NOT_SAVED: "the last checkpoint or standard output could not be written, or the run's folder was deleted",
    EXIT_START_AGAIN: "interrupted after saving: start it again",
    EXIT_INTERRUPTED: "Ctrl-C without a save: the second one during training, or the first in other commands",
    EXIT_CLOSED_PIPE: "nobody reads standard output any more, as after `| head`",
}

_before_leaving: list[Callable[[int, str], None]] = []
_is_leaving = threading.RLock()  # never released: the first thread that ends the process determines its code and lines
terminals: list[int] = []  # file descriptor of the real standard error, while descriptor 2 is captured
MOST_LINES = 10  # maximum number of stored problems of one input, such as the lines of a file
_ENOUGH = 1000  # problems after which the rest of the input is not read
_WHERE = "{where}"  # placeholder in a problem of `Problems.add_at`, replaced by the place
_MOST_SHOWN = 40  # maximum number of characters of a value from a user's data
_NUMBERS = re.compile(r"\d+")
_OPTION = re.compile(r"(?<![\w.])[a-z]\w*(?:\.[a-z]\w*)+")  # the key of an option: `mesh.data`
_LONG = re.compile(r"\S{400,}")  # probably the content of a file, not a path or a name
_LONG_VALUE = re.compile(r"(?<![\w'])'([^']{400,})'(?!\w)")
_LONG_NUMBER = re.compile(r"\d[\d,]{39,}")  # too large or too precise for any numeric type
_MOST_CHARACTERS = 4000  # maximum length of an error line


class Problem(str):
    """An error line for the user, with its parts as attributes.

    A problem is a `str`: code prints, joins and sorts problems as it does other lines. Code that needs a part of the
    line reads the attribute.

    >>> problem = Problem("mesh.data", got=3, allowed="a divisor of batch_size", nearest=4, depends_on=["batch_size"])
    >>> print(problem)
    mesh.data: got 3; allowed: a divisor of batch_size; nearest: 4
    >>> problem.key, problem.got, problem.nearest
    ('mesh.data', '3', '4')
    >>> print(Problem("w", fault="not in the files", allowed="b", fix=nearest("w", ["b"]), nearest="rename it"))
    w: not in the files; allowed: b; nearest: rename it

    Attributes:
      key: the wrong option, path or argument; '' if it is not known yet, see `at`.
      got: the given value, as text; '' if `fault` states the error in other words.
      fault: the text between the key and the allowed values: `got 3`, or other words.
      allowed: the allowed values, as text; '' if the line does not state them.
      condition: the condition under which these values are allowed, such as `with data.source=idx`; '' for none.
      nearest: the nearest allowed value, as text; '' for none.
      fix: the end of the line: `; nearest: 4`, `; did you mean 'x'?`, or ''.
      depends_on: other options that led to the problem. `resolve` drops the problem if one of them is wrong itself.
    """

    key: str
    got: str
    fault: str
    allowed: str
    condition: str
    nearest: str
    fix: str
    depends_on: frozenset[str]
    _parts: dict[str, Any]  # what the constructor takes

    def __new__(
        cls,
        key: object,
        *,
        got: object = "",
        fault: object = "",
        allowed: object = "",
        condition: str = "",
        nearest: object = "",
        fix: str = "",
        depends_on: Iterable[str] = (),
    ) -> "Problem":
        """Creates the error line `KEY: got GOT; allowed CONDITION: ALLOWED; nearest: NEAREST` from its parts.

        A part that is not given is left out of the line.

        Args:
          key: the wrong option, path or argument; None if only the caller knows it.
          got: the given value.
          fault: words that replace `got GOT` in the line; '' for none.
          allowed: the allowed values.
          condition: the condition under which these values are allowed, such as `with data.source=idx`.
          nearest: the nearest allowed value.
          fix: the result of the function `nearest`, such as `; did you mean 'x'?`, which replaces `; nearest: NEAREST`
            in the line; '' for none.
          depends_on: other options that led to the problem; they are not in the line.
        """
        fault = f"{fault}" or f"got {got}"
        fix = fix or (f"; nearest: {nearest}" if f"{nearest}" else "")
        legal = f"; allowed{condition and f' {condition}'}: {allowed}" if f"{allowed}" else ""
        self = super().__new__(cls, f"{'' if key is None else f'{key}: '}{fault}{legal}{fix}")
        self.key, self.fault = "" if key is None else f"{key}", fault
        self.got = fault.removeprefix("got ") if fault.startswith("got ") else ""
        self.allowed, self.condition = f"{allowed}", condition
        self.fix, self.nearest = fix, fix.removeprefix("; nearest: ") if fix.startswith("; nearest: ") else ""
        self.depends_on = frozenset(depends_on)
        self._parts = {"key": key if key is None else self.key, "fault": fault, "allowed": allowed}
        self._parts |= {"condition": condition, "fix": fix, "depends_on": self.depends_on}
        return self

    @classmethod
    def plain(cls, line: str) -> "Problem":
        """Converts a plain text to a problem, such as a line from a user's function or from another process.

        The key is the text before the first colon. The problem depends on every option that the line names. A `Problem`
        is returned unchanged.

        >>> problem = Problem.plain("model.width: 3 is below model.depth")
        >>> problem.key, sorted(problem.depends_on)
        ('model.width', ['model.depth'])
        """
        if isinstance(line, cls):
            return line
        key, colon, fault = line.partition(": ")
        return cls(key, fault=fault, depends_on=_OPTION.findall(fault)) if colon else cls(None, fault=line)

    def with_parts(self, **parts: Any) -> "Problem":
        """Returns a copy of the problem that is created with other values for some arguments of the constructor.

        >>> print(Problem("a", got=1, allowed=2, fix="; did you mean 2?").with_parts(key="b", nearest=3))
        b: got 1; allowed: 2; nearest: 3
        """
        own = dict(self._parts)
        own |= {"fault": ""} if "got" in parts else {}
        own |= {"fix": ""} if "nearest" in parts else {}
        return Problem(**own | parts)

    def at(self, place: object) -> "Problem":
        """Returns a copy of the problem with `place`, such as a file and its line, before the key.

        >>> print(Problem(None, got="3", allowed="a text").at("a.jsonl, line 2"))
        a.jsonl, line 2: got 3; allowed: a text
        """
        return self.with_parts(key=place if self._parts["key"] is None else f"{place}: {self.key}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes `pickle` and `copy` call the constructor with all parts of the problem, not only with the line."""
        return functools.partial(Problem, **self._parts), ()


class UserError(ValueError):
    """An error that the user can fix, with one or more problems. `Problem.plain` converts plain texts to problems.

    Attributes:
      problems: the problems, in the order in which they are printed.
    """

    code = EXIT_USER_ERROR

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(map(Problem.plain, problems))


class TooFew(UserError):
    """An elastic run does not fit its remaining processes: exit code 69. Another number of processes may fit."""

    code = EXIT_TOO_FEW


class Problems:
    """Collects problems of many inputs, such as lines of files: stores the first ten, and counts all of them.

    Attributes:
      count: the number of problems so far.
    """

    def __init__(self, problems: Iterable[Problem] = ()) -> None:
        """Creates a collection that contains `problems`."""
        self.count = 0
        self._num_told = 0  # number of problems that the stored problems describe
        self._first = list[Problem | tuple[Problem, str | None]]()  # a problem, or the key of `_places`
        self._places = dict[tuple[Problem, str | None], list[str]]()
        self.add(*problems)

    def add(self, *problems: Problem) -> None:
        """Counts problems, and stores them if they are among the first ten."""
        first = problems[: MOST_LINES - len(self._first)]
        self._first += first
        self._num_told += len(first)
        self.count += len(problems)

    def add_at(self, where: str, problem: Problem, fix: str | None = "") -> None:
        """Counts a problem in a line of a file; a problem that occurs in several lines of files is stored once.

        Args:
          where: the file and the number of the line, such as `a.jsonl, line 3`.
          problem: the problem, with the placeholder `{where}` in its key or its fault. `lines` replaces the placeholder
            by the first place where the problem occurs.
          fix: the suggested fix; '': the suggestion to remove the line from the file; None: `problem` includes a fix.
        """
        self.count += 1
        if (problem, fix) not in self._places:
            if len(self._first) >= MOST_LINES:
                return
            self._first.append((problem, fix))
            self._places[problem, fix] = []
        self._places[problem, fix].append(where)
        self._num_told += 1

    def is_enough(self) -> bool:
        """Returns whether 1,000 problems were counted, so that the caller should stop reading its input."""
        return self.count >= _ENOUGH

    def lines(self) -> list[Problem]:
        """Returns the stored problems, and, if more problems were counted, a line with the number of the others."""
        problems = [each if isinstance(each, Problem) else self._placed(*each) for each in self._first]
        num_more = self.count - self._num_told
        if not num_more:
            return problems
        more = f"at least {num_more}" if self.is_enough() else f"{num_more}"
        return [*problems, Problem.plain(f"... and {more} more like these")]

    def _placed(self, problem: Problem, fix: str | None) -> Problem:
        """Returns a stored problem with the first place where it occurs, such as `a.jsonl, line 3`, and with a fix.

        Args:
          problem: the argument `problem` of `add_at`, with the placeholder `{where}`.
          fix: the argument `fix` of `add_at`.
        """
        first, *others = self._places[problem, fix]
        part = "key" if _WHERE in problem.key else "fault"
        place = f"{first} and others" if others else first
        problem = problem.with_parts(**{part: getattr(problem, part).replace(_WHERE, place, 1)})
        if fix is None or (not fix and problem.nearest):
            return problem
        fix = fix or ("leave them out, or rewrite them" if others else "leave out that line")
        return problem.with_parts(fix=f"{problem.fix}; nearest: {fix}")


def refuse(problems: Iterable[str]) -> None:
    """Raises a UserError that contains `problems`, unless there are none."""
    if lines := tuple(problems):
        raise UserError(*lines)


def refusals(work: Callable[..., object], *given: object) -> list[Problem]:
    """Calls `work(*given)`; returns the problems of the UserError that it raises, or [] if it raises none."""
    try:
        work(*given)
    except UserError as error:
        return list(error.problems)
    return []


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception of XLA or Python means that memory is exhausted."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY in str(error))


class TrainingStopped(Exception):
    """Training cannot continue (too many skipped steps): exit code 3."""


class Interrupted(Exception):
    """A signal arrived and everything is saved: exit code 75, the same command continues the run."""


class SaveFailed(Exception):
    """A checkpoint could not be written; if it was the run's last checkpoint, exit code 74."""


class FolderLost(SaveFailed):
    """The run's folder or its checkpoint folder was deleted or replaced during the run: exit code 74."""


class LostPeer(Exception):
    """Another process of the run has ended or hangs: exit code 4."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or a placeholder if it is empty or its `__str__` raises."""
    try:
        return (str(error).strip() or "no message").splitlines()[0]
    except Exception:  # noqa: BLE001  a user's __str__ may raise anything
        return "a message that cannot be printed"


def fold(word: str) -> str:
    """Returns a word in lower case without punctuation and blanks, to compare names.

    >>> fold("FULL_SHARD")
    'fullshard'
    """
    return re.sub(r"[\W_]", "", word).lower()


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the most similar of `allowed`, or an empty string.

    Names that differ only in case or punctuation are preferred, then names with the same numbers.

    >>> nearest("fp16", ["float32", "bfloat16", "float16", "fp8"])
    "; did you mean 'float16'?"
    """
    names, numbers = list(allowed), _NUMBERS.findall(name)
    same = [one for one in names if fold(name) and fold(one) == fold(name)]
    alike = [one for one in names if numbers and _NUMBERS.findall(one) == numbers]
    close = [found for some in (alike, names) for found in difflib.get_close_matches(name, some, n=1, cutoff=0.5)]
    close = same + close
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown(what: str, got: str, allowed: Sequence[str], near: str = "") -> Problem:
    """Returns the problem of an unknown name, which lists all allowed names and suggests a similar name.

    >>> print(unknown("mesh", "tensr", ["data", "tensor"]))
    mesh: got 'tensr'; allowed: data, tensor; did you mean 'tensor'?

    Args:
      what: the key of the problem, such as an option.
      got: the unknown name.
      allowed: all allowed names.
      near: the suggestion if no allowed name is similar; '' for none.
    """
    names = ", ".join(name or "''" for name in allowed) or "none"
    return Problem(what, got=f"'{got}'", allowed=names, fix=nearest(got, allowed), nearest=near)


def as_json_text(value: Any) -> str:
    """Returns a value from a user's data as JSON, shortened after 40 characters; values that JSON lacks become text.

    >>> as_json_text({"a": [1, 2]}), as_json_text("x" * 100)
    ('{"a": [1, 2]}', '"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...')
    """
    text = json.dumps(value, default=str)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def short_number(number: int) -> str:
    """Returns a positive whole number of any size as short text for a message.

    >>> short_number(100_000), short_number(10**300)
    ('100,000', 'about 10^300')
    """
    return f"{number:,}" if number < 10**15 else f"about 10^{round(math.log10(number))}"


def one_line(problem: str) -> str:
    """Returns a problem as one printable line: replaces line breaks by blanks, shortens long words and numbers.

    >>> one_line("seed: got " + "9" * 500)
    'seed: got 9999999999... (500 digits)'
    """
    line = " ".join(problem.split())
    line = _LONG_NUMBER.sub(lambda number: f"{number[0][:10]}... ({len(number[0].replace(',', ''))} digits)", line)
    line = _LONG_VALUE.sub(lambda value: f"'{_ends_of(value[1], 200)}'", line)
    line = _ends_of(_LONG.sub(lambda word: _ends_of(word[0], 200), line), _MOST_CHARACTERS)
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)


def _ends_of(text: str, most: int) -> str:
    """Shortens a text to about `most` characters; keeps its start, and its end, which contains the fix."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]}...{text[-most // 4 :]}"


def run(entry: Callable[[], int | None]) -> NoReturn:
    """Runs a program and exits with its exit code; prints one line for each problem of a UserError.

    The program also ends if its standard output cannot be written. Any other exception is a bug and prints its
    traceback.

    Args:
      entry: the program, without arguments; it returns its exit code or None for 0.
    """
    open_closed_streams()
    code = EXIT_FINISHED
    try:
        result, lines = _code_of(entry)
        if result not in (EXIT_FINISHED, EXIT_START_AGAIN) and _others_may_wait():
            leave_at_once(result, lines)
        if lines:
            print(lines, file=sys.stderr, flush=True)
        code = result
        sys.stdout.flush()
    except KeyboardInterrupt:
        leave_at_once(code or EXIT_INTERRUPTED)
    except Exception as error:
        lost = lost_output() if isinstance(error, OSError) else EXIT_FINISHED
        code = code or lost
        if code != EXIT_START_AGAIN and _others_may_wait():
            leave_at_once(code or EXIT_BUG, "" if code else traceback.format_exc().rstrip())
        if not code:
            raise
    atexit.register(_end_at_signals, code)
    sys.exit(code)


def open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed, for example by `2>&-` in a shell.

    Otherwise the next opened file would get the descriptor of the stream, and C++ code would log into that file.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)  # `open` returns the lowest free number: this one
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _end_at_signals(code: int) -> None:
    """Makes SIGINT and SIGTERM end the process with this exit code and without a traceback while Python exits."""
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(code))


def _code_of(entry: Callable[[], int | None]) -> tuple[int, str]:
    """Runs a program; returns its exit code, and the lines for standard error that explain a code other than 0."""
    try:
        return entry() or EXIT_FINISHED, ""
    except UserError as error:
        return error.code, error_lines(error)
    except TrainingStopped as error:
        return EXIT_STOPPED_ITSELF, f"meshtrain: stopped: {error}"
    except Interrupted as error:
        return EXIT_START_AGAIN, f"meshtrain: interrupted: {error}"
    except SaveFailed as error:
        return EXIT_NOT_SAVED, f"meshtrain: not saved: {one_line(str(error))}"
    except LostPeer as error:
        leave_at_once(EXIT_LOST_PEER, f"meshtrain: lost: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fix = "more devices, or a machine with more memory"
        problem = Problem("memory", got=f"'{first_line(error)}'", allowed="the memory of the device", nearest=fix)
        return EXIT_USER_ERROR, error_lines(UserError(problem))
    except KeyboardInterrupt:
        leave_at_once(EXIT_INTERRUPTED)
    except SystemExit as end:  # argparse raises it for `--help`, before its output is flushed
        if end.code:
            raise
        return EXIT_FINISHED, ""


def error_lines(error: UserError) -> str:
    """Returns the lines to print for a user error, one for each problem."""
    return "\n".join(f"meshtrain: error: {one_line(problem)}" for problem in error.problems)


def lost_output() -> int:
    """Returns the exit code for standard output or standard error that cannot be written, or 0 if both can.

    To test it, the function writes an empty line to standard output, because an unbuffered stream does not remember a
    failed write. It prints an error line about the stream, unless the stream is a closed pipe.
    """
    code = EXIT_FINISHED
    for stream, end in ((sys.stdout, "\n"), (sys.stderr, "")):
        try:
            print(end=end, file=stream, flush=True)
        except OSError as error:
            # Discard the buffer, because Python's flush at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            code = code or (EXIT_CLOSED_PIPE if error.errno == errno.EPIPE else EXIT_NOT_SAVED)
            if error.errno != errno.EPIPE:
                fault = f"cannot be written ({error.strerror})"
                problem = Problem(stream.name, fault=fault, allowed="a disk with free space", nearest="another file")
                print(f"meshtrain: error: {problem}", file=sys.stderr)
    return code


def _others_may_wait() -> bool:
    """Returns whether other processes of the job may be waiting for this process, in JAX's shutdown or to connect."""
    return bool(_before_leaving) or (
        "jax.distributed" in sys.modules and bool(sys.modules["jax.distributed"].is_initialized())
    )


def warn(line: str) -> None:
    """Prints a warning on standard error."""
    print(f"meshtrain: WARNING: {line}", file=sys.stderr, flush=True)


def before_leaving(tell: Callable[[int, str], None]) -> None:
    """Registers a function: `leave_at_once` calls `tell(code, message)` after it has printed the message."""
    if tell not in _before_leaving:
        _before_leaving.append(tell)


def leave_at_once(code: int, message: str = "") -> NoReturn:
    """Ends the process immediately, without exit handlers, which would wait for threads and hanging processes.

    First prints the message, and calls the functions that `before_leaving` has registered. The first call determines
    code and message: calls from other threads block until the process ends.

    Args:
      code: the exit code.
      message: lines for standard error; '' for none.
    """
    _is_leaving.acquire()
    if terminals:
        os.dup2(terminals[0], 2)
    try:
        if message:
            print(message, file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
    except RuntimeError:
        pass  # the thread was interrupted inside a write to this stream
    except OSError:
        code = code or lost_output()
    for tell in _before_leaving:
        tell(code, message)
    os._exit(code)


def is_finite(value: Any) -> bool:
    """Returns whether a value is a finite number within the range of float64, and not a bool."""
    try:
        return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def divisors(number: int) -> list[int]:
    """Returns all divisors of a positive number, ascending."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def nearest_divisor(number: int, size: int) -> int:
    """Returns the divisor of `number` that is nearest to `size`; the larger one of two equally near divisors.

    >>> nearest_divisor(12, 5)
    6
    """
    return min(divisors(number), key=lambda candidate: (abs(candidate - size), -candidate))


def nearest_multiple(number: int, divisor: int) -> int:
    """Returns the positive multiple of `divisor` nearest to `number`; the larger of two equally near multiples.

    >>> nearest_multiple(510, 4)
    512
    """
    return divisor * max(1, (2 * number + divisor) // (2 * divisor))
