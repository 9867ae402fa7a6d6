"""Learning rates against their formulas in float64, at both ends of every stretch."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.optim.learning_rate import NAMES, LearningRateOptions, check, learning_rate

pytestmark = pytest.mark.quick

NUM_STEPS, WARMUP = 100, 20
OPTIONS = LearningRateOptions(peak=3e-3, warmup_steps=WARMUP, final_fraction=0.1, stable_fraction=0.5)


def rates(name, counts, num_steps=NUM_STEPS, **changes):
    options = dataclasses.replace(OPTIONS, name=name, **changes)
    schedule = learning_rate(options, num_steps=num_steps, embed_dim=64, batch_size=32)
    return np.asarray(jax.jit(schedule)(jnp.asarray(counts, jnp.int32)))


def expected(name, count):
    """The same learning rates in float64, one at a time, from the formulas' usual form."""
    step, peak, final = count + 1, 3e-3, 0.1
    if name == "noam":
        return 64**-0.5 * min(step**-0.5, step * WARMUP**-1.5)
    if step <= WARMUP:
        return peak * step / WARMUP
    progress = (count - WARMUP) / (NUM_STEPS - WARMUP)
    stable = max(0.0, (count - 60) / (NUM_STEPS - 60))
    return (
        peak
        * {
            "constant": 1.0,
            "linear": 1 + (final - 1) * progress,
            "cosine": final + (1 - final) * math.cos(math.pi * progress / 2) ** 2,
            "inverse_sqrt": math.sqrt(WARMUP / step),
            "warmup_stable_decay": 1 + (final - 1) * stable,
        }[name]
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_update_follows_the_formula(name):
    counts = np.arange(NUM_STEPS)
    got = rates(name, counts)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [expected(name, int(count)) for count in counts], rtol=5e-7)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "noam"])
def test_warmup_starts_above_zero_and_its_last_update_has_the_peak(name):
    first, last = rates(name, [0, WARMUP - 1])
    assert first == np.float32(3e-3 / WARMUP)
    assert last == np.float32(3e-3)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "noam"])
def test_without_warmup_the_first_update_has_the_peak(name):
    assert rates(name, 0, warmup_steps=0) == np.float32(3e-3)


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup_stable_decay"])
def test_decay_wastes_no_update_and_stays_at_its_end(name):
    last, end, later = rates(name, [NUM_STEPS - 1, NUM_STEPS, 10 * NUM_STEPS], final_fraction=0.0)
    assert last > 0
    assert end == later == 0


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup_stable_decay"])
def test_decay_steps_hold_the_decay_whatever_the_run(name):
    counts = np.arange(50)
    np.testing.assert_array_equal(rates(name, counts, 1000, decay_steps=50), rates(name, counts, 50))
    assert not np.allclose(rates(name, counts, 1000), rates(name, counts, 50))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_shorter_than_its_warmup_is_legal(name):
    np.testing.assert_array_equal(rates(name, np.arange(5), num_steps=5), rates(name, np.arange(5)))


def test_noam_peaks_where_the_warmup_ends_and_survives_without_one():
    counts = np.arange(NUM_STEPS)
    assert np.argmax(rates("noam", counts)) == WARMUP - 1
    np.testing.assert_allclose(rates("noam", counts, warmup_steps=0), 1 / 8 / np.sqrt(counts + 1), rtol=5e-7)
    np.testing.assert_array_equal(rates("noam", counts, peak=7.0), rates("noam", counts))
    np.testing.assert_allclose(rates("noam", counts, noam_factor=2.0), 2 * rates("noam", counts), rtol=5e-7)


def test_noam_of_the_paper():
    options = LearningRateOptions(name="noam", warmup_steps=4000)
    schedule = learning_rate(options, num_steps=100_000, embed_dim=512, batch_size=1)
    np.testing.assert_allclose(schedule(3999), 512**-0.5 * 4000**-0.5, rtol=5e-7)
    np.testing.assert_allclose(schedule(99_999), 512**-0.5 * 100_000**-0.5, rtol=5e-7)


def test_long_runs_stay_exact():
    options = LearningRateOptions(name="linear", peak=1.0, warmup_steps=0, final_fraction=0.0)
    schedule = learning_rate(options, num_steps=30_000_000, embed_dim=1, batch_size=1)
    np.testing.assert_allclose(schedule(15_000_000), 0.5, rtol=1e-7)


@pytest.mark.parametrize("name", ["cosine", "noam"])
@pytest.mark.parametrize("scaling, factor", [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_batch_scaling_multiplies_all_of_it(name, scaling, factor):
    counts = np.arange(NUM_STEPS)
    scaled = rates(name, counts, batch_scaling=scaling, base_batch_size=8)
    np.testing.assert_allclose(scaled, factor * rates(name, counts), rtol=5e-7)


def test_all_mistakes_are_told_together():
    assert (
        len(check(dataclasses.replace(OPTIONS, stable_fraction=2.0, final_fraction=2.0, batch_scaling="linear"))) == 3
    )
    assert check(LearningRateOptions()) == []
