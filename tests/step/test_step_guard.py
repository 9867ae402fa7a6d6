"""Steps that go wrong: refused, counted and named on every mesh, and forgotten by the weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain.models.task import Sums
from meshtrain.step import guard
from meshtrain.step.guard import NUM_NORMS, GuardOptions
from meshtrain.step.state import init_state, num_updates
from meshtrain.step.step import WeightUpdate, train_step
from tests.step.conftest import same

MESHES = [
    {},
    pytest.param({"data": 8}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow),
    {"data": 2, "tensor": 2, "pipeline": 2},
]
RATE, ADAM, GUARD = 0.5, optax.adam(0.5), GuardOptions()


def start():
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    return init_state(params, ADAM, jax.random.key(0))


@functools.cache
def plain_step(options=GUARD):
    """A step whose batch is the loss, the gradient of `a` and that of `b`."""

    def gradients(params, batch, rng, seed):
        found = {name: jnp.full_like(params[name], batch[name][0]) for name in params}
        return Sums(batch["loss"][0], jnp.float32(1), {"extra": jnp.float32(2)}, found)

    return jax.jit(train_step(gradients, WeightUpdate(ADAM, optax.linear_schedule(RATE, 0.0, 100), 1.0, options)))


def batch(loss=1.0, a=1.0, b=1.0):
    return {"loss": jnp.float32([loss]), "a": jnp.float32([a]), "b": jnp.float32([b])}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{a}{n}" for a, n in mesh.items()) or "one")
def test_a_broken_batch_changes_no_weight_on_any_mesh(mesh, steps):
    start, first, second, third = steps(num_steps=3, broken=(2,), **mesh)
    same((second.state.params, second.state.opt_state), (first.state.params, first.state.opt_state))
    assert [int(taken.state.step) for taken in (start, first, second, third)] == [0, 1, 2, 3]
    assert [int(taken.state.skipped.total) for taken in (start, first, second, third)] == [0, 0, 1, 1]
    assert [taken.metrics["skipped_in_a_row"] for taken in (first, second, third)] == [0, 1, 0]
    assert not np.isfinite(second.metrics["loss"])
    assert np.abs(third.state.params["head"]["kernel"] - second.state.params["head"]["kernel"]).max() > 1e-4
    reference = steps(num_steps=3, broken=(2,))
    for got, expected in zip((first, third), (reference[1], reference[3]), strict=True):
        np.testing.assert_allclose(got.metrics["loss"], expected.metrics["loss"], rtol=1e-5)
    # The step after it draws and reads what it would have without the broken one.
    assert third.metrics["learning_rate"] == second.metrics["learning_rate"] != first.metrics["learning_rate"]


def test_a_good_step_is_what_it_is_without_a_guard(steps):
    """Looking changes no bit: the same steps again, with a rule that never finds anything."""
    found, again = steps(num_steps=3), steps(num_steps=3, broken=(9,))
    same(found[3].state, again[3].state)
    assert found[3].metrics["skipped_steps"] == 0


@pytest.mark.parametrize(
    "wrong, number",
    [({"loss": np.nan}, 0), ({"loss": np.inf}, 0), ({"a": np.nan}, 1), ({"b": -np.inf}, 2), ({"b": 1e30}, 2)],
)
def test_what_is_refused_and_who_is_named(wrong, number):
    before = plain_step()(start(), batch())[0]
    after, metrics = plain_step()(before, batch(**wrong))
    same((after.params, after.opt_state, after.rng), (before.params, before.opt_state, before.rng))
    assert (int(after.step), int(num_updates(after)), int(after.skipped.total)) == (2, 1, 1)
    assert metrics[guard.FIRST_NOT_FINITE] == number
    name = guard.name_of_first(after.params, int(metrics[guard.FIRST_NOT_FINITE]))
    assert name == ["loss", "gradients/a", "gradients/b"][number]
    assert metrics["learning_rate"] == pytest.approx(RATE * 0.99)


def test_the_gradient_named_is_that_of_the_trained_weight_and_a_frozen_one_stays():
    mask, params = {"a": False, "b": True}, start().params

    def gradients(params, batch, rng, seed):
        return Sums(batch["loss"][0], jnp.float32(1), {}, {"a": None, "b": jnp.full_like(params["b"], batch["b"][0])})

    step = jax.jit(train_step(gradients, WeightUpdate(ADAM, lambda count: RATE, 1.0, GUARD, mask=mask)))
    good, metrics = step(init_state(params, ADAM, jax.random.key(0), mask=mask), batch(b=3.0))
    assert metrics["grad_norm"] == 6.0
    assert metrics[guard.FIRST_NOT_FINITE] == -1
    same(good.params["a"], params["a"])
    assert np.all(good.params["b"] < params["b"])
    bad, metrics = step(good, batch(b=np.nan))
    same((bad.params, bad.opt_state), (good.params, good.opt_state))
    assert guard.name_of_first(bad.params, int(metrics[guard.FIRST_NOT_FINITE])) == "gradients/b"


@pytest.mark.parametrize("weight", [1e-4, 0.3, 6.0, 0.0])
def test_the_mean_of_a_batch_is_its_sum_over_any_positive_weight(weight):
    def gradients(params, batch, rng, seed):
        sums = jax.tree.map(lambda leaf: 3 * batch["weight"][0] * jnp.ones_like(leaf), params)
        return Sums(5 * batch["weight"][0], batch["weight"][0], {"extra": 2 * batch["weight"][0]}, sums)

    step = jax.jit(train_step(gradients, WeightUpdate(ADAM, lambda count: RATE, 0.0, GUARD)))
    _, metrics = step(start(), {"weight": jnp.float32([weight])})
    got = [float(metrics[name]) for name in ("loss", "extra", "grad_norm", "weight")]
    is_there = weight > 0
    np.testing.assert_allclose(got, [5 * is_there, 2 * is_there, 3 * np.sqrt(7) * is_there, weight], rtol=1e-5)


def test_each_step_draws_from_a_key_of_its_own_a_skipped_one_among_them():
    def gradients(params, batch, rng, seed):
        drawn = {"drawn": jax.random.uniform(rng)}
        return Sums(batch["loss"][0], jnp.float32(1), drawn, jax.tree.map(jnp.ones_like, params))

    step = jax.jit(train_step(gradients, WeightUpdate(ADAM, lambda count: RATE, 1.0, GUARD)))
    state, drawn = start(), []
    for loss in (1.0, np.nan, 1.0, 1.0):
        state, metrics = step(state, batch(loss=loss))
        drawn.append(float(metrics["drawn"]))
    assert len(set(drawn)) == 4


def test_a_weight_that_is_no_number_is_named_first():
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2)).at[1, 1].set(jnp.nan)}
    assert guard.name_of_first(params, 0) == "params/b"


def test_in_a_row_begins_again_after_a_good_step():
    state, rows = start(), []
    for loss in (1, np.nan, np.nan, 1, np.nan):
        state, metrics = plain_step()(state, batch(loss=loss))
        rows.append((int(metrics["skipped_in_a_row"]), int(metrics["skipped_steps"]), int(num_updates(state))))
    assert rows == [(0, 0, 1), (1, 1, 1), (2, 2, 1), (0, 2, 2), (1, 3, 2)]
    assert int(optax.tree.get(state.opt_state, "count")) == 2


def test_a_spike_is_skipped_once_enough_has_been_seen():
    state = start()
    step = plain_step(GuardOptions(spike_factor=3.0))
    state = dataclasses.replace(
        state, skipped=dataclasses.replace(state.skipped, norms=jnp.ones(NUM_NORMS).at[0].set(0.0))
    )
    state, metrics = step(state, batch(a=100.0))
    assert metrics["skipped_steps"] == 0, "one norm is missing still"
    state, metrics = step(state, batch(a=100.0))
    assert metrics["skipped_steps"] == 1
    assert metrics[guard.FIRST_NOT_FINITE] == -1
    assert "guard.spike_factor" in guard.name_of_first(state.params, -1)
    state, metrics = step(state, batch(a=1.0, b=0.5))
    assert (metrics["skipped_steps"], metrics["skipped_in_a_row"]) == (1, 0)
    assert [f"{norm:.0f}" for norm in state.skipped.norms[-3:]] == ["173", "173", "2"]
    _, metrics = plain_step()(state, batch(a=1e4))
    assert metrics["skipped_steps"] == 1


def test_what_is_no_number_is_no_norm_either():
    state, _ = plain_step()(start(), batch(a=np.nan))
    assert not state.skipped.norms.any()
