"""What begins at the weights of `init_from` besides the weights: their averages, and each group of local steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import LogicallyPartitioned

from meshtrain.models.task import Entry, Task
from meshtrain.training import train
from tests.run.test_run_saving import GIVEN, points


def line(config, placement):
    """A weight that starts at 0, and whose goal is 1."""

    def loss(params, batch, rng, train):
        return jnp.sum((params["w"] * batch["x"] - 1) ** 2), jnp.float32(len(batch["x"])), {}

    batch = {"x": Entry((config.batch_size,), jnp.float32, ("batch",))}
    init = lambda rng: {"w": LogicallyPartitioned(jnp.zeros(1), (None,))}  # noqa: E731
    return Task(init, loss, batch, unit="lines", takes_manual_axes=True)


def trained(directory, **changes):
    given = {**GIVEN, "eval_every": 0, "checkpoint": {"every": 0}, "num_steps": 2}
    return train(given | changes, directory, line, points).state


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The folder of a run, and its one weight, which training has moved from its initial value."""
    directory = tmp_path_factory.mktemp("given") / "run"
    weight = float(trained(directory).params["w"][0])
    assert weight > 0.1
    return directory, weight


STILL = {"name": "constant", "peak": 1e-9, "warmup_steps": 0}


def test_averages_begin_at_the_loaded_weights(given, tmp_path):
    directory, weight = given
    optimizer = {"name": "sgd", "average": 0.5}
    state = trained(tmp_path, learning_rate=STILL, init_from=str(directory), optimizer=optimizer)
    for weights in (state.params, state.opt_state.averaged_weights):
        [leaf] = jax.tree.leaves(weights)
        np.testing.assert_allclose(leaf, [weight], rtol=1e-5)


def test_each_group_begins_at_the_loaded_weights(given, tmp_path):
    """After two steps that move nothing the groups exchange weights: another one would show in their mean."""
    directory, weight = given
    groups = {"local_steps": {"period": 2, "groups": 2}, "mesh": {"data": 2}}
    state = trained(tmp_path, learning_rate=STILL, init_from=str(directory), **groups)
    np.testing.assert_allclose(state.params["w"], [weight], rtol=1e-5)
