"""Detects slow processes: every process shares its local timings, and all processes compare them.

All processes run a step together, so every process measures the duration of the slowest one. Only local timings
distinguish the processes: the wait for data, the host's work before it dispatches a step, and a fixed matrix
product (no collectives, on one device of the process). A process is slow in one of these timings at a logged step if

    own > (1 + OVER) median      and      lost >= LEAST_SHARE step_seconds

where the median is taken over the other processes, and the loss per step is own - median. For the product, which
represents all computation of the devices, the loss is (own / median - 1) step_seconds. A process that waits for its
devices for LEAST_SHARE of a step or longer loses no time by data or host work, because the devices compute meanwhile.

The product starts when the result of a logged step is ready, and a thread waits for it:

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
LEAST_SHARE = 0.05  # the share of a step: a smaller loss delays nobody, even if it is many times the median
NUM_RUNNING = 3  # logged steps in a row
SHARE = 1e-3  # the maximum share of the time for the product
# Dim and repetitions of the product, which takes some milliseconds.
_DIM, _NUM_PRODUCTS = 2048, 128
_CPU_DIM, _CPU_NUM_PRODUCTS = 192, 4
_MEASURED = ("step_seconds", "data_seconds", "host_seconds", "device_wait_seconds")
CAUSES = {
    "data": "waiting for data",
    "host": "host work before a step is dispatched",
    "device": "device computation (measured by a fixed product)",
}


@dataclasses.dataclass(frozen=True)
class Times:
    """The timings of a process since the previous logged step.

    Attributes:
      step_seconds: the mean duration of a step.
      data_seconds: the mean time for which a step waited for data.
      host_seconds: the mean time from the end of the wait for an earlier step to the dispatch of the next step, without
        the wait for data.
      device_wait_seconds: the mean time for which the host waited for an earlier step.
      probe_seconds: the duration of the fixed product; None if it was not measured since the previous logged step.
    """

    step_seconds: float
    data_seconds: float
    host_seconds: float
    device_wait_seconds: float
    probe_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class Slow:
    """A process that was slow at `NUM_RUNNING` consecutive logged steps.

    Attributes:
      process: the index of the process.
      lost_seconds: {cause: lost seconds per step}, the largest first, for causes that lasted for all of these steps.
    """

    process: int
    lost_seconds: Mapping[str, float]

    def values(self) -> dict[str, float | None]:
        """Returns entries for a row of metrics: the slow process, and its lost seconds by cause."""
        lost = {f"slow_process_{cause}_seconds": seconds for cause, seconds in self.lost_seconds.items()}
        return {"slow_process": float(self.process), **lost}

    def line(self) -> str:
        """Returns the warning about this process for the terminal."""
        lost = "; ".join(f"{seconds:.3g} s a step on {CAUSES[cause]}" for cause, seconds in self.lost_seconds.items())
        return (
            f"meshtrain: WARNING: process {self.process} is slow: compared with the median of the other processes, it "
            "loses "
            f"{lost}"
        )


def lost_seconds(times: Mapping[int, Times], probes: Mapping[int, float]) -> dict[tuple[int, str], float]:
    """Returns {(process, cause): lost seconds per step} for each process that is slow at a logged step.

    Args:
      times: process -> its timings, for at least two processes.
      probes: process -> the duration in seconds of its newest fixed product, for processes that have measured it.
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
    """Finds the process that was slow, by the same cause, at each of the last `NUM_RUNNING` logged steps.

    For each process and cause, it counts the consecutive logged steps at which the process was slow.
    """

    def __init__(self) -> None:
        """Starts with a count of 0 for each process."""
        self._probes: dict[int, float] = {}
        self._num_running: collections.Counter[tuple[int, str]] = collections.Counter()

    def of(self, times: Mapping[int, Times]) -> Slow | None:
        """Adds a logged step; returns the slow process that loses the most time per step, or None.

        A process is slow if it lost time by the same cause at the last `NUM_RUNNING` logged steps.

        Args:
          times: process -> its timings at the next logged step. If a process has not measured the fixed product since
            the previous logged step, its count of slow products does not change.
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
    """Exchanges the timings of all processes at logged steps inside a `with` block, without blocking the loop.

    Each process creates one object, and calls `exchange` for the same steps as all other processes.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter) -> None:
        """Compiles the fixed matrix product for this process's first device.

        Args:
          now: a function that returns a monotonic time in seconds.
        """
        self._now = now
        self._device = jax.local_devices()[0]
        self._product, self._matrix = _compile(self._device)
        self._judgement = Judgement()
        self._exchange = Exchange("own_times", self._complete)
        self._probe_seconds: float | None = None  # a measurement that was not yet reported
        self._not_before_seconds = now()
        self._slow: Slow | None = None
        self._named: tuple[int | str, ...] = ()

    def __enter__(self) -> Self:
        self._exchange.__enter__()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._exchange.__exit__(kind)

    def probe(self, of_step: jax.Array) -> None:
        """Dispatches the fixed product after a step, but so rarely that it takes at most `SHARE` of the run's time.

        Args:
          of_step: a result of the step, a float32 scalar that is replicated on all devices.
        """
        if self._now() < self._not_before_seconds:
            return
        self._not_before_seconds = float("inf")  # until the thread has measured it
        [own] = [shard.data for shard in of_step.addressable_shards if shard.device == self._device]
        result = self._product(self._matrix, own)
        self._exchange.do(lambda: self._measure(own, result))

    def exchange(self, step: int, values: Mapping[str, Json], say: Callable[[str], None]) -> dict[str, float | None]:
        """Publishes this process's timings at a logged step; returns metrics about a process slow at earlier steps.

        Args:
          step: the number of the logged step.
          values: the metrics of this step so far, including the clock's averages if steps were timed.
          say: a function that prints a line. It is called with a warning if a process has become slow, or if the causes
            of the slow process have changed.

        Returns:
          `Slow.values` of the slow process, to add to the row of metrics; {} if no process is slow, and always {} in
          processes other than 0.
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


def _compile(device: jax.Device) -> tuple[jax.stages.Compiled, jax.Array]:
    on_cpu = device.platform == "cpu"
    dim, num_products = (_CPU_DIM, _CPU_NUM_PRODUCTS) if on_cpu else (_DIM, _NUM_PRODUCTS)

    def product(matrix: jax.Array, of_step: jax.Array) -> jax.Array:
        # This data dependency delays the product until the step has finished.
        first = matrix + 0 * of_step.astype(matrix.dtype)
        return jax.lax.fori_loop(0, num_products, lambda _, x: x @ matrix, first)

    matrix = jax.device_put(jnp.full((dim, dim), 1 / dim, jnp.float32 if on_cpu else jnp.bfloat16), device)
    where = jax.sharding.SingleDeviceSharding(device)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=where)
    return jax.jit(product).lower(matrix, scalar).compile(), matrix
