"""Records of runs of version 0.2: their keys and meanings become those of today, for commands that use the weights."""

import json

import pytest

from meshtrain.config import version_0_2
from meshtrain.config.resolve import resolve, to_json
from meshtrain.config.resume import from_json
from meshtrain.errors import UserError
from meshtrain.hf.config_export import as_json
from meshtrain.models.decoder_options import DecoderOptions, MoeOptions, NormOptions, RopeOptions

SMALL = {"num_layers": 3, "embed_dim": 8, "mlp_dim": 8, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 16}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 4, "balance_weight": 0.01, "expert_room": 0.0}
# What each run of 0.2 recorded, and this version has no more.
GONE = {
    "compression": {"kind": "int8", "block": 16, "kept": 2, "feedback": True},
    "pipeline": {"table": ""},
    "guard": {"allow_left_out": False},
    "local_steps": {"delay": 1},
}


def of(model, **others):
    """The configuration that a record of version 0.2 becomes."""
    data = {"source": "synthetic", "numbers_below": 1000, "num_held_out": 0, "spelling": "digits"}
    return from_json(json.dumps({"task": "decoder", "model": SMALL | model, "data": data, **GONE, **others}))


def test_each_flat_option_is_in_its_group_today():
    moe = {**EXPERTS, "shared_experts": 1, "router": "sigmoid", "router_scale": 2.5, "z_weight": 0.5}
    rope = {"base": 5.0, "factor": 8.0, "low": 2.0, "high": 3.0, "original_length": 16, "local_base": 7.0}
    norm = {"norm": "layernorm", "norm_epsilon": 1e-3, "centered_scales": True, "post_norms": True, "qk_norm": True}
    found = of(moe | {f"rope_{name}": value for name, value in rope.items()} | norm | {"expert_exchange": "tokens"})
    assert found.model == DecoderOptions(
        **SMALL,
        moe=MoeOptions(
            4, 2, 4, shared_experts=1, router="sigmoid", router_scale=2.5, balance_weight=0.015, z_weight=0.5
        ),
        rope=RopeOptions(**rope),
        norm=NormOptions("layernorm", 1e-3, centered_scales=True, post=True, qk=True),
    )
    assert found.data.begin_token == "none", "texts started with no token"
    assert found.reduction.name == "sum"


def test_the_weight_of_the_balance_loss_gives_the_former_loss():
    """Then weight x sum over layers of losses divided by k, now weight x mean over layers of losses summed over k."""
    options = of(EXPERTS | {"z_weight": 0.0}).model
    of_layers = [1.2, 1.0, 1.1]  # divided by k
    now = options.moe.balance_weight * options.moe.experts_per_token * sum(of_layers) / len(of_layers)
    assert now == pytest.approx(0.01 * sum(of_layers), rel=1e-12)
    assert as_json(options, "mixtral", "float32", 8, -1, {})["router_aux_loss_coef"] == 0.015


def test_a_record_of_today_is_read_as_it_is():
    config = resolve({"model": SMALL | {"moe": {"num_experts": 4}}, "data": {"source": "synthetic"}})
    assert from_json(to_json(config)) == config
    assert config.model.moe.balance_weight == 0.01


@pytest.mark.parametrize(("key", "plain", "given"), [
    ("task", "decoder", {"task": "seq2seq"}),
    ("model.expert_room", "0.0", {"model": SMALL | EXPERTS | {"expert_room": 1.25}}),
])  # fmt: skip
def test_another_run_is_one_line_that_names_the_way(key, plain, given):
    with pytest.raises(UserError) as caught:
        from_json(json.dumps({"task": "decoder", **given}))
    [line] = caught.value.problems
    assert line.startswith(f"config.json: got {key}=")
    assert line.endswith(f" in a run of version 0.2; allowed: {key}={plain}; nearest: `hf export` with meshtrain "
        "0.2.0, then `hf import` of this folder")  # fmt: skip


BROKEN = ({"experts_per_token": 0}, {"balance_weight": "x"}, {"balance_weight": 10**400}, {"num_layers": []})


@pytest.mark.parametrize("values", BROKEN, ids=str)
def test_a_weight_that_cannot_be_converted_stays_as_it_is(values):
    model = EXPERTS | values
    assert version_0_2.today({"model": model})["model.moe.balance_weight"] == model["balance_weight"]


def test_anything_in_place_of_options_stays_as_it_is():
    assert version_0_2.today({"model": None}) == {"data.begin_token": "none", "model": None}
