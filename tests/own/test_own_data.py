"""The page's data of one's own: an ArrayRecord through Grain, the same batches wherever a run goes on."""

import ast
import pathlib

import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from docs.guide.own_data import documents
from meshtrain.config import resolve
from meshtrain.data.dataset import open_user_data
from meshtrain.data.loader import batches
from meshtrain.models.task import token_batch

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = [f"record {number} " * (number % 7 + 1) for number in range(200)]


@pytest.fixture
def config(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return resolve({}, {
        "data.source": "docs.guide.own_data:documents", "data.path": str(tmp_path / "a.array_record"),
        "sequence_length": "32", "batch_size": "8", "model.vocab_size": "257",
    })  # fmt: skip


def test_the_records_are_rows_and_a_run_goes_on_where_it_was(config):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    entries = token_batch(config.batch_size, config.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding) for name, one in entries.items()}
    data = open_user_data(documents(config), batch, {"tokens": 257, "targets": 257}, 0)
    assert (len(data.train), len(data.validation)) == (190, 10)
    assert data.text.decode(data.validation[3]["tokens"]).startswith(TEXTS[3][:32])
    row = data.validation[0]
    assert row["weights"].sum() == len(TEXTS[0])
    assert row["targets"][len(TEXTS[0]) - 1] == 256
    whole = batches(data.train, batch=batch, seed=3, num_threads=2)
    held = [next(whole) for _ in range(30)]
    whole.close()
    later = batches(data.train, batch=batch, seed=3, start_step=28, num_threads=0)
    assert np.array_equal(next(later)["tokens"], held[28]["tokens"])


def test_the_program_is_short():
    path = ROOT / "docs" / "guide" / "own_data.py"
    [function] = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    lines = path.read_text().splitlines()[function.lineno - 1 : function.end_lineno]
    assert len([line for line in lines if line.strip()]) <= 21
