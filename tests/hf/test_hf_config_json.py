"""config.json as options: both spellings, what an absent key means, and every key that is not understood by name."""

import dataclasses
import json
import shutil

import pytest

from meshtrain.errors import UserError
from meshtrain.files import read_json
from meshtrain.hf import folder, names
from meshtrain.hf.config_export import as_json
from meshtrain.hf.config_json import config_of_text, describe_model, differences, is_described, of_json
from meshtrain.hf.families import HARMLESS as HARMLESS_KEYS
from meshtrain.models.decoder_options import MoeOptions, NormOptions, RopeOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from tests.hf.models import FIXTURES, NAMES


def given(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def of(tmp_path, values, ignore=""):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return describe_model(tmp_path, ignore)


def refused(tmp_path, values, ignore=""):
    with pytest.raises(UserError) as error:
        of(tmp_path, values, ignore)
    for line in error.value.problems:
        assert line.startswith(f"{tmp_path / 'config.json'}: ")
        assert "allowed: " in line
        assert line.count("nearest: ") + line.count("did you mean") == 1
    return [line.removeprefix(f"{tmp_path / 'config.json'}: ") for line in error.value.problems]


@pytest.mark.parametrize("name", NAMES)
def test_the_older_spelling_says_the_same(name, tmp_path):
    older = json.loads((FIXTURES / name / "config.v4.json").read_text())
    assert of(tmp_path, older) == describe_model(FIXTURES / name)


def test_a_llama_in_the_decoders_words():
    found = describe_model(FIXTURES / "llama3-rope-scaled")
    assert found.options == DecoderOptions(
        num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=119,
        rope=RopeOptions(base=500.0, factor=8.0, low=1.0, high=4.0, original_length=16),
    )  # fmt: skip
    assert (found.max_length, found.dtype) == (64, "float32")


def test_what_an_absent_key_means_is_what_transformers_says(tmp_path):
    llama = given("llama")
    for key in ("rope_parameters", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        del llama[key]
    options = of(tmp_path, llama).options
    assert (options.rope.base, options.num_kv_heads, options.head_dim) == (10000.0, 4, 0)
    assert not options.tied_embeddings
    gpt2 = given("gpt2")
    del gpt2["tie_word_embeddings"], gpt2["n_inner"]
    assert (of(tmp_path, gpt2).options.tied_embeddings, of(tmp_path, gpt2).options.mlp_dim) == (True, 128)


# name of the model, changes (None takes a key away), how the lines begin
REFUSED = {
    "longrope": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}},
        ["rope_parameters.rope_type: got 'longrope'; allowed: default, llama3, linear, yarn; nearest: none, this mod"],
    ),
    "dynamic, older": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        ["rope_scaling.rope_type: got 'dynamic'"],
    ),
    "yarn of another paper": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7}},
        ["rope_parameters.mscale: got 0.7; allowed: rope_type, rope_theta, factor, beta_slow, beta_fast, original_max"],
    ),
    "yarn that scales scores alone": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "attention_factor": 1.2}},
        ["rope_parameters.attention_factor: got 1.2; allowed: no attention_factor if factor is 1"],
    ),
    "a ramp upwards": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 0.5}},
        ["rope_parameters.beta_fast: got 0.5; allowed: above beta_slow=1.0"],
    ),
    "a factor that default ignores": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}},
        ["rope_parameters.factor: got 2.0"],
    ),
    "llama3 without its factors": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        [
            "rope_parameters.low_freq_factor: got nothing",
            "rope_parameters.high_freq_factor: got nothing",
            "rope_parameters.original_max_position_embeddings: got nothing",
        ],
    ),
    "two thetas": (
        "llama",
        {"rope_theta": 5e5},
        ["rope_parameters.rope_theta: got 10000.0, but rope_theta or rope_scaling"],
    ),
    "no theta": ("qwen2", {"rope_parameters": None}, ["rope_theta: got nothing"]),
    "theta a text": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        ["rope_parameters.rope_theta: got 'x'"],
    ),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor: got 0.5; allowed: 1.0"]),
    "partial rotary inside": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["rope_parameters.partial_rotary_factor: got 0.5"],
    ),
    "layers without rotary positions, in no order": (
        "smollm3",
        {"no_rope_layers": [0, 1]},
        ["no_rope_layers: got [0, 1]; allowed: 2 layers, with 0 for every n-th layer and 1 for the others"],
    ),
    "windows of layers without them": ("smollm3", {"use_sliding_window": True}, ["use_sliding_window: got True"]),
    "longer texts of phi": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]},
        },
        [
            "partial_rotary_factor: got 0.75; allowed: 1.0; nearest: none, this model cannot be imported: attention",
            "rope_parameters.rope_type: got 'longrope'; allowed: default; nearest: none",
        ],
    ),
    "two halves of olmo": (
        "olmo3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ["rope_parameters: got {'rope_type': 'default', 'rope_theta': 10000.0}; allowed: an object with full_att"],
    ),
    "quantized": (
        "llama",
        {"quantization_config": {"quant_method": "gptq"}},
        [
            "quantization_config: got {'quant_method': 'gptq'}; allowed: keys that meshtrain understands in a llama; "
            "nearest: the unquantized copy of this model, in bfloat16 or float32"
        ],
    ),
    "other bits": (
        "gpt-oss-mxfp4",
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        ["quantization_config: got {'quant_method': 'bitsandbytes'}; allowed: mxfp4; nearest: the unquantized copy of"],
    ),
    "code": ("llama", {"auto_map": {"AutoModel": "x.Y"}}, ["auto_map: got"]),
    "biases": (
        "mistral-window",
        {"attention_bias": True, "mlp_bias": True},
        ["attention_bias: got True; allowed: False", "mlp_bias: got True"],
    ),
    "a bias of the output": (
        "seed-oss",
        {"attention_out_bias": True},
        ["attention_out_bias: got True; allowed: False"],
    ),
    "no biases": ("starcoder2", {"use_bias": False}, ["use_bias: got False; allowed: True"]),
    "activation": ("llama", {"hidden_act": "gelu"}, ["hidden_act: got 'gelu'; allowed: silu"]),
    "erf": (
        "gpt2",
        {"activation_function": "gelu"},
        ["activation_function: got 'gelu'; allowed: gelu_new, gelu_pytorch_tanh"],
    ),
    "scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        ["scale_attn_by_inverse_layer_idx: got True"],
    ),
    "cross-attention": ("gpt2", {"add_cross_attention": True}, ["add_cross_attention: got True"]),
    "rotary of gpt2": ("gpt2", {"rope_theta": 1e4}, ["rope_theta: got 10000.0"]),
    "family": (
        "llama",
        {"model_type": "lama"},
        ["model_type: got 'lama'; allowed: llama, mistral, qwen2, qwen3, "],
    ),
    "no family": ("llama", {"model_type": 3}, ["model_type: got '3'"]),
    "later layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "layer_types": None},
        ["max_window_layers: got 1; allowed: a window in all layers or in none"],
    ),
    "mixed layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
        ["layer_types: got ['full_attention', 'sliding_attention']"],
    ),
    "a window of no size": ("qwen2", {"layer_types": ["sliding_attention"] * 2}, ["layer_types: got"]),
    "turns of no kind": (
        "gemma3",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        ["layer_types: got ['full_attention', 'sliding_attention', 'full_attention']; allowed: 3 layers, of which"],
    ),
    "too few layers": ("gemma2", {"layer_types": ["sliding_attention"]}, ["layer_types: got ['sliding_attention']"]),
    "a turn of no length": (
        "gemma3",
        {"_sliding_window_pattern": 0, "layer_types": None},
        ["_sliding_window_pattern: got 0; allowed: the same integer, at least 1"],
    ),
    "two patterns": (
        "gemma3",
        {"sliding_window_pattern": 2, "layer_types": None},
        ["sliding_window_pattern: got 2; allowed: the same integer"],
    ),
    "turns without a window": ("gemma2", {"sliding_window": None}, ["sliding_window: got nothing"]),
    "another size": ("gemma2", {"sliding_window_size": 8}, ["sliding_window_size: got 8; allowed: 6, the value of"]),
    "a cap that is not there": ("gemma2", {"final_logit_softcapping": None}, ["final_logit_softcapping: got nothing"]),
    "both ways": (
        "gemma3",
        {"use_bidirectional_attention": True, "hidden_act": "silu"},
        ["use_bidirectional_attention: got True; allowed: False", "hidden_act: got 'silu'"],
    ),
    "one base for both": (
        "gemma3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ["rope_parameters: got {'rope_type': 'default', 'rope_theta': 10000.0}; allowed: an object with full_att"],
    ),
    "no base of windows": (
        "gemma3",
        {"rope_parameters": None, "rope_theta": 1e6},
        ["rope_local_base_freq: got nothing"],
    ),
    "two bases of windows, and linear": (
        "gemma3",
        {
            "rope_local_base_freq": 1e4,
            "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "rope_theta": 5e2, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e1},
            },
        },
        [
            "rope_parameters.full_attention.rope_type: got 'dynamic'; allowed: default, llama3",
            "rope_parameters.sliding_attention.rope_theta: got 50.0, but rope_local_base_freq has 10000.0",
        ],
    ),
    "dense layers between": (
        "qwen3-moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [0]},
        ["decoder_sparse_step: got 2; allowed: 1; nearest: none", "mlp_only_layers: got [0]; allowed: []"],
    ),
    "dense layers first": (
        "qwen3-moe",
        {"first_k_dense_replace": 1, "n_shared_experts": 1},
        ["first_k_dense_replace: got 1; allowed: keys that meshtrain understands", "n_shared_experts: got 1"],
    ),
    "gates that do not add up to 1": (
        "qwen3-moe",
        {"norm_topk_prob": False},
        ["norm_topk_prob: got False; allowed: T"],
    ),
    "the same, unsaid": ("qwen3-moe", {"norm_topk_prob": None}, ["norm_topk_prob: got False; allowed: True"]),
    "a window of experts": (
        "qwen3-moe",
        {"use_sliding_window": True, "sliding_window": 6},
        ["use_sliding_window: got True; allowed: False"],
    ),
    "two numbers of experts": (
        "qwen3-moe",
        {"num_experts": 8},
        ["num_local_experts: got 4, but num_experts has 8; allowed: the same"],
    ),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise: got 0.1; allowed: 0.0"]),
    "more experts than there are": (
        "mixtral",
        {"num_experts_per_tok": 5},
        ["num_experts_per_tok: got 5; allowed: at most the 4 experts"],
    ),
    "no experts": ("mixtral", {"num_local_experts": None}, ["num_local_experts: got nothing; allowed: int"]),
    "no width": ("llama", {"hidden_size": None}, ["hidden_size: got nothing; allowed: int"]),
    "a text": (
        "llama",
        {"num_hidden_layers": "2"},
        ["num_hidden_layers: got '2' (str); allowed: a whole number (int)"],
    ),
    "true is no number": ("llama", {"num_hidden_layers": True}, ["num_hidden_layers: got True (bool)"]),
    "infinite": ("llama", {"rms_norm_eps": float("inf")}, ["rms_norm_eps: got inf"]),
    "heads": ("llama", {"num_key_value_heads": 3}, ["num_key_value_heads: got 3; allowed: a divisor of the 4 heads"]),
    "odd heads": ("llama", {"head_dim": 7}, ["head_dim: got 7; allowed: an even number"]),
    "all at once": (
        "llama",
        {"hidden_size": None, "hidden_act": "relu", "x": 1, "rope_parameters": {"rope_type": "su"}},
        ["hidden_act: got 'relu'", "hidden_size: got nothing", "rope_parameters.rope_type: got 'su'", "x: got 1"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_decoder_has_nothing_for_is_refused_by_name_and_value(name, tmp_path):
    model, changes, starts = REFUSED[name]
    values = {key: value for key, value in (given(model) | changes).items() if value is not None}
    lines = refused(tmp_path, values)
    assert len(lines) == len(starts), lines
    for start in starts:
        assert any(line.startswith(start) for line in lines), (start, lines)


HARMLESS = {
    "is_llama_config": True, "rope_interleaved": False, "unsloth_fixed": True, "unsloth_version": "2025.1",
    "unsloth_of_next_year": 1, "transformers.js_config": {"dtype": "q4"}, "_num_labels": 2, "num_labels": 2,
    "max_sequence_length": 2048, "pad_token": "<pad>", "neftune_noise_alpha": 5.0, "max_length": 4096,
    "temperature": 0.6, "top_p": 0.9, "top_k": 50, "do_sample": True, "repetition_penalty": 1.1,
    "_attn_implementation_internal": "sdpa", "attn_implementation": "eager", "_flash_attn_2_enabled": True,
    "meshtrain_ignored": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_change_no_logits_are_read_over(name, tmp_path):
    values = given(name) | HARMLESS
    if "layer_types" not in values:
        values["layer_types"] = ["full_attention"] * 2
    assert of(tmp_path, values) == describe_model(FIXTURES / name)


# key and value that a llama does not have -> what would differ
CHANGES = {
    "rope_interleaved": (True, "attention"),
    "sliding_window": (16, "attention"),
    "layer_types": (["sliding_attention"] * 2, ""),
    "query_pre_attn_scalar": (8, "attention"),
    "use_bias": (True, "tensors"),
    "architectures": (["LlamaForSequenceClassification"], "tensors"),
    "num_experts": (4, "tensors"),
    "n_embd": (32, "tensors"),
    "residual_multiplier": (0.2, "activations"),
    "hidden_act": ("relu", "activations"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_changes_numbers_is_named_and_cannot_be_ignored(key, tmp_path):
    value, what = CHANGES[key]
    values = given("llama") | {key: value}
    [line] = refused(tmp_path, values)
    assert line.endswith(f"this model cannot be imported{f': {what} would differ' if what else ''}"), line
    lines = refused(tmp_path, values, ignore=key)
    assert line in lines
    [other] = set(lines) - {line}
    assert other.startswith(
        f"init_ignore: got '{key}'; allowed: keys that meshtrain does not know, here none, and tokenizer.json; "
    )


def test_a_key_in_no_table_is_refused_with_the_words_that_accept_it(tmp_path):
    values = given("llama") | {"my_tool": {"a": 1}, "others": 3}
    lines = refused(tmp_path, values)
    assert [line.partition(":")[0] for line in lines] == ["my_tool", "others"]
    for line in lines:
        assert "the effect of this key is unknown" in line
        assert line.endswith("nearest: --config.init_ignore=my_tool,others")
    assert of(tmp_path, values, ignore="my_tool,others") == describe_model(FIXTURES / "llama")
    assert describe_model(tmp_path, ignore=None) == describe_model(FIXTURES / "llama")
    assert [line.partition(":")[0] for line in refused(tmp_path, values, ignore="others")] == ["my_tool"]
    [line] = refused(tmp_path, values, ignore="my_tool, others,gone")
    assert (
        "got 'gone'; allowed: keys that meshtrain does not know, here my_tool, others, and tokenizer.json; nearest: "
        in line
    )


@pytest.mark.parametrize(
    "kind",
    ["gptj", "opt", "gpt", "stablelm", "smollm", "gemma4", "gemma3n_text", "qwen2_moe", "ministral3", "deepseek_v2"],
)
def test_another_model_type_is_not_guessed(kind, tmp_path):
    [line] = refused(tmp_path, {"model_type": kind})
    assert line.endswith("; nearest: none, this model cannot be imported")


# Another model_type -> the folder whose config.json it has, its changes, and what the line states.
ALIKE = {
    "glm4": (
        "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "(the most similar families are llama and ", "keys that differ from llama: rope_parameters (attention))",
    ),
    "granite": (
        "llama", {"residual_multiplier": 0.2, "attention_multiplier": 0.1}, "(the most similar families are ",
        ": residual_multiplier (activations), attention_multiplier (attention))",
    ),
    "qwen2_moe": (
        "qwen3-moe", {"shared_expert_intermediate_size": 8, "norm_topk_prob": False}, ("(the most similar families are "
            "qwen3_moe and "),
        "from qwen3_moe: norm_topk_prob (activations), shared_expert_intermediate_size (unknown))",
    ),
    "gptj": ("gpt2", {"rotary_dim": 8}, "(the most similar families are gpt2 and ", "from gpt2: rotary_dim (unknown))"),
    "arcee": ("llama", {"hidden_act": "relu2"}, "(the most similar families are ", ": hidden_act (activations))"),
    "mamba": (
        "llama", {f"mamba_{number}": 1 for number in range(9)}, ": mamba_0 (unknown), ",
        "mamba_5 (unknown) and 3 more)",
    ),
    "vaultgemma": ("gemma2", {}, "(the most similar families are gemma2 and ", ")"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIKE)
def test_another_model_type_states_what_differs_from_the_nearest_family(kind, tmp_path):
    name, changes, start, end = ALIKE[kind]
    [line] = refused(tmp_path, given(name) | changes | {"model_type": kind})
    assert start in line
    assert line.endswith(f"{end}; nearest: none, this model cannot be imported")


def test_no_value_of_another_model_type_raises_more_than_a_line(tmp_path):
    values = given("gemma3") | given("smollm3") | given("deepseek-v3") | {"model_type": "x"}
    for number, key in enumerate(key for key in values if key != "model_type"):
        text = mutated(values, key, HOSTILE[number % len(HOSTILE)])
        with pytest.raises(UserError) as error:
            of_json(read_json(text), tmp_path / "config.json", "")
        assert len(error.value.problems) == 1


def test_the_text_beside_images_may_leave_out_what_transformers_knows(tmp_path):
    """As the published files of Gemma 3 4B and Mistral Small 3.1 do."""
    shape = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text = shape | {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    found = of(tmp_path, outer | {"text_config": text, "vision_config": {}, "mm_tokens_per_image": 256})
    assert (found.family, found.dtype, found.max_length) == ("gemma3_text", "bfloat16", 131072)
    o = found.options
    assert (o.num_heads, o.num_kv_heads, o.head_dim, o.vocab_size, o.attention_scalar) == (8, 4, 256, 262208, 256)
    assert (o.rope.base, o.rope.local_base, o.rope.factor, o.rope.scaling) == (1e6, 1e4, 8.0, "linear")
    assert (o.window, o.global_every, o.tied_embeddings, o.norm.epsilon) == (1024, 6, True, 1e-6)
    lines = refused(tmp_path, {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}})
    assert lines[0].startswith("model_type: got 'ministral3'; allowed: ")
    lines = refused(tmp_path, outer | {"text_config": text, "quantization_config": {}, "x": 1})
    assert [line.partition(":")[0] for line in lines] == ["quantization_config", "x"]
    untied = of(tmp_path, outer | {"text_config": text, "tie_word_embeddings": False})
    assert not untied.options.tied_embeddings


def test_a_model_type_in_another_spelling_is_named(tmp_path):
    [line] = refused(tmp_path, {"model_type": "Qwen3-MoE"})
    assert line.endswith("; did you mean 'qwen3_moe'?")


BOUNDS = {
    "num_hidden_layers": ("llama", 0),
    "num_attention_heads": ("llama", 0),
    "num_key_value_heads": ("llama", 0),
    "num_local_experts": ("mixtral", 0),
    "kv_lora_rank": ("deepseek-v3", 0),
    "vocab_size": ("llama", 0),
    "intermediate_size": ("llama", -1),
    "n_head": ("gpt2", -1),
    "sliding_window": ("mistral-window", -1),
    "moe_intermediate_size": ("qwen3-moe", -1),
}


@pytest.mark.parametrize("key", BOUNDS)
def test_a_number_out_of_bounds_is_named_as_in_the_file_with_one_way_out(key, tmp_path):
    name, value = BOUNDS[key]
    line = next(line for line in refused(tmp_path, given(name) | {key: value}) if line.startswith(f"{key}: "))
    assert line.startswith(f"{key}: got {value}; allowed: at least ")
    assert line.count("nearest: ") == 1


WRONG_NUMBERS = {
    "a length below 0": ("llama", {"max_position_embeddings": -5}, "max_position_embeddings: got -5; allowed: a whole"),
    "no positions": ("gpt2", {"n_positions": 0}, "n_positions: got 0; allowed: a whole number from 1 to"),
    "no number": ("llama", {"max_position_embeddings": "x"}, "max_position_embeddings: got 'x'; allowed: a whole numb"),
    "layers without end": ("gemma2", {"num_hidden_layers": 10**9}, "layer_types: got ["),
    "rotated without end": ("smollm3", {"num_hidden_layers": 10**9, "no_rope_layers": [1, 0]}, "no_rope_layers: got"),
    "dense layers alone": ("deepseek-v3", {"first_k_dense_replace": 7}, "first_k_dense_replace: got 7; allowed: fewer"),
    "kinds of layers": ("llama", {"layer_types": {}}, "layer_types: got {}; allowed: full_attention in all layers"),
    "turns below 0": (
        "llama3-rope-scaled",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": -1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
        "rope_parameters.high_freq_factor: got 4.0; allowed: above low_freq_factor=-1.0, which must be above 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_NUMBERS)
def test_a_number_is_checked_before_it_is_used(case, tmp_path):
    name, changes, start = WRONG_NUMBERS[case]
    lines = refused(tmp_path, {key: value for key, value in (given(name) | changes).items() if value is not None})
    assert any(line.startswith(start) for line in lines), lines


HOSTILE = ("0", "-1", "1e999", "NaN", "9" * 400, "1e30", "2147483648", "0.5", "-0.0", "true", '"x"', "[]", "{}", "null")


def mutated(values, key, text, inner=None):
    """Returns the text of a config.json in which the value of a key, or of a key inside it, is another text."""
    changed = {**values, key: {**values[key], inner: "HERE"} if inner else "HERE"}
    return json.dumps(changed).replace('"HERE"', text)


@pytest.mark.parametrize("name", NAMES)
def test_no_value_of_a_key_raises_more_than_lines_that_name_the_file(name, tmp_path):
    """Three values of each key of each family, others for the next key; 1,000 cases and more in all."""
    values = config_of_text(FIXTURES / name)
    keys = [(key, None) for key in values if key not in HARMLESS_KEYS or key == "max_position_embeddings"]
    keys += [(key, inner) for key, value in values.items() if isinstance(value, dict) for inner in value]
    lines = []
    for number, (key, inner) in enumerate(keys):
        for text in (HOSTILE[(3 * number + more) % len(HOSTILE)] for more in range(3)):
            try:
                found = of_json(read_json(mutated(values, key, text, inner)), tmp_path / "config.json", None)
            except UserError as error:
                lines += error.problems
                continue
            size = names.sizes(found.options)
            assert all(one >= 0 for one in size.values()), (key, text, size)
    assert all(line.startswith(f"{tmp_path / 'config.json'}: ") for line in lines)


def test_a_model_of_more_tensors_than_the_files_can_have_is_one_line(tmp_path):
    shutil.copytree(FIXTURES / "mixtral", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(given("mixtral") | {"num_local_experts": 2**20}))
    with pytest.raises(UserError) as error:
        folder.open_folder(tmp_path)
    [line] = error.value.problems
    assert " tensors in the files; allowed: the 6291473 tensors of the model in config.json; nearest: " in line


def test_experts_in_the_decoders_words(tmp_path):
    shape = {"num_layers": 2, "embed_dim": 24, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 119}
    of_experts = MoeOptions(num_experts=4, expert_dim=16, balance_weight=0.001)
    qwen = given("qwen3-moe")
    assert describe_model(FIXTURES / "qwen3-moe").options == DecoderOptions(
        mlp_dim=48, head_dim=8, norm=NormOptions(qk=True), moe=of_experts, **shape
    )
    qwen["num_experts"] = qwen.pop("num_local_experts")
    assert of(tmp_path, qwen) == describe_model(FIXTURES / "qwen3-moe")
    mixtral = describe_model(FIXTURES / "mixtral").options
    assert mixtral == DecoderOptions(mlp_dim=mixtral.mlp_dim, moe=of_experts, **shape)
    # The width of an mlp that there is not is no difference, nor are losses of routers.
    of_experts = dataclasses.replace(of_experts, balance_weight=0.5, z_weight=0.0)
    ours = DecoderOptions(mlp_dim=7, moe=of_experts, **shape)
    assert differences(ours, mixtral, 32, "DIR") == []
    for name, value, wanted in (("experts_per_token", 1, 2), ("num_experts", 8, 4)):
        other = dataclasses.replace(ours, moe=dataclasses.replace(of_experts, **{name: value}))
        [line] = differences(other, mixtral, 32, "DIR")
        assert line.startswith(
            f"model.moe.{name}: got {value}, but the model in DIR has {wanted}; allowed: {wanted}; near"
        )


def test_the_coefficient_of_the_routers_loss_is_read_and_written_with_the_meaning_of_transformers(tmp_path):
    for name, family in (("mixtral", "mixtral"), ("qwen3-moe", "qwen3_moe"), ("gpt-oss", "gpt_oss")):
        for stated, weight in (({"router_aux_loss_coef": 0.02}, 0.02), ({}, 0.001), ({"router_aux_loss_coef": 0}, 0.0)):
            keys = {key: value for key, value in given(name).items() if key != "router_aux_loss_coef"}
            options = of(tmp_path, keys | stated).options
            assert options.moe.balance_weight == weight
            changed = dataclasses.replace(options, moe=dataclasses.replace(options.moe, balance_weight=0.3))
            written = as_json(changed, family, "float32", 24, 0, keys | stated)
            assert written["router_aux_loss_coef"] == 0.3, "the run's, whatever the original has"


WINDOWS = {
    "mixtral": ("mixtral", {"sliding_window": 6}, 6),
    "mistral": ("mistral-window", {}, 6),
    "mistral without": ("mistral-window", {"sliding_window": "null"}, 0),
    "mistral by default": ("mistral-window", {"sliding_window": None}, 4096),
    "qwen2 switched off": ("qwen2", {"sliding_window": 6}, 0),
    "qwen2 in all layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0, "layer_types": None}, 6,
    ),
    "qwen2 after the last layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": None}, 0),
    "qwen2 with no layer left": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "layer_types": None}, 0,
    ),
    "qwen2 by layer_types": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_the_window_is_that_of_transformers(name, tmp_path):
    model, changes, window = WINDOWS[name]
    merged = {key: value for key, value in (given(model) | changes).items() if value is not None}
    values = {key: None if value == "null" else value for key, value in merged.items()}
    assert of(tmp_path, values).options.window == window


TURNS = {
    "gemma2 by default": ("gemma2", {"layer_types": None}, (6, 2)),
    "gemma3 by default": ("gemma3", {"layer_types": None, "_sliding_window_pattern": None}, (6, 6)),
    "gemma3 by its older key": (
        "gemma3",
        {"layer_types": None, "_sliding_window_pattern": None, "sliding_window_pattern": 2},
        (6, 2),
    ),
    "windows in all layers": ("gemma3", {"layer_types": ["sliding_attention"] * 3}, (6, 0)),
    "windows in none": ("gemma2", {"layer_types": ["full_attention"] * 2, "sliding_window": None}, (0, 0)),
}


@pytest.mark.parametrize("name", TURNS)
def test_layers_with_a_window_and_without_take_turns(name, tmp_path):
    model, changes, expected = TURNS[name]
    values = {key: value for key, value in (given(model) | changes).items() if value is not None}
    found = of(tmp_path, values).options
    assert (found.window, found.global_every) == expected


def test_a_cap_of_null_is_none(tmp_path):
    assert given("gemma2")["attn_logit_softcapping"] == 5.0
    assert of(tmp_path, given("gemma2") | {"attn_logit_softcapping": None}).options.attention_cap == 0.0


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_what_is_no_json_object_is_one_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as error:
        describe_model(tmp_path)
    [line] = error.value.problems
    assert "allowed: a JSON object; nearest: " in line


def test_a_folder_is_told_from_a_workdir(tmp_path):
    assert is_described(FIXTURES / "llama")
    assert not is_described(tmp_path)
    assert not is_described(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model": {}, "mesh": {}}')
    assert not is_described(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").touch()
    assert is_described(tmp_path), "its config.json is missing, and that is the line to print"


def test_adapters_without_their_model_are_named(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UserError, match=r"got peft adapters without their base model; allowed: a "):
        describe_model(tmp_path)


def test_options_that_compute_something_else_are_named():
    theirs = describe_model(FIXTURES / "llama").options
    rope = dataclasses.replace(theirs.rope, base=5.0)
    ours = dataclasses.replace(theirs, rope=rope, dropout_rate=0.1, init_std=0.5, head_dim=0)
    [line] = differences(ours, theirs, 64, "DIR")
    assert line.startswith("model.rope.base: got 5.0, but the model in DIR has 10000.0; allowed: 10000.0; nearest: mo")
    learned = describe_model(FIXTURES / "gpt2").options
    assert differences(DecoderOptions(**{**vars(learned), "max_positions": 0}), learned, 32, "DIR") == []
    [line] = differences(DecoderOptions(**{**vars(learned), "max_positions": 0}), learned, 16, "DIR")
    assert line.startswith("model.max_positions: got 16, but the model in DIR has 32")
