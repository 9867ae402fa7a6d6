"""Exchanges small messages between the processes of a run, with the key-value store of JAX's coordination service.

JAX has no public interface to that store. Only this module uses the private interface, and a test fails if it changes.
With a single process, `gather_values` and the functions that use it return the message of this process.
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

from meshtrain.errors import Interrupted, LostPeer, Problem, TrainingStopped, refuse
from meshtrain.files import Json

_PATIENCE_SECONDS = 600  # patience for the slowest process, which may be reading a large file
_LAST_SECONDS = 5.0  # how long the end of an `Exchange` waits until the remaining reports are published
_ROOM = "meshtrain"
SAME_START = "start them with the same command from the same installation"
SAME_FILES = "the same files on every machine, for example in a shared folder"
FINISHED = "finished"  # instead of a heartbeat
_num_calls: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()
_beats = itertools.count()
_exchanges = itertools.count()  # distinguishes the exchanges of a program that trains several times


def index() -> int:
    """Returns the index of this process, starting at 0."""
    return jax.process_index()


def is_main_process() -> bool:
    """Returns whether this is process 0, which writes the run's files and prints for the user.

    Call it after `distributed.start`: before that, JAX knows only a single process.
    """
    return index() == 0


def make_stop(start_step: int) -> Callable[[int], bool] | None:
    """Returns a function step -> whether all processes stop after this step; None for a single process.

    After a process has received SIGTERM, JAX chooses the step after which all processes stop: one more than the largest
    step that any process has passed to JAX, or step 1 if no process has passed a step. A resumed run has step 1 already
    completed and would never stop there. So the function passes JAX the number of steps since `start_step`.

    Args:
      start_step: the last completed step. Call the returned function for each following step.
    """
    if count() == 1:
        return None
    return lambda step: multihost_utils.reached_preemption_sync_point(step - start_step)


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count()


def gather_values(name: str, value: Json) -> list[Json]:
    """Returns the values of all processes, in the order of process indices.

    All processes call it together. They must make their calls with the same names in the same order.

    Args:
      name: the name of the message.
      value: the value of this process; any JSON value.

    Raises:
      LostPeer: a process does not answer within 10 minutes.
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
    """Returns the number of connected processes without starting JAX's backends, unlike `count`."""
    return int(distributed.global_state.num_processes)


def num_machines() -> int:
    """Returns the number of machines, by host name, on which the processes run. All processes call it."""
    return len(set(gather_values("machine", socket.gethostname())))


def refuse_differences(what: str, facts: Mapping[str, Json], fix: str = SAME_START) -> None:
    """Checks that values are equal in all processes. All processes call it together.

    Args:
      what: a word for the values, such as `versions`, which starts the error lines and names the message.
      facts: name -> any JSON value, in this process.
      fix: the suggested fix in the error lines.

    Raises:
      UserError: a process differs from process 0; every process raises the same lines.
    """
    refuse(differences(what, gather_values(what, dict(facts)), fix))


def differences(what: str, facts: Sequence[Mapping[str, Json]], fix: str = SAME_START) -> list[Problem]:
    """Returns an error line for each value in which a process differs from process 0.

    Args:
      what: a word for the values, such as `versions`, which starts the error lines.
      facts: name -> any JSON value, for each process by index.
      fix: the suggested fix in the error lines.
    """
    problems = []
    for process, own in enumerate(facts):
        for name in sorted({*own, *facts[0]}):
            here, there = (repr(side[name]) if name in side else "nothing" for side in (own, facts[0]))
            if here != there:
                problems.append(
                    Problem(
                        "processes",
                        fault=f"{what} differs: {name} is {here} in process {process} and {there} in process 0",
                        allowed="the same value in all processes",
                        nearest=fix,
                    )
                )
    return problems


def share_problems(name: str, problems: Sequence[str]) -> list[Problem]:
    """Returns the problems of all processes, without duplicates, so that all processes raise the same error.

    All processes call it together.

    Args:
      name: the name of the check, the same in all processes.
      problems: the problems of this process.
    """
    return list(dict.fromkeys(line for lines in gather_values(name, list(problems)) for line in lines))


def announce(what: str) -> None:
    """Announces an event with the name `what` to all processes, which query it with `is_announced`.

    An announcement is not withdrawn, so use each name for one event only.
    """
    if count() > 1:
        _service().key_value_set(f"{_ROOM}/{what}/{index()}", "", allow_overwrite=True)


def is_announced(what: str) -> bool:
    """Returns whether any process has announced the event `what`. It queries process 0, so do not call it too often."""
    return count() > 1 and bool(_service().key_value_dir_get(f"{_ROOM}/{what}/"))


def beat(step: int) -> None:
    """Publishes a heartbeat of this process, which contains its last completed step."""
    _service().key_value_set(f"{_ROOM}/beat/{index()}", f"{step} {next(_beats)}", allow_overwrite=True)


def say_finished() -> None:
    """Publishes the last heartbeat of a process that ends normally; other processes expect no further heartbeats."""
    _service().key_value_set(f"{_ROOM}/beat/{index()}", FINISHED, allow_overwrite=True)


def say_ending(message: Json) -> None:
    """Publishes why this process is about to end; `message` is any JSON value, which `endings` then returns."""
    _service().key_value_set(f"{_ROOM}/ending/{own_number()}", json.dumps(message), allow_overwrite=True)


def endings() -> dict[int, Json]:
    """Returns {process number: message} for the processes that have published a message with `say_ending`."""
    entries = _service().key_value_dir_get(f"{_ROOM}/ending/")
    return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries}


def own_number() -> int:
    """Returns the number of this process at the coordination service, without starting JAX's backends."""
    return int(distributed.global_state.process_id)


def is_connected() -> bool:
    """Returns whether this process is currently connected to other processes."""
    return distributed.global_state.client is not None


def signs_of_life() -> dict[int, str]:
    """Returns {process number: last heartbeat}, in which FINISHED marks processes that have ended normally.

    Each heartbeat is a different text. If a process has the same text in two calls, it has sent no heartbeat between
    the calls.
    """
    beats = _service().key_value_dir_get(f"{_ROOM}/beat/")
    return {int(key.rpartition("/")[2]): value for key, value in beats}


class Exchange:
    """Collects numbered reports of all processes in process 0, in a thread, while its `with` block is open.

    No process waits for another process. Process 0 handles the reports with one number after every process has
    published its report with this number, so there may be a delay. All processes open the same exchanges in the same
    order.
    """

    def __init__(self, name: str, complete: Callable[[int, dict[int, Json]], None]) -> None:
        """Creates an exchange; its thread starts with the `with` block.

        Args:
          name: the name of the reports.
          complete: (number, {process index: report}) -> None; handles the reports with one number. It is called only in
            process 0, in the exchange's thread, in the order of numbers.
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
        # In these cases all processes end; otherwise another process may have died, and nothing answers. A remaining
        # thread would query JAX for this process's index while Python exits, and JAX would start its backend for it.
        if kind in (None, Interrupted, TrainingStopped):
            self._thread.join(_LAST_SECONDS)

    def do(self, job: Callable[[], None]) -> None:
        """Queues the function `job` and returns; the exchange's thread calls the queued functions in order."""
        self._jobs.put(job)

    def publish(self, number: int, report: Callable[[], Json]) -> None:
        """Queues a report of this process and returns; the exchange's thread computes it and sends it to process 0.

        Args:
          number: the number of the report, such as a step: larger than all previous numbers of this exchange, and the
            same in all processes.
          report: () -> any JSON value; called in the thread, so it may wait for a device.
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
        # JAX raises RuntimeError if process 0 or a device has failed, which the watchdog and the loop notice.
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
