"""What any mesh has saved goes on under any other: a sample of the table that scripts/bench mesh makes."""

import dataclasses
import json
import logging
import pathlib
import shutil

import numpy as np
import pytest

from scripts.benchmarks import mesh, witness
from scripts.benchmarks.mesh import SAMPLE, SETTINGS, Setting, compare, copy_save, differing_arrays

SMALLER = {"model.num_layers": 2, "accumulation_steps": 1}  # compiles in half the time


@pytest.fixture(autouse=True)
def _orbax_alone_is_quiet():
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A run without a stop, one that went on from its save, and their settings."""

    writer: pathlib.Path
    wrote: Setting
    reader: pathlib.Path
    reads: Setting

    def compared(self):
        return compare(self.writer, self.wrote, self.reader, self.reads)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    """From weights split by ZeRO to moments split by it, and another mesh; both in this process."""
    work = tmp_path_factory.mktemp("meshes")
    wrote, reads = (dataclasses.replace(SETTINGS[name], processes=1) for name in "BE")
    witness.main([f"--workdir={work / 'writer'}", *wrote.words(SMALLER)])
    reader = copy_save(work / "writer", work / "reader")
    witness.main([f"--workdir={reader}", *reads.words(SMALLER)])
    return Pair(work / "writer", wrote, reader, reads)


@pytest.fixture
def tampered(pair, tmp_path):
    """A function (how what the reader saw is changed) -> what is found."""

    def found(change):
        reader = shutil.copytree(pair.reader, tmp_path / "reader")
        path = reader / "seen.0.json"
        seen = json.loads(path.read_text())
        change(seen)
        path.write_text(json.dumps(seen))
        return dataclasses.replace(pair, reader=reader).compared().problems

    return found


def test_from_one_level_and_mesh_to_another(pair):
    cell = pair.compared()
    assert cell.problems == []
    assert cell.difference <= 1e-5
    arrays = mesh.stored(pair.writer)
    moments = [path for path in arrays if path.startswith("opt_state/") and arrays[path].size > 1]
    assert len(moments) >= 2 * len([path for path in arrays if path.startswith("params/")])
    assert all(np.abs(arrays[path]).max() > 0 for path in moments), "zeros come back from anywhere"


def test_the_two_hold_their_arrays_in_different_pieces(pair):
    """Else the table would compare a mesh with itself."""
    path = "params/layers/mlp/down"
    (saved,), (restored,) = (mesh.seen(run, pair.wrote) for run in (pair.writer, pair.reader))
    bounds = [[where for where, _ in arrays["3"][path]["pieces"]] for arrays in (saved["saved"], restored["restored"])]
    assert bounds[0] != bounds[1]
    assert [len(where) for where in bounds] == [8, 2]


def test_a_changed_value_is_found(tampered):
    def change(seen):
        seen["restored"]["3"]["params/layers/mlp/down"]["pieces"][1][1] = "0" * 64

    [line] = tampered(change)
    assert line.startswith("restored: params/layers/mlp/down: another value in [[0, 2], ")


@pytest.mark.parametrize("step", ["4", "6"])
def test_another_row_is_found(tampered, step):
    def change(seen):
        rows = seen["rows"][step]
        rows["0"], rows["1"] = rows["1"], rows["0"]

    assert tampered(change) == ["other rows of data"]


def test_another_loss_is_found(pair, tmp_path):
    reader = shutil.copytree(pair.reader, tmp_path / "reader")
    rows = [json.loads(line) for line in (reader / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] == 5 and "loss" in row:
            row["loss"] *= 1 + 2e-5
    (reader / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [line] = dataclasses.replace(pair, reader=reader).compared().problems
    assert line.startswith("a loss differs by 2.0e-05")


def held(array, *bounds):
    """What one process holds of an array: these pieces."""
    pieces = [(where, witness.hashed(array[tuple(slice(*ends) for ends in where)])) for where in bounds]
    return {"w": {"dtype": array.dtype.name, "shape": list(array.shape), "pieces": pieces}}


def test_arrays_are_compared_piece_by_piece():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    left, right = ((0, 4), (0, 3)), ((0, 4), (3, 6))
    assert differing_arrays({"w": array}, [held(array, left), held(array, right)]) == []
    in_chunks = array.reshape(2, 2, 6)
    assert differing_arrays({"w": array}, [held(in_chunks, *(((i, i + 1), (0, 2), (0, 6)) for i in (0, 1)))]) == []
    other = array.copy()
    other[0, 5] = np.nextafter(other[0, 5], 9)
    assert differing_arrays({"w": array}, [held(array, left), held(other, right)]) == [f"w: another value in {right}"]
    # A copy that differs is found beside the right one.
    assert differing_arrays({"w": array}, [held(array, left, right), held(other, right)])
    assert differing_arrays({"w": array}, [held(array, left)]) == ["w: no process has the complete array"]
    whole = ((0, 4), (0, 6))
    assert differing_arrays({"w": array}, [held(array.astype(np.float64), whole)]) == ["w: another dtype or size"]
    assert differing_arrays({"w": array, "v": array}, [held(array, whole)])[0] == "process 0: other arrays"


@pytest.mark.slow
@pytest.mark.long
def test_any_processes_schedule_and_level_go_on_with_those_of_any_other(tmp_path):
    """One test for all pairs: two workers that share them out would each train what the pairs have in common."""
    cells = mesh.cells(SAMPLE, tmp_path)
    assert {pair: cell.problems for pair, cell in cells.items()} == {pair: [] for pair in SAMPLE}
    assert all(cell.difference <= 1e-5 for cell in cells.values())


def test_the_sample_changes_all_that_can_change():
    pairs = [(SETTINGS[writer], SETTINGS[reader]) for writer, reader in SAMPLE]
    assert {(2, 4), (1, 2), (4, 1)} <= {(wrote.processes, reads.processes) for wrote, reads in pairs}
    assert sum(wrote.schedule != reads.schedule for wrote, reads in pairs) >= 3
    assert sum(wrote.zero != reads.zero for wrote, reads in pairs) >= 3
    assert all(wrote.mesh != reads.mesh or wrote.zero != reads.zero for wrote, reads in pairs)
