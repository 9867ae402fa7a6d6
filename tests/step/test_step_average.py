"""Averages follow the weights that a step leaves: in float32, trained ones alone, and not in skipped steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain.models.task import Sums
from meshtrain.optim.average import with_averages
from meshtrain.step.guard import GuardOptions
from meshtrain.step.state import init_state
from meshtrain.step.step import WeightUpdate, train_step
from tests.step.conftest import same

DECAY, RATE = 0.75, 0.5
SGD = with_averages(optax.sgd(RATE))
MASK = {"frozen": False, "moved": True, "trained": True}


def after_update(params, metrics):
    return {**params, "moved": params["moved"] + 1}


def gradients(params, batch, rng, seed):
    found = {"frozen": None} | {name: jnp.full(3, batch["gradient"][0]) for name in ("moved", "trained")}
    return Sums(jnp.float32(1), jnp.float32(1), {}, found)


@pytest.fixture(scope="module")
def states():
    """The state before the first of four steps and after each; the gradient of the third is not finite."""
    update = WeightUpdate(
        SGD, lambda count: RATE, 0.0, GuardOptions(), mask=MASK, after_update=after_update, average_decay=DECAY
    )
    step = jax.jit(train_step(gradients, update))
    params = {name: jnp.full(3, 1 / 3, jnp.bfloat16) for name in MASK}
    found = [init_state(params, SGD, jax.random.key(0), mask=MASK)]
    for gradient in (0.001, -0.3, np.nan, 0.2):
        found.append(step(found[-1], {"gradient": jnp.float32([gradient])})[0])
    return found


def test_each_average_follows_its_weight_in_float32(states):
    weight = np.float32(jnp.bfloat16(1 / 3))
    expected = weight
    for gradient, state in ((0.001, states[1]), (-0.3, states[2]), (0.2, states[4])):
        exact = weight - RATE * gradient
        expected = DECAY * expected + (1 - DECAY) * exact
        weight = np.asarray(state.params["trained"], np.float32)  # rounded up or down at random
        np.testing.assert_allclose(weight, exact, rtol=2.0**-7)
        average = state.opt_state.averaged_weights["trained"]
        assert average.dtype == jnp.float32
        np.testing.assert_allclose(average, expected, rtol=1e-6)


def test_what_moves_a_weight_after_the_optimizer_counts(states):
    before, after = states[:2]
    change = after.opt_state.averaged_weights["moved"] - before.opt_state.averaged_weights["moved"]
    np.testing.assert_allclose(change, (1 - DECAY) * (1 - RATE * 0.001), rtol=1e-6)


def test_a_skipped_step_moves_no_average(states):
    same(states[3].opt_state, states[2].opt_state)
    assert int(states[3].skipped.total) == 1


def test_a_frozen_weight_has_no_average(states):
    assert all(state.opt_state.averaged_weights["frozen"] is None for state in states)
