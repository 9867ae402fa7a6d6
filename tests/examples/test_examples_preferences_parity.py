"""Four steps on pairs of answers: the same numbers on one device and on any mesh, and a reference that stays.

The steps are SGD's. The loss of a pair follows a difference of long sums of log-probabilities, so elements of its
gradient cancel to almost zero, while their rounding stays relative to the terms. Adam divides each element by its own
size: such an element makes a step of full size in a direction that rounding decides. At Adam's 3e-3 the losses of step
3 differ by up to 1.2e-5 and changes by up to 1.3e-3 on some CPUs (`scripts/bench margins --isa=AVX`), and changes by
as much at any rate, as the rate divides out. SGD's step is proportional to the gradient: rounding of 5e-7 of a leaf's
gradient moves the leaf by 5e-7 of its change. All errors are then below a sixth of the general bounds.
"""

import dataclasses
import functools

import numpy as np
import pytest

from meshtrain.examples.preferences_task import PreferenceOptions
from meshtrain.models.lora import LoraOptions
from meshtrain.sharding.trainable import is_adapter, is_frozen
from tests.parity.comparison import assert_same
from tests.parity.runs import CONFIG, sizes, train

MODEL = PreferenceOptions(num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=4, vocab_size=100,
                          vocab_multiple=8, dropout_rate=0.0, beta=0.5)  # fmt: skip
COPIES = dataclasses.replace(
    CONFIG,
    task="preferences",
    model=MODEL,
    optimizer=dataclasses.replace(CONFIG.optimizer, name="sgd"),
    learning_rate=dataclasses.replace(CONFIG.learning_rate, peak=0.1),
)
ADAPTERS = dataclasses.replace(COPIES, lora=LoraOptions(rank=4))
IPO = dataclasses.replace(COPIES, model=dataclasses.replace(MODEL, preference_loss="ipo"))


@functools.cache
def on_one_device(config):
    return train(config, sizes())


@pytest.mark.parametrize(
    "config, axes",
    [
        pytest.param(COPIES, {"data": 2, "fsdp": 2}, id="copies"),
        pytest.param(COPIES, {"tensor": 2, "pipeline": 2}, id="copies in a pipeline"),
        pytest.param(ADAPTERS, {"tensor": 2, "pipeline": 2}, id="adapters in a pipeline", marks=pytest.mark.slow),
        pytest.param(IPO, {"pipeline": 2, "context": 2}, id="ipo", marks=pytest.mark.slow),
    ],
)
def test_the_mesh_changes_no_number_and_the_reference_stays(config, axes):
    expected, got = on_one_device(config), train(config, sizes(**axes))
    assert_same(got, expected)
    assert expected.losses[0] == pytest.approx(1.0 if config is IPO else np.log(2), rel=1e-6)
    for path, weight in got.final.items():
        stays = is_frozen(path) or (config is ADAPTERS and not is_adapter(path))
        assert np.array_equal(weight, got.initial[path]) == stays, path
        assert (path in got.gradients) != stays, path
