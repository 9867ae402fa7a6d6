"""Which weights a pattern trains, and what is said where it trains none."""

import jax
import jax.numpy as jnp
import pytest

from meshtrain.sharding.trainable import trainable_mask
from meshtrain.sharding.trees import leaves_with_paths, merge, select

pytestmark = pytest.mark.quick

PARAMS = jax.eval_shape(
    lambda: {
        "embedding": {"table": jnp.zeros((8, 4))},
        "layers": {
            "attention": {"query": jnp.zeros((2, 4)), "key": jnp.zeros((2, 4))},
            "mlp": {"up": {"kernel": jnp.zeros((2, 4)), "bias": jnp.zeros(2)}},
        },
        "norm": jnp.zeros(4),
    }
)
PATHS = {path for path, _ in leaves_with_paths(PARAMS)}


@pytest.mark.parametrize(
    "pattern, trained",
    [
        ("", PATHS),
        (".*", PATHS),
        ("query", {"layers/attention/query"}),
        ("^layers/", {path for path in PATHS if path.startswith("layers/")}),
        ("bias$|^norm", {"layers/mlp/up/bias", "norm"}),
        ("^(?!embedding)", PATHS - {"embedding/table"}),
    ],
)
def test_a_pattern_is_searched_in_each_path(pattern, trained):
    mask = trainable_mask(pattern, PARAMS)
    assert {path for path, is_trained in leaves_with_paths(mask) if is_trained} == trained
    chosen, others = select(PARAMS, mask)
    assert {path for path, _ in leaves_with_paths(chosen)} == trained
    assert {path for path, _ in leaves_with_paths(others)} == PATHS - trained
    assert merge(chosen, others) == PARAMS
