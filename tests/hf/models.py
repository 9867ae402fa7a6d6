"""The small models of tests/hf/fixtures, and what this program computes with them."""

import dataclasses
import pathlib

import jax
import numpy as np

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.data.sources import DataOptions
from meshtrain.hf import folder
from meshtrain.run.generating import without_pipeline

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
DATA = DataOptions(source="synthetic")  # whose vocabulary is the model's
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz"))


def assembled(directory, shape, *, folds_pipeline=False):
    """Returns the assembly on a mesh, the weights, and (ids int32 [2, 24], logits float32 [2, 24, vocabulary]).

    A pipeline may be folded into other axes, as generation does it.
    """
    opened = folder.open_folder(directory)
    with np.load(directory / "expected.npz") as file:
        ids, expected = file["input_ids"], file["logits"]
    num_rows = max(len(ids), shape["data"] * shape["fsdp"] * shape["expert"])
    # A pipeline of three splits the rows, too.
    options = dataclasses.replace(opened.model.options, vocab_multiple=128 * shape["pipeline"])
    config = Config(model=options, batch_size=num_rows, sequence_length=ids.shape[1], data=DATA)
    if folds_pipeline:
        config, shape, _ = without_pipeline(config, shape)
    assembly = assemble(config, shape, jax.devices())
    return assembly, folder.read(opened, assembly.state.params), (ids, expected)


def logits_of(directory, shape):
    """Returns our logits and the expected ones, float32 [2, 24, vocabulary]; rows are repeated to fill the mesh."""
    assembly, params, (ids, expected) = assembled(directory, shape)
    return computed(assembly, params, ids)[..., : expected.shape[-1]], expected


def computed(assembly, params, ids):
    """Returns the logits of ids, float32 [2, 24, padded vocabulary]."""
    num_rows, length = assembly.batch["tokens"].shape
    rows = np.resize(ids, (num_rows, length))
    batch = {
        "tokens": rows,
        "targets": rows,
        "weights": np.ones(rows.shape, np.float32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), rows.shape),
        "segment_ids": np.ones(rows.shape, np.int32),
    }
    placed = {name: jax.device_put(batch[name], entry.sharding) for name, entry in assembly.batch.items()}
    return np.asarray(assembly.steps.logits(params, placed))[: len(ids)]
