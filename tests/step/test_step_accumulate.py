"""Microbatches: which examples each holds, that cutting keeps every dim split as the rules say, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.task import Entry, Ratio, Task
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.mesh import make_mesh
from meshtrain.sharding.param_sharding import param_shardings
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import AXES, LayoutOptions, Rule, default_rules, extend
from meshtrain.step.accumulate import accumulate_gradients, split_microbatches, stack_microbatches

BATCH_AXES = {"images": ("batch", "height", "width", "channels"), "labels": ("batch",)}


@pytest.mark.parametrize("function, dims", [(split_microbatches, (2, 3)), (stack_microbatches, (3, 2))])
def test_microbatches_of_any_rank_stay_split_as_the_rules_say(function, dims):
    shape = dict.fromkeys(AXES, 1) | {"data": 2, "tensor": 2}
    rules = extend(default_rules(LayoutOptions()), Rule("height", activations=("tensor",)), Rule("width"),
                   Rule("channels"))  # fmt: skip
    mesh = make_mesh(shape, jax.devices()[:4])
    images = jnp.arange(6.0)[:, None, None, None] * jnp.ones((6, 4, 2, 3))
    batch = {"images": jax.device_put(images, NamedSharding(mesh, P("data", "tensor"))), "labels": jnp.arange(6)}
    placement = Placement(rules, mesh)
    found = jax.jit(lambda batch: function(batch, 3, placement, BATCH_AXES))(batch)
    assert found["images"].shape == (*dims, 4, 2, 3)
    wanted = P("data", None, "tensor") if function is split_microbatches else P(None, "data", "tensor")
    assert found["images"].sharding.is_equivalent_to(NamedSharding(mesh, wanted), 5)
    numbers = np.arange(6).reshape(2, 3)  # microbatch m holds m, m + 3
    np.testing.assert_array_equal(found["labels"], numbers if function is split_microbatches else numbers.T)
    np.testing.assert_array_equal(found["images"][..., 0, 0, 0], found["labels"])


@pytest.mark.parametrize("level, num_microbatches", [(1, 2), (2, 1), (2, 2)])
def test_a_gradient_that_data_does_not_divide_is_reduced_once(level, num_microbatches):
    mesh = make_mesh(dict.fromkeys(AXES, 1) | {"data": 2}, jax.devices()[:2])
    rules = default_rules(LayoutOptions())
    params, names = {"odd": jnp.ones(3), "even": jnp.ones(4)}, {"odd": ("norm",), "even": ("norm",)}
    replicas = GradientSync(mesh, param_shardings(params, names, rules, mesh.shape, level), level)

    def loss(params, batch, rng, train):
        weight = jnp.sum(batch["weights"])
        return weight * (jnp.sum(params["odd"]) + jnp.sum(params["even"])), weight, {}

    gradients = accumulate_gradients(loss, num_microbatches, Placement(rules, mesh), replicas, {"weights": ("batch",)})
    sums = jax.jit(gradients)(params, {"weights": jnp.ones(8)}, jax.random.key(0), jnp.float32(1))
    assert [replicas.stored[name].data_dim for name in ("odd", "even")] == [0, -1]
    np.testing.assert_array_equal(sums.gradients["odd"], [8] * 3)
    np.testing.assert_array_equal(sums.gradients["even"], [8] * 4)


def numbers_task(config, placement):
    def loss(params, batch, rng, train):
        large = batch["weights"] * (batch["numbers"] > 4)
        metrics = {
            "plain": jnp.sum(batch["numbers"]),
            "large": Ratio(jnp.sum(large * batch["numbers"]), jnp.sum(large)),
            "none": Ratio(jnp.float32(0), jnp.float32(0)),
        }
        return params["w"][0] * jnp.sum(batch["numbers"]), jnp.sum(batch["weights"]), metrics

    entry = Entry((config.batch_size,), jnp.float32, ("batch",))
    init = lambda rng: {"w": nn.LogicallyPartitioned(jnp.ones(1), ("norm",))}  # noqa: E731
    return Task(init, loss, {"numbers": entry, "weights": entry})


def test_a_ratio_is_summed_over_shards_and_microbatches_and_divided_by_its_own_weight():
    numbers = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.float32)
    config = Config(batch_size=8, accumulation_steps=2)
    assembly = assemble(config, dict.fromkeys(AXES, 1) | {"data": 2}, jax.devices()[:2], numbers_task)
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    batch = {"numbers": numbers, "weights": np.ones(8, np.float32)}
    placed = {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
    sums = assembly.steps.evaluate(state.params, placed)
    assert (sums["loss"], sums["weight"], sums["plain"]) == (numbers.sum(), 8, numbers.sum())
    assert sums["large"] == Ratio(5 + 9 + 6, 3)
    _, metrics = assembly.steps.train(state, placed)
    assert {name: float(metrics[name]) for name in ("plain", "large", "none")} == {
        "plain": numbers.mean(),
        "large": np.float32((5 + 9 + 6) / 3),
        "none": 0,
    }
