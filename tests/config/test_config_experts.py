"""Options of experts that contradict each other or the rest, and those without effect."""

import pytest

from meshtrain.config import effects
from meshtrain.config.config import default, resolve
from meshtrain.errors import UserError
from meshtrain.sharding.axes import AXES

BROKEN = {
    "model.experts_per_token=9": "model.experts_per_token: got 9; allowed: at most model.num_experts = 8; nearest: 8",
    "model.experts_per_token=0": "model.experts_per_token: got 0; allowed: at least 1; nearest: 1",
    "model.activation=gelu": "model.activation: got gelu with .*; allowed: swiglu, geglu, .*=swiglu",
    "model.biases=true": "model.biases: got True with model.num_experts = 8.*nearest: model.biases=False",
    "model.expert_room=0.5": "model.expert_room: got 0.5; allowed: 0 .*, or at least 1, the even load; nearest: 1.0",
    "precision.policy=fp8": "precision.policy: got fp8 with model.num_experts = 8.*=bfloat16",
    "model.router=top": "model.router: got 'top'.*softmax, sigmoid",
    "mesh.fsdp=3": "(batch_size|model.embed_dim|mesh.fsdp|.*expert_embed).*3",
}


@pytest.mark.parametrize(("change", "line"), BROKEN.items(), ids=BROKEN)
def test_contradictions_are_refused_with_a_line_each(change, line):
    key, _, value = change.partition("=")
    with pytest.raises(UserError, match=line):
        resolve(default(), {"model.num_experts": "8", key: value})


def test_a_token_may_go_through_all_experts():
    config = resolve(default(), {"model.num_experts": "8", "model.experts_per_token": "8"})
    assert config.model.experts_per_token == config.model.num_experts


def test_contradictions_are_reported_together():
    asked = dict(change.split("=") for change in list(BROKEN)[2:6])
    with pytest.raises(UserError) as caught:
        resolve(default(), {"model.num_experts": "8", **asked})
    assert len(caught.value.problems) == len(asked)


def test_options_of_experts_are_legal_without_experts_and_listed():
    asked = {"experts_per_token": "9", "expert_dim": "64", "router": "sigmoid", "expert_room": "1.5", "z_weight": "0"}
    sizes = dict.fromkeys(AXES, 1)
    config = resolve(default(), {f"model.{name}": value for name, value in asked.items()})
    found = effects.without_effect(config, sizes)
    assert found == {f"model.{name}": "model.num_experts=0" for name in asked}
    config = resolve(default(), {"model.num_experts": "8", "model.mlp_dim": "64", "model.expert_dim": "64"})
    assert effects.without_effect(config, sizes) == {"model.mlp_dim": "model.num_experts=8"}
