"""What a metric with a weight of its own comes to: in a step over shards and microbatches, and in an evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from meshtrain.assemble import assemble
from meshtrain.config.config import Config
from meshtrain.data.own import Data
from meshtrain.layout.axes import AXES
from meshtrain.models.task import Entry, Ratio, Task
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.run.evaluate import evaluate

CONFIG = Config(
    batch_size=8, accumulation_steps=2, learning_rate=LearningRateOptions(name="constant", peak=1e-3, warmup_steps=0)
)
NUMBERS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], np.float32)  # a batch of eight, and a half


def make_task(config, placement):
    def loss(params, batch, rng, train):
        numbers, weights = batch["numbers"], batch["weights"]
        large = weights * (numbers > 4)
        metrics = {
            "plain": jnp.sum(numbers),
            "large": Ratio(jnp.sum(large * numbers), jnp.sum(large)),
            "none": Ratio(jnp.float32(0), jnp.float32(0)),
        }
        return params["w"][0] * jnp.sum(numbers), jnp.sum(weights), metrics

    init = lambda rng: {"w": nn.LogicallyPartitioned(jnp.ones(1), ("norm",))}  # noqa: E731
    entry = Entry((config.batch_size,), jnp.float32, ("batch",))
    return Task(init, loss, {"numbers": entry, "weights": entry})


@pytest.fixture(scope="module")
def assembly():
    return assemble(CONFIG, dict.fromkeys(AXES, 1) | {"data": 2}, jax.devices()[:2], make_task)


@pytest.fixture(scope="module")
def state(assembly):
    return assembly.init(jax.random.key_data(jax.random.key(0)))


def test_a_step_divides_a_ratio_by_its_own_weight(assembly, state):
    state = jax.tree.map(jnp.copy, state)  # the step donates it
    batch = {"numbers": NUMBERS[:8], "weights": np.ones(8, np.float32)}
    _, metrics = assembly.train_step(
        state, {name: jax.device_put(batch[name], leaf.sharding) for name, leaf in assembly.batch.items()}
    )
    assert float(metrics["plain"]) == NUMBERS[:8].mean()
    assert float(metrics["large"]) == np.float32((5 + 9 + 6) / 3)
    assert float(metrics["none"]) == 0


def test_an_evaluation_divides_the_sums_of_its_batches(assembly, state):
    examples = [{"numbers": np.float32(number), "weights": np.float32(1)} for number in NUMBERS]
    values = evaluate(assembly, Data(examples, examples, "numbers"), state)
    np.testing.assert_allclose(values["eval_loss"], NUMBERS.mean())
    np.testing.assert_allclose(values["eval_plain"], NUMBERS.mean())
    np.testing.assert_allclose(values["eval_large"], NUMBERS[NUMBERS > 4].mean())
    assert values["eval_none"] == 0
