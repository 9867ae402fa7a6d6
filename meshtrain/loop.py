"""Batches through the step: when to log, evaluate, save and stop. Knows no mesh and no model."""

import contextlib
import dataclasses
import functools
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from meshtrain.errors import Interrupted, TrainingStopped
from meshtrain.observe.metrics import CompletedStep, StepClock, log_line, mfu, model_flops_per_second, scalars
from meshtrain.observe.profiler import Profiler
from meshtrain.observe.progress import Progress


@dataclasses.dataclass(frozen=True)
class Plan:
    """When things happen and what a step is worth.

    Attributes:
      num_steps: the step to stop after.
      log_every: steps between log lines.
      eval_every: steps between evaluations, 0 for one after the last step only.
      save_every: steps between saves, 0 for one after the last step only.
      num_tokens_per_step: targets and padding in a global batch.
      flops_per_token: model FLOPs, 0 where unknown.
      num_devices: devices in the mesh.
      peak_flops_per_second: of one device in the compute dtype, None where unknown.
    """

    num_steps: int
    log_every: int
    eval_every: int
    save_every: int
    num_tokens_per_step: int
    flops_per_token: float
    num_devices: int
    peak_flops_per_second: float | None


@dataclasses.dataclass(frozen=True)
class Actions:
    """What the loop calls.

    Attributes:
      train_step: (state, batch) -> (state, metrics).
      evaluate: state -> values such as `eval_loss`.
      save: (step, state) -> None; returns once the state may change.
      write: (step, values) -> None, into the run's files.
    """

    train_step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]
    evaluate: Callable[[Any], Mapping[str, float]]
    save: Callable[[int, Any], None]
    write: Callable[[int, Mapping[str, float | None]], None]


def run(
    state: Any,
    start_step: int,
    batches: Iterator[Any],
    plan: Plan,
    actions: Actions,
    progress: Progress,
    profiler: Profiler,
) -> tuple[Any, dict[str, float | None]]:
    """Trains from `start_step` to `plan.num_steps`.

    Args:
      state: the state after `start_step` updates; its buffers are given away.
      start_step: updates done before.
      batches: the global batches from `start_step` on.
      plan: when things happen.
      actions: what is called.
      progress: the bar and the log lines.
      profiler: traces the steps it was told to.

    Returns:
      The last state, and the values last logged and evaluated; where no step was left, only the latter.

    Raises:
      TrainingStopped: the loss of a step that is logged, evaluated or saved is not a number.
      Interrupted: SIGTERM or SIGINT arrived; the state is saved.
    """
    clock, latest = StepClock(), dict[str, float | None]()
    tell = functools.partial(report, plan, actions, progress, latest)
    with interruptions() as interrupted:
        for step in range(start_step + 1, plan.num_steps + 1):
            with clock.waiting_for_data():
                batch = next(batches)
            profiler.before(step)
            state, metrics = actions.train_step(state, batch)
            profiler.after(step, metrics)
            log(clock.dispatched(step, metrics), clock, plan, progress, tell)
            is_last = step == plan.num_steps
            stops = bool(interrupted) and not is_last  # whoever sent the signal may not wait for an evaluation
            evaluates = is_last or (due(step, plan.eval_every) and not stops)
            saves = is_last or stops or due(step, plan.save_every)
            if not (evaluates or saves):
                continue
            log(clock.drain(), clock, plan, progress, tell)
            refuse_nan(step, scalars(metrics))  # between log lines too: such a state must not replace a good one
            with clock.pause():
                if saves:
                    actions.save(step, state)
                if evaluates:
                    tell(step, actions.evaluate(state))
            if stops:
                raise Interrupted(f"saved at step {step} of {plan.num_steps}; the same command goes on from there")
    if start_step == plan.num_steps:
        latest.update(actions.evaluate(state))
    return state, latest


def log(
    completed: Iterable[CompletedStep],
    clock: StepClock,
    plan: Plan,
    progress: Progress,
    tell: Callable[[int, Mapping[str, float | None]], None],
) -> None:
    """Moves the bar over completed steps, and tells of those that are to be logged.

    Raises:
      TrainingStopped: the loss of one of these is not a number.
    """
    for done in completed:
        progress.advance_to(done.step)
        if done.is_first or due(done.step, plan.log_every) or done.step == plan.num_steps:
            values = logged(done, clock, plan)
            tell(done.step, values)
            refuse_nan(done.step, values)


def report(
    plan: Plan,
    actions: Actions,
    progress: Progress,
    latest: dict[str, float | None],
    step: int,
    values: Mapping[str, float | None],
) -> None:
    """Says values wherever somebody looks: in the run's files, on the terminal, and in what the run returns."""
    latest.update(values)
    actions.write(step, values)
    progress.line(log_line({"step": step, **values}, plan.num_steps))


def due(step: int, every: int) -> bool:
    """Returns whether something that happens every so many steps (0: never) happens now."""
    return every > 0 and step % every == 0


def logged(done: CompletedStep, clock: StepClock, plan: Plan) -> dict[str, float | None]:
    """Returns what a log line says of a completed step and of the times since the line before."""
    values: dict[str, float | None] = dict(scalars(done.result))
    values["tokens"] = done.step * plan.num_tokens_per_step
    values |= clock.averages(plan.num_tokens_per_step)
    rate = values.get("tokens_per_second")
    if rate and plan.flops_per_token:
        flops = model_flops_per_second(plan.flops_per_token, rate)
        values["model_flops_per_second"] = flops
        values["mfu"] = mfu(flops, plan.num_devices, plan.peak_flops_per_second)
    return values


def refuse_nan(step: int, values: Mapping[str, float | None]) -> None:
    """Stops a run whose loss or gradients are no longer numbers.

    Raises:
      TrainingStopped: naming the first value that is not finite.
    """
    for name in ("loss", "grad_norm"):
        value = values[name]
        if value is None or not math.isfinite(value):
            raise TrainingStopped(
                f"{name} is {value} at step {step}; the checkpoints before it stay; try a lower learning rate"
            )


@contextlib.contextmanager
def interruptions() -> Iterator[list[int]]:
    """Gives a list that SIGTERM and SIGINT add to, so that a step is never cut in two; a second SIGINT ends at once."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread, as in some notebooks: signals are somebody else's there
        yield arrived
        return
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
