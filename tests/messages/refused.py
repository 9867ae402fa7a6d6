"""Commands in this process that must refuse what they are given: how they are run, and what a refusal looks like."""

import contextlib
import ctypes
import dataclasses
import hashlib
import io
import os
import pathlib
import signal
import stat
from collections.abc import Callable, Iterator, Sequence

import pytest

from meshtrain import errors
from meshtrain.__main__ import main as meshtrain
from meshtrain.config.schema import Config
from meshtrain.run.weights import weights_problems

HANG_SECONDS = 30  # the slowest case takes two
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # capabilities: what lets root read what no permission allows


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that a user can get wrong.

    Attributes:
      name: what pytest calls it.
      prepare: makes the broken files in a folder of the case's own, where the program also runs; returns the words.
      starts: how some lines begin: each of these at least one.
      command: the command of `python -m meshtrain`.
      unprivileged: permissions count for root too.
    """

    name: str
    prepare: Callable[[pathlib.Path], list[str]]
    starts: tuple[str, ...] = ()
    command: str = "train"
    unprivileged: bool = False


class Accepted(Exception):
    """The program was about to write and compile: nothing refused the input."""


class Hang(BaseException):
    """Not an Exception, so that nobody who handles those goes on waiting."""


def assert_refused(case: Case, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs the command in the folder; returns the lines it refuses with, having left everything as it was."""
    monkeypatch.chdir(folder)
    words = case.prepare(folder)
    stop_before_work(monkeypatch)
    before = snapshot(folder)
    with unprivileged() if case.unprivileged else contextlib.nullcontext():
        code, lines = outcome(case.command, words)
    if not code:
        raise Accepted(words)
    assert code == errors.EXIT_USER_ERROR, lines
    assert_same(before, snapshot(folder))
    assert_speaks(lines)
    for start in case.starts:
        assert any(line.removeprefix("meshtrain: error: ").startswith(start) for line in lines), (start, lines)
    return lines


def outcome(command: str, words: Sequence[str]) -> tuple[int | str | None, list[str]]:
    """Runs a command in this process; returns its exit code and the lines on standard error.

    Raises:
      Accepted: see `stop_before_work`.
    """
    said, quiet = io.StringIO(), contextlib.redirect_stdout(io.StringIO())
    with deadline(), contextlib.redirect_stderr(said), quiet, pytest.raises(SystemExit) as ended:
        errors.run(lambda: meshtrain([command, *words]))
    return ended.value.code, said.getvalue().splitlines()


def stop_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes what is accepted fail where the program would begin to write and to compile.

    The workdir that goes with small.py seems to have weights.
    """

    def accepted(*given: object, **named: object) -> None:
        raise Accepted

    def problems(config: Config, run: pathlib.Path, *step: int | None) -> list[str]:
        return [] if pathlib.Path(run).name == "small" else weights_problems(config, run, *step)

    monkeypatch.setattr("meshtrain.run.existing_run.weights_problems", problems)
    monkeypatch.setattr("meshtrain.run.saving.open_checkpoints", accepted)
    monkeypatch.setattr("meshtrain.plan.planner.plan", accepted)
    monkeypatch.setattr("meshtrain.generate.restore_weights", accepted)
    monkeypatch.setattr("meshtrain.evaluate.restore_weights", accepted)
    monkeypatch.setattr("meshtrain.launch.local_processes.run", accepted)
    monkeypatch.setattr("meshtrain.probe.bench.benchmark.sizes", accepted)
    monkeypatch.setattr("meshtrain.probe.doctor.diagnose", accepted)


def assert_speaks(lines: list[str]) -> None:
    """Each line is one of ours and says what it got, what is allowed, and the nearest fix."""
    assert lines
    for line in lines:
        assert line.startswith("meshtrain: error: "), lines
        assert len(line) < 4000, line[:400]
        assert line.isprintable(), line
        if line.startswith("meshtrain: error: ... and "):
            continue
        near = line if not line.startswith("meshtrain: error: workdir ") else lines[-1]
        assert "allowed" in near, line
        assert "nearest" in near or "did you mean" in near, line


def snapshot(folder: pathlib.Path) -> dict[str, tuple[object, ...]]:
    """Returns what stands in a folder: kind and permissions, and of files since when and what is in them.

    A folder's own time is left out: to see whether it can be written, the program makes a folder there and removes it.
    """
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        seen: tuple[object, ...] = (about.st_mode, about.st_ino)
        if stat.S_ISREG(about.st_mode):
            with path.open("rb") as file:
                seen += (about.st_mtime_ns, about.st_size, hashlib.file_digest(file, "sha256").hexdigest())
        elif stat.S_ISLNK(about.st_mode):
            seen += (os.readlink(path),)
        found[str(path.relative_to(folder))] = seen
    return found


def assert_same(before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]) -> None:
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert not changed, f"written, changed or lost: {sorted(changed)}"


@contextlib.contextmanager
def deadline(seconds: float = HANG_SECONDS) -> Iterator[None]:
    """Ends a block that hangs, with the stack of where it does."""

    def hang(number: int, frame: object) -> None:
        raise Hang(f"no end after {seconds} s")

    old = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


_Sets = (ctypes.c_uint32 * 3) * 2  # effective, permitted, inheritable; capabilities 0 to 31, 32 to 63


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Takes from this thread the right to pass over permissions, which root has, and gives it back; see capset(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, old = _Header(0x20080522, 0), _Sets()
    assert libc.capget(ctypes.byref(header), ctypes.byref(old)) == 0, os.strerror(ctypes.get_errno())
    new = _Sets.from_buffer_copy(old)
    new[0][0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert libc.capset(ctypes.byref(header), ctypes.byref(new)) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(ctypes.byref(header), ctypes.byref(old)) == 0, os.strerror(ctypes.get_errno())


SMALL = """
from meshtrain.config.build import default

def get_config():
    config = default()
    config.batch_size = 8
    config.sequence_length = 32
    config.model.num_layers = 2
    config.model.embed_dim = 32
    config.model.mlp_dim = 64
    config.data.source = "text"
    config.data.path = "words.txt"
    config.data.num_threads = 0
    return config
"""


def small(folder: pathlib.Path, *changes: str) -> list[str]:
    """Writes a configuration and its text, both in order; returns the words of a command line with the changes."""
    (folder / "small.py").write_text(SMALL)
    (folder / "words.txt").write_text("".join(f"def f{i % 7}(x):\n    return x + {i * i % 13}\n" for i in range(500)))
    return ["--config=small.py", "--workdir=run", *(f"--config.{change}" for change in changes)]


# What may stand where a file is expected.
ODD = ("loop", "dangling", "pipe", "folder", "missing", "below a file", "too long", "no such home")


def odd_things(folder: pathlib.Path) -> dict[str, str]:
    """Makes what may stand where a file is expected; returns {what: path}."""
    os.symlink("loop", folder / "loop")
    os.symlink("nowhere", folder / "dangling")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    return {name: name for name in ("loop", "dangling", "pipe", "folder")} | {
        "missing": "missing",
        "below a file": "words.txt/x",
        "too long": "x" * 5000,
        "no such home": "~nosuchuser/x",
    }
