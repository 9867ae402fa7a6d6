"""Products of 8-bit floats on a mesh: a scale is that of all shards, so losses differ by a stated bound alone.

Rounding to 3 bits turns a difference in a float32 sum into one of 1/16 in an operand now and then, so this bound is not
that of the other dtypes.
"""

import dataclasses
import functools

import numpy as np
import pytest

from meshtrain.step.precision import PrecisionOptions
from tests.parity import runs

pytestmark = pytest.mark.slow

LOSS_BOUND, NORM_BOUND = 1e-3, 0.1
CONFIG = dataclasses.replace(runs.CONFIG, precision=PrecisionOptions("fp8"))


@functools.cache
def one_device():
    return runs.train(CONFIG, runs.sizes())


@pytest.mark.parametrize("axes", [{"data": 2, "context": 2, "tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_mesh_changes_losses_by_less_than_the_bound(axes):
    one, other = one_device(), runs.train(CONFIG, runs.sizes(**axes))
    np.testing.assert_allclose(other.losses, one.losses, rtol=LOSS_BOUND)
    np.testing.assert_allclose(other.grad_norms, one.grad_norms, rtol=NORM_BOUND)
    assert one.losses[-1] < one.losses[0] - 0.005, "the bounds say nothing of a model that stands still"
