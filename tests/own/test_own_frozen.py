"""Half of a task's weights frozen, on one device and on meshes: what moves, what is kept, what is computed.

The reference is the same task with all of its weights trained, on one device. Plain SGD's momentum is, after the first
step, the gradient that the optimizer was given.

B: sequences, T: tokens a sequence, D: embed dim, F: mlp dim, V: vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from meshtrain import explain
from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.models.task import Task, token_batch
from meshtrain.models.vocabulary import cross_entropy
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.rules import AXES, LayoutOptions, Rule, default_rules, extend
from meshtrain.sharding.trees import leaves_with_paths
from meshtrain.step.device_memory import training_state_bytes
from meshtrain.step.loss_scale import LossScaleOptions

B, T, D, F, V = 8, 4, 16, 32, 64
# Each of a shape of its own, so that an array of that shape in a program is the gradient of that weight.
WEIGHTS = {
    "table": ((V, D), ("rows", "embed")),
    "up": ((D, F), ("embed", "mlp")),
    "down": ((F, D), ("mlp", "embed")),
    "head": ((D, V), ("embed", "vocab")),
}
TRAINED, FROZEN = {"up", "head"}, {"table", "down"}
SGD = OptimizerOptions(name="sgd", weight_decay=0.1, clip_norm=0.0)
CONFIG = Config(
    num_steps=3,
    batch_size=B,
    sequence_length=T,
    accumulation_steps=2,
    optimizer=SGD,
    learning_rate=LearningRateOptions(name="constant", peak=0.1, warmup_steps=0),
)
FREEZING = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(SGD, trainable="up|head"))
MESHES = {
    "one device": (0, {}),
    "data 2 x fsdp 2": (0, {"data": 2, "fsdp": 2}),
    "level 1": (1, {"data": 4}),
    "level 2": (2, {"data": 4}),
    "level 3": (3, {"data": 2, "fsdp": 2}),
}


def own(config, placement):
    def init(rng):
        return {
            name: nn.LogicallyPartitioned(0.3 * jax.random.normal(jax.random.fold_in(rng, i), shape), axes)
            for i, (name, (shape, axes)) in enumerate(WEIGHTS.items())
        }

    def loss(params, batch, rng, train):
        w = {name: placement.weight(params[name], axes) for name, (_, axes) in WEIGHTS.items()}
        logits = jnp.tanh(w["table"][batch["tokens"]] @ w["up"]) @ w["down"] @ w["head"]
        return cross_entropy(logits, batch["targets"], batch["weights"], V), jnp.sum(batch["weights"]), {}

    return Task(init, loss, token_batch(B, T))


def batch(step):
    generator = np.random.default_rng(step)
    values = {name: generator.integers(0, V, (B, T)).astype(np.int32) for name in ("tokens", "targets")}
    ones = np.ones((B, T), np.int32)
    return values | {"segment_ids": ones, "positions": ones, "weights": np.ones((B, T), np.float32)}


def assembled(config, **axes):
    shape = dict.fromkeys(AXES, 1) | axes
    rules = extend(default_rules(LayoutOptions()), Rule("rows"))
    return assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))], own, rules)


@functools.cache
def steps(config, **axes):
    """The state before each step and after the last one, on the host, and the metrics of each step."""
    assembly = assembled(config, **axes)
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    states, metrics = [jax.device_get(state)], []
    for step in range(config.num_steps):
        placed = {name: jax.device_put(batch(step)[name], like.sharding) for name, like in assembly.batch.items()}
        state, values = assembly.steps.train(state, placed)
        states.append(jax.device_get(state))
        metrics.append({name: float(value) for name, value in values.items()})
    return states, metrics


def gradients_of(state):
    return state.opt_state[0].trace


def norm_of(tree):
    return np.sqrt(sum(np.sum(np.square(leaf.astype(np.float64))) for leaf in jax.tree.leaves(tree)))


def assert_near(got, expected, bound=5e-6):
    assert norm_of(np.subtract(got, expected)) <= bound * norm_of(expected)


@pytest.mark.parametrize("level, axes", MESHES.values(), ids=MESHES)
def test_frozen_weights_stay_and_trained_ones_get_the_gradients_of_a_full_run(level, axes):
    states, metrics = steps(dataclasses.replace(FREEZING, zero=ZeroOptions(level)), **axes)
    everything, metrics_of_all = steps(CONFIG)
    for name in FROZEN:
        np.testing.assert_array_equal(states[-1].params[name], everything[0].params[name])
    full = gradients_of(everything[1])
    for name in TRAINED:
        assert_near(gradients_of(states[1])[name], full[name])
        assert_near(
            states[1].params[name] - states[0].params[name], everything[1].params[name] - everything[0].params[name]
        )
        assert norm_of(states[-1].params[name] - states[0].params[name]) > 1e-2
    assert metrics[0]["grad_norm"] == pytest.approx(norm_of({name: full[name] for name in TRAINED}), rel=1e-6)
    assert metrics_of_all[0]["grad_norm"] == pytest.approx(norm_of(full), rel=1e-6)
    assert metrics[0]["grad_norm"] < 0.9 * metrics_of_all[0]["grad_norm"]


def test_clipping_and_the_loss_scale_go_by_the_trained_gradients():
    optimizer = dataclasses.replace(FREEZING.optimizer, clip_norm=0.01)
    scaled = dataclasses.replace(FREEZING, num_steps=1, optimizer=optimizer, loss_scale=LossScaleOptions("dynamic"))
    (_, state), _ = steps(scaled)
    full = gradients_of(steps(CONFIG)[0][1])
    norm = norm_of({name: full[name] for name in TRAINED})
    for name in TRAINED:
        assert_near(gradients_of(state)[name], full[name] * (0.01 / norm))


@pytest.mark.parametrize("config, trained", [(CONFIG, WEIGHTS.keys()), (FREEZING, TRAINED)], ids=["all", "half"])
def test_frozen_weights_have_neither_sums_of_gradients_nor_moments(config, trained, carried_shapes):
    assembly = assembled(config)
    carried = carried_shapes(assembly)
    assert {name for name, (shape, _) in WEIGHTS.items() if shape in carried} == set(trained)
    moments = {path.split("/")[-1] for path, leaf in leaves_with_paths(assembly.state.opt_state) if leaf.ndim}
    assert moments == set(trained)
    assert training_state_bytes(assembly.state, assembly.states.sums).gradients == 4 * sum(
        np.prod(WEIGHTS[name][0]) for name in trained
    )


def test_explain_marks_frozen_weights_and_counts_trained_ones():
    lines = explain.text(assembled(FREEZING, data=2)).splitlines()
    marked = {line.split()[0].split("/")[-1] for line in lines if line.endswith(", frozen")}
    assert marked == FROZEN
    num_trained, num_all = (sum(np.prod(WEIGHTS[name][0]) for name in names) for names in (TRAINED, WEIGHTS))
    assert f"trained      {num_trained:,} of {num_all:,} stored parameters, the others are frozen" in lines
    assert "frozen" not in explain.text(assembled(CONFIG, data=2))
