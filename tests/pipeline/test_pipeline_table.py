import pytest

from meshtrain.pipeline.check import prove
from meshtrain.pipeline.schedules import NAMES, Action, PipelineOptions, build
from meshtrain.pipeline.table import chosen, format_table, read_table
from meshtrain.words.errors import UserError


def written(tmp_path, text):
    path = tmp_path / "mine.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_survives_a_file(name, tmp_path):
    for num_stages in (1, 4):
        num_chunks = 2 if name == "interleaved_1f1b" else 1
        schedule = build(name, num_stages=num_stages, num_microbatches=4, num_chunks=num_chunks)
        path = written(tmp_path, format_table(schedule))
        assert read_table(path) == schedule._replace(name=path)


def test_cells_as_people_and_spreadsheets_write_them(tmp_path):
    text = '\ufeff F0 ,\r\n\r\n,F0.0\r\n,"B0"\r\nB0,\r\n'
    schedule = read_table(written(tmp_path, text))
    assert schedule.rows == (
        (Action("F", 0), None),
        (None, Action("F", 0)),
        (None, Action("B", 0)),
        (Action("B", 0), None),
    )
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == (2, 1, 1)
    prove(schedule)


@pytest.mark.parametrize(
    "text, words",
    [
        ("F0,\nX3,F0\n", ["line 2 column 1", "got 'X3'", "as F3"]),
        ("F0,\nF1,f0\n", ["line 2 column 2", "got 'f0'"]),
        ("F0,\n\nF1,F0.\n", ["line 3 column 2", "got 'F0.'"]),
        ("F0,\nF-1,\n", ["line 2 column 1", "got 'F-1'"]),
        ("F0,\nF٣,\n", ["line 2 column 1"]),
        ("F0,\nF0\n", ["line 2: got 1 columns", "allowed: 2"]),
        ("F0,\nF0,,\n", ["line 2: got 3 columns"]),
        ("", ["without any action"]),
        (",\n,\n", ["without any action"]),
        (b"F0,\n\xff\xfe,\n", ["UTF-8"]),
        ('F0,"\n', ["a CSV file"]),
    ],
)
def test_malformed_files_are_one_line(text, words, tmp_path):
    with pytest.raises(UserError) as caught:
        read_table(written(tmp_path, text))
    assert len(caught.value.problems) == 1
    assert all(word in str(caught.value) for word in ["mine.csv", *words]), str(caught.value)


def test_unreadable_files_are_one_line(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(UserError, match="cannot read it"):
            read_table(str(path))


def test_a_huge_microbatch_is_refused_at_once(tmp_path):
    schedule = read_table(written(tmp_path, "F999999999,\n,F999999999\n,B999999999\nB999999999,\n"))
    with pytest.raises(UserError, match="F0 is missing on stage 0"):
        prove(schedule)


def test_a_table_takes_the_schedule_s_place(tmp_path):
    path = written(tmp_path, format_table(build("gpipe", num_stages=2, num_microbatches=3)))
    options = PipelineOptions(schedule="1f1b", table=path)
    assert chosen(options, num_stages=2, num_microbatches=3).name == path
    named = chosen(PipelineOptions(), num_stages=2, num_microbatches=3)
    assert named == build("1f1b", num_stages=2, num_microbatches=3)


def test_a_table_for_other_numbers_is_refused_with_all_of_them(tmp_path):
    path = written(tmp_path, format_table(build("interleaved_1f1b", num_stages=2, num_microbatches=4, num_chunks=2)))
    with pytest.raises(UserError) as caught:
        chosen(PipelineOptions(table=path), num_stages=4, num_microbatches=8)
    stages, microbatches, chunks = caught.value.problems
    assert stages.startswith("mesh.pipeline: got 4; allowed: 2")
    assert microbatches.startswith("pipeline.num_microbatches: got 8; allowed: 4")
    assert chunks.startswith("pipeline.num_chunks: got 1; allowed: 2")
