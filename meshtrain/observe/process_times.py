"""What each of several processes measures alone, told to all of them: the wait for data, the host, and a fixed product.

All processes take a step in the same time. The product (no collectives, on one device of the process) shows whose
devices are slow. It starts when the result of a logged step is there, and a thread waits for it:

    device   ... step 10 | product | step 11 ...
    loop     dispatch 10, dispatch product, wait for 9, ... dispatch 11, wait for 10 ...
    thread              wait for 10 ...| wait for the product: its seconds
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Self

import jax
import jax.numpy as jnp

from meshtrain.files import Json
from meshtrain.launch.peers import Exchange
from meshtrain.observe.stragglers import Judgement, Slow, Times

SHARE = 1e-3  # of the time, at most, for the product
# Dim of the product and how often it is repeated: some milliseconds.
_DIM, _NUM_PRODUCTS = 2048, 128
_CPU_DIM, _CPU_NUM_PRODUCTS = 192, 4
_MEASURED = ("step_seconds", "data_seconds", "host_seconds", "device_wait_seconds")


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
          What belongs into the row: see `stragglers.Slow.values`. Empty where no process is slow, and in all processes
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
