"""Groups that train apart: the same numbers on every mesh, synchronous SGD as the limit, and a guard for each group.

B: sequences, T: tokens a sequence, D: embed dim, V: vocabulary, G: groups.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config, LocalStepsOptions
from meshtrain.lab.compression import CompressionOptions
from meshtrain.lab.local_steps import in_groups, inner_step, outer_optimizer, outer_step, over_groups
from meshtrain.models.task import Sums, Task, token_batch
from meshtrain.models.vocabulary import cross_entropy
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.collectives import collectives
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import AXES
from meshtrain.step import guard
from meshtrain.step.guard import GuardOptions
from meshtrain.step.state import init_state
from meshtrain.step.step import WeightUpdate
from tests.parity import runs

B, T, D, V, G = 16, 4, 8, 32, 4
NUM_STEPS = 4
EVERY_TWO = LocalStepsOptions(period=2, groups=G)
SGD = OptimizerOptions(name="sgd", momentum=0.9, clip_norm=0.0)
CONFIG = Config(
    num_steps=NUM_STEPS,
    batch_size=B,
    sequence_length=T,
    accumulation_steps=2,
    learning_rate=LearningRateOptions(name="constant", peak=0.03, warmup_steps=0),
)
APART = dataclasses.replace(CONFIG, local_steps=EVERY_TWO)


def own(config, placement):
    shapes = {"table": ((V, D), (None, "embed")), "up": ((D, D), ("embed", "mlp")), "head": ((D, V), ("embed", None))}

    def init(rng):
        return {
            name: nn.LogicallyPartitioned(0.3 * jax.random.normal(jax.random.fold_in(rng, i), shape), axes)
            for i, (name, (shape, axes)) in enumerate(shapes.items())
        }

    def loss(params, batch, rng, train):
        logits = jnp.tanh(params["table"][batch["tokens"]] @ params["up"]) @ params["head"]
        return cross_entropy(logits, batch["targets"], batch["weights"], V), jnp.sum(batch["weights"]), {}

    return Task(init, loss, token_batch(B, T))


def batch(step, weights=1.0):
    generator = np.random.default_rng(step)
    values = {name: generator.integers(0, V, (B, T)).astype(np.int32) for name in ("tokens", "targets")}
    ones = np.ones((B, T), np.int32)
    share = np.repeat(np.broadcast_to(np.float32(weights), (G,)), B // G)
    return values | {"segment_ids": ones, "positions": ones, "weights": share[:, None] * np.ones((B, T), np.float32)}


@functools.cache
def assembled(config, **axes):
    shape = dict.fromkeys(AXES, 1) | axes
    return assemble(config, shape, jax.devices()[: int(np.prod(list(shape.values())))], own)


@functools.cache
def trained(config, weights=(1.0, 1.0, 1.0, 1.0), **axes):
    """The state after each step, its outer step done, on the host; and the metrics of each step."""
    assembly = assembled(config, **axes)
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    states, rows = [jax.device_get(state)], []
    for step in range(1, config.num_steps + 1):
        placed = {
            name: jax.device_put(batch(step, weights)[name], like.sharding) for name, like in assembly.batch.items()
        }
        state, metrics = assembly.steps.train(state, placed)
        if assembly.steps.join and step % config.local_steps.period == 0:
            state = assembly.steps.join(state)
        states.append(jax.device_get(state))
        rows.append({name: float(value) for name, value in metrics.items()})
    return states, rows


def assert_near(got, expected, bound):
    """Each leaf within `bound` of the norm of what is expected."""

    def compare(a, b):
        assert np.linalg.norm(np.ravel(a - b)) <= bound * np.linalg.norm(np.ravel(b))

    jax.tree.map(compare, got, expected)


def test_the_same_groups_give_the_same_numbers_on_any_mesh():
    """Of uneven shares: the third group has a fifth of the others' targets, and the same say in the mean."""
    uneven = (1.0, 1.0, 0.2, 1.0)
    reference, rows = trained(APART, uneven)
    for size in (2, 4):
        states, others = trained(APART, uneven, data=size)
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose([row[name] for row in others], [row[name] for row in rows], rtol=1e-5)
        for state, expected in zip(states, reference, strict=True):
            assert_near(state.params, expected.params, 1e-5)
            assert_near(state.extra.params, expected.extra.params, 1e-5)
            assert state.extra.params["up"].shape == (G, D, D)
    apart = [np.ptp(state.extra.params["up"], axis=0).max() for state in reference]
    assert [spread > 1e-3 for spread in apart] == [False, True, False, True, False], "they meet every second step"
    anchors = [state.params["up"] for state in reference]
    assert [np.array_equal(a, b) for a, b in itertools.pairwise(anchors)] == [True, False, True, False]


def test_a_device_computes_several_groups_on_a_pipeline():
    losses = []
    for size in (1, 2):
        config = dataclasses.replace(runs.CONFIG, num_steps=2, local_steps=LocalStepsOptions(period=2, groups=2))
        assembly = assemble(config, runs.sizes(pipeline=size), jax.devices()[:size])
        state, rows = assembly.steps.init(jax.random.key_data(jax.random.key(0))), []
        for examples in runs.example_batches(config.num_steps):
            placed = {name: jax.device_put(examples[name], like.sharding) for name, like in assembly.batch.items()}
            state, metrics = assembly.steps.train(state, placed)
            rows.append([metrics["loss"], metrics["grad_norm"]])
        losses.append(np.asarray(rows))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_joined_after_each_step_sgd_is_synchronous_sgd():
    """Also its momentum: what is linear in the gradients does not mind when they are averaged."""
    rate = dataclasses.replace(CONFIG.learning_rate, peak=0.3)
    config = dataclasses.replace(CONFIG, optimizer=SGD, learning_rate=rate)
    every = LocalStepsOptions(period=1, groups=G, outer_learning_rate=1.0, outer_momentum=0.0)
    reference, rows = trained(config)
    states, others = trained(dataclasses.replace(config, local_steps=every), data=4)
    np.testing.assert_allclose([row["loss"] for row in others], [row["loss"] for row in rows], rtol=1e-6)
    for state, expected in zip(states, reference, strict=True):
        assert_near(state.params, expected.params, 1e-6)
    assert np.abs(reference[-1].params["up"] - reference[0].params["up"]).max() > 1e-2


def test_the_outer_step_is_nesterov_sgd_on_the_mean_distance():
    states, _ = trained(APART, data=4)
    momentum = 0.0
    for last in (2, 4):
        before, after = states[last - 2], states[last]
        # What each group had at the end of the period is not kept: its last step is taken again.
        inner = at_end_of_period(states[last - 1], last)
        gone = before.params["up"] - inner.mean(0)
        momentum = 0.9 * momentum + gone
        expected = before.params["up"] - 0.7 * (gone + 0.9 * momentum)
        np.testing.assert_allclose(after.params["up"], expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(after.extra.params["up"], np.broadcast_to(after.params["up"], (G, D, D)))


def at_end_of_period(state, step, config=APART, **axes):
    """The weights of the groups, [G, ...], before they are joined after a step, given the state before it."""
    assembly = assembled(config, **axes)
    placed = {name: jax.device_put(value, assembly.batch[name].sharding) for name, value in batch(step, 1.0).items()}
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, assembly.state)
    return np.asarray(assembly.steps.train(state, placed)[0].extra.params["up"])


def test_what_int8_does_not_send_of_the_distance_is_sent_later():
    """With a rate of 1 and no momentum the anchor moves by what has arrived."""
    means = dataclasses.replace(EVERY_TWO, outer_learning_rate=1.0, outer_momentum=0.0)
    config = dataclasses.replace(APART, local_steps=means, reduction=CompressionOptions("int8"))
    states, _ = trained(config, data=4)
    for last in (2, 4):
        before, after = states[last - 2], states[last]
        gone = (before.params["up"] - at_end_of_period(states[last - 1], last, config, data=4)).sum(0)
        waiting = [state.extra.residual["up"].sum(0) for state in (before, after)]
        assert np.abs(waiting[1]).max() > 1e-6
        arrived = G * (before.params["up"] - after.params["up"])
        np.testing.assert_allclose(arrived + waiting[1], gone + waiting[0], atol=1e-5 * np.abs(gone).max())
    plain, _ = trained(dataclasses.replace(APART, local_steps=means))
    assert_near(states[-1].params, plain[-1].params, 1e-3)
    assert outer_bytes(assembled(config, data=4)) < 0.5 * outer_bytes(assembled(APART, data=4))


def outer_bytes(assembly):
    program = parse.read(assembly.steps.join.lower(assembly.state).compile().as_text())
    return sum(one.count * one.wire_bytes for one in collectives(program, dict(assembly.mesh.shape)))


def test_a_frozen_weight_is_kept_once_and_stays():
    config = dataclasses.replace(APART, optimizer=OptimizerOptions(trainable="up|head"))
    states, _ = trained(config, data=2)
    assert states[-1].extra.params["table"] is None
    np.testing.assert_array_equal(states[-1].params["table"], states[0].params["table"])
    assert np.abs(states[-1].params["up"] - states[0].params["up"]).max() > 1e-2


def test_the_inner_program_sends_scalars_and_the_outer_one_all_weights_once():
    assembly = assembled(APART, data=4)
    programs = {"inner": (assembly.state, assembly.batch), "outer": (assembly.state,)}
    sent = {}
    for (name, given), step in zip(programs.items(), (assembly.steps.train, assembly.steps.join), strict=True):
        program = parse.read(step.lower(*given).compile().as_text())
        sent[name] = sum(one.count * one.wire_bytes for one in collectives(program, dict(assembly.mesh.shape)))
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(assembly.state.params))
    assert sent["outer"] == 2 * 3 / 4 * 4 * num_parameters
    assert 0 < sent["inner"] <= 1024


LATE = dataclasses.replace(CONFIG, reduction=ReductionOptions("one_step_late"))


def test_a_late_gradient_is_applied_by_the_next_step_on_any_mesh():
    """By hand: SGD with the gradient of the batch before, at the weights of the step before."""
    rate = dataclasses.replace(CONFIG.learning_rate, peak=0.3)
    config = dataclasses.replace(LATE, optimizer=dataclasses.replace(SGD, momentum=0.0), learning_rate=rate)
    reference, rows = trained(config)
    assert_near(reference[1].params, reference[0].params, 0.0)
    synchronous, _ = trained(dataclasses.replace(config, reduction=ReductionOptions()))
    assert_near(reference[2].params, synchronous[1].params, 1e-6)  # the first gradient, no matter when
    assert np.abs(reference[3].params["up"] - synchronous[2].params["up"]).max() > 1e-4, "the second is another one"
    assert rows[0]["grad_norm"] == 0.0
    for size, level in ((4, 0), (2, 1)):
        states, others = trained(dataclasses.replace(config, zero=ZeroOptions(level=level)), data=size)
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose([row[name] for row in others], [row[name] for row in rows], rtol=1e-5)
        assert_near(states[-1].params, reference[-1].params, 1e-5)


def test_before_there_is_a_gradient_nothing_decays_and_nothing_is_counted():
    states, rows = trained(dataclasses.replace(LATE, learning_rate=LearningRateOptions(warmup_steps=2)), data=2)
    assert_near(states[1].params, states[0].params, 0.0)
    assert [int(optax.tree.get(state.opt_state[0], "count")) for state in states] == [0, 0, 1, 2, 3]
    assert rows[0]["learning_rate"] == rows[1]["learning_rate"] < rows[2]["learning_rate"]


def test_a_late_gradient_waits_while_a_step_is_skipped():
    """The second step's own gradient is not finite: it is dropped, and the first step's is applied by the third."""
    assembly, states = assembled(LATE, data=2), []
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    for step in (1, 2, 3):
        given = batch(step, np.inf if step == 2 else 1.0)
        placed = {name: jax.device_put(given[name], like.sharding) for name, like in assembly.batch.items()}
        state, metrics = assembly.steps.train(state, placed)
        states.append(jax.device_get(state))
    assert_near((states[1].params, states[1].extra), (states[0].params, states[0].extra), 0.0)
    assert metrics["skipped_steps"] == 1
    whole, _ = trained(LATE, data=2)
    assert_near(states[2].params, whole[2].params, 1e-6)


# One step of three groups with plain gradients: a batch is each group's loss and its gradient.
GUARD = GuardOptions()
THREE = dataclasses.replace(EVERY_TWO, groups=3)


def plain(losses, gradients):
    """The state before and after one inner step of three groups, and its metrics; weights [4] of 1, SGD at rate 1."""
    sgd = optax.sgd(1.0)

    def found(params, batch, rng, seeds):
        each = jnp.broadcast_to(batch["gradient"][:, None], params["w"].shape)
        return Sums(batch["loss"], jnp.ones(3), {"extra": jnp.float32([1, 2, 3])}, {"w": each * seeds[:, None]})

    state = in_groups(init_state({"w": jnp.ones(4)}, sgd, jax.random.key(0)), THREE)
    step = inner_step(found, WeightUpdate(sgd, lambda count: 0.1, 1.0, GUARD))
    given = {"loss": jnp.float32(losses), "gradient": jnp.float32(gradients)}
    return state, *jax.jit(step)(state, given)


def test_each_group_is_clipped_by_its_own_norm():
    _, after, metrics = plain([1, 1, 1], [0.25, 0.5, 5.0])
    moved = 1 - np.asarray(after.extra.params["w"])[:, 0]
    np.testing.assert_allclose(moved, [0.25, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.mean([0.5, 1.0, 10.0]), rtol=1e-6)
    assert metrics["extra"] == 2.0


def test_the_loss_of_all_groups_is_their_sum_over_their_weight():
    sums = Sums(jnp.float32([1.0, 0.2]), jnp.float32([0.5, 0.3]), {"extra": jnp.float32([0.4, 0.0])}, None)
    names = ("grad_norm", "learning_rate", "skipped_steps", guard.IN_A_ROW, guard.FIRST_NOT_FINITE)
    found = over_groups(dict.fromkeys(names, jnp.zeros(2)) | {"loss": sums.loss / sums.weight}, sums)
    np.testing.assert_allclose([found["loss"], found["extra"], found["weight"]], [1.5, 0.5, 0.8], rtol=1e-6)


@pytest.mark.parametrize("losses, gradients", [([1, np.nan, 1], [1, 1, 1]), ([1, 1, 1], [1, np.inf, 1])])
def test_a_group_that_is_not_finite_skips_its_step_alone(losses, gradients):
    before, after, metrics = plain(losses, gradients)
    moved = np.any(np.asarray(after.extra.params["w"]) != np.asarray(before.extra.params["w"]), axis=1)
    assert moved.tolist() == [True, False, True]
    assert np.asarray(after.skipped.total).tolist() == [0, 1, 0]
    assert (metrics["skipped_steps"], metrics[guard.IN_A_ROW]) == (1, 1)
    assert metrics[guard.FIRST_NOT_FINITE] == (0 if np.isnan(losses[1]) else 1)
    mean = lambda tree, residual: (jax.tree.map(lambda x: x.mean(0), tree), residual)  # noqa: E731
    joined = outer_step(outer_optimizer(THREE), mean)(after)
    assert np.all(np.isfinite(joined.params["w"]))
