"""Checkpoints: the training state of a run, written in the background, restored onto any mesh.

On disk (Orbax, one directory per step, OCDBT format)::

    <workdir>/checkpoints/<step>/state/   every array of the training state, complete and in its global shape
                                 extra/   one JSON object: data position, configuration, corpus, versions
                                 manifest.json   checksums, written last: without it a checkpoint is incomplete
    <workdir>/damaged/<step>/             a checkpoint whose checksums did not match

In a bucket, all these folders, including `damaged/`, are below `checkpoint.directory`. `store/buckets.py` describes
how a bucket differs from a disk.

Arrays are stored under the path of their leaf (`params/layers/attention/query`), independent of the Python classes of
the state. So a reader may use another mesh and other container types than the writer.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshtrain.checkpoint import integrity, retention
from meshtrain.checkpoint.manager import EXTRA, STATE, manager, renaming_problems, start_save
from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.cli.tables import format_bytes
from meshtrain.errors import FolderLost, Problem, SaveFailed, UserError, nearest, warn
from meshtrain.files import JsonObject
from meshtrain.launch import peers
from meshtrain.sharding.trees import Arrays, Leaf, Shaped, Tree, leaves_with_paths
from meshtrain.store import buckets
from meshtrain.store.buckets import Place, wrap_bucket_errors

CHECKPOINTS = "checkpoints"  # the directory's name inside a workdir
_PARAMS = "params"
AVERAGES = "opt_state/averaged_weights"  # path of the weight averages in the state, see `optim/average.py`
_LOOK_SECONDS = 1.0
_ASK_SECONDS = 5.0  # interval of asking the other processes whether their part of a save failed
_saves = itertools.count()  # every process counts saves in the same order
_MAX_MISMATCHES = 5
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CODE = re.compile(r"os_error_code='(\d+)'")  # how TensorStore quotes the system's error, after a long path
_MAX_REASON = 300  # characters of a library's error message, which may contain stack traces


class _Save(NamedTuple):
    """A save whose files or checksums are still being written.

    Attributes:
      step: number of completed training steps.
      failure: the name of the event that a process announces to the other processes if its part of the save fails.
      has_failed: set in this process after its part has failed; it ends the wait of the background thread.
      sealed: a future of the background thread, whose result is whether the manifest was written.
    """

    step: int
    failure: str
    has_failed: threading.Event
    sealed: futures.Future[bool]


class Checkpoints:
    """Saves and restores the state of one run. Every process of the run creates one and calls it at the same steps.

    A background thread seals each checkpoint: it writes the manifest of checksums after all files are complete.

    Args:
      directory: the folder or bucket prefix that contains one folder per step. It is made absolute, and created if
        `options` is not None.
      options: which checkpoints to keep. None opens the folder for reading: nothing is created or deleted, so that
        another program can read a run's checkpoints during training.
      higher_is_better: whether a larger value of `options.best_metric` is better.
      lost: a function that returns an error line if the run's folder or this directory no longer belongs to the run,
        else ''.
      saved: a function that the background thread of process 0 calls with the step of each sealed checkpoint.

    Raises:
      UserError: the directory cannot be created, or the bucket cannot be reached.
    """

    def __init__(
        self,
        directory: str | Place,
        options: CheckpointOptions | None,
        *,
        higher_is_better: bool = False,
        lost: Callable[[], str] = str,
        saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._lost, self._saved = lost, saved
        self.directory = buckets.place(directory)
        self._options = options
        self._higher_is_better = higher_is_better
        self._in_flight: _Save | None = None
        self._rated: futures.Future[None] | None = None
        self.newest_failure: SaveFailed | None = None  # the error of the newest save if it has failed
        self._thread = futures.ThreadPoolExecutor(1, "seal")
        if options is not None:
            buckets.make(self.directory)
        self._manager = self._new_manager()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # If another process has died, the save in progress cannot complete; a second Ctrl-C should not wait for it.
        cannot = (jax.errors.JaxRuntimeError, KeyboardInterrupt) if peers.count() > 1 else (KeyboardInterrupt,)
        if kind is None or not issubclass(kind, cannot):
            self.close()

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoint has a manifest (is sealed), oldest first. Waits for a save in progress."""
        self.wait()
        with wrap_bucket_errors(self.directory):
            steps = retention.checkpoint_steps(self.directory)
            return [step for step in steps if integrity.is_sealed(self.directory / str(step))]

    def latest_step(self) -> int | None:
        """Returns the newest step with a sealed checkpoint, or None. Waits for a save in progress."""
        return max(self.steps(), default=None)

    def refuse_lost(self) -> None:
        """Raises FolderLost if the run's folder or the checkpoint folder was deleted or replaced during the run."""
        if line := self._lost():
            raise FolderLost(line)

    def save(self, step: int, state: Arrays, extra: JsonObject) -> bool:
        """Starts to save a state; returns when the state's buffers may be overwritten, while threads write the files.

        First waits for the previous save. Old checkpoints are deleted only after the new checkpoint is sealed.

        Args:
          step: number of completed training steps.
          state: pytree of jax.Array with any shardings. Convert typed random keys with `jax.random.key_data`.
          extra: a JSON object to save with the state: data position, configuration, corpus, versions.

        Returns:
          False if this step is already saved; then nothing is written.

        Raises:
          TypeError: `extra` cannot be converted to JSON.
          FolderLost: the run's folder or the checkpoint folder was deleted or replaced.
          SaveFailed: the previous save failed in its thread, or this save failed at its start. A later save may
            succeed.
        """
        assert self._options is not None, "opened for reading only"
        failure = f"save {next(_saves)} failed"
        self.refuse_lost()
        self.wait()
        json.dumps(dict(extra))  # raises here, in the caller's thread, instead of later in a background thread
        items = ocp.args.Composite(
            **{STATE: ocp.args.PyTreeSave(_nested(leaves_by_path(state))), EXTRA: ocp.args.JsonSave(dict(extra))}
        )
        try:
            if integrity.is_sealed(self.directory / str(step)):
                self.newest_failure = None
                return False
            if self.newest_failure and not isinstance(self.directory, Path):  # the bucket may have been unreachable
                self._manager = self._new_manager()
            buckets.make(self.directory)
            start_save(self._manager, step, items)
        except Exception as error:
            raise self._failure(step, error) from error
        self.newest_failure, has_failed = None, threading.Event()
        sealed = self._thread.submit(self._seal, step, failure, has_failed)
        self._in_flight = _Save(step, failure, has_failed, sealed)
        return True

    def rate(self, step: int, values: Mapping[str, float]) -> None:
        """Records the evaluation metrics of a step, by which `CheckpointOptions.keep_best` selects checkpoints.

        Only process 0 acts, and only if `keep_best` is above 0. Its background thread writes the metrics after the save
        in progress, and deletes checkpoints that are no longer among the best.

        Args:
          step: number of completed training steps.
          values: metric name -> value.
        """
        if self._options is not None and self._options.keep_best and peers.is_main_process():
            if self._rated is not None:
                self._rated.result()  # raises errors other than failed writes
            self._rated = self._thread.submit(self._rate, step, values)

    def _rate(self, step: int, values: Mapping[str, float]) -> None:
        try:
            with wrap_bucket_errors(self.directory):
                retention.rate(self.directory, step, values)
                self._prune()
        except (OSError, buckets.Unreached) as error:
            if not self._lost():
                warn(f"{error}; keep_best ignores step {step}")

    def newest_whole(self) -> tuple[int | None, list[str]]:
        """Returns the newest undamaged step, or None, and an error line for each newer, damaged checkpoint.

        In an undamaged checkpoint, all checksums match the manifest, and the step in the state matches the folder's
        name. A checkpoint without a manifest counts as damaged. All processes call this together; each reads a part of
        the files. If the checkpoints are open for writing, damaged checkpoints are moved to the folder `damaged`.

        Returns:
          The step and the error lines. The step is None if no checkpoint in the folder has a manifest.

        Raises:
          UserError: there are checkpoints with a manifest, and all of them are damaged. Then no checkpoint is moved.
        """
        self.wait()
        damaged, newest = dict[int, str](), None
        with wrap_bucket_errors(self.directory):
            for step in reversed(retention.checkpoint_steps(self.directory)):
                if not (line := self._damage(step)):
                    newest = step
                    break
                damaged[step] = line
            if newest is None and any(integrity.is_sealed(self.directory / str(step)) for step in damaged):
                raise UserError(
                    *damaged.values(),
                    Problem(
                        self.directory,
                        got="no undamaged checkpoint",
                        allowed="at least one",
                        nearest="another --workdir",
                    ),
                )
            if self._options is not None and damaged:
                for step in damaged if peers.is_main_process() else ():
                    retention.set_aside(self.directory, step)
                peers.gather_values("set aside", None)
                self._manager.reload()
        return newest, list(damaged.values())

    def refuse_damaged(self, step: int) -> None:
        """Checks that a step's checksums match, and that its state is from this step; all processes call it together.

        Raises:
          UserError: the step has no checkpoint, or the checkpoint is damaged.
        """
        self.refuse_unknown(step)
        if line := self._damage(step):
            others = ", ".join(str(other) for other in self.steps() if other != step) or "none"
            problem = Problem.plain(line).with_parts(allowed="an undamaged checkpoint", nearest=f"step {others}")
            raise UserError(problem)

    def _damage(self, step: int) -> str:
        """Returns an error line for the first damage in a step's checkpoint, or ""; all processes call it together."""
        directory = self.directory / str(step)
        with wrap_bucket_errors(directory):
            problems = integrity.damage(directory, peers.index(), peers.count())
            lines = [line for part in peers.gather_values(f"damage {step}", problems) for line in part]
            lines = lines or integrity.unreadable(directory) or renaming_problems(directory)
        return f"checkpoint {directory}: {lines[0]}" if lines else ""

    def restore(self, step: int, abstract_state: Arrays) -> Arrays:
        """Reads the complete state of a step, each array directly onto its sharding.

        Args:
          step: an element of `steps()`.
          abstract_state: pytree of jax.ShapeDtypeStruct with shardings, of any mesh and any number of processes.

        Returns:
          A pytree of jax.Array of the same structure, bitwise equal to the saved state.

        Raises:
          UserError: the step has no checkpoint. An array of `abstract_state` is missing in the checkpoint or differs
            in shape or dtype. The checkpoint has an array that `abstract_state` lacks and that is no weight average
            (`optimizer.average`).
        """
        wanted, saved = leaves_by_path(abstract_state), self._array_metadata(step)
        stored = {path: saved[path] for path in saved if path in wanted or not path.startswith(f"{AVERAGES}/")}
        _refuse_mismatches(self.directory / str(step), stored, wanted)
        return self._read(step, wanted, abstract_state)

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Returns {path: global shape} of all arrays in the checkpoint of a step; reads only metadata.

        Raises:
          UserError: the step has no checkpoint, or its metadata are damaged.
        """
        return {path: tuple(leaf.shape) for path, leaf in self._array_metadata(step).items()}

    def restore_params(
        self, step: int, abstract_params: Arrays, rounded: Collection[str] = (), *, averaged: bool = False
    ) -> Arrays:
        """Reads the weights of a step, or their averages, and no other array of the checkpoint.

        Args:
          step: an element of `steps()`.
          abstract_params: pytree of jax.ShapeDtypeStruct with shardings, in the structure of the state's `params`.
          rounded: paths in `abstract_params` of weights that are converted if their saved dtype differs.
          averaged: whether to read a weight's average (`optimizer.average`) in place of the weight, converted to the
            dtype of the weight. If a weight has no average, the weight itself is read.

        Returns:
          A pytree of jax.Array with the structure of `abstract_params`.

        Raises:
          UserError: the step has no checkpoint. Its weights differ from `abstract_params` in paths, shapes or dtypes.
            `averaged` is True and the checkpoint has no averages.
        """
        self.refuse_other_params(step, abstract_params, rounded)
        stored, weights = self._array_metadata(step) if averaged else {}, leaves_by_path(abstract_params)
        in_place = {path: f"{AVERAGES}/{path}" for path in weights if f"{AVERAGES}/{path}" in stored}
        if averaged and not in_place:
            raise UserError(
                Problem(
                    "--weights",
                    got=f"average, but step {step} in {self.directory} has no averages",
                    allowed="the averages of a run with optimizer.average",
                    nearest="--weights=last",
                )
            )
        wanted = {in_place[path] if path in in_place else f"{_PARAMS}/{path}": leaf for path, leaf in weights.items()}
        return self._read(step, wanted, abstract_params)

    def refuse_other_params(self, step: int, abstract_params: Arrays, rounded: Collection[str] = ()) -> None:
        """Checks that the weights of a step have the paths, shapes and dtypes of `abstract_params`; reads no array.

        Args:
          step: an element of `steps()`.
          abstract_params: pytree of jax.ShapeDtypeStruct, in the structure of the state's `params`.
          rounded: paths in `abstract_params` of weights whose dtype may differ.

        Raises:
          UserError: the step has no checkpoint; or a weight is missing, is not in `abstract_params`, or differs.
        """
        stored = {path: leaf for path, leaf in self._array_metadata(step).items() if path.startswith(f"{_PARAMS}/")}
        wanted, of_state = leaves_by_path({_PARAMS: abstract_params}), {f"{_PARAMS}/{path}" for path in rounded}
        _refuse_mismatches(self.directory / str(step), stored, wanted, of_state)

    def wait(self) -> None:
        """Waits until the save in progress, if any, is complete, including its checksums.

        Raises:
          SaveFailed: the save in progress failed.
        """
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        try:
            self._manager.wait_until_finished()
            while not futures.wait([save.sealed], _LOOK_SECONDS).done:
                # Only process 0 checks: another machine of a shared file system may see the folder later.
                directory = self.directory / str(save.step)
                if peers.is_main_process() and isinstance(directory, Path) and not directory.is_dir():
                    raise FileNotFoundError(f"{directory} has vanished")
            if not save.sealed.result():
                raise OSError("another process could not write its part")
        except Exception as error:
            save.has_failed.set()  # otherwise the sealing thread would wait forever and block later saves
            peers.announce(save.failure)
            futures.wait([save.sealed])
            raise self._failure(save.step, error) from error

    def close(self) -> None:
        """Waits for the save in progress and ends the threads.

        If the save fails, SaveFailed is stored in `newest_failure` and not raised.
        """
        with contextlib.suppress(SaveFailed):
            self.wait()
        self._thread.shutdown()
        if self._rated is not None:
            self._rated.result()
        try:
            self._manager.close()
        except Exception:  # Orbax raises the error of a failed save in a bucket again
            if not self.newest_failure:
                raise

    def _seal(self, step: int, failure: str, has_failed: threading.Event) -> bool:
        asked_seconds = time.monotonic()

        def is_cancelled() -> bool:
            nonlocal asked_seconds
            if self._lost():
                return True
            if has_failed.is_set() or time.monotonic() - asked_seconds < _ASK_SECONDS:
                return has_failed.is_set()
            asked_seconds = time.monotonic()
            return peers.is_announced(failure)

        try:
            is_sealed = integrity.seal(self.directory / str(step), peers.index(), peers.count(), is_cancelled)
        except Exception:
            peers.announce(failure)  # the other processes wait for this process's part
            raise
        if is_sealed and peers.is_main_process():
            self._saved(step)
            self._prune()
        return is_sealed

    def _prune(self) -> None:
        assert self._options is not None
        retention.prune(self.directory, self._options, higher_is_better=self._higher_is_better)

    def _failure(self, step: int, error: Exception) -> SaveFailed:
        """Returns the SaveFailed for `error`, the exception of a failed save, and stores it in `newest_failure`.

        For checkpoints on a disk, it also replaces Orbax's manager, so that the next save may succeed. For a bucket,
        `save` replaces the manager.
        """
        directory = self.directory / str(step)
        line = f"checkpoint {directory}: not written: {_reason(error)}"
        if not isinstance(directory, Path):
            self.newest_failure = SaveFailed(f"{line}; nearest: check the network and this user's permissions")
            return self.newest_failure
        disk = f" ({free})" if (free := _free_space(directory)) else ""  # measured before the save's files are deleted
        self.newest_failure = SaveFailed(f"{line}{disk}; nearest: free some space there, or use another --workdir")
        # Orbax's manager would treat the failed step as saved, so a new manager replaces it.
        if not self._lost():  # else the run ends, and `retention.remove_rest` removes the files
            self._manager = self._new_manager()
        return self.newest_failure

    def _new_manager(self) -> ocp.CheckpointManager:
        writes = self._options is not None
        with wrap_bucket_errors(self.directory):
            if writes and peers.is_main_process():
                retention.sweep(self.directory)
            return manager(self.directory, writes=writes)

    def _array_metadata(self, step: int) -> dict[str, Shaped]:
        """Returns {path: metadata with `.shape` and `.dtype`} for all arrays of a step; reads no array."""
        self.refuse_unknown(step)
        with wrap_bucket_errors(self.directory):
            if lines := integrity.unreadable(directory := self.directory / str(step)):
                raise UserError(
                    Problem(
                        f"checkpoint {directory}",
                        fault=lines[0],
                        allowed="an undamaged checkpoint",
                        nearest="another step",
                    )
                )
            return leaves_by_path(self._manager.item_metadata(step)[STATE].tree)

    def _read(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct], like: Arrays) -> Arrays:
        assert all(leaf.sharding is not None for leaf in wanted.values()), "every leaf has a sharding"
        abstract = _nested(wanted)
        items = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        with wrap_bucket_errors(self.directory):
            leaves = leaves_by_path(self._manager.restore(step, args=ocp.args.Composite(**{STATE: items}))[STATE])
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in wanted])

    def refuse_unknown(self, step: int) -> None:
        """Raises UserError if a step has no sealed checkpoint; the error lists the steps with a sealed checkpoint."""
        steps = self.steps()
        if step not in steps:
            fix = min(steps, key=lambda one: abs(one - step), default="another --workdir")
            raise UserError(
                Problem(
                    self.directory,
                    got=f"step {step}",
                    allowed=", ".join(map(str, steps)) or "none, the directory is empty",
                    nearest=fix,
                )
            )


def leaves_by_path(tree: Tree) -> dict[str, Leaf]:
    """Returns {path: leaf} of a pytree in the order of `jax.tree.leaves`; paths do not depend on container types."""
    leaves = leaves_with_paths(tree)
    by_path = dict(leaves)
    assert len(by_path) == len(leaves), "two leaves have the same path: a key contains a '/'"
    return by_path


def _nested(leaves: Mapping[str, Leaf]) -> dict[str, Tree]:
    """Converts {"a/b": leaf} to nested dicts {"a": {"b": leaf}}, the structure in which Orbax stores the leaves."""
    root: dict[str, Tree] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return root


def _refuse_mismatches(
    directory: Place, stored: Mapping[str, Shaped], wanted: Mapping[str, Shaped], rounded: Collection[str] = ()
) -> None:
    """Checks that the arrays of a checkpoint have the paths, shapes and dtypes of the run's arrays.

    Dtypes must match because a reader would otherwise convert silently, and the resumed run would give other results.

    Args:
      directory: the checkpoint's folder, for the error.
      stored: path -> array of the checkpoint, an object with `.shape` and `.dtype`.
      wanted: path -> array of the run, an object with `.shape` and `.dtype`.
      rounded: paths of arrays whose dtype may differ.

    Raises:
      UserError: an array is missing in the checkpoint or in the run, or its shape or dtype differs between them. The
        error lists the first five of these arrays.
    """
    problems = []
    for path, leaf in wanted.items():
        if path not in stored:
            fix = nearest(path, stored.keys() - wanted.keys())
            problems.append(Problem(path, fault="not in the checkpoint", fix=fix))
            continue
        got, allowed = _signature(stored[path]), _signature(leaf)
        if got != allowed and not (path in rounded and tuple(stored[path].shape) == tuple(leaf.shape)):
            problems.append(Problem(path, got=got, allowed=allowed))
    unread = [path for path in stored if path not in wanted]
    problems += [Problem(path, fault="in the checkpoint, not in this run") for path in unread]
    if problems:
        more = len(problems) - _MAX_MISMATCHES
        raise UserError(
            *(problem.at(f"checkpoint {directory}") for problem in problems[:_MAX_MISMATCHES]),
            *([f"checkpoint {directory}: {more} more arrays differ"] if more > 0 else []),
            "nearest: the model and optimizer options of the run that wrote the checkpoint, or another workdir",
        )


def _signature(leaf: Shaped) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _reason(error: Exception) -> str:
    """Returns the reason of a failed save as one line: the system's message if it is known, else the library's text.

    The system's message is known for an error code in TensorStore's text and for a full disk. The library's text is
    truncated to 300 characters.
    """
    quoted = _CODE.search(str(error))
    if quoted:
        return os.strerror(int(quoted[1]))
    if isinstance(error, OSError) and error.errno in _FULL:
        return os.strerror(error.errno)
    return " ".join(str(error).split())[:_MAX_REASON] or type(error).__name__


def _free_space(directory: Path) -> str:
    """Returns `12.0 MiB free on /mount/point` for the disk of a directory, which need not exist; "" if unknown."""
    path = directory.absolute()
    try:
        while not os.path.ismount(path):
            path = path.parent
        return f"{format_bytes(shutil.disk_usage(path).free)} free on {path}"
    except OSError:
        return ""
