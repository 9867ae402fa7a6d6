"""Proves that a schedule's table is correct, and computes its timelines, bubbles and peak memory. Uses no JAX."""

import dataclasses
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from meshtrain.errors import Problem, refusals, refuse
from meshtrain.pipeline.schedules import (
    KEY,
    Action,
    PipelineOptions,
    Schedule,
    chosen,
    dependencies,
    describe,
    leaves_stage_empty,
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The duration of each kind of action and of a transfer between neighbours: exact fractions in the same unit.

    Attributes:
      forward: the duration of the forward pass of one chunk.
      backward: the duration of the backward pass of one chunk.
      transfer: the time until the result of an action arrives at a neighbouring stage.
    """

    forward: Fraction = Fraction(1)
    backward: Fraction = Fraction(1)
    transfer: Fraction = Fraction(0)

    def of(self, action: Action) -> Fraction:
        """Returns the duration of an action."""
        return {"F": self.forward, "B": self.backward}[action.kind]


class Span(NamedTuple):
    """The time during which a stage runs one action; `start` and `end` are in the unit of `Costs`."""

    stage: int
    action: Action
    start: Fraction
    end: Fraction


def check(
    options: PipelineOptions, *, num_stages: int, num_layers: int, num_microbatches: int, key: str = "model.num_layers"
) -> list[Problem]:
    """Returns an error line for each reason why the executor cannot run a configuration; empty if it can.

    These checks compare several options. `options.problems` checks each option by itself.

    Args:
      options: the pipeline options; each value is already within its bounds.
      num_stages: size of the mesh's pipeline axis, above 1.
      num_layers: layers of the model.
      num_microbatches: microbatches in a step.
      key: name of the option that sets the number of layers, for the error.
    """
    lines = _without_layers(key, num_layers, num_stages, options.num_chunks)
    return lines + refusals(lambda: prove(chosen(options, num_stages=num_stages, num_microbatches=num_microbatches)))


def _without_layers(key: str, num_layers: int, num_stages: int, num_chunks: int) -> list[Problem]:
    """Returns an error line if a stage has no layers, or if the last chunk of every stage has none; else an empty list.

    Args:
      key: name of the option that sets the number of layers, for the error.
      num_layers: layers of the model.
      num_stages: size of the mesh's pipeline axis.
      num_chunks: chunks of layers on each stage.
    """
    num_all = num_stages * num_chunks
    if num_layers >= num_all or not leaves_stage_empty(num_layers, num_stages, num_chunks):
        return []
    least = num_all - num_stages + 1 if num_chunks > 1 else num_all
    return [
        Problem(
            key,
            got=(
                f"{num_layers}, so that a {'chunk' if num_chunks > 1 else 'stage'} of mesh.pipeline {num_stages} x "
                f"pipeline.num_chunks {num_chunks} has no layer"
            ),
            allowed=f"at least {least}",
            nearest=least,
            depends_on=["mesh.pipeline", "pipeline.num_chunks"],
        )
    ]


def prove(schedule: Schedule) -> None:
    """Raises UserError unless each microbatch passes each chunk once forward and once backward, in a legal order.

    An action may only depend on actions of *earlier rows*, because results are sent to the neighbour between two rows.
    All actions of a row are of one kind: stages advance together, and would wait for the slower kind.
    """
    refuse(_incomplete(schedule) or _dependency_problem(schedule) or _mixed_row_problem(schedule))


def _incomplete(schedule: Schedule) -> list[Problem]:
    """Returns an error line for the first action that is missing, repeated, or has a microbatch or chunk out of range.

    The list is empty if every stage has exactly one forward and one backward action for each microbatch and chunk.
    """
    microbatches, chunks = schedule.num_microbatches, schedule.num_chunks
    for stage in range(schedule.num_stages):
        seen = Counter(row[stage] for row in schedule.rows if row[stage] is not None)
        # A generator: the first missing action ends the search.
        for action in (Action(k, m, c) for m in range(microbatches) for c in range(chunks) for k in ("F", "B")):
            times = seen.pop(action, 0)
            if times != 1:
                what = describe(action, chunks)
                often = f"occurs {times} times" if times else "is missing"
                return [
                    Problem(
                        KEY,
                        got=f"'{schedule.name}', where {what} {often} on stage {stage}",
                        allowed="exactly once",
                        nearest="once" if times else "a row with it",
                    )
                ]
        for extra in seen:
            return [
                Problem(
                    KEY,
                    got=f"'{schedule.name}', where {describe(extra, 2)} occurs on stage {stage}",
                    allowed=f"microbatches 0 to {microbatches - 1}, chunks 0 to {chunks - 1}",
                    nearest="leave it out",
                )
            ]
    return []


def _dependency_problem(schedule: Schedule) -> list[Problem]:
    """Returns an error line for the first action that needs a result of the same row or a later row, else [].

    The line also describes the deadlock, if there is one on asynchronous stages. These are stages that run their
    actions in the schedule's order, but do not wait for each other at the end of a row.
    """
    stages, chunks = schedule.num_stages, schedule.num_chunks
    row_of = {
        (stage, action): row for row, cells in enumerate(schedule.rows) for stage, action in enumerate(cells) if action
    }
    for row, cells in enumerate(schedule.rows):
        for stage, action in enumerate(cells):
            for needed in dependencies(action, stage, stages, chunks) if action else []:
                if row_of[needed] >= row:
                    where = f"{describe(action, chunks)} in row {row} on stage {stage}"
                    source = f"{describe(needed[1], chunks)} of stage {needed[0]}, which is in row {row_of[needed]}"
                    problem = Problem(
                        KEY,
                        got=f"'{schedule.name}', where {where} needs {source}",
                        allowed="needed actions in earlier rows",
                        nearest=f"a row after {row_of[needed]}",
                    )
                    deadlock = _deadlock(schedule)
                    return [problem.with_parts(fix=f"{problem.fix}; {deadlock}") if deadlock else problem]
    return []


def _mixed_row_problem(schedule: Schedule) -> list[Problem]:
    """Returns an error line for the first row with both forward and backward actions; empty if there is none."""
    for index, row in enumerate(schedule.rows):
        cells = {a.kind: f"{describe(a, schedule.num_chunks)} on stage {s}" for s, a in enumerate(row) if a}
        if len(cells) > 1:
            return [
                Problem(
                    KEY,
                    got=f"'{schedule.name}', which mixes {' and '.join(cells.values())} in row {index}",
                    allowed="rows of one kind, because all stages advance together and would wait for the slower kind",
                    nearest="a separate row for each kind",
                )
            ]
    return []


def _deadlock(schedule: Schedule) -> str:
    """Returns a text about the deadlock of asynchronous stages that run a schedule; '' if they do not deadlock.

    The text lists the action that each stage cannot start, and the unfinished action that it waits for.

    In a deadlock every stage has an unfinished action: a stage that has run its last backward pass has already produced
    all inputs of earlier stages.
    """
    spans, left = _replay(schedule, Costs())
    if not any(left):
        return ""
    finished = {(span.stage, span.action) for span in spans}
    waits = []
    for stage, actions in enumerate(left):
        needs = dependencies(actions[0], stage, schedule.num_stages, schedule.num_chunks)
        place, needed = next(key for key in needs if key not in finished)
        waits.append(
            f"stage {stage} waits in {describe(actions[0], schedule.num_chunks)} for "
            f"{describe(needed, schedule.num_chunks)} of stage {place}"
        )
    return f"deadlock: {', '.join(waits)}"


def _replay(schedule: Schedule, costs: Costs) -> tuple[list[Span], list[list[Action]]]:
    """Simulates asynchronous stages: each stage starts its next action when the action's inputs have arrived.

    Args:
      schedule: the schedule, which need not be proven.
      costs: the durations of actions and transfers.

    Returns:
      The spans of all actions that run; and for each stage a list of the actions that never start because of a
      deadlock. The next action of the stage is the first of its list.
    """
    stages, chunks = schedule.num_stages, schedule.num_chunks
    left = [[row[stage] for row in reversed(schedule.rows) if row[stage]] for stage in range(stages)]
    ends, free, spans = dict[tuple[int, Action], Fraction](), [Fraction(0)] * stages, list[Span]()
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(left):
            while actions:
                action = actions[-1]
                assert action is not None
                needs = dependencies(action, stage, stages, chunks)
                if not all(key in ends for key in needs):
                    break
                arrivals = [ends[key] + (costs.transfer if key[0] != stage else 0) for key in needs]
                start = max([free[stage], *arrivals])
                ends[stage, action] = free[stage] = start + costs.of(action)
                spans.append(Span(stage, action, start, free[stage]))
                actions.pop()
                progress = True
    return spans, [[action for action in reversed(actions) if action] for actions in left]


def run_freely(schedule: Schedule, costs: Costs) -> list[Span]:
    """Returns the span of each action of a proven schedule on asynchronous stages.

    An action starts when its stage is free and its inputs have arrived; stages do not wait for the end of a row.
    """
    spans, left = _replay(schedule, costs)
    assert not any(left), "only proven tables have a timeline"
    return spans


def run_in_step(schedule: Schedule, costs: Costs) -> list[Span]:
    """Returns the span of each action of a proven schedule on synchronous stages, which start each row together.

    A row takes as long as its slowest action, plus the time of one transfer. A row without actions takes no time. A
    program that ends each row with a permute between neighbours runs like this.
    """
    spans, now = list[Span](), Fraction(0)
    for row in schedule.rows:
        busy = [(stage, action) for stage, action in enumerate(row) if action]
        spans += [Span(stage, action, now, now + costs.of(action)) for stage, action in busy]
        now += max((costs.of(action) for _, action in busy), default=Fraction(0))
        now += costs.transfer if busy else 0
    return spans


def bubble_fraction(spans: list[Span], num_stages: int) -> Fraction:
    """Returns the bubble fraction: the share of time in which stages idle, averaged over stages, as an exact fraction.

    The time is counted from 0 to the end of the last action. The fraction is (S - 1) / (M + S - 1) for gpipe on S
    stages with M microbatches:

    >>> from meshtrain.pipeline.schedules import build
    >>> schedule = build("gpipe", num_stages=4, num_microbatches=8)
    >>> bubble_fraction(run_freely(schedule, Costs()), num_stages=4)
    Fraction(3, 11)
    """
    makespan = max(span.end for span in spans)
    work = sum((span.end - span.start for span in spans), Fraction(0))
    return 1 - work / (num_stages * makespan)


def bubbles(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """Returns the bubble fractions of a proven schedule: (with asynchronous stages, with synchronous stages)."""
    free, step = (bubble_fraction(run(schedule, costs), schedule.num_stages) for run in (run_freely, run_in_step))
    return float(free), float(step)


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Returns, for each stage, the largest number of (microbatch, chunk) pairs in flight.

    A pair is in flight from the start of its forward pass to the end of its backward pass. The number depends only on
    the order of a stage's actions, not on their timing.
    """
    peaks = [0] * schedule.num_stages
    for stage in range(schedule.num_stages):
        held = 0
        for row in schedule.rows:
            action = row[stage]
            kind = action.kind if action else ""
            held += kind == "F"
            peaks[stage] = max(peaks[stage], held)
            held -= kind == "B"
    return peaks
