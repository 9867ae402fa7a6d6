"""Sums and scales on data alone, with accumulation: layers are reduced inside the backward loop of the last microbatch.

Each gradient of the task is the sum of the examples' numbers. They are chosen so that an exact result tells where a sum
was rounded, scaled or lost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import LogicallyPartitioned

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.metrics import Load
from meshtrain.models.task import Entry, Task
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step.loss_scale import LossScaleOptions
from meshtrain.step.precision import PrecisionOptions

DATA, MICROBATCHES, LAYERS = 2, 3, 2
NUM_EXAMPLES = DATA * MICROBATCHES
# Halfway between two numbers of bfloat16. Three of them, 771, become 772, and rounded one by one 768.
X = 257.0
EXACT, ROUNDED_ONCE = NUM_EXAMPLES * X, DATA * 772.0


def make_task(config, placement):
    def init(rng):
        return {
            "layers": {
                "bias": LogicallyPartitioned(jnp.zeros((LAYERS, 2)), ("layers", "router")),
                "kernel": LogicallyPartitioned(jnp.zeros((LAYERS, 2)), ("layers", None)),
            },
            "outer": LogicallyPartitioned(jnp.zeros(2), (None,)),
        }

    def loss(params, batch, rng, train):
        def layer(y, weights):
            return y + jnp.sum(weights["kernel"]), jnp.stack([jnp.sum(batch["x"]), jnp.float32(len(batch["x"]))])

        y, counts = jax.lax.scan(layer, jnp.sum(params["outer"]), params["layers"])
        value = jnp.sum(batch["x"]) * y.astype(jnp.float32)
        return value, jnp.sum(batch["share"]), {"load": Load(counts)}

    def after_update(params, metrics):
        layers = params["layers"]
        return {**params, "layers": {**layers, "bias": layers["bias"] + metrics["load"].counts}}

    batch = {name: Entry((config.batch_size,), jnp.float32, ("batch",)) for name in ("x", "share")}
    return Task(init, loss, batch, after_update=after_update, takes_manual_axes=True, unit="examples")


def moved(trainable="", **changes):
    """The weights after one step of gradient descent at rate 1, and its metrics; the weights of examples add to 1."""
    config = Config(
        batch_size=NUM_EXAMPLES,
        accumulation_steps=MICROBATCHES,
        optimizer=OptimizerOptions(name="sgd", momentum=0.0, clip_norm=0.0, trainable=trainable),
        learning_rate=LearningRateOptions(name="constant", peak=1.0, warmup_steps=0),
        **changes,
    )
    assembly = assemble(config, dict.fromkeys(AXES, 1) | {"data": DATA}, jax.devices()[:DATA], make_task)
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    batch = {"x": np.full(NUM_EXAMPLES, X, np.float32), "share": np.zeros(NUM_EXAMPLES, np.float32)}
    batch["share"][1] = 1
    placed = {name: jax.device_put(x, assembly.batch[name].sharding) for name, x in batch.items()}
    state, metrics = assembly.steps.train(state, placed)
    return jax.device_get(state.params), jax.device_get(metrics)


RUNS = {
    "float32": ({}, EXACT),
    "float16 and its loss scale": (
        {"precision": PrecisionOptions("float16"), "loss_scale": LossScaleOptions(initial=64.0)},
        EXACT,
    ),
    "bfloat16 on the wire": ({"precision": PrecisionOptions("float32", reduce_dtype="bfloat16")}, ROUNDED_ONCE),
    "bfloat16 on the wire, level 1": (
        {"precision": PrecisionOptions("float32", reduce_dtype="bfloat16"), "zero": ZeroOptions(level=1)},
        ROUNDED_ONCE,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_gradients_and_counts_are_the_sums_of_all_examples(name):
    changes, gradient = RUNS[name]
    params, metrics = moved(**changes)
    np.testing.assert_array_equal(params["layers"]["kernel"], np.full((LAYERS, 2), -gradient))
    np.testing.assert_array_equal(params["outer"], np.full(2, -gradient))
    np.testing.assert_array_equal(params["layers"]["bias"], [[EXACT, NUM_EXAMPLES]] * LAYERS)
    assert metrics["weight"] == 1


def test_a_frozen_weight_stays_and_the_others_move():
    params, _ = moved(trainable="kernel")
    np.testing.assert_array_equal(params["layers"]["kernel"], np.full((LAYERS, 2), -EXACT))
    assert not params["outer"].any()
