import random

import pytest

from meshtrain.errors import UserError
from meshtrain.pipeline.program import Segment, Signature, executable, segments
from meshtrain.pipeline.schedules import Action, Schedule, build

CASES = [
    ("gpipe", 4, 16, 1),
    ("gpipe", 3, 1, 1),
    ("1f1b", 1, 3, 1),
    ("1f1b", 2, 2, 1),
    ("1f1b", 4, 16, 1),
    ("1f1b", 5, 3, 1),
    ("interleaved_1f1b", 2, 2, 3),
    ("interleaved_1f1b", 4, 8, 2),
    ("interleaved_1f1b", 4, 4, 4),
    ("interleaved_1f1b", 1, 3, 2),
]


def program_of(name, num_stages, num_microbatches, num_chunks=1):
    return executable(build(name, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks))


def late_table(num_microbatches=5):
    """One-kind rows drawn at random: activations and cotangents wait, microbatches overtake one another."""
    stages, rows, draw, done = 3, [], random.Random(1), {}
    while len(done) < 2 * stages * num_microbatches:
        kind, row = draw.choice("FB"), [None] * stages
        for stage in range(stages):
            for m in draw.sample(range(num_microbatches), num_microbatches):
                before = stage == 0 or ("F", stage - 1, m) in done
                if kind == "B":
                    before = ("F", stage, m) in done and (stage == stages - 1 or ("B", stage + 1, m) in done)
                if before and (kind, stage, m) not in done and draw.random() < 0.5:
                    row[stage] = Action(kind, m)
                    break
        done |= dict.fromkeys((kind, stage, action.microbatch) for stage, action in enumerate(row) if action)
        rows.append(tuple(row))
    return Schedule("late", stages, num_microbatches, 1, tuple(rows))


def check_by_acting_out(program):
    """Runs a program with names for arrays, as the executor does: every stage in every row, idle ones with garbage."""
    stages, chunks = program.schedule.num_stages, program.schedule.num_chunks
    inputs = [["garbage"] * (program.num_slots + 1) for _ in range(stages)]
    kept = [["garbage"] * (program.num_kept_slots + 1) for _ in range(stages)]
    outputs = [["garbage"] * (program.num_output_slots + 1) for _ in range(stages)]
    cotangents = [["garbage"] * (program.num_cotangent_slots + 1) for _ in range(stages)]
    inputs[0][0] = f"x{program.first_microbatch} into 0"
    losses, embedded, ran, leaving = [], [], 0, "nothing"

    def embedding_s_gradient(m):
        assert leaving == f"d{m} out of the first layer"
        embedded.append(m)

    for row, kind in enumerate(program.kinds):
        sent = []
        if program.cells.embed_backward_microbatch[row] >= 0:
            embedding_s_gradient(int(program.cells.embed_backward_microbatch[row]))
            leaving = "nothing"
        for stage in range(stages):
            m, c = int(program.cells.microbatch[row, stage]), int(program.cells.chunk[row, stage])
            active, virtual = program.cells.active[row, stage], c * stages + stage
            ran += bool(active)
            slot, output_slot = program.cells.kept_slot[row, stage], program.cells.output_slot[row, stage]
            if kind == "F":
                assert not active or inputs[stage][program.cells.input_slot[row, stage]] == f"x{m} into {virtual}"
                kept[stage][slot] = f"residuals of {m} in {virtual}" if active else "garbage"
                outputs[stage][output_slot] = f"y{m} of {virtual}" if active else "garbage"
                sent.append(f"x{m} into {virtual + 1}" if active else "garbage")
                continue
            given = cotangents[stage][program.cells.cotangent_slot[row, stage]]
            assert not active or kept[stage][slot] == f"residuals of {m} in {virtual}"
            if active and virtual == stages * chunks - 1:
                assert given == "garbage"
                assert outputs[stage][output_slot] == f"y{m} of {virtual}"
                losses.append(int(program.cells.head_microbatch[row]))
                assert losses[-1] == m
            elif active:
                assert given == f"d{m} out of {virtual}"
            if active and virtual == 0:
                assert leaving == "nothing"
                leaving = f"d{m} out of the first layer"
            sent.append(f"d{m} out of {virtual - 1}" if active else "garbage")
        for stage in range(stages):
            if kind == "F":
                inputs[stage][program.cells.receive_slot[row, stage]] = sent[stage - 1]
            else:
                slot = program.cells.receive_cotangent_slot[row, stage]
                cotangents[stage][slot] = sent[(stage + 1) % stages]
                cotangents[stage][-1] = "garbage"
            inputs[stage][program.cells.embed_slot[row, stage]] = f"x{program.cells.embed_microbatch[row]} into 0"
    embedding_s_gradient(program.last_microbatch)
    everything = list(range(program.schedule.num_microbatches))
    assert losses == embedded == everything or program.schedule.name == "late"
    assert sorted(losses) == sorted(embedded) == everything
    assert ran == 2 * stages * chunks * len(everything)


@pytest.mark.parametrize("case", CASES)
def test_every_row_finds_its_data_in_its_slots(case):
    check_by_acting_out(program_of(*case))


def test_data_that_wait_for_several_rows_keep_their_slots():
    schedule = late_table()
    program = executable(schedule)
    assert program.num_cotangent_slots > 1
    check_by_acting_out(program)
    assert flat(segments(program)) == [Signature(*row) for row in exact_or_masked(program)]


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_memory_does_not_grow_with_microbatches(num_stages):
    few, many = (program_of("1f1b", num_stages, m) for m in (4 * num_stages, 16 * num_stages))
    assert few.num_kept_slots == many.num_kept_slots == 2 * num_stages - 1
    assert few.num_slots == many.num_slots == 1
    assert few.num_output_slots == many.num_output_slots == 1
    assert few.num_cotangent_slots == many.num_cotangent_slots == 1
    few, many = (program_of("interleaved_1f1b", num_stages, m, 2) for m in (4 * num_stages, 16 * num_stages))
    assert few.num_kept_slots == many.num_kept_slots == 3 * num_stages - 1
    assert few.num_slots == many.num_slots
    assert few.num_output_slots == many.num_output_slots == 1
    assert few.num_cotangent_slots == many.num_cotangent_slots == 1


@pytest.mark.parametrize("num_microbatches", [1, 4, 32])
def test_gpipe_keeps_the_residuals_of_all_microbatches(num_microbatches):
    program = program_of("gpipe", 4, num_microbatches)
    assert program.num_kept_slots == program.num_output_slots == num_microbatches
    assert program.num_slots <= 2


def test_idle_cells_touch_only_the_dump_slots():
    program = program_of("1f1b", 4, 8)
    idle = ~program.cells.active
    assert set(program.cells.input_slot[idle]) == {program.num_slots}
    assert set(program.cells.kept_slot[idle]) == {program.num_kept_slots}
    assert (program.cells.output_slot[:, :-1] == program.num_output_slots).all()
    assert set(program.cells.cotangent_slot[idle]) == {program.num_cotangent_slots}
    assert (program.cells.embed_slot[:, 1:] == program.num_slots).all()


def test_wrong_tables_are_refused():
    schedule = build("1f1b", num_stages=2, num_microbatches=2)
    with pytest.raises(UserError, match="B1 in row 0 on stage 0 needs F1 of stage 0"):
        executable(schedule._replace(rows=schedule.rows[::-1]))


def test_rows_without_any_action_are_left_out():
    schedule = build("1f1b", num_stages=2, num_microbatches=2)
    padded = schedule._replace(rows=((None, None), *schedule.rows))
    assert executable(padded).kinds == executable(schedule).kinds


def show(node):
    if isinstance(node, Signature):
        return node.kind + "e" * node.embed + "h" * node.head + "d" * node.embed_backward
    return f"({' '.join(show(child) for child in node.body)})x{node.count}"


def flat(nodes):
    rows = []
    for node in nodes:
        rows += flat(node.body) * node.count if isinstance(node, Segment) else [node]
    return rows


def bodies(nodes):
    return [row for node in nodes for row in (bodies(node.body) if isinstance(node, Segment) else [node])]


def exact_or_masked(program):
    """Yields each row's signature as its segment has it, after checking that it can do what the row needs."""
    rows = flat(segments(program))
    assert len(rows) == len(program.kinds)
    for index, row in enumerate(rows):
        assert row.kind == program.kinds[index]
        assert row.head == (program.cells.head_microbatch[index] >= 0)
        assert row.embed >= (program.cells.embed_microbatch[index] >= 0)
        assert row.embed_backward >= (program.cells.embed_backward_microbatch[index] >= 0)
        yield row


@pytest.mark.parametrize(
    "case, expected",
    [
        (("1f1b", 4, 16), "(Fe)x3 (F Behd)x16 (Bd)x3"),
        (("1f1b", 2, 4), "(Fe)x1 (F Behd)x4 (Bd)x1"),
        (("1f1b", 1, 4), "(F Behd)x4"),
        (("1f1b", 4, 2), "(Fe)x3 (F Bh)x2 (Bd)x3"),
        (("gpipe", 4, 16), "(Fe)x19 (Bhd)x16 (Bd)x3"),
        (("interleaved_1f1b", 4, 16, 2), "(Fe)x3 ((F)x4 (F Behd)x4 (B)x4)x4 (Bd)x3"),
        (("interleaved_1f1b", 2, 8, 3), "(Fe)x1 ((F)x4 (F Behd)x2 (B)x4)x4 (Bd)x1"),
        # No group repeats: rows without an embedding get a loop of their own, where most of a loop's rows have none.
        pytest.param(
            ("interleaved_1f1b", 4, 4, 3), "(Fe)x3 (F)x8 (F Bh)x4 (B)x8 (Bd)x3", id="in chunks without repeats"
        ),
        (("1f1b", 5, 2), "(Fe)x4 (F Bh)x2 (Bd)x4"),
    ],
)
def test_segments_compile_few_bodies(case, expected):
    assert " ".join(show(segment) for segment in segments(program_of(*case))) == expected


@pytest.mark.parametrize("case", CASES)
def test_segments_are_the_program_s_rows(case):
    program = program_of(*case)
    rows = list(exact_or_masked(program))
    assert sum(row.head for row in rows) == case[2]
    for row in bodies(segments(program)):
        assert not (row.kind == "F" and (row.head or row.embed_backward))


def test_a_body_can_do_what_only_its_last_repeat_needs():
    f0, f1, b0, b1 = Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)
    rows = ((f0, None), (None, f0), (None, b0), (f1, None), (None, f1), (b0, b1), (b1, None))
    program = executable(Schedule("mine", 2, 2, 1, rows))
    check_by_acting_out(program)
    assert " ".join(show(segment) for segment in segments(program)) == "((F)x2 (Beh)x1)x2 (Bd)x1"


def test_the_number_of_bodies_does_not_grow_with_microbatches():
    for name, num_chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)):
        few, many = (len(bodies(segments(program_of(name, 4, m, num_chunks)))) for m in (8, 64))
        assert few == many <= 8
