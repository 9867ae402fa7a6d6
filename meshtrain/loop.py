"""Batches through the step: when to log, evaluate, save and stop. Knows no mesh and no model."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from meshtrain.launch.signals import interruptions
from meshtrain.launch.watchdog import Watchdog
from meshtrain.observe.goodput import Goodput
from meshtrain.observe.metrics import CompletedStep, StepClock, log_line, mfu, model_flops_per_second, scalars
from meshtrain.observe.profiler import Profiler
from meshtrain.observe.progress import Progress
from meshtrain.step import guard
from meshtrain.words.errors import Interrupted, TrainingStopped


@dataclasses.dataclass(frozen=True)
class Plan:
    """When things happen and what a step is worth.

    Attributes:
      num_steps: the step to stop after.
      log_every: steps between log lines.
      eval_every: steps between evaluations, 0 for one after the last step only.
      save_every: steps between saves, 0 for one after the last step only.
      max_skipped_in_a_row: steps that may go wrong one after the other.
      unit: what throughput counts: tokens, images, ...
      units_per_step: units in a global batch, padding included.
      flops_per_token: model FLOPs for one unit, 0 where unknown.
      num_devices: devices in the mesh.
      peak_flops_per_second: of one device in the compute dtype, None where unknown.
    """

    num_steps: int
    log_every: int
    eval_every: int
    save_every: int
    max_skipped_in_a_row: int
    unit: str
    units_per_step: int
    flops_per_token: float
    num_devices: int
    peak_flops_per_second: float | None


@dataclasses.dataclass(frozen=True)
class Actions:
    """What the loop calls.

    Attributes:
      train_step: (state, batch) -> (state, metrics).
      evaluate: state -> values such as `eval_loss`.
      save: (step, state) -> values to write; returns once the state may change.
      finish_saving: returns once what was saved lies on the disk, and raises where it does not.
      rate: (step, what an evaluation found) -> None: how good the save of a step is.
      write: (step, values) -> None, into the run's files.
      diagnose: (state, number) -> text: the first array that was no number (`guard.first_not_finite` gave the number)
        and the checkpoint to go back to.
    """

    train_step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]
    evaluate: Callable[[Any], Mapping[str, float]]
    save: Callable[[int, Any], Mapping[str, float]]
    finish_saving: Callable[[], None]
    rate: Callable[[int, Mapping[str, float]], None]
    write: Callable[[int, Mapping[str, float | None]], None]
    diagnose: Callable[[Any, int], str]


@dataclasses.dataclass(frozen=True)
class Observers:
    """Who is told of steps.

    Attributes:
      progress: the bar and the log lines.
      profiler: traces the steps it was told to.
      watchdog: ends the process where no step comes.
      goodput: adds up what steps took.
    """

    progress: Progress
    profiler: Profiler
    watchdog: Watchdog
    goodput: Goodput


def run(
    state: Any, start_step: int, batches: Iterator[Any], plan: Plan, actions: Actions, observers: Observers
) -> tuple[Any, dict[str, float | None]]:
    """Trains from `start_step` to `plan.num_steps`.

    Args:
      state: the state after `start_step` updates; its buffers are given away.
      start_step: updates done before.
      batches: the global batches from `start_step` on.
      plan: when things happen.
      actions: what is called.
      observers: who is told of steps.

    Returns:
      The last state, and the values last logged and evaluated; where no step was left, only the latter.

    Raises:
      TrainingStopped: more steps in a row than the plan allows went wrong, or the last one did.
      Interrupted: SIGTERM or SIGINT arrived; the state is saved.
      SaveFailed: the last save could not be written.
    """
    clock, latest = StepClock(), dict[str, float | None]()
    tell = functools.partial(report, plan, actions, observers.progress, latest)
    note = functools.partial(log, clock, plan, observers, tell)
    with interruptions() as interrupted:
        for step in range(start_step + 1, plan.num_steps + 1):
            with clock.waiting_for_data():
                batch = next(batches)
            observers.profiler.before(step)
            state, metrics = actions.train_step(state, batch)
            observers.profiler.after(step, metrics)
            look = functools.partial(look_at, plan, actions, state)
            note(clock.dispatched(step, metrics), look)
            is_last = step == plan.num_steps
            stops = interrupted(step) and not is_last  # whoever sent the signal may not wait for an evaluation
            evaluates = is_last or (due(step, plan.eval_every) and not stops)
            saves = is_last or stops or due(step, plan.save_every)
            if not (evaluates or saves):
                continue
            note(clock.drain(), look)
            # Weights that only make steps go wrong must not replace the good ones that are kept.
            is_in_doubt = not (is_last or stops) and int(metrics[guard.IN_A_ROW]) > 0
            with clock.pause(), observers.watchdog.patient():
                if saves and not is_in_doubt:
                    actions.write(step, actions.save(step, state))
                if evaluates:
                    tell(step, found := actions.evaluate(state))
                    actions.rate(step, found)
                if is_last or stops:
                    actions.finish_saving()
            if stops:
                raise Interrupted(f"saved at step {step} of {plan.num_steps}; the same command goes on from there")
    if start_step == plan.num_steps:
        latest.update(actions.evaluate(state))
    return state, latest


def log(
    clock: StepClock,
    plan: Plan,
    observers: Observers,
    tell: Callable[[int, Mapping[str, float | None]], None],
    completed: Iterable[CompletedStep],
    look: Callable[[CompletedStep], str],
) -> None:
    """Moves the bar over completed steps, and tells of those that are to be logged.

    Raises:
      TrainingStopped: `look` has found a reason in one of these, which is told of before.
    """
    for done in completed:
        observers.progress.advance_to(done.step)
        observers.watchdog.completed(done.step, None if done.is_first else done.step_seconds)
        observers.goodput.add(0.0 if done.is_first else done.step_seconds)
        reason = look(done)
        if reason or done.is_first or due(done.step, plan.log_every) or done.step == plan.num_steps:
            tell(done.step, logged(done, clock, plan) | observers.goodput.values())
        if reason:
            raise TrainingStopped(reason)


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
    for name in (guard.IN_A_ROW, guard.FIRST_NOT_FINITE):
        del values[name]
    values[plan.unit] = done.step * plan.units_per_step
    values |= clock.averages(plan.units_per_step, plan.unit)
    rate = values.get(f"{plan.unit}_per_second")
    if rate and plan.flops_per_token:
        flops = model_flops_per_second(plan.flops_per_token, rate)
        values["model_flops_per_second"] = flops
        values["mfu"] = mfu(flops, plan.num_devices, plan.peak_flops_per_second)
    return values


def look_at(plan: Plan, actions: Actions, state: Any, done: CompletedStep) -> str:
    """Returns why training cannot go on after a completed step, or an empty string. Reading a counter is all it costs.

    Args:
      plan: how much is allowed to go wrong.
      actions: whom to ask what was wrong.
      state: the newest state, whose weights are those of the last good step.
      done: the step.
    """
    in_a_row = int(done.result[guard.IN_A_ROW])
    if in_a_row == 0:
        return ""
    values = scalars(done.result)
    loss, norm = values["loss"], values["grad_norm"]
    ends_badly = done.step == plan.num_steps and not (math.isfinite(loss) and math.isfinite(norm))
    if in_a_row <= plan.max_skipped_in_a_row and not ends_badly:
        return ""
    found = actions.diagnose(state, int(values[guard.FIRST_NOT_FINITE]))
    allowed = f"guard.max_skipped_in_a_row = {plan.max_skipped_in_a_row}{', the last not' if ends_badly else ''}"
    return (
        f"loss is {loss} and the gradient norm {norm} at step {done.step}; {in_a_row} steps in a row were skipped "
        f"(allowed: {allowed}); {found}; try a lower learning rate"
    )
