"""Ensures that only one run writes checkpoints into a folder or bucket: a file names the owner and has a heartbeat.

The file contains the run's id, its process and the time of the heartbeat. The file remains if the process is killed. A
run that restarts in its workdir resumes immediately, since the lock of the workdir shows that no other process of the
run is alive. Another run takes over immediately if the owner's process ran on the same machine and has ended. If the
owner's process ran on another machine, another run takes over after ten minutes without a heartbeat.
"""

import contextlib
import fcntl
import functools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshtrain.errors import EXIT_LOST_PEER, Problem, is_finite, leave_at_once, refusals, refuse, warn
from meshtrain.files import JsonObject, open_folder, read_json
from meshtrain.launch import peers
from meshtrain.launch.signals import undone
from meshtrain.store import buckets
from meshtrain.store.buckets import Place, Unreached, wrap_bucket_errors

OWNER = "owner.json"
_BEAT_SECONDS, _STALE_SECONDS = 60.0, 600.0
_PROCESS = re.compile(r"process (\d{1,9}) on (.*)", re.DOTALL)
_STATE, _START_TIME = 0, 19  # fields of /proc/PID/stat after the name, see proc_pid_stat(5)


@contextlib.contextmanager
def own_folder(directory: str | Place, run: str, *, may_vanish: bool = False) -> Iterator[Callable[[], str]]:
    """Keeps other runs out of a folder or gs://bucket/prefix during the block; process 0 acts for all processes.

    If another run takes over nevertheless, because this machine was asleep, the process exits immediately.

    Args:
      directory: the checkpoint folder, created if it is missing, or the bucket prefix.
      run: the id of the run, stored in its workdir.
      may_vanish: whether the folder may be deleted during the run, because the next save creates it again. True for a
        folder inside the workdir.

    Yields:
      A function that returns an error line if the folder was deleted, replaced or unmounted, else ''. It always returns
      '' for a bucket, in processes other than 0, and with `may_vanish`. With `may_vanish`, it writes the owner's file
      again if the folder was created again.

    Raises:
      UserError: another run owns the folder (the error names its process and the time), or it cannot be written.
    """
    place, problems = buckets.place(directory), list[Problem]()
    if not peers.is_main_process():
        refuse(peers.share_problems("owner", problems))
        yield lambda: ""
        return
    ends = threading.Event()
    beats = threading.Thread(target=_beat, args=(place, run, ends), daemon=True, name="owner")

    def release() -> None:
        ends.set()
        if beats.is_alive():
            beats.join()
        with contextlib.suppress(Unreached, OSError), wrap_bucket_errors(place):
            if _is_own(_owner(place), run):
                (place / OWNER).unlink()

    with undone(release):
        if not (problems := refusals(buckets.make, place)):
            with contextlib.suppress(FileExistsError):
                line = Problem(
                    "checkpoint.directory",
                    got=f"{place}, where another run is starting",
                    allowed="one run in each directory",
                    nearest="another directory",
                )
                problems = [line]
                problems = _problems(place, run)
        refuse(peers.share_problems("owner", problems))
        beats.start()
        yield functools.partial(_lost, place, run, may_vanish=may_vanish)
    release()


def _problems(place: Place, run: str) -> list[Problem]:
    """Makes this run the owner of a folder or bucket prefix; returns an error line if that is impossible, else [].

    Raises:
      FileExistsError: another run became the owner at the same time.
    """
    try:
        with wrap_bucket_errors(place), _start_lock(place):
            if was := _owner(place):
                if line := _in_use(place, was, run):
                    return [line]
                (place / OWNER).unlink(missing_ok=True)
            buckets.write(place / OWNER, _text(run), is_new=True)
    except Unreached as error:
        return list(error.problems)
    except FileExistsError:
        raise
    except OSError as error:
        return [
            Problem(place, got=error.strerror or error, allowed="a directory that can be written", nearest="another")
        ]
    return []


def _in_use(place: Place, was: JsonObject, run: str) -> Problem | None:
    """Returns a problem if another run still uses a folder or bucket, else None.

    Warns if another run owned the folder or bucket and this run can take it over.

    Args:
      place: the folder or bucket prefix.
      was: the content of the owner's file.
      run: the id of this run.
    """
    seconds = abs(time.time() - was["seconds"])  # abs: a heartbeat in the future means that the clock was set back
    is_alive = _is_alive(was)
    is_silent = seconds >= _STALE_SECONDS or was["run"] == run
    again = (
        f"the same directory in {_STALE_SECONDS - seconds:.0f} s"
        if is_alive is None
        else "the same directory after that run has ended"
    )
    if (is_alive or (is_alive is None and not is_silent)) and not _is_own(was, run):
        return Problem(
            "checkpoint.directory",
            got=f"{place}, used by {was['host']} {seconds:.0f} s ago",
            allowed="one run in each directory",
            nearest=f"another directory, or {again}",
        )
    if was["run"] not in ("", run):
        why = "which has ended" if is_alive is False else f"silent for {seconds / 60:.0f} minutes"
        warn(f"{place}: taken over from {was['host']}, {why}")
    return None


def _is_alive(was: JsonObject) -> bool | None:
    """Returns whether the owner's process is still running; None if it is unknown, because it ran on another machine.

    `was` is the content of the owner's file. A newer process may have the same process number; the start times
    distinguish the two processes.
    """
    found, now = _PROCESS.fullmatch(was["host"]), _process()
    same = ("machine" not in was) or was["machine"] == now["machine"]
    if not found or found[2] != socket.gethostname() or not same:
        return None
    try:
        os.kill(number := int(found[1]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        return True
    state, started = _stat(number)
    return state not in "ZX" and ("started" not in was or not started or was["started"] == started)


def _stat(process: int) -> tuple[str, str]:
    """Returns the state of the process with this number, such as `Z` for a zombie, and its start time, as texts.

    The result is ('?', '') if there is no such process.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[_STATE], fields[_START_TIME]
    except (OSError, IndexError):
        return "?", ""


@functools.cache
def _machine() -> str:
    """Returns the boot id and the pid namespace as text; they distinguish containers with the same host name."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _process() -> JsonObject:
    host = f"process {os.getpid()} on {socket.gethostname()}"
    return {"host": host, "machine": _machine(), "started": _stat(os.getpid())[1]}


def _is_own(was: JsonObject, run: str) -> bool:
    """Returns whether the owner's file, with content `was`, names this process and this run."""
    return bool(was) and {**was, **_process(), "run": run} == was


def _beat(place: Place, run: str, ends: threading.Event) -> None:
    while not ends.wait(_BEAT_SECONDS):
        with contextlib.suppress(Unreached, OSError), wrap_bucket_errors(place):
            now = _owner(place)
            _leave_to(now, place, run)
            if now or not isinstance(place, Path):  # a folder without the file belongs to another run
                buckets.write(place / OWNER, _text(run))


def _leave_to(now: JsonObject, place: Place, run: str) -> None:
    if now and now["run"] and not _is_own(now, run):
        leave_at_once(EXIT_LOST_PEER, f"meshtrain: lost: {place} was taken over by {now['host']}")


def _lost(place: Place, run: str, *, may_vanish: bool) -> str:
    """Returns an error line if the owner's file has disappeared, else ''. Exits if another run has become the owner.

    With `may_vanish`, a missing file is no error: it is written again if the folder exists, and the result is ''.
    """
    if not isinstance(place, Path):
        return ""
    if now := _owner(place):
        _leave_to(now, place, run)
        return ""
    if not may_vanish:
        got = (
            f"{f'a folder without {OWNER}' if place.is_dir() else 'no folder'} at {place} instead of this run's folder"
        )
        return Problem("checkpoint.directory", got=got, allowed="the run's own folder until the end")
    if place.is_dir():
        with contextlib.suppress(OSError):  # a full disk: the save reports it
            buckets.write(place / OWNER, _text(run))
    return ""


@contextlib.contextmanager
def _start_lock(place: Place) -> Iterator[None]:
    """Locks a folder during the block, so that only one process of this machine reads and writes the owner's file."""
    with contextlib.ExitStack() as held:
        if isinstance(place, Path):
            with contextlib.suppress(OSError):  # a file system without locks: only the exclusive write protects
                fcntl.flock(open_folder(place, held), fcntl.LOCK_EX)
        yield


def _owner(place: Place) -> JsonObject:
    """Returns the content of the owner's file: {} if the file is missing; an empty `run` id if it is damaged."""
    try:
        owner = dict(read_json(buckets.read(place / OWNER)))
        if all(isinstance(owner[name], str) for name in ("run", "host")) and is_finite(owner["seconds"]):
            return owner
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (KeyError, ValueError, TypeError):
        pass
    return {"run": "", "host": "nobody", "seconds": 0.0}


def _text(run: str) -> str:
    return json.dumps({"run": run, **_process(), "seconds": time.time()})
