"""Measures step times under asynchronous dispatch, and formats the log line.

A step ends when its result is ready, not when it is dispatched. If the host waited for each step immediately, the
device would be idle while the host prepares the next step. So the clock waits for the step *before the last*:

    host     dispatch 3 | wait for 2 ......| log 2, data 4, dispatch 4 | wait for 3 ...
    device   ... step 2 ................... | step 3 .......................... | step 4 ...
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from meshtrain.observe.run_files import IMPLIED, LOSS_OF, is_of_one
from meshtrain.sharding.trees import Arrays


@dataclasses.dataclass(frozen=True)
class CompletedStep:
    """A step whose result is ready.

    Attributes:
      step: the number of the step.
      result: the result of the step; reading it does not block.
      step_seconds: the time from the completion of the previous step (or the clock's start) to the completion of this
        step.
      data_seconds: the part of step_seconds in which the loop waited for data.
      is_first: whether the time includes tracing and compilation; averages exclude this step.
    """

    step: int
    result: Arrays
    step_seconds: float
    data_seconds: float
    is_first: bool


class StepClock:
    """Times the steps of a loop without stalling it.

        clock = StepClock()
        for step in ...:
            with clock.waiting_for_data():
                batch = next(batches)
            state, result = train_step(state, batch)
            for done in clock.dispatched(step, result):
                ...  # done.result can be read; log `clock.averages(...)` at regular steps
        for done in clock.drain():
            ...

    One step stays in flight. Only the first step is awaited immediately: its time is reported separately, and the first
    log line appears early. The clock reads the time only when the loop calls it: if data is the bottleneck, a part of a
    step's time may be attributed to the next step. Sums and means are exact.
    """

    def __init__(
        self, *, now: Callable[[], float] = time.perf_counter, wait: Callable[[Arrays], Arrays] = jax.block_until_ready
    ) -> None:
        """Starts the clock.

        Args:
          now: a function that returns a monotonic time in seconds.
          wait: a function that blocks until a step's result is ready.
        """
        self._now = now
        self._wait = wait
        self._in_flight: collections.deque[tuple[int, Arrays]] = collections.deque()
        self._last_completion_seconds = now()
        self._waited_seconds = 0.0
        self._host_seconds = self._device_wait_seconds = 0.0  # since the last averages
        self._free_since_seconds = self._last_completion_seconds
        self._unaveraged: list[CompletedStep] = []
        self._is_first = True

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time of the `with` block as waiting for data."""
        start_seconds = self._now()
        try:
            yield
        finally:
            seconds = self._now() - start_seconds
            self._waited_seconds += seconds
            self._free_since_seconds += seconds

    def dispatching(self) -> None:
        """Adds the host's work before a step to the host time. Call this method before each step is dispatched.

        The host's work is the time since the clock last waited for a step, without the wait for data.
        """
        self._host_seconds += self._now() - self._free_since_seconds

    def dispatched(self, step: int, result: Arrays) -> list[CompletedStep]:
        """Records that a step was dispatched, and waits for the previous step.

        After the first step of the process, waits for that step itself.

        Args:
          step: the number of the step.
          result: the result of the step: arrays that are not donated to a later step (not the state).

        Returns:
          The steps that have completed since the last call, oldest first.
        """
        self._in_flight.append((step, result))
        if self._is_first:
            return self._complete(0)
        start_seconds = self._now()
        completed = self._complete(1)
        self._device_wait_seconds += self._now() - start_seconds
        return completed

    def drain(self) -> list[CompletedStep]:
        """Waits for every step in flight and returns these steps, oldest first.

        Call this method before an evaluation or `pause`, and at the end of the loop.
        """
        return self._complete(0)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of the `with` block (an evaluation, a save) from step times. Call `drain` before it.

        A step in flight would run during the block, and its time could not be measured.
        """
        assert not self._in_flight, "call drain before pause"
        start_seconds, waited_seconds = self._now(), self._waited_seconds
        free_since_seconds = self._free_since_seconds
        try:
            yield
        finally:
            paused_seconds = self._now() - start_seconds
            self._last_completion_seconds += paused_seconds
            self._free_since_seconds = free_since_seconds + paused_seconds
            self._waited_seconds = waited_seconds

    def averages(self, units_per_step: int, unit: str = "tokens") -> dict[str, float]:
        """Returns means over the steps that have completed since the last call, without the first step.

        Args:
          units_per_step: the number of units (such as tokens) in a global batch.
          unit: the name of the unit, for the key of the rate.

        Returns:
          If a step other than the first completed: step_seconds, data_seconds, host_seconds (the host's work before a
          step), device_wait_seconds (how long the host then waited for the previous step), data_share (0 to 1) and
          tokens_per_second (with another unit: UNIT_per_second). In the call after the first step: first_step_seconds.
        """
        steps, self._unaveraged = self._unaveraged, []
        host_seconds, device_wait_seconds = self._host_seconds, self._device_wait_seconds
        self._host_seconds = self._device_wait_seconds = 0.0
        first = [step for step in steps if step.is_first]
        later = [step for step in steps if not step.is_first]
        values = {"first_step_seconds": first[0].step_seconds} if first else {}
        step_seconds = sum(step.step_seconds for step in later)
        data_seconds = sum(step.data_seconds for step in later)
        if step_seconds > 0:
            values |= {
                "step_seconds": step_seconds / len(later),
                "data_seconds": data_seconds / len(later),
                "host_seconds": host_seconds / len(later),
                "device_wait_seconds": device_wait_seconds / len(later),
                "data_share": data_seconds / step_seconds,
                f"{unit}_per_second": units_per_step * len(later) / step_seconds,
            }
        return values

    def _complete(self, num_left: int) -> list[CompletedStep]:
        completed = []
        while len(self._in_flight) > num_left:
            step, result = self._in_flight.popleft()
            self._wait(result)
            now_seconds = self._now()
            step_seconds = now_seconds - self._last_completion_seconds
            completed.append(CompletedStep(step, result, step_seconds, self._waited_seconds, self._is_first))
            self._last_completion_seconds, self._waited_seconds, self._is_first = now_seconds, 0.0, False
        self._free_since_seconds = self._now()
        # Averages need only the times; references to the results would keep device memory allocated until the next log
        # line.
        self._unaveraged += [dataclasses.replace(done, result=None) for done in completed]
        return completed


def scalars(result: Mapping[str, jax.Array]) -> dict[str, float]:
    """Fetches the scalars of a completed step's result in one transfer; returns {name: float}.

    An array [E] becomes E scalars `NAME/0`, `NAME/1` and so on. Arrays that span several processes must be fully
    replicated.

    Args:
      result: {name: array [] or [E]}.
    """
    found = dict[str, float]()
    for name, value in jax.device_get(dict(result)).items():
        if np.ndim(value):
            found |= {f"{name}/{number}": float(one) for number, one in enumerate(value)}
        else:
            found[name] = float(value)
    return found


def log_line(values: Mapping[str, float | None], num_steps: int = 0) -> str:
    """Formats a row of metrics as one readable line.

    Known names come first, in a fixed order and with their units; other metrics (of a user's model) follow with their
    name. The line omits None, values that another entry implies, and metrics of a single expert, layer or data source.

    Args:
      values: metric name -> value, a row of metrics.jsonl.
      num_steps: the number of steps of the complete run, for the text `step 3/10`; 0 omits it.
    """
    width = len(str(num_steps)) if num_steps else 1
    known: dict[str, Callable[[float], str]] = {
        "step": lambda value: f"step {value:{width}.0f}" + (f"/{num_steps}" if num_steps else ""),
        "loss": lambda value: f"loss {value:.4f}",
        "eval_loss": lambda value: f"eval loss {value:.4f}",
        "learning_rate": lambda value: f"learning rate {value:.3g}",
        "grad_norm": lambda value: f"grad norm {value:.3g}",
        "loss_scale": lambda value: f"loss scale {value:g}",
        "skipped_steps": lambda value: f"{value:.0f} skipped" if value else "",
        "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
        "step_seconds": lambda value: f"{value:.3g} s/step",
        "data_share": lambda value: f"data wait {value:.1%}",
        "first_step_seconds": lambda value: f"first step {value:.2f} s",
        "model_flops_per_second": _flops_text,
        "mfu": lambda value: f"MFU {value:.1%}",
    }
    said_already = {"tokens", "goodput", "processes", *IMPLIED}
    for name in values:
        if name.endswith("_per_second") and name not in known:  # throughput in another unit than tokens
            unit = name.removesuffix("_per_second")
            known[name] = functools.partial("{:,.0f} {unit}/s".format, unit=unit)
            said_already.add(unit)
    parts = [text(value) for name, text in known.items() if (value := values.get(name)) is not None]
    for name, value in values.items():
        is_said = name in known or name.partition("/")[0] in said_already
        if value is None or is_said or is_of_one(name):
            continue
        if name.startswith(LOSS_OF):
            parts.append(f"{name.removeprefix(LOSS_OF)} {value:.4f}")
        else:
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return "  ".join(part for part in parts if part)


def _flops_text(flops_per_second: float) -> str:
    scales = [(1e15, "P"), (1e12, "T"), (1e9, "G")]
    scale, prefix = next((pair for pair in scales if flops_per_second >= pair[0]), (1e6, "M"))
    return f"{flops_per_second / scale:.3g} {prefix}FLOP/s"
