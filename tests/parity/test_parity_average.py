"""Averages of the weights on a mesh are those of the weights that one device has after each step."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from meshtrain.assembly.assemble import assemble
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.plan.search.estimate import state_bytes, weights_of
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.trees import leaves_with_paths
from meshtrain.step.device_memory import training_state_bytes
from tests.parity import runs
from tests.parity.comparison import CHANGE_BOUND, slices, within

DECAY = 0.7
PLAIN = dataclasses.replace(runs.CONFIG, num_steps=3, model=dataclasses.replace(runs.LLAMA, num_layers=4))
EXPERTS = dataclasses.replace(
    PLAIN, model=dataclasses.replace(PLAIN.model, moe=MoeOptions(num_experts=4, expert_dim=16, router="sigmoid"))
)
RUNS = [
    (PLAIN, 1, {"data": 2, "pipeline": 2}),
    pytest.param(EXPERTS, 3, {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
]


def trained(config, shape, visit):
    """The assembly, and the last state of the steps of a configuration; `visit` gets each state."""
    assembly = assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed)))
    visit(assembly.steps.to_kept(state))
    step = assembly.steps.train.lower(assembly.state, assembly.batch).compile()
    for batch in runs.example_batches(config.num_steps):
        placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
        state, _ = step(state, placed)
        visit(assembly.steps.to_kept(state))
    return assembly, assembly.steps.to_kept(state)


@functools.cache
def reference(config):
    """The initial weights, and the averages of weights after each step of one device that keeps none."""
    found = []
    trained(config, runs.sizes(), lambda state: found.append(runs.by_path(state.params)))
    averages = {path: weight.astype(np.float64) for path, weight in found[0].items()}
    for weights in found[1:]:
        averages = {path: DECAY * average + (1 - DECAY) * weights[path] for path, average in averages.items()}
    return found[0], averages


@pytest.mark.parametrize(("plain", "level", "axes"), RUNS, ids=["pipeline", "experts"])
def test_averages_are_those_of_the_weights_of_one_device(plain, level, axes):
    optimizer = dataclasses.replace(plain.optimizer, average=DECAY)
    config = dataclasses.replace(plain, optimizer=optimizer, zero=ZeroOptions(level=level))
    assembly, last = trained(config, runs.sizes(**axes), lambda state: None)
    initial, expected = reference(plain)
    averages = runs.by_path(last.opt_state.averaged_weights)
    assert averages.keys() == expected.keys()
    for path, average in averages.items():
        got, right = average - initial[path], expected[path] - initial[path]
        for (where, a), (_, b) in zip(slices(path, got), slices(path, right), strict=True):
            error = float(np.linalg.norm(a - b))
            assert within("average", where, error, CHANGE_BOUND * float(np.linalg.norm(b))), where
    placed = dict(leaves_with_paths(assembly.state.opt_state.averaged_weights))
    moments = [pair for pair in leaves_with_paths(assembly.state.opt_state.inner) if "/mu/" in pair[0]]
    assert all(placed[path.partition("/mu/")[2]].sharding == leaf.sharding for path, leaf in moments)
    assert len(moments) == len(placed) - ("layers/experts/router_bias" in placed)
    shape = dict(assembly.mesh.shape)
    assert training_state_bytes(assembly.state, assembly.states.sums).total == state_bytes(
        config, shape, weights_of(config)
    )
