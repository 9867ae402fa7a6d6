"""The training loop: step, log, evaluate, save, stop.

The loop has no access to the mesh or the model: the functions that it calls are arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax

from meshtrain.errors import Interrupted, TrainingStopped, UserError
from meshtrain.launch import peers
from meshtrain.launch.signals import interruptions
from meshtrain.launch.watchdog import Watchdog
from meshtrain.models.metrics import EXPERT_PARTS
from meshtrain.observe.goodput import Goodput
from meshtrain.observe.process_times import OwnTimes
from meshtrain.observe.profiler import Profiler
from meshtrain.observe.progress import Progress
from meshtrain.observe.step_times import CompletedStep, StepClock, log_line, scalars
from meshtrain.observe.throughput import Throughput, Uneven
from meshtrain.step import guard
from meshtrain.step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The steps at which the loop logs, evaluates, saves and stops.

    Attributes:
      num_steps: the last step.
      log_every: steps between rows of metrics.
      eval_every: steps between evaluations; 0: evaluate after the last step only.
      save_every: steps between saves; 0: save after the last step only.
      max_skipped_in_a_row: the number of consecutive steps that may be skipped; training stops if a further step is
        skipped.
      can_stop: whether `Actions.reason` may end the run early. Then a run that resumes at a step with a due evaluation
        evaluates first, because the saved history of evaluations may lack this evaluation.
    """

    num_steps: int
    log_every: int
    eval_every: int
    save_every: int
    max_skipped_in_a_row: int
    can_stop: bool = False


@dataclasses.dataclass(frozen=True)
class Actions:
    """The functions that the loop calls.

    Attributes:
      train_step: (step, state, batch) -> (state, metrics); it returns before the devices have computed the step.
      evaluate: state -> values such as `eval_loss`.
      save: (step, state) -> values for the row of metrics; returns once the state's buffers may be overwritten.
      finish_saving: () -> None: waits until the last save is on disk; raises SaveFailed if it could not be written.
      rate: (step, values of the evaluation) -> None: records the values with the step's checkpoint.
      write: (step, values) -> None: writes a row of metrics into the run's files.
      diagnose: (state, number, layer) -> text that names the first non-finite array and the checkpoint to resume from;
        `number` is the index from `first_not_finite`.
      drawn: step -> {metric name: epochs or tokens consumed from a data source up to this step}.
      name: (number, layer) -> the name of the loss or gradient for which a step was skipped.
      reason: (step, values of the evaluation) -> the reason why the run ends at this step, the same in all processes;
        an empty text if the run continues.
      is_missing: step -> whether the evaluation at this step was due and has no row, because the process was
        interrupted before it.
      lost: () -> whether the run has to save and stop after this step, because one of the run's files was deleted.
    """

    train_step: Callable[[int, TrainState, Mapping[str, jax.Array]], tuple[TrainState, Mapping[str, jax.Array]]]
    evaluate: Callable[[TrainState], Mapping[str, float]]
    save: Callable[[int, TrainState], Mapping[str, float]]
    finish_saving: Callable[[], None]
    rate: Callable[[int, Mapping[str, float]], None]
    write: Callable[[int, Mapping[str, float | None]], None]
    diagnose: Callable[[TrainState, int, int], str]
    drawn: Callable[[int], dict[str, float]] = lambda step: {}
    name: Callable[[int, int], str] = lambda number, layer: f"array {number}"
    reason: Callable[[int, Mapping[str, float]], str] = lambda step, values: ""
    is_missing: Callable[[int], bool] = lambda step: False
    lost: Callable[[], bool] = bool


@dataclasses.dataclass(frozen=True)
class Observers:
    """Objects that observe the steps.

    Attributes:
      progress: the bar and the log lines on the terminal.
      profiler: traces the steps that the user named.
      watchdog: ends the process if no step completes in time.
      goodput: adds up the time of the steps.
      own_times: compares the step times of all processes and finds a slow process; None for a single process.
    """

    progress: Progress
    profiler: Profiler
    watchdog: Watchdog
    goodput: Goodput
    own_times: OwnTimes | None = None


def run(
    state: TrainState,
    start_step: int,
    batches: Iterator[Mapping[str, jax.Array]],
    when: Timetable,
    throughput: Throughput,
    actions: Actions,
    observers: Observers,
) -> tuple[TrainState, dict[str, float | None]]:
    """Runs the steps to the end of the run; returns the last state, and the values of the last row and evaluation.

    Args:
      state: the state after `start_step` steps; its buffers are donated, so the caller cannot use it afterwards.
      start_step: the number of steps already done.
      batches: yields the global batch of each step after `start_step`, in order.
      when: the steps at which the loop logs, evaluates, saves and stops.
      throughput: computes the metrics of speed in each row.
      actions: the functions that the loop calls; `reason` may end the run after an evaluation.
      observers: objects that observe the steps.

    Raises:
      TrainingStopped: more consecutive steps were skipped than the timetable allows, or the last step was not finite.
      Interrupted: SIGTERM or SIGINT arrived, or a file of the run was deleted; the state is saved.
      SaveFailed: the last save could not be written.
    """
    log = Log(when, throughput, actions, observers)
    reason = evaluate_first(start_step, state, log)
    with interruptions(peers.make_stop(start_step)) as interrupted:
        for step in range(start_step + 1, when.num_steps + 1) if not reason else ():
            state, metrics = dispatch(step, state, batches, log)
            log.completed(log.clock.dispatched(step, metrics), state)  # the previous step; this one is still in flight

            is_last = step == when.num_steps
            stops = (interrupted(step) or actions.lost()) and not is_last
            evaluates = is_last or (due(step, when.eval_every) and not stops)  # a signal may leave little time
            saves = is_last or stops or due(step, when.save_every)
            if not (evaluates or saves):
                continue
            log.completed(log.clock.drain(), state)
            with log.clock.pause(), observers.watchdog.longer_limit():
                # A save between skipped steps could delete the last good checkpoint.
                if saves and (is_last or stops or not num_skipped_in_a_row(metrics)):
                    actions.write(step, actions.save(step, state))
                if evaluates:
                    values = actions.evaluate(state)
                    log.row(step, values)
                    actions.rate(step, values)
                    reason = "" if is_last else actions.reason(step, values)
                if reason:
                    actions.write(step, actions.save(step, state))
                if is_last or stops or reason:
                    actions.finish_saving()
            if stops:
                raise Interrupted(f"saved at step {step} of {when.num_steps}; the same command resumes from there")
            if reason:
                break
    if reason:
        observers.progress.line(reason)
    return state, log.latest


def evaluate_first(step: int, state: TrainState, log: "Log") -> str:
    """Evaluates the state from which a run resumes, if the evaluation of this step was due and its result is needed.

    The result is needed in three cases: its row is missing in the metrics, the step is the last, or the result may end
    the run (early stopping). A missing row is written, and its values are recorded with the checkpoint now, before the
    next save deletes a checkpoint.

    Args:
      step: the step from which the run resumes; 0 for a new run.
      state: the state after this step.
      log: writes the rows of metrics.

    Returns:
      The reason why the run ends at this step; an empty text if it continues.
    """
    is_due = step > 0 and (step == log.when.num_steps or due(step, log.when.eval_every))
    is_missing = is_due and log.actions.is_missing(step)
    if not (is_missing or step == log.when.num_steps or (is_due and log.when.can_stop)):
        return ""
    log.latest.update(values := log.actions.evaluate(state))
    if is_missing:
        log.row(step, values)
        log.actions.rate(step, values)
    return log.actions.reason(step, values)


def save_before(step: int, state: TrainState, log: "Log") -> None:
    """Saves the state before a step whose batch cannot be read, and prints a line about the save.

    Args:
      step: the step whose batch cannot be read.
      state: the state after the previous step.
      log: writes the rows of metrics.
    """
    log.completed(log.clock.drain(), state)
    with log.clock.pause(), log.observers.watchdog.longer_limit():
        log.actions.write(step - 1, log.actions.save(step - 1, state))
        log.actions.finish_saving()
    log.observers.progress.line(f"saved at step {step - 1}: the batch of step {step} cannot be read")


def dispatch(
    step: int, state: TrainState, batches: Iterator[Mapping[str, jax.Array]], log: "Log"
) -> tuple[TrainState, Mapping[str, jax.Array]]:
    """Takes the next batch and starts a step; returns the new state and the metrics, which the devices compute later.

    Raises:
      UserError, OSError: the batch cannot be read; a single process saves the state first.
    """
    actions, observers = log.actions, log.observers
    try:
        with log.clock.waiting_for_data():
            batch = next(batches)
    except (UserError, OSError):
        if step > 1 and peers.count() == 1:  # all processes save together, and the others may have a batch
            save_before(step, state, log)
        raise
    observers.profiler.before(step)
    log.clock.dispatching()
    state, metrics = actions.train_step(step, state, batch)
    observers.profiler.after(step, metrics)
    if observers.own_times and due(step, log.when.log_every):
        observers.own_times.probe(metrics["grad_norm"])
    return state, metrics


@dataclasses.dataclass
class Log:
    """Writes rows of metrics to the run's files and to the terminal.

    Attributes:
      when: the steps at which a row is due.
      throughput: computes the metrics of speed.
      actions: the functions that the loop calls.
      observers: objects that observe the steps.
      clock: measures the times of steps.
      latest: metric name -> value in the last row and the last evaluation; `run` returns it.
      uneven: warns if the load of experts is uneven for a long time.
    """

    when: Timetable
    throughput: Throughput
    actions: Actions
    observers: Observers
    clock: StepClock = dataclasses.field(default_factory=StepClock)
    latest: dict[str, float | None] = dataclasses.field(default_factory=dict)
    uneven: Uneven = dataclasses.field(default_factory=lambda: Uneven(EXPERT_PARTS))

    def completed(self, steps: Iterable[CompletedStep], state: TrainState) -> None:
        """Records completed steps, and writes a row of metrics if one is due.

        The first step, the last step, and a step that stops training always have a row.

        Args:
          steps: the completed steps, in the order of time.
          state: the newest state, with the weights after the last good step: skipped steps do not change them.

        Raises:
          TrainingStopped: the guard has skipped too many consecutive steps. The message contains the values of the
            step, the cause, and the last good checkpoint.
        """
        for done in steps:
            self._complete(done, state)

    def _complete(self, done: CompletedStep, state: TrainState) -> None:
        progress, is_fatal = self.observers.progress, too_many_skipped(done, self.when)
        progress.advance_to(done.step)
        self.observers.watchdog.completed(done.step, None if done.is_first else done.step_seconds)
        self.observers.goodput.add(0.0 if done.is_first else done.step_seconds)
        is_due = due(done.step, self.when.log_every) or done.is_first or done.step == self.when.num_steps
        if is_due or is_fatal:
            of_guard = (guard.IN_A_ROW, guard.FIRST_NOT_FINITE, guard.ITS_LAYER)
            values: dict[str, float | None] = {
                name: value for name, value in scalars(done.result).items() if name not in of_guard
            }
            values |= self.throughput.since_last_row(done.step, self.clock) | self.actions.drawn(done.step)
            if self.observers.own_times:
                values |= self.observers.own_times.exchange(done.step, values, progress.line)
            self.row(done.step, values | self.observers.goodput.values())
            if line := self.uneven.line(done.step, values):
                progress.line(line)
        if num_skipped_in_a_row(done.result):
            first = self.actions.name(*first_not_finite(done))
            progress.line(f"step {done.step} was skipped; first array that is not finite: {first}")
        if is_fatal:
            last, in_a_row = scalars(done.result), num_skipped_in_a_row(done.result)
            allowed = f"guard.max_skipped_in_a_row = {self.when.max_skipped_in_a_row}"
            allowed += ", but not the last step" if ends_badly(done, self.when) else ""
            raise TrainingStopped(
                f"loss is {last['loss']} and the gradient norm {last['grad_norm']} at step {done.step}; "
                f"{in_a_row} steps in a row were skipped (allowed: {allowed}); "
                f"{self.actions.diagnose(state, *first_not_finite(done))}; try a lower learning rate"
            )

    def row(self, step: int, values: Mapping[str, float | None]) -> None:
        """Writes a step's row of metrics (name -> value) to the run's files, and prints it as a line."""
        self.latest.update(values)
        self.actions.write(step, values)
        self.observers.progress.line(log_line({"step": step, **values}, self.when.num_steps))


def due(step: int, every: int) -> bool:
    """Returns whether `step` is a multiple of `every`; false if `every` is 0."""
    return every > 0 and step % every == 0


def num_skipped_in_a_row(metrics: Mapping[str, jax.Array]) -> int:
    """Returns the number of consecutive steps that the guard has skipped, up to and including a step.

    Args:
      metrics: the metrics of the step, which may still be in progress; the function waits for it.
    """
    return int(metrics[guard.IN_A_ROW])


def too_many_skipped(done: CompletedStep, when: Timetable) -> bool:
    """Returns whether training stops after the step `done`, because of too many consecutive skips, or a bad last step.

    A last step is bad if its loss or gradient norm is not finite.
    """
    num_skipped = num_skipped_in_a_row(done.result)
    if num_skipped == 0:  # the usual case, in which only this counter is read
        return False
    return num_skipped > when.max_skipped_in_a_row or ends_badly(done, when)


def first_not_finite(done: CompletedStep) -> tuple[int, int]:
    """Returns the index and the layer of the first non-finite value of a skipped step, for `guard.skip_reason`.

    The index is 0 for the loss, n + 1 for the gradient of parameter n, and negative for other causes. The layer is -1
    if it is unknown.
    """
    values = scalars(done.result)
    layer = values[guard.ITS_LAYER] if guard.ITS_LAYER in values else -1
    return int(values[guard.FIRST_NOT_FINITE]), int(layer)


def ends_badly(done: CompletedStep, when: Timetable) -> bool:
    """Returns whether a completed step is the run's last step and its loss or gradient norm is not finite."""
    values = scalars(done.result)
    return done.step == when.num_steps and not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]))
