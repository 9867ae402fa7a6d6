import dataclasses
import itertools
import random
from fractions import Fraction

import pytest

from meshtrain.errors import UserError
from meshtrain.pipeline.check import (
    Costs,
    bubble_fraction,
    check,
    peak_in_flight,
    prove,
    run_freely,
    run_in_step,
)
from meshtrain.pipeline.schedules import NAMES, Action, PipelineOptions, Schedule, build

pytestmark = pytest.mark.quick

F0, F1, B0, B1 = Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)


def table(*rows, num_microbatches=1, num_chunks=1):
    return Schedule("mine", len(rows[0]), num_microbatches, num_chunks, tuple(rows))


def refusal(schedule):
    with pytest.raises(UserError) as caught:
        prove(schedule)
    assert len(caught.value.problems) == 1
    return str(caught.value)


def test_a_missing_action_is_named():
    assert "B0 is missing on stage 1" in refusal(table((F0, None), (None, F0), (B0, None)))


def test_a_doubled_action_is_named():
    assert "F0 occurs 2 times on stage 0" in refusal(table((F0, None), (F0, F0), (None, B0), (B0, None)))


def test_an_action_outside_the_numbers_is_named():
    extra = Action("F", 7)
    assert "F7.0 occurs on stage 0" in refusal(table((F0, None), (extra, F0), (None, B0), (B0, None)))


def test_the_first_violated_dependency_is_named():
    message = refusal(table((F0, F0), (None, B0), (B0, None)))
    assert "F0 in row 0 on stage 1 needs F0 of stage 0, which is in row 0" in message
    assert "nearest: a row after 0" in message
    assert "deadlock" not in message


def test_a_deadlock_names_what_each_stage_waits_for():
    # Stage 0 wants to finish microbatch 1 before it lets 1 go on; stage 1 answers in the other order.
    rows = [(F0, None), (B0, F1), (F1, F0), (None, B1), (B1, B0)]
    message = refusal(table(*rows, num_microbatches=2))
    assert "B0 in row 1 on stage 0 needs B0 of stage 1, which is in row 4" in message
    assert "deadlock: stage 0 waits in B0 for B0 of stage 1, stage 1 waits in F1 for F1 of stage 0" in message


def test_a_stage_that_waits_for_itself_is_named():
    rows = [(Action("F", 0), B0), (B0, F0)]
    assert "stage 1 waits in B0 for F0 of stage 1" in refusal(table(*rows))


@pytest.mark.parametrize("name", NAMES)
def test_shuffled_tables_are_refused_exactly_when_a_row_comes_too_early_or_mixes_kinds(name):
    """Swaps two cells of a stage and compares the proof with a plain walk along every microbatch's way."""
    num_chunks = 2 if name == "interleaved_1f1b" else 1
    good = build(name, num_stages=3, num_microbatches=3, num_chunks=num_chunks)
    draw, verdicts = random.Random(0), set()
    for _ in range(200):
        rows = [list(row) for row in good.rows]
        stage, a, b = draw.randrange(3), draw.randrange(len(rows)), draw.randrange(len(rows))
        rows[a][stage], rows[b][stage] = rows[b][stage], rows[a][stage]
        changed = good._replace(rows=tuple(tuple(row) for row in rows))
        legal = is_legal(changed)
        verdicts.add(legal)
        if legal:
            prove(changed)
        else:
            refusal(changed)
    assert verdicts == {True, False}


def is_legal(schedule):
    row_of = {(s, action): r for r, row in enumerate(schedule.rows) for s, action in enumerate(row) if action}
    places = [(s, c) for c in range(schedule.num_chunks) for s in range(schedule.num_stages)]
    for m in range(schedule.num_microbatches):
        way = [row_of[s, Action("F", m, c)] for s, c in places]
        way += [row_of[s, Action("B", m, c)] for s, c in reversed(places)]
        if any(later <= earlier for earlier, later in itertools.pairwise(way)):
            return False
    return all(len({action.kind for action in row if action}) <= 1 for row in schedule.rows)


def test_timelines_pay_for_transfers():
    schedule = build("gpipe", num_stages=2, num_microbatches=1)
    costs = Costs(forward=Fraction(1), backward=Fraction(2), transfer=Fraction(1, 2))
    free = run_freely(schedule, costs)
    assert [(span.stage, span.start, span.end) for span in free] == [
        (0, 0, 1),
        (1, Fraction(3, 2), Fraction(5, 2)),
        (1, Fraction(5, 2), Fraction(9, 2)),
        (0, 5, 7),
    ]
    assert bubble_fraction(free, 2) == 1 - Fraction(6, 14)
    assert [span.start for span in run_in_step(schedule, costs)] == [0, Fraction(3, 2), 3, Fraction(11, 2)]


def test_a_chunk_s_way_back_to_the_first_stage_is_a_transfer_and_one_stage_has_none():
    costs = Costs(transfer=Fraction(1))
    one = run_freely(build("interleaved_1f1b", num_stages=1, num_microbatches=1, num_chunks=2), costs)
    assert max(span.end for span in one) == 4
    two = run_freely(build("interleaved_1f1b", num_stages=2, num_microbatches=2, num_chunks=2), costs)
    starts = {(span.stage, span.action): span.start for span in two}
    assert starts[0, Action("F", 0, 1)] == starts[1, Action("F", 0, 0)] + 2


def test_in_step_a_stage_waits_for_rows_of_others():
    rows = table((F0, None), (None, F0), (None, B0), (F1, None), (None, F1), (B0, B1), (B1, None), num_microbatches=2)
    prove(rows)
    for run, starts in ((run_in_step, {F0: 1, B0: 2, F1: 6, B1: 7}), (run_freely, {F0: 1, B0: 2, F1: 5, B1: 6})):
        spans = run(rows, Costs(forward=Fraction(1), backward=Fraction(3)))
        assert {span.action: span.start for span in spans if span.stage == 1} == starts


def test_peaks_hold_until_the_backward():
    assert peak_in_flight(table((F0,), (B0,), (F1,), (B1,), num_microbatches=2)) == [1]
    assert peak_in_flight(table((F0,), (F1,), (B0,), (B1,), num_microbatches=2)) == [2]


def test_a_row_of_both_kinds_is_named():
    message = refusal(table((F0, None), (F1, F0), (None, B0), (B0, F1), (None, B1), (B1, None), num_microbatches=2))
    assert "mixes B0 on stage 0 and F1 on stage 1 in row 3" in message
    assert "allowed: rows of one kind" in message
    assert message.endswith("nearest: a separate row for each kind")


@pytest.mark.parametrize(
    "changes, numbers, words",
    [
        ({}, (4, 8, 4), []),
        ({"schedule": "gpipe"}, (4, 8, 1), []),
        ({"schedule": "interleaved_1f1b", "num_chunks": 2}, (4, 8, 4), []),
        ({}, (4, 10, 4), []),
        ({}, (4, 9, 4), []),
        ({}, (4, 1, 4), [["model.num_layers: got 1", "a stage", "allowed: at least 4; nearest: 4"]]),
        ({"schedule": "interleaved_1f1b", "num_chunks": 4}, (8, 94, 64), []),
        ({"schedule": "interleaved_1f1b", "num_chunks": 8}, (16, 126, 128), []),
        ({"schedule": "interleaved_1f1b", "num_chunks": 2}, (2, 5, 2), []),
        (
            {"schedule": "interleaved_1f1b", "num_chunks": 2},
            (4, 4, 6),
            [
                ["num_layers: got 4", "a chunk", "allowed: at least 5; nearest: 5"],
                ["num_microbatches: got 6", "nearest: 8"],
            ],
        ),
    ],
)
def test_configurations(changes, numbers, words):
    num_stages, num_layers, num_microbatches = numbers
    options = dataclasses.replace(PipelineOptions(), **changes)
    found = check(options, num_stages=num_stages, num_layers=num_layers, num_microbatches=num_microbatches)
    assert len(found) == len(words), found
    for line, parts in zip(found, words, strict=True):
        assert all(part in line for part in parts), line
