"""Averages of the weights on a mesh are those of the weights that one device has after each step."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from meshtrain.assemble import assemble
from meshtrain.plan.search.estimate import state_bytes, weights_of
from meshtrain.sharding.stored import ZeroOptions
from meshtrain.step.device_memory import held
from tests.parity import runs
from tests.parity.comparison import CHANGE_BOUND, slices

DECAY = 0.7
MODEL = dataclasses.replace(runs.LLAMA, num_layers=4, num_experts=4, expert_dim=16, router="sigmoid")
PLAIN = dataclasses.replace(runs.CONFIG, num_steps=3, model=MODEL)
CONFIG = dataclasses.replace(PLAIN, optimizer=dataclasses.replace(PLAIN.optimizer, average=DECAY))
MESHES = [
    (1, {"data": 2, "pipeline": 2}),
    pytest.param(0, {"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param(3, {"data": 2, "expert": 2}, marks=pytest.mark.slow),
]


def trained(config, shape, visit):
    """The assembly, and the last state of the steps of a configuration; `visit` gets each state."""
    assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])
    state = assembly.init(jax.random.key_data(jax.random.key(config.seed)))
    visit(assembly.to_kept(state))
    step = assembly.train_step.lower(assembly.state, assembly.batch).compile()
    for batch in runs.example_batches(config.num_steps):
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, _ = step(state, placed)
        visit(assembly.to_kept(state))
    return assembly, assembly.to_kept(state)


@functools.cache
def reference():
    """The initial weights, and the averages of weights after each step of one device that keeps none."""
    found = []
    trained(PLAIN, runs.sizes(), lambda state: found.append(runs.by_path(state.params)))
    averages = {path: weight.astype(np.float64) for path, weight in found[0].items()}
    for weights in found[1:]:
        averages = {path: DECAY * average + (1 - DECAY) * weights[path] for path, average in averages.items()}
    return found[0], averages


@pytest.mark.parametrize(("level", "axes"), MESHES, ids=str)
def test_averages_are_those_of_the_weights_of_one_device(level, axes):
    config = dataclasses.replace(CONFIG, zero=ZeroOptions(level=level))
    assembly, last = trained(config, runs.sizes(**axes), lambda state: None)
    initial, expected = reference()
    averages = runs.by_path(last.opt_state.averaged_weights)
    assert averages.keys() == expected.keys()
    for path, average in averages.items():
        got, right = average - initial[path], expected[path] - initial[path]
        for (where, a), (_, b) in zip(slices(path, got), slices(path, right), strict=True):
            assert np.linalg.norm(a - b) <= CHANGE_BOUND * np.linalg.norm(b), where
    without = assemble(dataclasses.replace(config, optimizer=PLAIN.optimizer), runs.sizes(**axes), jax.devices()[:4])
    more = held(assembly.state, assembly.replicas).moments - held(without.state, without.replicas).moments
    of_moments = assembly.state.opt_state.inner.inner_states["others"].inner_state[0].mu
    sizes = [np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(of_moments)]
    biases = assembly.state.params["layers"]["experts"]["router_bias"]
    assert more == 4 * (sum(sizes) + np.prod(biases.sharding.shard_shape(biases.shape))), "as a moment is split"
    shape = dict(assembly.mesh.shape)
    assert held(assembly.state, assembly.replicas).total == state_bytes(config, shape, weights_of(config))
