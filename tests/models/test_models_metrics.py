"""What is logged of a sum over a batch, by the kind of the metric."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.models.metrics import Count, Largest, Load, Ratio, all_logged, are_metrics, number_to_log

COUNTS = np.array([[2.0, 2.0, 2.0, 2.0], [8.0, 0.0, 0.0, 0.0], [4.0, 2.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    "metric, expected",
    [
        (6.0, 3.0),
        (Ratio(6.0, 4.0), 1.5),
        (Ratio(0.0, 0.0), 0.0),
        (Count(6.0), 6.0),
        (Load(COUNTS[0]), 1.0),
        (Load(COUNTS[1]), 4.0),
        (Load(COUNTS), (1.0 + 4.0 + 2.0) / 3),
        (Load(jnp.asarray(COUNTS, jnp.float32)), (1.0 + 4.0 + 2.0) / 3),
        (Load(np.zeros(4)), 0.0),
        (Largest(np.float32([0, 7, 0, 2, 0])), 3.0),
        (Largest(jnp.float32([0, 7, 0, 2, 0])), 3.0),
        (Largest(np.zeros(4)), 0.0),
    ],
)
def test_what_is_logged(metric, expected):
    np.testing.assert_allclose(number_to_log(metric, 2.0), expected, rtol=1e-6)


@pytest.mark.parametrize(("weight", "mean"), [(6.1e-2, 4.0), (1e-4, 4.0), (6.1, 4.0), (0.0, 0.0)])
def test_a_mean_is_the_sum_over_any_positive_weight(weight, mean):
    np.testing.assert_allclose(number_to_log(jnp.float32(4.0 * weight), jnp.float32(weight)), mean, rtol=1e-6)
    assert number_to_log(np.float64(4.0 * weight), np.float64(weight)) == pytest.approx(mean)


def test_layers_that_prefer_different_experts_are_no_balance():
    """The sum of their counts is even, and each of them sends all tokens to one expert."""
    preferring = Load(np.eye(4))
    assert number_to_log(preferring, 1.0) == 4.0
    assert number_to_log(Load(preferring.counts.sum(axis=0)), 1.0) == 1.0


def test_a_load_is_logged_for_each_expert_too():
    """Of layers the mean: no layer has more weight because more tokens went through it."""
    found = all_logged({"load": Load(np.concatenate([COUNTS, [[0, 1, 0, 0]]])), "sum": 6.0}, 2.0)
    assert list(found) == ["load", "sum", "load_each"]
    np.testing.assert_allclose(found["load_each"], [1 + 4 + 2, 1 + 1 + 4, 1 + 0.5, 1 + 0.5] / np.array(4), rtol=1e-6)


@pytest.mark.parametrize(
    "metrics, is_right",
    [
        ({}, True),
        ({"a": 1.0, "b": Ratio(1.0, 2.0), "c": Count(1.0), "d": Load(COUNTS), "e": Largest(COUNTS[0])}, True),
        ([1.0], False),
        ({"a": COUNTS}, False),
        ({"a": (1.0, 2.0)}, False),
        ({"a": Ratio(COUNTS, 1.0)}, False),
        ({"a": Count(COUNTS)}, False),
        ({"a": Load(np.float32(1))}, False),
    ],
)
def test_what_metrics_are(metrics, is_right):
    assert are_metrics(metrics) is is_right
