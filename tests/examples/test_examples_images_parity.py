"""Ten steps of a small convnet on the digits: the same numbers on one device, on data and on data x fsdp.

Convolutions, GroupNorm, pooling, dropout and shifts; the mesh of two axes cuts the batch into microbatches, too.
"""

import jax
import numpy as np
import pytest

from meshtrain.assemble import assemble
from meshtrain.config.config import resolve
from meshtrain.config.tasks import abstract_task
from meshtrain.data.loader import batches
from meshtrain.run.opened import open_data
from tests.parity.comparison import Trained, assert_same
from tests.parity.runs import by_path, first_moments, sizes

NUM_STEPS = 10
GIVEN = {
    "task": "convnet",
    "num_steps": NUM_STEPS,
    "batch_size": 32,
    "model": {"filters": 8, "hidden": 16, "num_groups": 4},
    "optimizer": {"name": "adam", "clip_norm": 0.0},
    "learning_rate": {"name": "constant", "peak": 3e-3, "warmup_steps": 0},
    "data": {"source": "digits", "num_threads": 0},
}


def train(accumulation_steps: int = 1, **axes: int) -> Trained:
    """Runs the steps of `assemble` on a mesh, on the batches that a run has there."""
    config = resolve({**GIVEN, "accumulation_steps": accumulation_steps, "mesh": sizes(**axes)})
    num_devices = int(np.prod(list(sizes(**axes).values())))
    assembly = assemble(config, sizes(**axes), jax.devices()[:num_devices])
    state = assembly.init(jax.random.key_data(jax.random.key(config.seed)))
    initial, losses, norms, gradients = by_path(state.params), [], [], {}
    step = assembly.train_step.lower(assembly.state, assembly.batch).compile()
    corpus = open_data(config, abstract_task(config))
    of_training = batches(corpus.train, batch=assembly.batch, seed=config.seed, num_threads=0)
    for _ in range(NUM_STEPS):
        state, metrics = step(state, next(of_training))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        gradients = gradients or first_moments(state.opt_state)
    if num_devices > 1:
        kernel = state.params["second"]["kernel"].sharding
        assert kernel.is_fully_replicated == (sizes(**axes)["fsdp"] == 1)
    return Trained(initial, by_path(state.params), gradients, np.array(losses), np.array(norms))


@pytest.fixture(scope="module")
def on_one_device() -> Trained:
    return train()


@pytest.mark.parametrize(
    "given", [{"data": 8}, {"data": 2, "fsdp": 4, "accumulation_steps": 2}], ids=["data 8", "data 2 x fsdp 4"]
)
def test_the_mesh_changes_no_number(given, on_one_device):
    assert_same(train(**given), on_one_device)
    assert on_one_device.losses[-1] < on_one_device.losses[0]
