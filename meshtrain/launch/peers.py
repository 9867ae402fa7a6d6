"""Small messages between the processes of a run, through the key-value store of JAX's coordination service.

JAX has no public interface to that store: this file is the only one that uses the private one, and a test fails if
it moves. With a single process every function returns that process' own message.
"""

import collections
import contextlib
import itertools
import json
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
from jax._src import distributed
from jax.experimental import multihost_utils

from meshtrain.errors import Interrupted, LostPeer, TrainingStopped, refuse
from meshtrain.files import Json

_PATIENCE_SECONDS = 600  # wait for the slowest process: it may be reading a large file
_LAST_SECONDS = 5.0  # for reports that are not yet published at the end
_ROOM = "meshtrain"
SAME_START = "start them by the same command on the same installation"
SAME_FILES = "the same files on every machine, as in one shared folder"
FINISHED = "finished"  # instead of a heartbeat
_num_calls: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()
_beats = itertools.count()
_exchanges = itertools.count()  # a program may train several times


def index() -> int:
    """Returns the index of this process, from 0 on."""
    return jax.process_index()


def is_main_process() -> bool:
    """Returns whether this process writes the run's files and talks to the user (process 0).

    Call it after `distributed.start`: before that, JAX knows of one process only.
    """
    return index() == 0


def agreed_stop(start_step: int) -> Callable[[int], bool] | None:
    """Returns a function of a step: whether all processes stop after it. None for a single process.

    JAX has all of them stop after the step that follows the last one asked for, which is 0 at first. So it is told the
    number of steps since the start: in a run that resumes, step 1 is long past.

    Args:
      start_step: the last step that is done; it is then asked for each of those that follow.
    """
    if count() == 1:
        return None
    return lambda step: multihost_utils.reached_preemption_sync_point(step - start_step)


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count()


def gathered(name: str, value: Json) -> list[Json]:
    """Returns the values of all processes, by process index. All processes call it, with the same names in one order.

    Args:
      name: of the message.
      value: of this process; anything that JSON holds.

    Raises:
      LostPeer: a process does not answer.
    """
    if count() == 1:
        return [value]
    with _lock:
        _num_calls[name] += 1
        room = f"{_ROOM}/{name}/{_num_calls[name]}"
    service = _service()
    service.key_value_set(f"{room}/{index()}", json.dumps(value))
    # Process 0 reads all values and publishes one list: 2 n messages instead of n^2.
    if is_main_process():
        service.key_value_set(f"{room}/all", json.dumps([_wait_for(f"{room}/{i}", i) for i in range(count())]))
    return list(_wait_for(f"{room}/all", 0))


def num_connected() -> int:
    """Returns the number of connected processes without starting JAX's backends, which `count` does."""
    return int(distributed.global_state.num_processes)


def num_machines() -> int:
    """Returns the number of machines, by host name, on which the processes run. All processes call it."""
    return len(set(gathered("machine", socket.gethostname())))


def refuse_differences(what: str, facts: Mapping[str, Json], fix: str = SAME_START) -> None:
    """Compares values that have to be equal in all processes. All processes call it.

    Args:
      what: what the values describe; it names the message and starts the lines.
      facts: name -> anything that JSON holds.
      fix: how the user makes them equal.

    Raises:
      UserError: a process differs from process 0; every process raises the same lines.
    """
    refuse(differences(what, gathered(what, dict(facts)), fix))


def differences(what: str, facts: Sequence[Mapping[str, Json]], fix: str = SAME_START) -> list[str]:
    """Returns one line for each fact in which a process differs from process 0.

    Args:
      what: what the facts describe.
      facts: of each process.
      fix: how the user makes them equal.
    """
    problems = []
    for process, own in enumerate(facts):
        for name in sorted({*own, *facts[0]}):
            here, there = (repr(side[name]) if name in side else "nothing" for side in (own, facts[0]))
            if here != there:
                problems.append(
                    f"processes: {what} differs: {name} is {here} in process {process} and {there} in process 0; "
                    f"allowed: the same in all; nearest: {fix}"
                )
    return problems


def share_problems(name: str, problems: Sequence[str]) -> list[str]:
    """Returns the problems of all processes, without duplicates, so that all of them stop if one has to.

    Args:
      name: of the check.
      problems: those of this process.
    """
    return list(dict.fromkeys(line for lines in gathered(name, list(problems)) for line in lines))


def announce(what: str) -> None:
    """Tells the other processes something that they ask for by `is_announced`, of a name that is used once."""
    if count() > 1:
        _service().key_value_set(f"{_ROOM}/{what}/{index()}", "", allow_overwrite=True)


def is_announced(what: str) -> bool:
    """Returns whether a process has announced it. It asks the service of process 0: not more often than need be."""
    return count() > 1 and bool(_service().key_value_dir_get(f"{_ROOM}/{what}/"))


def beat(step: int) -> None:
    """Publishes a heartbeat of this process: the step that it has completed; see `say_finished` for the last one."""
    _service().key_value_set(f"{_ROOM}/beat/{index()}", f"{step} {next(_beats)}", allow_overwrite=True)


def say_finished() -> None:
    """Tells the other processes that this one ends normally: they no longer expect a heartbeat from it."""
    _service().key_value_set(f"{_ROOM}/beat/{index()}", FINISHED, allow_overwrite=True)


def say_ending(message: Json) -> None:
    """Publishes why this process ends, as JSON holds it, before it ends."""
    _service().key_value_set(f"{_ROOM}/ending/{own_number()}", json.dumps(message), allow_overwrite=True)


def endings() -> dict[int, Json]:
    """Returns {process: why it ends} for the processes that have published it."""
    entries = _service().key_value_dir_get(f"{_ROOM}/ending/")
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries}


def own_number() -> int:
    """Returns the number of this process at the coordination service, without starting JAX's backends."""
    return int(distributed.global_state.process_id)


def is_connected() -> bool:
    """Returns whether this process is connected with others at this moment."""
    return distributed.global_state.client is not None


def signs_of_life() -> dict[int, str]:
    """Returns {process: its last heartbeat, or FINISHED}. A heartbeat that has not changed is an old one."""
    beats = _service().key_value_dir_get(f"{_ROOM}/beat/")
    return {int(key.rpartition("/")[2]): value for key, value in beats}


class Exchange:
    """Publishes numbered reports from a thread while its `with` block is open; nobody waits for another process.

    Process 0 knows a report once every process has published it: the others may be a while behind. All processes open
    the same exchanges in one order.
    """

    def __init__(self, name: str, complete: Callable[[int, dict[int, Json]], None]) -> None:
        """Makes an exchange; its thread starts with the `with` block.

        Args:
          name: of the reports.
          complete: (number, {process: report}) -> None; called in the thread of process 0, in the order of the numbers,
            once all processes have published a report of that number.
        """
        self._room = f"{_ROOM}/{name}/{next(_exchanges)}"
        self._complete = complete
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"exchange of {name}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._jobs.put(None)
        # So all processes end alike; otherwise another one may be gone, and nothing answers. A thread that is left over
        # would ask JAX for this process's number while Python exits, and JAX would start its backend for that.
        if kind in (None, Interrupted, TrainingStopped):
            self._thread.join(_LAST_SECONDS)

    def do(self, job: Callable[[], None]) -> None:
        """Calls a function in the thread, after all that was given to it before."""
        self._jobs.put(job)

    def publish(self, number: int, report: Callable[[], Json]) -> None:
        """Publishes a report from the thread.

        Args:
          number: larger than those before, and the same in all processes.
          report: returns anything that JSON holds; it may wait for a device.
        """
        self.do(lambda: self._publish(number, report()))

    def _publish(self, number: int, report: Json) -> None:
        service = _service()
        service.key_value_set(f"{self._room}/{number}/{index()}", json.dumps(report))
        if not is_main_process():
            return
        reports = collections.defaultdict[int, dict[int, Json]](dict)
        for key, value in service.key_value_dir_get(f"{self._room}/"):
            known, process = map(int, key.split("/")[-2:])
            reports[known][process] = json.loads(value)
        for known, of_each in sorted(reports.items()):
            if len(of_each) == count():
                service.key_value_delete(f"{self._room}/{known}/")
                self._complete(known, of_each)

    def _work(self) -> None:
        # RuntimeError: raised by JAX when process 0 or a device is gone, which the watchdog and the loop notice.
        with contextlib.suppress(RuntimeError):
            while (job := self._jobs.get()) is not None:
                job()


def _wait_for(key: str, process: int) -> Json:
    try:
        return json.loads(_service().blocking_key_value_get(key, _PATIENCE_SECONDS * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise LostPeer(f"process {process} does not answer ({str(error).splitlines()[0]})") from error


def _service() -> Any:
    client = distributed.global_state.client
    assert client is not None, "the processes are connected"
    return client
