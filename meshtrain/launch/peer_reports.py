"""Reports of all processes, numbered, without a wait for any of them: a thread of each process publishes its own.

Process 0 reads them, and knows a report once every process has published it: the others may be a while behind.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from meshtrain.files import Json
from meshtrain.launch import peers

_LAST_SECONDS = 5.0  # for what is not yet published at the end
_exchanges = itertools.count()  # a program may train several times


class Exchange:
    """Publishes reports from a thread while its `with` block is open. All processes open the same ones in one order."""

    def __init__(self, name: str, complete: Callable[[int, dict[int, Json]], None]) -> None:
        """Makes an exchange; its thread starts with the `with` block.

        Args:
          name: of the reports.
          complete: (number, {process: report}) -> None; called in the thread of process 0, in the order of the numbers,
            once all processes have published a report of that number.
        """
        self._name = f"{name}/{next(_exchanges)}"
        self._complete = complete
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"exchange of {name}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        if kind is None:  # otherwise another process may be gone, and nothing answers
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
        self._jobs.put(lambda: self._publish(number, report()))

    def _publish(self, number: int, report: Json) -> None:
        peers.report(self._name, number, report)
        if not peers.is_main_process():
            return
        reports = peers.reports(self._name)
        for known in sorted(reports):
            if len(reports[known]) == peers.count():
                peers.forget_reports(self._name, known)
                self._complete(known, reports[known])

    def _work(self) -> None:
        # RuntimeError: raised by JAX when process 0 or a device is gone, which the watchdog and the loop notice.
        with contextlib.suppress(RuntimeError):
            while (job := self._jobs.get()) is not None:
                job()
