"""Which process holds up the others: what each measures alone, told to all of them and judged.

Processes take every step together, so that a step takes as long as that of the slowest process, everywhere. What a
process does alone tells them apart: its wait for data, its own work before it dispatches a step, and a fixed product
(no collectives, on one device of the process). A process is slow in one of these at a logged step if

    own > (1 + OVER) median      and      lost >= LEAST_SHARE step_seconds

with the median over the other processes, and what it loses a step: own - median; for the product, which stands for all
that its devices compute, (own / median - 1) step_seconds. A process that waits for its devices for LEAST_SHARE of a
step or longer loses nothing by data or host: the devices compute meanwhile.

The product starts when the result of a logged step is there, and a thread waits for it:

    device   ... step 10 | product | step 11 ...
    loop     dispatch 10, dispatch product, wait for 9, ... dispatch 11, wait for 10 ...
    thread              wait for 10 ...| wait for the product: its seconds
"""

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Self

import jax
import jax.numpy as jnp

from meshtrain.files import Json
from meshtrain.launch.peers import Exchange

OVER = 0.2
LEAST_SHARE = 0.05  # of a step: below it a process may take many times as long, and nobody waits
NUM_RUNNING = 3  # logged steps in a row
SHARE = 1e-3  # of the time, at most, for the product
# Dim of the product and how often it is repeated: some milliseconds.
_DIM, _NUM_PRODUCTS = 2048, 128
_CPU_DIM, _CPU_NUM_PRODUCTS = 192, 4
_MEASURED = ("step_seconds", "data_seconds", "host_seconds", "device_wait_seconds")
CAUSES = {
    "data": "waiting for data",
    "host": "its own work before a step is dispatched",
    "device": "what its devices compute (by a product of its own)",
}


@dataclasses.dataclass(frozen=True)
class Times:
    """What a process has measured since the logged step before.

    Attributes:
      step_seconds: mean of a step.
      data_seconds: mean wait of a step for data.
      host_seconds: mean time from the end of the wait for an earlier step to the dispatch of the next, without data.
      device_wait_seconds: mean wait for an earlier step.
      probe_seconds: of the fixed product; None if it was not measured again since the logged step before.
    """

    step_seconds: float
    data_seconds: float
    host_seconds: float
    device_wait_seconds: float
    probe_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Slow:
    """A process that is slow at `NUM_RUNNING` logged steps running.

    Attributes:
      process: its index.
      lost_seconds: {cause: seconds a step that it loses}, of the causes with so many steps running, the largest first.
    """

    process: int
    lost_seconds: Mapping[str, float]

    def values(self) -> dict[str, float | None]:
        """Returns what a row of metrics has of it."""
        lost = {f"slow_process_{cause}_seconds": seconds for cause, seconds in self.lost_seconds.items()}
        return {"slow_process": float(self.process), **lost}

    def line(self) -> str:
        """Returns the line for the terminal."""
        lost = "; ".join(f"{seconds:.3g} s a step with {CAUSES[cause]}" for cause, seconds in self.lost_seconds.items())
        return f"meshtrain: WARNING: process {self.process} is slow: against the median of the others it loses {lost}"


def lost_seconds(times: Mapping[int, Times], probes: Mapping[int, float]) -> dict[tuple[int, str], float]:
    """Returns {(process, cause): seconds a step} for each process that is slow at one logged step.

    Args:
      times: of each process, two at least.
      probes: of each process that has measured one, the seconds of its newest product.
    """
    result = {}
    measured: dict[str, Mapping[int, float]] = {
        "data": {process: own.data_seconds for process, own in times.items()},
        "host": {process: own.host_seconds for process, own in times.items()},
        "device": probes,
    }
    for cause, seconds in measured.items():
        for process, own in seconds.items():
            others = [value for other, value in seconds.items() if other != process]
            if not others or own <= (1 + OVER) * (median := statistics.median(others)):
                continue
            step_seconds = times[process].step_seconds
            if cause != "device" and times[process].device_wait_seconds >= LEAST_SHARE * step_seconds:
                continue
            lost = (own / median - 1) * step_seconds if cause == "device" else own - median
            if lost >= LEAST_SHARE * step_seconds:
                result[process, cause] = lost
    return result


class Judgement:
    """Counts at how many logged steps running each process has been slow."""

    def __init__(self) -> None:
        """Nothing is known at the beginning."""
        self._probes: dict[int, float] = {}
        self._num_running: collections.Counter[tuple[int, str]] = collections.Counter()

    def of(self, times: Mapping[int, Times]) -> Slow | None:
        """Returns the process that loses most, of those that are slow at so many logged steps running.

        Args:
          times: of every process, at the next logged step. A process that has not measured its product again neither
            begins nor ends to be slow by it.
        """
        fresh = {process: own.probe_seconds for process, own in times.items() if own.probe_seconds is not None}
        self._probes |= fresh
        lost = lost_seconds(times, self._probes)
        for process in times:
            for cause in CAUSES:
                if cause == "device" and process not in fresh:
                    continue
                key = process, cause
                self._num_running[key] = self._num_running[key] + 1 if key in lost else 0
        running = {key: seconds for key, seconds in lost.items() if self._num_running[key] >= NUM_RUNNING}
        if not running:
            return None
        (process, _), _ = max(running.items(), key=lambda pair: pair[1])
        own = [(cause, seconds) for (other, cause), seconds in running.items() if other == process]
        return Slow(process, dict(sorted(own, key=lambda pair: -pair[1])))


class OwnTimes:
    """Exchanges the times of the processes at logged steps while its `with` block is open; nothing waits for it.

    All processes make one, and call `exchange` for the same steps.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter) -> None:
        """Compiles the product, which this process's first device computes; `now` is a monotonic time in seconds."""
        self._now = now
        self._device = jax.local_devices()[0]
        self._product, self._matrix = _compiled(self._device)
        self._judgement = Judgement()
        self._exchange = Exchange("own_times", self._complete)
        self._probe_seconds: float | None = None  # of a product that was not yet reported
        self._not_before_seconds = now()
        self._slow: Slow | None = None
        self._named: tuple[int | str, ...] = ()

    def __enter__(self) -> Self:
        self._exchange.__enter__()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._exchange.__exit__(kind)

    def probe(self, of_step: jax.Array) -> None:
        """Dispatches the product after a step, unless it would take more than its share.

        Args:
          of_step: what the step returns, a float32 scalar that each device has.
        """
        if self._now() < self._not_before_seconds:
            return
        self._not_before_seconds = float("inf")  # until the thread knows how long it took
        [own] = [shard.data for shard in of_step.addressable_shards if shard.device == self._device]
        result = self._product(self._matrix, own)
        self._exchange.do(lambda: self._measure(own, result))

    def exchange(self, step: int, values: Mapping[str, Json], say: Callable[[str], None]) -> dict[str, float | None]:
        """Publishes this process's times at a logged step, and returns what is known of the steps before.

        Args:
          step: the logged step.
          values: its row so far, with the clock's averages if steps were timed.
          say: prints a line, if a process is slow that was not slow before, or for another reason.

        Returns:
          What belongs into the row: see `Slow.values`. Empty where no process is slow, and in all processes
          but the first.
        """
        if "step_seconds" in values:
            own = Times(*(values[name] for name in _MEASURED))
            self._exchange.publish(step, lambda: self._report(own))
        slow = self._slow
        named: tuple[int | str, ...] = (slow.process, *slow.lost_seconds) if slow else ()
        if slow and named != self._named:
            say(slow.line())
        self._named = named
        return slow.values() if slow else {}

    def _measure(self, of_step: jax.Array, result: jax.Array) -> None:
        jax.block_until_ready(of_step)
        start_seconds = self._now()
        jax.block_until_ready(result)
        end_seconds = self._now()
        self._probe_seconds = end_seconds - start_seconds
        self._not_before_seconds = end_seconds + self._probe_seconds / SHARE

    def _report(self, own: Times) -> dict[str, float | None]:
        probe_seconds, self._probe_seconds = self._probe_seconds, None
        return dataclasses.asdict(dataclasses.replace(own, probe_seconds=probe_seconds))

    def _complete(self, step: int, reports: Mapping[int, Mapping[str, float]]) -> None:
        self._slow = self._judgement.of({process: Times(**report) for process, report in reports.items()})


def _compiled(device: jax.Device) -> tuple[jax.stages.Compiled, jax.Array]:
    on_cpu = device.platform == "cpu"
    dim, num_products = (_CPU_DIM, _CPU_NUM_PRODUCTS) if on_cpu else (_DIM, _NUM_PRODUCTS)

    def product(matrix: jax.Array, of_step: jax.Array) -> jax.Array:
        # The scalar makes it wait for the step.
        first = matrix + 0 * of_step.astype(matrix.dtype)
        return jax.lax.fori_loop(0, num_products, lambda _, x: x @ matrix, first)

    matrix = jax.device_put(jnp.full((dim, dim), 1 / dim, jnp.float32 if on_cpu else jnp.bfloat16), device)
    where = jax.sharding.SingleDeviceSharding(device)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=where)
    return jax.jit(product).lower(matrix, scalar).compile(), matrix
