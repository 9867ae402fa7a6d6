"""What a task states about itself: the units of a batch, and the width that learning rates follow."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.assemble import learning_rates
from meshtrain.config.config import Config
from meshtrain.models.task import Task, token_batch
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.words.errors import UserError

NOAM = Config(learning_rate=LearningRateOptions(name="noam", warmup_steps=10))


def task(**states):
    return Task(init=lambda rng: {}, loss=lambda *_: (0.0, 0.0, {}), batch=token_batch(4, 8), **states)


def test_noam_follows_the_width_of_the_task_and_not_the_decoders():
    narrow, wide = (learning_rates(NOAM, task(width=width))(jnp.int32(0)) for width in (64, 4096))
    np.testing.assert_allclose(narrow, 8 * wide, rtol=1e-6)  # width^-0.5
    assert NOAM.model.embed_dim not in (64, 4096)


def test_noam_is_refused_where_the_task_states_no_width():
    with pytest.raises(UserError, match=r"learning_rate\.name: got noam, .* nearest: inverse_sqrt"):
        learning_rates(NOAM, task())
    assert learning_rates(dataclasses.replace(NOAM, learning_rate=LearningRateOptions()), task())(0) > 0


def test_units_of_a_batch():
    assert task().num_units == 32
    assert task(units_per_step=5).num_units == 5
    assert task(unit="documents").num_units == 4
