"""A pipeline schedule of one's own: the example of the docs trains, and what is wrong with others is one line."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from meshtrain import explain
from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import resolve
from meshtrain.errors import UserError
from meshtrain.pipeline import __main__ as chart
from meshtrain.pipeline.schedules import PipelineOptions, build
from tests.parity import runs

EXAMPLE = "docs.guide.own_schedule:in_groups"
GIVEN = []  # what `given` returns


def test_it_trains_with_the_losses_of_one_device():
    config = dataclasses.replace(runs.CONFIG, pipeline=PipelineOptions(schedule=EXAMPLE, num_microbatches=4))
    own, alone = (runs.train(config, sizes) for sizes in (runs.sizes(pipeline=2), runs.sizes()))
    np.testing.assert_allclose(own.losses, alone.losses, rtol=1e-5)
    np.testing.assert_allclose(own.grad_norms, alone.grad_norms, rtol=1e-5)
    assert own.losses[-1] < own.losses[0]


def test_its_program_keeps_what_its_table_says():
    config = dataclasses.replace(runs.CONFIG, pipeline=PipelineOptions(schedule=EXAMPLE, num_microbatches=8))
    program = assemble(config, runs.sizes(pipeline=2), jax.devices()[:2]).placed.program
    assert "".join(program.kinds) == 4 * "FFFBBB"
    assert program.num_kept_slots == 2


def test_explain_names_it(capsys):
    words = ["--config.mesh.pipeline=2", f"--config.pipeline.schedule={EXAMPLE}", "--config.model.num_layers=2"]
    assert explain.main(words) == 0
    assert f"\nschedule     {EXAMPLE}, 4 microbatches, 1 chunks a stage\n" in capsys.readouterr().out


def test_its_chart_is_drawn(capsys):
    chart.main([f"--schedule={EXAMPLE}", "--stages=2", "--microbatches=3", "--backward=1"])
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "stage 0  F0 F1       B0 B1 F2       B2",
        "stage 1     F0 F1 B0 B1       F2 B2",
        "",
    ]


def given(stages, microbatches, chunks):
    return GIVEN[0]


def two(stages, microbatches):
    raise AssertionError


def of_numpy(stages, microbatches, chunks):
    return [[("F", np.int64(0)), None], [None, ("F", np.int64(0))], [None, ("B", np.int32(0))], [("B", 0, 0), None]]


def test_numbers_may_be_those_of_numpy():
    own, built_in = (build(name, num_stages=2, num_microbatches=1) for name in (f"{__name__}:of_numpy", "gpipe"))
    assert own.rows == built_in.rows
    assert {type(cell.microbatch) for row in own.rows for cell in row if cell} == {int}


def raises(stages, microbatches, chunks):
    raise RuntimeError("no idea\nand no second line")


def refuses(stages, microbatches, chunks):
    raise UserError(f"pipeline.num_microbatches: got {microbatches}; allowed: 7; nearest: 7")


def problems(name, **pipeline):
    """The lines of a configuration on two stages with one microbatch."""
    changes = {"mesh": {"pipeline": 2}, "model": {"num_layers": 4}, "pipeline": {"num_microbatches": 1} | pipeline}
    with pytest.raises(UserError) as caught:
        resolve(changes, {"pipeline.schedule": name})
    return list(caught.value.problems)


F0, B0, LAST = ("F", 0), ("B", 0, 0), "\\[\\('F', 0, 0\\)\\] \\+ \\[None\\] \\* 1 as the first row"


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ((row for row in [[F0, None]]), f"which returns generator; allowed: a list of rows, .*; nearest: {LAST}"),
        (None, "which returns NoneType; .*"),
        ([[F0, None], "F0"], "which returns str as row 1; .*"),
        ([[F0, None], [F0]], "which returns 1 cells in row 1; .* the 2 stages: .*"),
        ([["F0", None]], "which returns 'F0' in row 0 on stage 0; .*"),
        ([[F0, None], [None, ("W", 0)]], r"which returns \('W', 0\) in row 1 on stage 1; .*"),
        ([[("F", 0.0), None]], r"which returns \('F', 0.0\) in row 0 on stage 0; .*"),
        ([], "where F0 is missing on stage 0; allowed: exactly once; nearest: a row with it"),
        ([[F0, None], [F0, F0]], "where F0 occurs 2 times on stage 0; allowed: exactly once; nearest: once"),
        (
            [[F0, None], [None, F0], [None, B0], [B0, None], [("F", 9), None]],
            "where F9.0 occurs on stage 0; allowed: microbatches 0 to 0, chunks 0 to 0; nearest: leave it out",
        ),
        (
            [[F0, None], [None, B0], [None, F0], [B0, None]],
            "where B0 in row 1 on stage 1 needs F0 of stage 1, which is in row 2; allowed: .*; nearest: a row .*",
        ),
    ],
)
def test_what_is_no_table_is_one_line(monkeypatch, rows, line):
    monkeypatch.setattr(f"{__name__}.GIVEN", [rows])
    (said,) = problems(f"{__name__}:given")
    assert re.fullmatch(f"pipeline.schedule: got '{__name__}:given', {line}", said), said


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no.such:rows", "but there is no module 'no' .*; nearest: 1f1b"),
        (f"{__name__}:givn", rf"but {__name__} has no 'givn'; .* did you mean 'given'\?"),
        (f"{__name__}:GIVEN", "which is not a function but list; .*"),
        (f"{__name__}:two", r"which does not accept three numbers \(.*\); .*; nearest: def two\(stages, .*\)"),
        (f"{__name__}:raises", r"which raises RuntimeError: no idea \(.*\.py:\d+\) for 2 stages, .*; nearest: .*"),
    ],
)
def test_a_function_that_gives_none_is_one_line(name, line):
    (said,) = problems(name, num_chunks=2)
    assert re.fullmatch(f"pipeline.schedule: got '{name}', {line}", said), said


def test_a_function_may_refuse_numbers_as_the_built_in_ones_do():
    assert problems(f"{__name__}:refuses") == ["pipeline.num_microbatches: got 1; allowed: 7; nearest: 7"]


def test_without_a_pipeline_it_is_imported_and_not_called():
    name = f"{__name__}:raises"
    assert resolve({}, {"pipeline.schedule": name}, reads_data=False).pipeline.schedule == name
    with pytest.raises(UserError, match=r"pipeline\.schedule: got 'no\.such:rows', but there is no module"):
        resolve({}, {"pipeline.schedule": "no.such:rows"}, reads_data=False)
