"""Options of experts that contradict each other or the rest, and those without effect."""

import pytest

from meshtrain.config import unused_options
from meshtrain.config.build import default
from meshtrain.config.resolve import resolve
from meshtrain.sharding.rules import AXES

pytestmark = pytest.mark.quick


def test_a_token_may_go_through_all_experts():
    config = resolve(default(), {"model.moe.num_experts": "8", "model.moe.experts_per_token": "8"})
    assert config.model.moe.experts_per_token == config.model.moe.num_experts


def test_options_of_experts_are_legal_without_experts_and_listed():
    asked = {"experts_per_token": "9", "expert_dim": "64", "router": "sigmoid", "z_weight": "0"}
    sizes = dict.fromkeys(AXES, 1)
    config = resolve(default(), {f"model.moe.{name}": value for name, value in asked.items()})
    found = unused_options.without_effect(config, sizes)
    assert found == {f"model.moe.{name}": "model.moe.num_experts=0" for name in asked}
    config = resolve(default(), {"model.moe.num_experts": "8", "model.mlp_dim": "64", "model.moe.expert_dim": "64"})
    assert unused_options.without_effect(config, sizes) == {"model.mlp_dim": "model.moe.num_experts=8"}
