"""Moments of 8 bits on a mesh: codes may differ where two meshes' gradients differ by rounding, and losses do not."""

import dataclasses

import numpy as np
import pytest

from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from tests.parity import runs

pytestmark = pytest.mark.slow


def test_an_interleaved_pipeline_at_level_1_trains_as_one_device():
    options = dataclasses.replace(runs.CONFIG.optimizer, moments="8bit")
    one = runs.train(dataclasses.replace(runs.CONFIG, optimizer=options), runs.sizes())
    pipeline = PipelineOptions(schedule="interleaved_1f1b", num_microbatches=4, num_chunks=2)
    config = dataclasses.replace(runs.CONFIG, optimizer=options, zero=ZeroOptions(level=1), pipeline=pipeline)
    other = runs.train(config, runs.sizes(data=2, pipeline=2, tensor=2))
    np.testing.assert_allclose(other.losses, one.losses, rtol=1e-5)
    np.testing.assert_allclose(other.grad_norms, one.grad_norms, rtol=1e-5)
    for path, after in one.final.items():
        change = np.linalg.norm(after - one.initial[path])
        assert np.linalg.norm(other.final[path] - after) < 1e-3 * change, path
