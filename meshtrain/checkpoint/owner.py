"""Which run writes into a bucket: an object with the run's id, its machine and a heartbeat.

A lock on a disk goes with its process; an object stays after a kill. A run that starts again in its workdir, whose lock
says that nothing of it is alive, goes on at once, and any other one after ten minutes without a heartbeat.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator

from meshtrain.errors import EXIT_LOST_PEER, leave_at_once, refuse, warn
from meshtrain.files import JsonObject, read_json
from meshtrain.launch import peers
from meshtrain.launch.signals import undone
from meshtrain.store import buckets
from meshtrain.store.buckets import Place, Unreached, reached

OWNER = "owner.json"
_BEAT_SECONDS, _STALE_SECONDS = 60.0, 600.0


@contextlib.contextmanager
def owned(directory: str, run: str) -> Iterator[None]:
    """Keeps other runs out of a gs://bucket/prefix during the block; process 0 does so for all processes.

    If another run takes over all the same, because this machine was asleep, the process leaves at once.

    Args:
      directory: the prefix.
      run: the id that the run's workdir keeps.

    Raises:
      UserError: another run has it (where, since when), or it cannot be written.
    """
    place, problems = buckets.place(directory), list[str]()
    if peers.is_main_process():
        with contextlib.suppress(FileExistsError):
            problems = [f"checkpoint.directory: got {place}, where another run begins; allowed: one; nearest: another"]
            problems = _problems(place, run)
    refuse(peers.share_problems("owner", problems))
    if not peers.is_main_process():
        yield
        return
    ends = threading.Event()
    beats = threading.Thread(target=_beat, args=(place, run, ends), daemon=True, name="owner")

    def release() -> None:
        ends.set()
        beats.join()
        with contextlib.suppress(Unreached, FileNotFoundError), reached(place):
            (place / OWNER).unlink()

    beats.start()
    with undone(release):
        yield
    release()


def _problems(place: Place, run: str) -> list[str]:
    """Makes the run the owner, or returns one line. Raises FileExistsError: another one becomes it at this moment."""
    try:
        with reached(place):
            was = _owner(place)
            seconds = time.time() - was["seconds"] if was else 0.0
            if was and was["run"] != run and seconds < _STALE_SECONDS:
                return [f"checkpoint.directory: got {place}, used by {was['host']} {seconds:.0f} s ago; allowed: one "
                        f"run in each; nearest: another, or the same in {_STALE_SECONDS - seconds:.0f} s"]  # fmt: skip
            if was and was["run"] != run:
                warn(f"{place}: taken over from {was['host']}, silent for {seconds / 60:.0f} minutes")
            if was:
                (place / OWNER).unlink(missing_ok=True)
            buckets.write(place / OWNER, _text(run), is_new=True)
    except Unreached as error:
        return list(error.problems)
    return []


def _beat(place: Place, run: str, ends: threading.Event) -> None:
    while not ends.wait(_BEAT_SECONDS):
        with contextlib.suppress(Unreached), reached(place):
            if (now := _owner(place)) and now["run"] != run:
                leave_at_once(EXIT_LOST_PEER, f"meshtrain: lost: {place} was taken over by {now['host']}")
            buckets.write(place / OWNER, _text(run))


def _owner(place: Place) -> JsonObject:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return dict(read_json(buckets.read(place / OWNER)))
    return {}


def _text(run: str) -> str:
    return json.dumps({"run": run, "host": f"process {os.getpid()} on {socket.gethostname()}", "seconds": time.time()})
