"""Writes the metrics of a run: `metrics.jsonl`, TensorBoard, and Weights & Biases or a custom tracker.

A tracker has `write(step, values)` and `close()`. Its first error during the run causes a warning; the run continues.
Only process 0 creates trackers, since processes would overwrite each other's files.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import numbers
import os
import pathlib
import secrets
import time
import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from meshtrain.errors import Problem, UserError, warn
from meshtrain.files import is_same, read_json, write_whole
from meshtrain.observe.goodput import Done
from meshtrain.observe.run_files import CONFIG_FILE, EVALUATED, has_goodput, row_of, seconds_since_start
from meshtrain.options import WITH_OPTIONS, option
from meshtrain.user_functions import FORM, call_user_function

METRICS_FILE = "metrics.jsonl"
WANDB_FOLDER, _WANDB_ID = "wandb", "meshtrain-run-id"
ACTIVATIONS = "activations"
KEY, NAMES = "observe.tracker", ("none", "wandb")
_PEEK_BYTES = 1 << 20  # the number of bytes at the start of a file that are checked for metrics
Run: TypeAlias = Any  # a `wandb.Run`, whose package may be missing


@dataclasses.dataclass(frozen=True)
class ObserveOptions:
    """Output of a run in addition to its log lines and `metrics.jsonl`."""

    progress: bool = option(True, "draw a progress bar (process 0, on a terminal only)")
    tensorboard: bool = option(True, "write TensorBoard events into WORKDIR/tensorboard")
    layers: str = option(
        "off",
        "in each row, norms of each layer's gradients, weights and updates; activations: also maxima",
        choices=("off", "norms", ACTIVATIONS),
    )
    tracker: str = option(
        "none",
        f"an additional tracker: none, wandb (Weights & Biases; reads WANDB_* variables), or a custom {FORM}",
        choices=NAMES,
        names=WITH_OPTIONS,
    )


class Tracker(Protocol):
    """The interface of a tracker, which stores rows of metrics."""

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes the row of metrics (name -> value) of a step."""
        ...

    def close(self) -> None:
        """Writes buffered data. The method may be called several times."""
        ...


class Trackers:
    """All trackers of a run; does nothing on processes other than 0.

    In use:
        with closing(Trackers(options, directory, start_step, is_main=peers.is_main_process())) as trackers:
            trackers.write(10, {"loss": 3.2})

    Attributes:
      done: the goodput that earlier processes of the run have logged; zeros on processes other than 0.
    """

    def __init__(
        self, options: ObserveOptions, directory: str | os.PathLike[str], resume_step: int = 0, *, is_main: bool = True
    ) -> None:
        """Opens `metrics.jsonl` in the run's folder and, depending on the options, `tensorboard/` and `wandb/`.

        Args:
          options: which trackers to use.
          directory: the run's folder, which must exist.
          resume_step: the step that the run resumes from; 0 for a new run.
          is_main: whether this is process 0.

        Raises:
          UserError: a tracker cannot be written.
        """
        self._opened = contextlib.ExitStack()
        self._trackers: list[Tracker] = []
        self._metrics: MetricsFile | None = None
        self.done = Done()  # processes other than 0 log nothing
        if not is_main:
            return
        directory = pathlib.Path(directory)
        with contextlib.ExitStack() as opened:
            metrics = opened.enter_context(contextlib.closing(MetricsFile(directory / METRICS_FILE, resume_step)))
            self.done, self._metrics = metrics.done, metrics
            self._trackers.append(metrics)
            if options.tensorboard:
                board = TensorBoard(directory / "tensorboard", resume_step)
                self._trackers.append(opened.enter_context(contextlib.closing(board)))
            if options.tracker != "none":
                make = WandB if options.tracker == "wandb" else functools.partial(_user_tracker, options)
                guarded = Guarded(options.tracker, make(directory, resume_step))
                self._trackers.append(opened.enter_context(contextlib.closing(guarded)))
            self._opened = opened.pop_all()

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes a row of metrics to each tracker."""
        for tracker in self._trackers:
            tracker.write(step, values)

    def lost(self) -> str:
        """Returns an error line if `metrics.jsonl` was deleted or replaced during the run, else ''."""
        return self._metrics.lost if self._metrics else ""

    def close(self) -> None:
        """Closes each tracker. The method may be called several times."""
        self._opened.close()


class MetricsFile:
    """Writes `metrics.jsonl`: one JSON object per row, `step` first, numbers unrounded.

    Each row is a single write of a complete line, so a killed run leaves at most one incomplete line. JSON has neither
    NaN nor infinity: they are written as null.

    Attributes:
      lost: an error line after the file was deleted or replaced (no more rows are then written), else ''.
      done: the goodput that earlier processes of the run have logged.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0) -> None:
        """Opens the file for appending after the rows up to `resume_step`.

        Removes rows of later steps, which the run repeats, and lines that are not rows (an incomplete last line). The
        file is replaced atomically, so that a reader sees either the old or the new rows.

        Args:
          path: the path of the file; its folder must exist.
          resume_step: the step that the run resumes from; 0 for a new run.

        Raises:
          UserError: the file cannot be read or written.
        """
        self.path = pathlib.Path(path)
        self._has_warned, self.lost = False, ""
        try:
            self.done = keep_rows_up_to(self.path, resume_step)
            # Unbuffered: each row is one write of the operating system.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            problem = f"metrics file: cannot write {self.path} ({error.strerror or error}); choose another workdir"
            raise UserError(problem) from None

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Appends a row: `step`, then the values in their order. Writes nothing if the file was deleted or replaced.

        If the row cannot be written, for example on a full disk, the first error prints a warning.
        """
        if self.lost or not is_same(self.path, self._file.fileno()):
            what = "another file" if self.path.exists() else "nothing"
            self.lost = self.lost or (
                Problem(
                    self.path,
                    got=f"{what} instead of the run's rows",
                    allowed="the run's own file until the end",
                )
            )
            return
        row = {"step": step} | {name: _json_number(value) for name, value in values.items() if name != "step"}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            size_bytes = os.fstat(self._file.fileno()).st_size
            try:
                num_written_bytes = self._file.write(line)
                if num_written_bytes != len(line):
                    raise OSError(f"only {num_written_bytes} of {len(line)} bytes were written")
            except OSError:
                # On a full disk only a part may be written; truncating it needs no space and keeps later rows readable.
                os.ftruncate(self._file.fileno(), size_bytes)
                raise
        except OSError as error:
            self._has_warned = _warn_once(
                self._has_warned, f"{self.path}: {error}; training continues, but rows are missing"
            )

    def close(self) -> None:
        """Closes the file. The method may be called several times."""
        try:
            self._file.close()
        except OSError as error:
            self._has_warned = _warn_once(self._has_warned, f"{self.path}: {error}; rows may be missing")


class TensorBoard:
    """Writes TensorBoard's event files.

    The calling thread writes the files. tensorboardX's SummaryWriter is not used, because it passes events to a thread
    that ends at the first disk error; then its queue fills up, and the training loop would wait forever.
    """

    def __init__(
        self, directory: str | os.PathLike[str], resume_step: int = 0, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Opens a new event file.

        Args:
          directory: the folder, created if it is missing.
          resume_step: the step that the run resumes from; 0 for a new run. TensorBoard then hides points of later
            steps, which the interrupted run has written.
          now: a function that returns a monotonic time in seconds.

        Raises:
          UserError: the folder cannot be written.
        """
        import tensorboardX.event_file_writer
        import tensorboardX.proto.event_pb2
        import tensorboardX.summary

        self.directory = pathlib.Path(directory)
        self._make_event = tensorboardX.proto.event_pb2.Event
        self._make_summary = tensorboardX.summary.scalar
        self._now = now
        self._next_flush_seconds = now()
        # The file's name contains the time in seconds: a run that resumes within a second would overwrite its file.
        suffix = f".{os.getpid()}.{resume_step}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._writer = tensorboardX.event_file_writer.EventsWriter(str(self.directory / "events"), suffix)
        except OSError as error:
            raise UserError(
                f"tensorboard: cannot write {self.directory} ({error.strerror or error}); "
                "choose another workdir or observe.tensorboard=False"
            ) from None
        if resume_step:
            start = tensorboardX.proto.event_pb2.SessionLog(status=tensorboardX.proto.event_pb2.SessionLog.START)
            self._add(self._make_event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Adds a point to the curve of each metric; a value of None is skipped."""
        for name, value in values.items():
            if value is not None and name != "step":
                summary = self._make_summary(name, float(value))
                self._add(self._make_event(wall_time=time.time(), step=step, summary=summary))
        if self._writer is not None and self._now() >= self._next_flush_seconds:
            # A flush also syncs the disk, which would be too slow for every row.
            self._next_flush_seconds = self._now() + 10
            self._attempt(self._writer.flush)

    def close(self) -> None:
        """Writes buffered data and closes the file. The method may be called several times."""
        if self._writer is not None:
            self._attempt(self._writer.close)
            self._writer = None

    def _add(self, event: object) -> None:
        if self._writer is not None:
            self._attempt(lambda: self._writer.write_event(event))

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            # Readers stop at an incomplete record of an event file, so later events would be lost.
            warn(f"{self.directory}: {error}; training continues, without TensorBoard")
            self._writer = None


class Guarded:
    """Wraps a tracker so that its exceptions do not end the run; the first exception prints a warning."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        """Wraps a tracker; `name` is its name in warnings."""
        self._name, self._tracker, self._has_warned = name, tracker, False

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes a row of metrics to the tracker; an exception of the tracker does not end the run."""
        self._attempt(lambda: self._tracker.write(step, dict(values)))  # a copy, since the tracker may change it

    def close(self) -> None:
        """Closes the tracker; an exception of the tracker does not end the run."""
        self._attempt(self._tracker.close)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a service or user code may raise anything
            line = f"{self._name}: {type(error).__name__}: {error}; training continues, but this tracker misses rows"
            self._has_warned = _warn_once(self._has_warned, line)


def _user_tracker(options: ObserveOptions, directory: pathlib.Path, resume_step: int) -> Tracker:
    """Returns the tracker that a user's function creates.

    Args:
      options: the options; `options.tracker` is the function, as `package.module:function`.
      directory: the run's folder.
      resume_step: the step that the run resumes from; 0 for a new run.

    Raises:
      UserError: the function raises an error, or its result has no methods `write` and `close`.
    """
    given = call_user_function(
        KEY,
        options.tracker,
        NAMES,
        [options, directory, resume_step],
        takes="options, a folder and a step",
        gives="an object with write(step, values) and close()",
        fix="correct the function, or use none",
    )
    missing = [name for name in ("write", "close") if not callable(getattr(given, name, None))]
    if missing:
        raise UserError(
            Problem(
                KEY,
                got=f"'{options.tracker}', which returns {type(given).__name__} without {' and '.join(missing)}",
                allowed="an object with write(step, values) and close()",
                nearest="none",
            )
        )
    return typing.cast(Tracker, given)


class WandB:
    """Writes rows of metrics to a Weights & Biases run.

    W&B's files are in the folder `wandb/` of the run; with WANDB_MODE=offline no data leaves the machine. Each row
    contains its step as an additional metric, which is the x axis of the curves. W&B's step counter is not used: it can
    only increase, so W&B would drop the steps that a resumed run repeats.
    """

    def __init__(self, directory: pathlib.Path, resume_step: int = 0) -> None:
        """Starts a W&B run; a resumed run continues its earlier W&B run.

        Project, name and id come from WANDB_PROJECT, WANDB_NAME and WANDB_RUN_ID; the defaults are `meshtrain`, the
        folder's name, and an id that is stored in the folder.

        Args:
          directory: the run's folder.
          resume_step: the step that the run resumes from; 0 for a new run.

        Raises:
          UserError: the W&B run cannot be started, for example without a key or a network.
        """
        import wandb

        config = directory / CONFIG_FILE
        try:
            # Arguments take precedence over the variables.
            own = {"project": "meshtrain", "name": directory.name, "run_id": self._id(directory, resume_step)}
            given = {name: None if f"WANDB_{name.upper()}" in os.environ else value for name, value in own.items()}
            self._run: Run = wandb.init(
                project=given["project"],
                name=given["name"],
                id=given["run_id"],
                resume="allow",
                dir=directory,
                config=read_json(config.read_bytes()) if config.is_file() else None,
            )
            self._run.define_metric("*", step_metric="step")
        except (wandb.Error, OSError, ValueError) as error:  # ValueError: a file of the run was modified
            raise UserError(
                Problem(
                    "observe.tracker",
                    got=f"'wandb', which cannot start: {error}",
                    allowed="none, or wandb after `wandb login`",
                    nearest="WANDB_MODE=offline in the environment",
                )
            ) from error

    @staticmethod
    def _id(directory: pathlib.Path, resume_step: int) -> str:
        """Returns the id of the W&B run, which is stored in the run's folder.

        If `resume_step` is 0 (a new run) or no id is stored, creates and stores a random id.

        Args:
          directory: the run's folder.
          resume_step: the step that the run resumes from; 0 for a new run.
        """
        path = directory / WANDB_FOLDER / _WANDB_ID
        if resume_step and path.is_file():
            return path.read_text(encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        new = secrets.token_hex(4)
        write_whole(path, new)
        return new

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Logs a row of metrics; a value of None is skipped."""
        row = {name: float(value) for name, value in values.items() if value is not None}
        self._run.log(row | {"step": step})

    def close(self) -> None:
        """Sends buffered data and ends the W&B run."""
        self._run.finish()


def missing(options: ObserveOptions) -> list[Problem]:
    """Returns [error line] if the package of the chosen tracker is not installed; else []."""
    if options.tracker != "wandb" or importlib.util.find_spec("wandb"):
        return []
    return [
        Problem(
            KEY,
            got="'wandb', whose package is not installed",
            allowed="none, or wandb with the extra 'wandb'",
            nearest="pip install wandb",
        )
    ]


def check(directory: str | os.PathLike[str]) -> list[Problem]:
    """Returns [error line] if a run's `metrics.jsonl` has lines, but no row of metrics; else [].

    Such a file is an error because the start of a run deletes lines that are not rows. A single incomplete row is
    accepted: a killed run leaves such a row, and the next start removes it. Only the first MiB is read.
    """
    path = pathlib.Path(directory) / METRICS_FILE
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines = file.read(_PEEK_BYTES).splitlines(keepends=True)
    is_torn = len(lines) == 1 and b'{"step": '.startswith(lines[0][:9])
    if not lines or is_torn or any(row_of(line) for line in lines):
        return []
    return [
        Problem(path, got="no row of metrics", allowed="the unchanged file of the run", nearest="another --workdir")
    ]


def metrics_of_evaluation(directory: str | os.PathLike[str], step: int) -> dict[str, float | None]:
    """Returns the metrics of the evaluation at a step: the entries `eval_...` in a run's `metrics.jsonl`.

    The result is empty if the file has no evaluation of this step. Of several evaluations, the last one is returned.
    """
    path = pathlib.Path(directory) / METRICS_FILE
    rows = map(row_of, path.read_bytes().splitlines(keepends=True)) if path.is_file() else ()
    found = [row for row in rows if row and row["step"] == step and any(name.startswith(EVALUATED) for name in row)]
    return {name: value for name, value in found[-1].items() if name.startswith(EVALUATED)} if found else {}


def keep_rows_up_to(path: pathlib.Path, step: int) -> Done:
    """Removes all lines of `metrics.jsonl` except rows up to a step; returns the goodput of earlier processes.

    Useful seconds and timed steps are counted up to this step. The passed time is counted up to the latest row before
    the removal, because the removed steps took time too.

    Args:
      path: the path of the file; it may be missing.
      step: the step that the run resumes from.
    """
    if not path.exists():
        return Done()
    lines = path.read_bytes().splitlines(keepends=True)
    all_rows = [row_of(line) for line in lines]
    rows = [row if row and row["step"] <= step else None for row in all_rows]
    kept = [line for line, row in zip(lines, rows, strict=True) if row]
    if kept != lines:
        write_whole(path, b"".join(kept))
    passed = [seconds_since_start(row) for row in all_rows if row and has_goodput(row)]
    useful = [row for row in rows if row and has_goodput(row)]
    if not useful:
        return Done(passed_seconds=max(passed, default=0.0))
    last = useful[-1]
    return Done(float(last["useful_seconds"]), int(last["timed_steps"]), max(passed))


def _json_number(value: Any) -> float | int | None:
    """Converts a number for JSON: integers stay integers, other scalars become float, NaN and infinity become None."""
    if value is None:
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _warn_once(has_warned: bool, message: str) -> bool:
    # Not warnings.warn: under -W error it would end the training.
    if not has_warned:
        warn(message)
    return True
