"""Biases of routers: which way each moves, the same whatever the optimizer of the other weights is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.optim import balance
from meshtrain.optim.optimizers import NAMES, OptimizerOptions, optimizer

AXES = {"matrix": ("layers", "embed", "mlp"), "norm": ("norm",), "router": ("embed", "router")}
BIAS = ("layers", "router")
COUNTS = np.array([[5, 1, 2, 0], [2, 2, 2, 2]], np.float32)


@pytest.mark.parametrize(
    "counts, expected",
    [
        ([3, 3, 3], [0, 0, 0]),
        ([4, 3, 3], [-1, 1, 1]),  # the mean is 10 / 3
        ([0, 0, 0], [0, 0, 0]),
        ([2**24 - 1, 2**24 - 2], [-1, 1]),
        ([2**24 - 1] * 100 + [2**24 - 2], [-1] * 100 + [1]),  # a mean in float32 would equal the counts
        (COUNTS, [[-1, 1, 0, 1], [0, 0, 0, 0]]),
    ],
)
def test_a_bias_falls_above_the_mean_and_rises_below(counts, expected):
    np.testing.assert_array_equal(balance.direction(jnp.float32(counts)), np.float32(expected))


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_moves_biases_alike_and_other_weights_as_without_them(name):
    sizes = {"layers": 2, "embed": 8, "mlp": 16, "norm": 8, "router": 4}
    params = {at: jnp.full([sizes[axis] for axis in axes], 0.5) for at, axes in AXES.items()}
    gradients = jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), params)

    def moved(params, gradients, axes):
        made = optimizer(OptimizerOptions(name=name, balance_rate=0.25), lambda count: jnp.float32(0.1), axes)
        state = jax.eval_shape(made.init, params)
        updates, _ = jax.jit(lambda: made.update(gradients, made.init(params), params))()
        return updates, sorted(leaf.shape for leaf in jax.tree.leaves(state))

    with_bias = {**params, "bias": jnp.full((2, 4), 7.0)}, {**gradients, "bias": jnp.asarray(COUNTS)}
    found, state = moved(*with_bias, {**AXES, "bias": BIAS})
    expected, state_without = moved(params, gradients, AXES)
    np.testing.assert_array_equal(found.pop("bias"), [[-0.25, 0.25, 0, 0.25], [0, 0, 0, 0]])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert state == state_without, "a bias has no moments"
