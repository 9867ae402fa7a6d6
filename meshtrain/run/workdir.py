"""Manages a run's workdir: config.json, corpus.json, device.json, layout.txt, metrics.jsonl, checkpoints/ and others.

Process 0 writes for all processes.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import jax
import numpy as np

from meshtrain.assembly.assemble import Assembly
from meshtrain.assembly.optimization import learning_rates
from meshtrain.checkpoint.checkpoint import CHECKPOINTS
from meshtrain.checkpoint.other_runs import extra_of_newest, find
from meshtrain.checkpoint.owner import OWNER
from meshtrain.cli import foreign, output_files
from meshtrain.config import records, version_0_2
from meshtrain.config.resolve import to_json
from meshtrain.config.resume import difference, from_json
from meshtrain.config.schema import CONFIG_FILE, Config
from meshtrain.errors import Problem, UserError, is_finite, refuse, warn
from meshtrain.files import Json, JsonObject, is_same, open_folder, read_json, what_is_at, write_whole
from meshtrain.launch import peers
from meshtrain.launch.signals import undone
from meshtrain.observe.run_files import DEVICE_FILE, PROMPTED_FILE, SAMPLES_FILE
from meshtrain.observe.trackers import METRICS_FILE, WANDB_FOLDER
from meshtrain.step.device_memory import bytes_of_device, statistics, training_state_bytes
from meshtrain.step.state import TrainState
from meshtrain.store.buckets import Unreached

CORPUS_FILE = "corpus.json"
LOCK_FILE = ".lock"
RUN_ID = "run"  # key in corpus.json: the run's id, which marks it as the owner of its checkpoint folder or bucket
_SAVED = "saved_step"  # key in corpus.json: the first step that was saved
_facts_lock = threading.Lock()  # the thread of a save writes into corpus.json too
_FILES = (CONFIG_FILE, CORPUS_FILE, "layout.txt", METRICS_FILE, LOCK_FILE, DEVICE_FILE, SAMPLES_FILE, PROMPTED_FILE)
_RATE_TOLERANCE = 0.01  # relative: a smaller change of the learning rate gives no warning
_FOLDERS = (CHECKPOINTS, "tensorboard", WANDB_FOLDER)


def check(run: Path, config: Config, *, is_saved: bool) -> list[Problem]:
    """Returns an error line for each reason why a configuration cannot run in a folder; writes nothing.

    The configuration is compared with the folder's config.json, and with the newest checkpoint in
    `checkpoint.directory`.

    Args:
      run: the run's folder, which need not exist.
      config: the run's configuration.
      is_saved: whether the run has a complete checkpoint.

    Raises:
      UserError: the folder's config.json is not JSON.
    """
    if problems := output_files.unwritable(run) or _out_of_place(run):
        return problems
    now, before = dataclasses.asdict(config), {f"workdir {run}": _read_json(run / CONFIG_FILE)}
    place = config.checkpoint.directory
    if place and "config" in (there := extra_of_newest(place)):  # it may be a copy of the place that it names
        before[place] = {**there["config"], "checkpoint": now["checkpoint"]}
    for where, was in before.items():
        if was and not records.is_of_this_release(was):
            words = [f"--config.init_from={run}"] if is_saved else []
            converted = {} if records.VERSION in was else version_0_2.converted(was)
            words += [f"--config.{key}={json.dumps(value)}" for key, value in converted.items()]
            fix = " ".join([*words, *(["in"] if words else []), "a new workdir"])
            return [records.version_problem(was, where if where == place else CONFIG_FILE, fix)]
    changed = {where: difference(was, now) for where, was in before.items() if was}
    problems = [one.at(f"{where} contains another run") for where, differing in changed.items() for one in differing]
    ending = "allowed: the run's own configuration"  # of all options above
    ends = [where for where, differing in changed.items() if differing]
    return problems + [Problem(where, fault=ending, nearest="another --workdir") for where in ends]


def _out_of_place(run: Path) -> list[Problem]:
    """Returns an error line for each path in the run's folder that is not of the expected kind, or is not writable.

    For example, a folder named `config.json` is an error, because this path must be a file. A missing path is no error.
    """
    problems = []
    for name, wanted in {**dict.fromkeys(_FILES, "a file"), **dict.fromkeys(_FOLDERS, "a folder")}.items():
        path = run / name
        what = what_is_at(path)
        if what == wanted and not _can_write(path):
            what = f"{wanted} that this user cannot read and write"
        if what not in (wanted, "nothing there"):
            problems.append(
                Problem(
                    f"workdir {run}",
                    got=f"{what} at {name}",
                    allowed=f"{wanted} of the run",
                    nearest="another --workdir",
                )
            )
    return problems


def _can_write(path: Path) -> bool:
    try:
        if path.is_dir():
            with tempfile.TemporaryDirectory(dir=path, prefix=".meshtrain-"):
                return True
        path.open("r+b").close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def lock(run: Path) -> Iterator[Callable[[], str]]:
    """Locks the run's folder against other runs during the block; process 0 has the lock for all processes.

    The system releases the lock when the process ends, also when it is killed; then the remaining file `.lock` has no
    effect. If the block fails before the first step of a new run, the files of this run are deleted.

    Yields:
      A function that returns an error line if the folder was deleted or replaced, else ''. It always returns '' in
      processes other than 0.

    Raises:
      UserError: another run has the lock (the error names process, host and start time), or the folder cannot be
        written.
    """
    with contextlib.ExitStack() as held:
        problems, folder = list[Problem](), None
        if peers.is_main_process():
            try:
                is_new = not (run / CONFIG_FILE).exists()
                made = [folder for folder in (run, *run.parents) if not folder.exists()]
                names = [name for name in (*_FILES, *_FOLDERS) if not (run / name).exists()]
                run.mkdir(parents=True, exist_ok=True)
                file, folder = _lock(run / LOCK_FILE, held), open_folder(run, held)
                if is_new:
                    held.enter_context(undone(functools.partial(_remove_beginning, run, folder, names, made)))
                since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
                file.truncate(0)
                # Unbuffered: after a failed write, `close` would try to write the buffer again.
                os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
            except BlockingIOError:
                owner = (run / LOCK_FILE).read_text(encoding="utf-8", errors="replace")
                problems = [
                    Problem(
                        f"workdir {run}",
                        fault=f"in use by {owner}",
                        allowed="one run in each workdir",
                        nearest="another --workdir",
                    )
                ]
            except OSError as error:
                problems = [
                    Problem(
                        f"workdir {run}",
                        fault=f"cannot write ({error.strerror})",
                        allowed="a folder that can be written",
                    )
                ]
        refuse(peers.share_problems("lock", problems))
        yield functools.partial(_lost, run, folder)


def _lost(run: Path, folder: int | None) -> str:
    """Returns an error line if the run's folder was deleted, replaced or emptied since this process opened it, else ''.

    Args:
      run: the run's folder.
      folder: the file descriptor of the opened folder; None in processes other than 0, which do not check.
    """
    if folder is None:
        return ""
    what = "another folder" if run.is_dir() else "no folder"
    if is_same(run, folder):  # it stays if a save wrote into it while it was being deleted
        what = "" if any((run / name).exists() for name in (LOCK_FILE, CONFIG_FILE)) else "a folder without its files"
    return what and Problem(
        f"workdir {run}", got=f"{what} instead of this run's folder", allowed="the run's own folder until the end"
    )


def _lock(path: Path, held: contextlib.ExitStack) -> TextIO:
    """Opens and locks a file, and returns it; the lock ends when the stack `held` closes.

    Raises:
      BlockingIOError: another process has locked it.
    """
    while True:
        file = held.enter_context(path.open("a+", encoding="utf-8"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If another process has removed the file between the two calls, a third process could lock a new file.
        if path.exists() and is_same(path, file.fileno()):
            return file


def _remove_beginning(run: Path, folder: int, names: Sequence[str], made: Sequence[Path]) -> None:
    """Deletes the files of a new run that has ended before it logged or saved a step.

    Does nothing if the run has logged or saved a step, or if the folder was replaced by another folder.

    Args:
      run: the run's folder.
      folder: the file descriptor of this folder, opened by this process.
      names: the names of files and folders in `run` that did not exist before the run.
      made: the folders that were created for the run: `run`, then its parents. They are also deleted if they are empty.
    """
    metrics, checkpoints = run / METRICS_FILE, run / CHECKPOINTS
    if _lost(run, folder):
        return
    saved = {path.name for path in checkpoints.iterdir()} if checkpoints.exists() else set()
    if (metrics.exists() and metrics.stat().st_size) or saved - {OWNER}:
        return
    for name in names:
        if name in _FOLDERS:
            shutil.rmtree(run / name, ignore_errors=True)
        else:
            (run / name).unlink(missing_ok=True)
    for path in made:
        with contextlib.suppress(OSError):  # the folder has other files
            path.rmdir()


def start_seconds(run: Path, own_seconds: float, logged_seconds: float) -> float:
    """Returns the time of the run's first start, in seconds of this process's `time.monotonic`.

    The first start writes the date, as seconds since the epoch, into corpus.json, because a monotonic clock restarts
    with its machine.

    Args:
      run: the run's folder.
      own_seconds: the start of this process by `time.monotonic`.
      logged_seconds: the age of the run at its last logged row, in seconds: a lower bound of its age, in case the
        system's clock was set back.
    """
    date = time.time() - (time.monotonic() - own_seconds)
    age_seconds = date - float(remember(run, "begun_seconds", lambda: date))
    return own_seconds - max(age_seconds, logged_seconds)


def record(run: Path, config: Config, fingerprint: str, layout: str) -> None:
    """Writes config.json, layout.txt and corpus.json into the run's folder; call it after all checks have passed.

    Args:
      run: the run's folder, created if it is missing.
      config: the run's configuration.
      fingerprint: the hash of the run's data.
      layout: the content of layout.txt, a line for each array of the training state.

    Raises:
      UserError: the folder cannot be written.
    """
    foreign.record_written(records.record(config))  # on each machine of the run
    if not peers.is_main_process():
        return
    try:
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / CONFIG_FILE, to_json(config))
        write_whole(run / "layout.txt", layout)
        remember(run, "fingerprint", lambda: fingerprint)
    except OSError as error:
        raise UserError(
            Problem(
                "--workdir",
                fault=f"cannot write {run} ({error.strerror})",
                allowed="a folder that can be created and written",
            )
        ) from None


def refuse_other_corpus(run: Path, fingerprint: str, directory: str = "") -> None:
    """Checks that a run that resumes has the same data as before.

    Args:
      run: the run's folder, whose corpus.json contains the fingerprint of its data.
      fingerprint: the fingerprint of the data that were opened now.
      directory: the value of `checkpoint.directory`. If corpus.json has no fingerprint, the fingerprint in its newest
        checkpoint is compared.

    Raises:
      UserError: the run in the folder was trained on other data.
    """
    facts = _facts(run)
    if directory and "fingerprint" not in facts and "corpus" in (there := extra_of_newest(directory)):
        facts = {"fingerprint": there["corpus"]}
    if "fingerprint" in facts and facts["fingerprint"] != fingerprint:
        raise UserError(
            Problem(
                f"workdir {run}",
                fault=(
                    f"its run was trained on data with hash {facts['fingerprint'][:12]}, but these have "
                    f"{fingerprint[:12]} (another Python, other weights, or files that changed)"
                ),
                allowed="the same data",
                nearest=f"another --workdir, with --config.init_from={run} to start from its weights",
            )
        )


def remember(run: Path, name: str, compute: Callable[[], Json]) -> Json:
    """Returns the value of `name` in corpus.json; if it is missing, calls `compute`, and process 0 stores the value."""
    facts = _facts(run)
    if name in facts:
        return facts[name]
    value = compute()
    if peers.is_main_process():
        with _facts_lock:
            write_whole(run / CORPUS_FILE, json.dumps({**_facts(run), name: value}))
    return value


def record_saved(run: Path, step: int) -> None:
    """Records `step` in corpus.json as the run's first saved step if it has none yet; ignores disk errors."""
    with contextlib.suppress(OSError):
        remember(run, _SAVED, lambda: step)


def lost_checkpoint(run: Path, place: str) -> list[Problem]:
    """Returns an error line if the checkpoints of a run have disappeared, else []; call it if no checkpoint exists.

    A run that ended before its first save starts again from step 0. If corpus.json records a save, a start from step 0
    would repeat the steps of the run and replace its rows of metrics.

    Args:
      run: the run's folder.
      place: the folder or bucket of the run's checkpoints, for the error.
    """
    facts = _facts(run)
    if _SAVED not in facts or not (run / CONFIG_FILE).exists():
        return []
    return [
        Problem(
            f"workdir {run}",
            fault=f"its run has saved step {facts[_SAVED]}, but {place} has no complete checkpoint",
            allowed="its checkpoints in this place",
            nearest=f"mount or copy them to this place, another --workdir, or `rm -r {run}` to start again",
        )
    ]


def _facts(run: Path) -> JsonObject:
    """Returns the entries of corpus.json; an empty object if the file is missing.

    Raises:
      UserError: the file is not a JSON object, or an entry does not have the type that a run writes.
    """
    facts = _read_json(run / CORPUS_FILE)
    for name, value in facts.items():
        is_none = value is None and name != "begun_seconds"  # a bigram loss is None if there are too many ids
        if not (isinstance(value, str) if name in ("fingerprint", RUN_ID) else is_none or is_finite(value)):
            raise UserError(
                Problem(
                    run / CORPUS_FILE,
                    got=f"{value!r} for {name}",
                    allowed="the unchanged file of the run",
                    nearest="another --workdir",
                )
            )
    return facts


def _read_json(path: Path) -> JsonObject:
    """Returns the JSON object in a file; {} if the file is missing. Raises UserError if it is not a JSON object."""
    try:
        content = read_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError
        return content
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(
            Problem(
                path,
                fault="not a JSON object",
                allowed="the unchanged file of the run",
                nearest="another --workdir",
            )
        ) from None


def record_device(run: Path, assembly: Assembly, step: jax.stages.Compiled) -> None:
    """Writes `device.json`, which describes the memory of one device; a disk error is only a warning.

    It is replaced at each start, because the mesh may change on resume. The keys are `mesh` (axis -> size), `device`
    (the device kind), and `..._bytes` for the parts of a device's memory. `temporary_bytes` and `peak_bytes` come from
    the compiler's memory analysis of the step, or are null if it has none. The compiler's temporaries include the
    gradients. The other bytes are computed from shapes and shardings.

    Args:
      run: the run's folder.
      assembly: the run's assembly.
      step: the compiled training step.
    """
    if not peers.is_main_process():
        return
    state = training_state_bytes(assembly.state, assembly.states.sums)
    analysis = step.memory_analysis()
    of_compiler = None if analysis is None else statistics(analysis)
    facts = {
        "mesh": {axis: int(size) for axis, size in assembly.mesh.shape.items()},
        "device": assembly.mesh.devices.flat[0].device_kind,
        "parameters_bytes": state.parameters,
        "gradients_bytes": state.gradients,
        "moments_bytes": state.moments,
        "extra_bytes": state.extra,
        "on_host_bytes": state.on_host,
        "batch_bytes": bytes_of_device(assembly.batch),
        "temporary_bytes": of_compiler and of_compiler.temporary_bytes,
        "peak_bytes": of_compiler and of_compiler.peak_bytes,
    }
    path = run / DEVICE_FILE
    try:
        write_whole(path, json.dumps(facts, indent=2) + "\n")
    except OSError as error:
        warn(f"{path}: {error}; a report of this run will not show the memory per device")


def newest_step(run: Path, directory: str = "") -> int:
    """Returns the step of a run's newest complete checkpoint, or 0 if there is none.

    Args:
      run: the run's folder.
      directory: the value of `checkpoint.directory`; '' for the folder `checkpoints` in `run`.

    Raises:
      Unreached: a bucket does not answer.
    """
    try:
        with find(directory or run / CHECKPOINTS, is_place=True) as checkpoints:
            return checkpoints.latest_step() or 0
    except Unreached:
        raise
    except UserError:
        return 0


def warn_of_another_rate(assembly: Assembly, run: Path, state: TrainState) -> None:
    """Warns if the learning rate jumps on resume because `num_steps` or `decay_steps` have changed.

    For example, if a run is made longer, a decay that had ended with the run starts again at a higher rate. Call it on
    one process, before the run's config.json is replaced.

    Args:
      assembly: the assembly of the new configuration.
      run: the run's folder, whose config.json has the previous options; without this file, nothing is compared.
      state: the restored training state.
    """
    if not (run / CONFIG_FILE).is_file() or int(state.step) >= assembly.config.num_steps:
        return
    now = assembly.config
    given = read_json((run / CONFIG_FILE).read_bytes())
    # Only these options are read: other options may be of a task that is not installed, or of a former version.
    name = {"learning_rate.name": now.learning_rate.name}  # a function that only this file names is not imported
    used = (records.VERSION, "num_steps", "learning_rate")
    was = from_json(json.dumps({key: given[key] for key in used if key in given}), name)
    options = dataclasses.replace(now.learning_rate, decay_steps=was.learning_rate.decay_steps)
    before = dataclasses.replace(now, num_steps=was.num_steps, learning_rate=options)
    # Local-SGD groups have separate counts: the group with the fewest skipped steps is used.
    count, step = int(state.step) - int(np.min(state.skipped.total)), int(state.step)
    last, planned = (float(learning_rates(before, assembly.task)(number)) for number in (max(count - 1, 0), count))
    rate = float(learning_rates(now, assembly.task)(count))
    if abs(rate - planned) > _RATE_TOLERANCE * max(rate, planned):
        ends = [config.learning_rate.decay_steps or config.num_steps for config in (before, now)]
        warn(
            f"learning rate: {last:.3g} at step {step}, {rate:.3g} at step {step + 1}: its decay was to end at step "
            f"{ends[0]} and now ends at {ends[1]}; --config.learning_rate.decay_steps={ends[0]} restores the former "
            "rate"
        )
