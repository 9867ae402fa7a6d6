from fractions import Fraction

import pytest

from meshtrain.pipeline.check import Costs, bubble_fraction, peak_in_flight, prove, run_freely, run_in_step
from meshtrain.pipeline.schedules import Action, build, describe

pytestmark = pytest.mark.quick

FULL = ("1f1b", "gpipe", "interleaved_1f1b")  # whose rows are full but at their start and end
SHAPES = [(1, 1), (1, 5), (2, 2), (2, 8), (3, 3), (4, 4), (4, 8), (4, 16), (5, 10), (8, 8), (8, 32)]


def texts(schedule):
    return [[describe(action, schedule.num_chunks) for action in row] for row in schedule.rows]


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("num_stages, num_microbatches", SHAPES)
def test_bubble_equals_the_closed_form(name, num_stages, num_microbatches):
    for num_chunks in (1, 2, 3) if name == "interleaved_1f1b" else (1,):
        schedule = build(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks)
        prove(schedule)
        closed_form = Fraction(num_stages - 1, num_chunks * num_microbatches + num_stages - 1)
        assert bubble_fraction(run_freely(schedule, Costs()), num_stages) == closed_form
        assert bubble_fraction(run_in_step(schedule, Costs()), num_stages) == closed_form


@pytest.mark.parametrize("name", FULL)
def test_one_kind_rows_keep_the_closed_form_at_every_cost(name):
    num_chunks = 2 if name == "interleaved_1f1b" else 1
    schedule = build(name, num_stages=4, num_microbatches=16, num_chunks=num_chunks)
    costs = Costs(forward=Fraction(1), backward=Fraction(3))
    assert bubble_fraction(run_freely(schedule, costs), 4) == Fraction(3, 16 * num_chunks + 3)
    assert bubble_fraction(run_in_step(schedule, costs), 4) == Fraction(3, 16 * num_chunks + 3)


@pytest.mark.parametrize("num_stages, num_microbatches", SHAPES)
def test_peak_in_flight_is_the_theory_s(num_stages, num_microbatches):
    def peaks(name, num_chunks=1):
        numbers = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
        return peak_in_flight(build(name, **numbers))

    stages = range(num_stages)
    assert peaks("gpipe") == [num_microbatches] * num_stages
    for num_chunks in (1, 2, 3):
        aligned = [min(num_chunks * num_stages + num_stages - 1 - 2 * s, num_chunks * num_microbatches) for s in stages]
        assert peaks("interleaved_1f1b", num_chunks) == aligned


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fewer_microbatches_than_stages_are_legal_where_no_schedule_needs_them(name, num_microbatches):
    schedule = build(name, num_stages=6, num_microbatches=num_microbatches)
    prove(schedule)
    assert bubble_fraction(run_freely(schedule, Costs()), 6) == Fraction(5, num_microbatches + 5)


def test_interleaved_is_this_table():
    assert texts(build("interleaved_1f1b", num_stages=2, num_microbatches=2, num_chunks=2)) == [
        ["F0.0", ""],
        ["F1.0", "F0.0"],
        ["F0.1", "F1.0"],
        ["F1.1", "F0.1"],
        ["", "B0.1"],
        ["", "F1.1"],
        ["B0.1", "B1.1"],
        ["B1.1", "B0.0"],
        ["B0.0", "B1.0"],
        ["B1.0", ""],
    ]


def test_interleaved_with_one_chunk_is_1f1b():
    numbers = {"num_stages": 4, "num_microbatches": 8}
    assert build("interleaved_1f1b", **numbers).rows == build("1f1b", **numbers).rows


def test_backwards_of_a_microbatch_follow_its_forward_on_the_last_stage():
    rows = build("1f1b", num_stages=4, num_microbatches=6).rows
    last = [row[-1] for row in rows if row[-1]]
    assert last == [Action(kind, m) for m in range(6) for kind in "FB"]
