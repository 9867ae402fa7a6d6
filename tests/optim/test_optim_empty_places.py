"""What optimizers make of a pipeline's empty places: zeros stay zeros, and layers are those without such places."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain.optim.optimizers import NAMES, OptimizerOptions, optimizer
from meshtrain.pipeline.stages import Stack

NUM_LAYERS, NUM_STEPS = 5, 3
STACK = Stack(NUM_LAYERS, 2, 2)
SHAPES = {"up": (128, 4, 32), "norm": (128,)}
AXES = {"up": ("layers", "embed", "heads", "head_dim"), "norm": ("layers", "norm")}
IN_CHUNKS = {name: ("chunks", *axes) for name, axes in AXES.items()}
OPTIONS = [
    *(OptimizerOptions(name=name, weight_decay=0.1) for name in NAMES),
    OptimizerOptions(moments="8bit"),
    OptimizerOptions(moments="bfloat16"),
]


def drawn(seed):
    generator = np.random.default_rng(seed)
    return {name: jnp.asarray(generator.normal(size=(NUM_LAYERS, *dims)), jnp.float32) for name, dims in SHAPES.items()}


def after_steps(options, axes, stacked):
    """The weights after three steps with random gradients."""
    transformation, params = optimizer(options, lambda _: jnp.float32(0.01), axes), stacked(drawn(0))

    @jax.jit
    def step(params, state, gradients):
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = transformation.init(params)
    for number in range(NUM_STEPS):
        params, state = step(params, state, stacked(drawn(1 + number)))
    return jax.device_get(params)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: f"{one.name}-{one.moments}")
def test_zeros_stay_zeros_and_layers_move_as_without_them(options):
    expected = after_steps(options, AXES, lambda layers: layers)
    found = after_steps(options, IN_CHUNKS, STACK.of_layers)
    for name, leaf in found.items():
        assert leaf.shape[:2] == (2, 4)
        in_order = leaf.reshape(8, *leaf.shape[2:])
        assert not in_order[NUM_LAYERS:].any(), name
        np.testing.assert_allclose(in_order[:NUM_LAYERS], expected[name], rtol=1e-5, atol=1e-7)
        assert (expected[name] != np.asarray(drawn(0)[name])).any()
