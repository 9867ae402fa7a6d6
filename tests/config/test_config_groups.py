"""Groups of the decoder's options: their keys, the conditions under which they are used, and errors about them."""

import dataclasses

import pytest

from meshtrain.config.resolve import default, resolve
from meshtrain.errors import UserError
from meshtrain.models.decoder_options import DecoderOptions
from meshtrain.options import dims, option, options_problem, unused

# flat key of 0.2 -> key today
FLAT = {
    "num_experts": "moe.num_experts", "experts_per_token": "moe.experts_per_token", "expert_dim": "moe.expert_dim",
    "shared_experts": "moe.shared_experts", "expert_biases": "moe.biases", "router": "moe.router",
    "router_groups": "moe.router_groups", "groups_per_token": "moe.groups_per_token", "dense_dim": "moe.dense_dim",
    "dense_layers": "moe.dense_layers", "router_scale": "moe.router_scale", "balance_weight": "moe.balance_weight",
    "z_weight": "moe.z_weight", "rope_base": "rope.base", "rope_factor": "rope.factor", "rope_scaling": "rope.scaling",
    "rope_low": "rope.low", "rope_high": "rope.high", "rope_original_length": "rope.original_length",
    "rope_attention": "rope.attention", "rope_whole_pairs": "rope.whole_pairs", "rope_local_base": "rope.local_base",
    "unrotated_every": "rope.unrotated_every", "latent_dim": "latent.dim", "query_latent_dim": "latent.query_dim",
    "rope_dim": "latent.rope_dim", "value_dim": "latent.value_dim", "norm": "norm.name", "norm_epsilon": "norm.epsilon",
    "centered_scales": "norm.centered_scales", "post_norms": "norm.post", "pre_norms": "norm.pre", "qk_norm": "norm.qk",
    "qk_norm_of_all": "norm.qk_of_all",
}  # fmt: skip
TEXTS = {"router": "sigmoid", "rope_scaling": "yarn", "norm": "layernorm"}  # others take a number; bools take 1


def lines(given, overrides=None):
    with pytest.raises(UserError) as caught:
        resolve(given, overrides or {})
    return list(caught.value.problems)


@pytest.mark.parametrize("flat", FLAT)
def test_a_flat_key_is_one_line_that_names_the_key_in_its_group(flat):
    value, key = TEXTS[flat] if flat in TEXTS else "1", f"model.{FLAT[flat]}"
    [line] = lines({}, {f"model.{flat}": value})
    assert line.startswith(f"model.{flat}: ")
    assert line.endswith((f"; did you mean '{key}'?", f"; nearest: {key}={value}"))
    given = default()
    given.model[flat] = value
    assert lines(given) == [line]


def test_a_value_in_place_of_a_group_is_one_line():
    [line] = lines({"model": {"moe": 8}})
    assert line.startswith("model.moe: got 8; allowed: a value for one of its fields: model.moe.num_experts, ")
    assert line.endswith("; nearest: model.moe.num_experts=8")
    [line] = lines({"model": {"rope": None}})
    assert line.endswith("; nearest: model.rope.base=10000.0")
    [line] = lines({"model": {"no_such_key": 1}})
    assert "model.head_dim, model.latent.*, model.vocab_size" in line
    [line] = lines({}, {"model.rope.bse": "5"})
    assert line.startswith("model.rope.bse: unknown key; allowed: model.rope.base, model.rope.factor, ")
    assert line.endswith("; did you mean 'model.rope.base'?")


def test_what_switches_a_group_off_is_the_reason_for_each_of_its_options():
    given = {"positions": "learned", "rope": {"base": 5.0, "low": 2.0, "local_base": 3.0}, "latent": {"value_dim": 3}}
    found = unused(resolve({"model": given}).model, "model")
    assert {found[f"model.rope.{name}"] for name in ("base", "low", "local_base")} == {"model.positions=learned"}
    assert found["model.latent.value_dim"] == "model.latent.dim=0"
    assert found["model.moe.router"] == "model.moe.num_experts=0"
    assert not [key for key in found if key.startswith("model.norm.") and key not in NORMS_OF_NORMS]
    assert unused(DecoderOptions(window=8), "")["rope.low"] == "rope.factor=1.0"
    assert "rope.local_base" not in unused(DecoderOptions(window=8), "")
    assert unused(DecoderOptions(), "")["rope.local_base"] == "window=0", "which is outside of the group"


NORMS_OF_NORMS = ("model.norm.pre", "model.norm.qk_of_all")


def test_lines_about_a_weight_name_the_option_in_its_group():
    assert dims(DecoderOptions(), "model")["expert_mlp"] == ("model.moe.expert_dim", 512)
    line = lines({"model": {"moe": {"num_experts": 6}}}, {"mesh.expert": "4"})[-1]
    assert "model.moe.num_experts" in line
    assert line.endswith("; nearest: 8, or mesh.expert=2")


@dataclasses.dataclass(frozen=True)
class Inner:
    """A group of options."""

    depth: int = option(2, "layers of the inner network")


@dataclasses.dataclass(frozen=True)
class WithoutText:
    """A group with a field that is not an option."""

    depth: int = 2


def test_the_options_of_a_users_task_may_have_groups():
    own = dataclasses.make_dataclass("Own", [("inner", Inner, dataclasses.field(default=Inner()))], frozen=True)
    wrong = dataclasses.make_dataclass("Own", [("inner", WithoutText, WithoutText())], frozen=True)
    bare = dataclasses.make_dataclass("Own", [("inner", Inner)], frozen=True)
    assert options_problem("task", "a:b", own) is None
    assert "whose option 'depth' is not an option(default, text)" in options_problem("task", "a:b", wrong)
    assert "whose option 'inner' is not an option(default, text)" in options_problem("task", "a:b", bare)
