"""Clipping against its formula in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.step.step import clip, square_sums

GRADIENTS = {"a": np.array([3.0, 0.0], np.float32), "b": np.full((2, 2), 2.0, np.float32)}  # norm 5


def test_square_sums_stand_in_the_order_of_the_leaves():
    np.testing.assert_array_equal(square_sums(GRADIENTS), [9.0, 16.0])


@pytest.mark.parametrize("max_norm, factor", [(1.0, 0.2), (5.0, 1.0), (6.0, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_to_the_norm_and_never_up(max_norm, factor):
    clipped = clip(GRADIENTS, jnp.sqrt(jnp.sum(square_sums(GRADIENTS))), max_norm)
    for name, gradient in GRADIENTS.items():
        np.testing.assert_allclose(clipped[name], gradient * factor, rtol=1e-6)


def test_gradients_of_zero_stay_zero():
    zeros = {"a": jnp.zeros(3)}
    np.testing.assert_array_equal(clip(zeros, jnp.float32(0), 1.0)["a"], np.zeros(3))
