"""Loss scaling: the rule step by step, no bit changed under float32, overflows skipped alike on every mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain.models.task import Sums
from meshtrain.step import guard, loss_scale
from meshtrain.step.guard import GuardOptions
from meshtrain.step.loss_scale import LossScale, LossScaleOptions, Scaling
from meshtrain.step.precision import PrecisionOptions
from meshtrain.step.state import init_state
from meshtrain.step.step import WeightUpdate, train_step
from tests.step.conftest import same

MESHES = [{}, {"data": 2, "tensor": 2, "pipeline": 2}]
# One program for all tests in float16 that can share it: compiling is what they cost.
FLOAT16_RULE = LossScaleOptions(initial=2.0**14, growth_steps=3, hysteresis=1)
GOOD, OVERFLOW, BROKEN = (1.0, 1.0), (1.0, math.inf), (math.nan, math.nan)
RULE = LossScaleOptions(initial=8.0, growth_steps=3, hysteresis=2)


def name(mesh):
    return "-".join(f"{axis}{size}" for axis, size in mesh.items()) or "one"


@pytest.mark.parametrize(
    "events, scales",
    [
        ([GOOD] * 7, [8, 8, 16, 16, 16, 32, 32]),
        ([OVERFLOW, OVERFLOW, OVERFLOW, GOOD], [8, 4, 2, 2]),
        ([OVERFLOW, GOOD, GOOD, OVERFLOW], [8, 8, 8, 4]),
        ([OVERFLOW, GOOD, GOOD, GOOD, OVERFLOW], [8, 8, 8, 16, 16]),
        ([GOOD, GOOD, OVERFLOW, GOOD, GOOD, GOOD], [8, 8, 8, 8, 8, 16]),
        ([OVERFLOW] * 6, [8, 4, 2, 1, 1, 1]),
        ([BROKEN, BROKEN, BROKEN], [8, 8, 8]),
        ([GOOD, GOOD, BROKEN, GOOD, GOOD, GOOD], [8, 8, 8, 8, 8, 16]),
    ],
)
def test_the_rule(events, scales):
    rule, seen = Scaling(RULE, 1), []
    state = loss_scale.first_scale(rule)
    for loss, norm in events:
        before = float(state.scale)
        state, is_excused = loss_scale.after(rule, state, jnp.float32(loss), jnp.float32(norm))
        assert bool(is_excused) == ((loss, norm) == OVERFLOW and before > 1)
        seen.append(float(state.scale))
    assert seen == scales


def test_it_does_not_grow_for_ever():
    rule = Scaling(dataclasses.replace(RULE, growth_steps=1, initial=loss_scale.MAXIMUM), 1)
    state, _ = loss_scale.after(rule, loss_scale.first_scale(rule), jnp.float32(1), jnp.float32(1))
    assert state.scale == loss_scale.MAXIMUM


@pytest.mark.parametrize("num_targets, seed", [(1, 8.0), (2, 4.0), (3, 4.0), (1000, 8 / 512), (1024, 8 / 1024)])
def test_the_seed_is_a_power_of_two(num_targets, seed):
    rule = Scaling(RULE, num_targets)
    assert loss_scale.seed(rule, loss_scale.first_scale(rule)) == seed
    assert loss_scale.seed(None, loss_scale.first_scale(None)) == 1


@pytest.mark.parametrize("is_float16, held", [(True, [True, True, False]), (False, [True, True, True])])
def test_a_sum_over_the_batch_that_float16_cannot_hold_is_an_overflow(is_float16, held):
    rule = loss_scale.scaling(LossScaleOptions("dynamic"), 4, computes_in_float16=is_float16)
    gradients = [jnp.float32([0, -1]), jnp.float32([65504 / 8]), jnp.float32([0, -65536 / 8])]
    squares = loss_scale.mark_overflows(rule, jnp.ones(3), gradients, jnp.float32(8))
    assert np.isfinite(squares).tolist() == held
    same(loss_scale.mark_overflows(None, jnp.ones(3), gradients, jnp.float32(8)), jnp.ones(3))


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param({"data": 2, "tensor": 2, "pipeline": 2}, marks=pytest.mark.slow)], ids=name
)
def test_under_float32_it_changes_no_bit(mesh, base, steps):
    scaled = dataclasses.replace(base, loss_scale=LossScaleOptions("dynamic", initial=2.0**20, growth_steps=2))
    without, got = [steps(config, num_steps=4, exact_bits=True, **mesh) for config in (base, scaled)]
    assert [taken.metrics["loss_scale"] for taken in got[1:]] == [2**20, 2**20, 2**21, 2**21]
    for a, b in zip(without, got, strict=True):
        same((a.state.params, a.state.opt_state), (b.state.params, b.state.opt_state))
        assert a.metrics == {key: value for key, value in b.metrics.items() if key != "loss_scale"}


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_an_overflow_in_float16_is_skipped_and_made_up_for_on_every_mesh(mesh, base, steps):
    config = dataclasses.replace(base, precision=PrecisionOptions("float16"), loss_scale=FLOAT16_RULE)
    taken = steps(config, num_steps=8, large=(3,), **mesh)
    seen = [(step.metrics["loss_scale"], step.metrics["skipped_steps"]) for step in taken[1:]]
    assert seen == [(2**14, 0), (2**14, 0), (2**14, 1), *[(2**13, 1)] * 3, (2**14, 1), (2**14, 1)]
    assert all(step.metrics["skipped_in_a_row"] == 0 for step in taken[1:])
    assert np.isfinite(taken[3].metrics["loss"])
    assert not np.isfinite(taken[3].metrics["grad_norm"])
    before, after = taken[2].state, taken[3].state
    same((before.params, before.opt_state), (after.params, after.opt_state))
    # Every other step is the one of float32, which takes the large batch like any other.
    steady = steps(base, num_steps=2)
    losses = [step.metrics["loss"] for step in taken[1:3]]
    np.testing.assert_allclose(losses, [step.metrics["loss"] for step in steady[1:3]], rtol=1e-3)
    reference = steps(config, num_steps=8, large=(3,))
    losses = [[step.metrics["loss"] for step in run[1:]] for run in (taken, reference)]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    moved = np.abs(taken[-1].state.params["head"]["kernel"] - after.params["head"]["kernel"]).max()
    assert moved > 1e-3


@pytest.mark.parametrize(
    "accumulation_steps, num_microbatches, mesh",
    [(8, 1, {}), (1, 4, {"data": 2, "pipeline": 2})],
    ids=["accumulation", "data and pipeline"],
)
def test_the_same_steps_are_skipped_with_any_number_of_parts(accumulation_steps, num_microbatches, mesh, base, steps):
    """Parts whose float16 sums do not overflow where that of the whole batch does are skipped with it."""
    rule = dataclasses.replace(FLOAT16_RULE, initial=2.0**23)
    config = dataclasses.replace(base, precision=PrecisionOptions("float16"), loss_scale=rule)
    pipeline = dataclasses.replace(base.pipeline, num_microbatches=num_microbatches)
    parts = dataclasses.replace(config, accumulation_steps=accumulation_steps, pipeline=pipeline)
    reference, got = (
        [(step.metrics["loss_scale"], step.metrics["skipped_steps"], step.metrics["loss"]) for step in run[1:]]
        for run in (steps(config, num_steps=8), steps(parts, num_steps=8, **mesh))
    )
    assert [row[:2] for row in got] == [row[:2] for row in reference]
    assert len({row[1] for row in reference}) > 3, "several steps are skipped"
    np.testing.assert_allclose([row[2] for row in got], [row[2] for row in reference], rtol=1e-4)


@pytest.mark.slow
def test_a_scale_that_is_far_too_large_comes_down_and_the_run_learns(base, steps):
    rule = LossScaleOptions(initial=2.0**28, hysteresis=1)
    config = dataclasses.replace(base, precision=PrecisionOptions("float16"), loss_scale=rule)
    taken = steps(config, num_steps=24)
    scales = [step.metrics["loss_scale"] for step in taken[1:]]
    num_skipped = int(taken[-1].metrics["skipped_steps"])
    assert 4 < num_skipped < 16
    assert min(scales) == 2.0 ** (28 - num_skipped)
    assert scales == sorted(scales, reverse=True)
    assert taken[-1].metrics["loss"] < taken[1].metrics["loss"] - 0.05


def test_a_broken_batch_is_not_the_scales_fault(base, steps):
    config = dataclasses.replace(base, precision=PrecisionOptions("float16"), loss_scale=FLOAT16_RULE)
    taken = steps(config, num_steps=3, broken=(2,))
    assert [step.metrics["loss_scale"] for step in taken[1:]] == [2**14] * 3
    assert [step.metrics["skipped_in_a_row"] for step in taken[1:]] == [0, 1, 0]


def test_what_a_smaller_scale_does_not_mend_counts_as_in_a_row():
    def gradients(params, batch, rng, seed):
        return Sums(jnp.float32(1), jnp.float32(1), {}, jnp.full_like(params, jnp.inf))

    adam, rule = optax.adam(0.1), Scaling(dataclasses.replace(RULE, hysteresis=1), 1)
    step = jax.jit(train_step(gradients, WeightUpdate(adam, lambda count: 0.1, 1.0, GuardOptions(), rule), rule))
    state, rows = init_state(jnp.ones(3), adam, jax.random.key(0), rule), []
    for _ in range(6):
        state, metrics = step(state, {"x": jnp.zeros((1, 1))})
        rows.append((float(metrics["loss_scale"]), int(metrics["skipped_in_a_row"]), int(metrics["skipped_steps"])))
    assert rows == [(8, 0, 1), (4, 0, 2), (2, 0, 3), (1, 1, 4), (1, 2, 5), (1, 3, 6)]


def test_a_sum_that_float16_cannot_hold_is_named_and_is_no_jump_of_the_norm():
    def gradients(params, batch, rng, seed):
        return Sums(jnp.float32(1), jnp.float32(1), {}, {"a": seed * jnp.ones(3), "b": seed * jnp.full(2, 60000.0)})

    rule = loss_scale.scaling(RULE, 1, computes_in_float16=True)
    change = WeightUpdate(optax.sgd(0.1), lambda count: 0.1, 1.0, GuardOptions(), rule)
    state = init_state({"a": jnp.ones(3), "b": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0), rule)
    _, metrics = jax.jit(train_step(gradients, change, rule))(state, {"x": jnp.zeros((1, 1))})
    assert metrics["skipped_steps"] == 1
    assert guard.skip_reason(["a", "b"], int(metrics[guard.FIRST_NOT_FINITE]), -1) == "gradients/b"


@pytest.mark.parametrize(
    "options, is_float16, words",
    [
        (LossScaleOptions(initial=3000.0), False, "loss_scale.initial: got 3000; allowed: a power of two"),
        (LossScaleOptions(initial=2.0**40), True, "nearest: 4294967296"),
        (LossScaleOptions("none"), True, "loss_scale.mode: got none with float16"),
    ],
)
def test_what_is_refused(options, is_float16, words):
    [line] = loss_scale.check(options, computes_in_float16=is_float16)
    assert words in line
    assert "; nearest: " in line


@pytest.mark.parametrize(
    "mode, is_float16, is_on",
    [("auto", True, True), ("auto", False, False), ("none", False, False), ("dynamic", False, True)],
)
def test_when_it_is_on(mode, is_float16, is_on):
    options = LossScaleOptions(mode)
    assert loss_scale.check(options, computes_in_float16=is_float16) == []
    assert (loss_scale.scaling(options, 4, computes_in_float16=is_float16) is not None) == is_on
    assert isinstance(loss_scale.first_scale(None), LossScale)
