"""The meshes that the short table leaves out, with each level of ZeRO: the same numbers as plain JAX on one device."""

import dataclasses

import numpy as np
import pytest

from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import LayoutOptions
from tests.parity import runs
from tests.parity.comparison import assert_same

pytestmark = pytest.mark.slow

# Meshes without a pipeline (most with one: test_parity_schedules.py) beyond those of test_parity_covering.py.
MESHES = [
    (0, {"fsdp": 8}),
    (3, {"data": 2, "fsdp": 2, "context": 2}),
]


def name(given):
    return "-".join(f"{axis}{size}" for axis, size in given.items()) if isinstance(given, dict) else f"level {given}"


@pytest.mark.parametrize("level, mesh", MESHES, ids=name)
def test_mesh_and_level_change_no_number(level, mesh, assert_parity):
    # Two microbatches where a level splits sums over data, so that adding up matters.
    parts = 2 if level else 1
    assert_parity(dataclasses.replace(runs.CONFIG, zero=ZeroOptions(level=level), accumulation_steps=parts), **mesh)


def test_layers_with_a_window_and_without_are_the_same_in_a_pipeline(assert_parity):
    """The second stage begins in the middle of a turn. With caps, and norms after attention and mlp."""
    layout = LayoutOptions(sequence_parallel=True)
    config = dataclasses.replace(runs.CONFIG, model=runs.GEMMA, layout=layout)
    assert_parity(config, context=2, tensor=2, pipeline=2)


def test_a_device_without_a_target_changes_no_number(monkeypatch):
    """The last of eight parts of each sequence is padding."""
    is_padding = np.arange(runs.SEQUENCE_LENGTH) >= runs.SEQUENCE_LENGTH * 7 // 8
    batches = [
        {name: np.where(is_padding, array.dtype.type(0), array) for name, array in batch.items()}
        for batch in runs.example_batches()
    ]
    monkeypatch.setattr(runs, "example_batches", lambda _: batches)
    assert_same(runs.train(runs.CONFIG, runs.sizes(context=8)), runs.reference(runs.CONFIG))
