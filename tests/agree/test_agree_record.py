"""Records: what is written is read, and what is damaged, pickled or of another run is rejected in one line."""

import dataclasses
import json
import pathlib
import zipfile

import numpy as np
import pytest

from meshtrain.agree import record
from meshtrain.agree.comparison import Figure
from meshtrain.agree.sides import Side
from meshtrain.errors import UserError

pytestmark = pytest.mark.quick
SIDE = Side(
    batches={"1/tokens": np.arange(6)},
    initial={"a/b": np.float32([1, 2])},
    sums={"loss/first batch": np.float32(3)},
    gradients={"a/b": np.float32([3, 4])},
    losses=[1.5],
    norms=[2.5],
    final={"a/b": np.float32([5, 6])},
)
ABOUT = {"config": {"seed": 0, "mesh": {"data": 2}, "model": {"width": 16}}, "data": "ab", "steps": 1}
RECORD = record.Record(SIDE, {("gradient", "a/b"): Figure(1e-7, 2.0, 3.0)}, 1.0, ABOUT)
START = "--against: got "


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "one.npz"
    record.write(str(target), RECORD)
    return target


def test_a_record_is_read_as_it_was_written(path):
    got = record.read(str(path))
    assert (got.rounding, got.unit, got.about) == (RECORD.rounding, 1.0, ABOUT)
    for field in dataclasses.fields(Side):
        one, other = (getattr(side, field.name) for side in (got.side, SIDE))
        if isinstance(other, dict):
            assert one.keys() == other.keys()
            assert all(one[name].tobytes() == other[name].tobytes() for name in other), field.name
        else:
            assert list(one) == list(other), field.name


def damaged(path):
    with zipfile.ZipFile(path) as file:
        start = file.getinfo("about.npy").header_offset
    content = bytearray(path.read_bytes())
    content[start + 100] ^= 0xFF  # in the compressed text, behind the name
    path.write_bytes(bytes(content))


def shortened(path):
    path.write_bytes(path.read_bytes()[:-100])


class Touches:
    """An object that creates a file in the current folder when it is unpickled."""

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path("unpickled"),)


def pickled(path):
    np.savez(path, about=np.array([Touches()], dtype=object))


def without_text(path):
    np.savez(path, x=np.arange(3))


def with_another_text(path):
    np.savez(path, about=np.frombuffer(json.dumps([1]).encode(), np.uint8))


def an_array(path):
    with path.open("wb") as file:
        np.save(file, np.arange(3))


def text(path):
    path.write_text("hello")


@pytest.mark.parametrize("change", [damaged, shortened, pickled, without_text, with_another_text, an_array, text])
def test_a_file_that_is_no_record_is_rejected_in_one_line(path, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change(path)
    with pytest.raises(UserError) as caught:
        record.read(str(path))
    [line] = caught.value.problems
    assert line.startswith(f"{START}'{path}'")
    assert line.endswith("; allowed: a file that --record has written; nearest: --record=before.npz first")
    assert [one.name for one in tmp_path.iterdir()] == ["one.npz"]


def test_a_missing_file_is_rejected_in_one_line(tmp_path):
    with pytest.raises(UserError, match=f"^{START}'{tmp_path}/none.npz': nothing there; allowed: "):
        record.read(f"{tmp_path}/none.npz")


def test_another_configuration_data_or_number_of_steps_is_rejected():
    def lines(**changed):
        try:
            record.refuse_other("one.npz", ABOUT, {**ABOUT, **changed})
        except UserError as error:
            return [str(line) for line in error.problems]
        return []

    assert lines() == []
    free = {"seed": 0, "mesh": {"data": 8}, "model": {"width": 16, "attention": "blockwise", "added": 1}}
    assert lines(config=free) == [], "the mesh, the kernel, and an option that the record's version lacks"
    other = {"seed": 0, "mesh": {"data": 2}, "model": {"width": 32}}
    assert lines(config=other) == [
        "model.width: got 32, but 16 in the record one.npz; allowed: the record's value; nearest: "
        "--config.model.width=16"
    ]
    assert lines(steps=2) == ["--steps: got 2; allowed: the number of steps in the record; nearest: 1"]
    [line] = lines(data="cd")
    assert line.startswith("--against: got 'one.npz', which was recorded with other training data; allowed: ")
