"""Ten steps of a small convnet on the digits: the same numbers on one device, on data and on data x fsdp.

Convolutions, GroupNorm, pooling, dropout and shifts; the mesh of two axes cuts the batch into microbatches, too.
"""

import pytest

from meshtrain.config.resolve import resolve
from tests.examples.runs import stepped
from tests.parity.comparison import Trained, assert_same
from tests.parity.runs import sizes

GIVEN = {
    "task": "convnet",
    "num_steps": 10,
    "batch_size": 32,
    "model": {"filters": 8, "hidden": 16, "num_groups": 4},
    "optimizer": {"name": "adam", "clip_norm": 0.0},
    "learning_rate": {"name": "constant", "peak": 3e-3, "warmup_steps": 0},
    "data": {"source": "digits", "num_threads": 0},
}


def train(accumulation_steps: int = 1, **axes: int) -> Trained:
    """Runs the steps on a mesh."""
    given = {**GIVEN, "accumulation_steps": accumulation_steps, "mesh": sizes(**axes)}
    trained, _, state, _ = stepped(resolve(given), **axes)
    if axes:
        kernel = state.params["second"]["kernel"].sharding
        assert kernel.is_fully_replicated == (sizes(**axes)["fsdp"] == 1)
    return trained


@pytest.fixture(scope="module")
def on_one_device() -> Trained:
    return train()


@pytest.mark.parametrize(
    "given", [{"data": 8}, {"data": 2, "fsdp": 4, "accumulation_steps": 2}], ids=["data 8", "data 2 x fsdp 4"]
)
def test_the_mesh_changes_no_number(given, on_one_device):
    assert_same(train(**given), on_one_device)
    assert on_one_device.losses[-1] < on_one_device.losses[0]
