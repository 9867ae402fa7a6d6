"""Converts decoder options to the content of a config.json; the inverse of `hf.config_json`.

If newer versions of transformers have renamed a key, the content has the newer and the older key.
"""

import contextlib
import operator
from collections.abc import Mapping
from pathlib import Path

from meshtrain.errors import Problem, UserError
from meshtrain.files import Json, JsonObject
from meshtrain.hf.config_json import CONFIG_FILE, QUANTIZED, TIED, differing, in_no_table, of_json
from meshtrain.hf.families import COEFFICIENT, FAMILIES
from meshtrain.hf.positions import (
    DEEPSEEK,
    FULL,
    GEMMA3,
    IN_HALVES,
    LOCAL_BASE,
    MSCALES,
    SCALINGS,
    SMOLLM3,
    TURNS,
    WINDOW_KEYS,
    WINDOWED,
    rope_layers,
    turns,
)  # fmt: skip
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.options import Value


def family_of(options: DecoderOptions) -> str:
    """Returns the Hugging Face `model_type` whose config.json can express these decoder options.

    The function converts the options to each family's config.json and back. It returns the first family for which all
    options that affect the model's results are unchanged.

    Raises:
      UserError: no family can express these options; the line names the family with the fewest different options.
    """
    differing_by_family = dict[str, Mapping[str, tuple[Value, Value]]]()
    for family in FAMILIES:
        with contextlib.suppress(UserError):  # the family's config.json cannot express these options
            theirs = of_json(as_json(options, family, "float32", 1, -1, {}), Path(CONFIG_FILE), None).options
            differing_by_family[family] = differing(options, theirs, 1)
    family, options_of_none = min(differing_by_family.items(), key=lambda of: len(of[1]))
    if not options_of_none:
        return family
    got, wanted = ([f"model.{name}={of[i]}" for name, of in options_of_none.items()] for i in (0, 1))
    raise UserError(
        Problem(
            "model",
            got=f"{', '.join(got)}, which no Hugging Face model combines with the other options",
            allowed=f"the options of one of {', '.join(FAMILIES)}",
            nearest=f"{', '.join(wanted)} for {family}",
        )
    )


def as_json(
    options: DecoderOptions, family: str, dtype: str, length: int, end_id: int, original: Mapping[str, Json]
) -> JsonObject:
    """Returns the content of a config.json for a decoder.

    Args:
      options: the options of the decoder.
      family: a `model_type`, a key of `FAMILIES`.
      dtype: the dtype of the tensors, such as `bfloat16`.
      length: the sequence length of training in tokens, exported as the maximum number of positions.
      end_id: the id of the token that ends a text; -1 if there is none.
      original: the content of config.json in the folder that the model was imported from; {} if the model was not
        imported. It must describe the same model as `options`, because its values replace the exported values. Some of
        its values are not used: the dtype, the quantization, the coefficient of the router loss, and tied embeddings if
        `options` unties them.
    """
    rows = FAMILIES[family]
    stated: JsonObject = {"architectures": [rows.architecture], "model_type": family}
    values = {key: operator.attrgetter(name)(options) for key, name in rows.fields.items()}
    stated |= values | {rows.activation[0]: rows.activation[1][0]}
    if rows.is_rotary:
        stated |= {"head_dim": options.width_of_head, "max_position_embeddings": length, **_rope(options)}
        in_turns = family in TURNS
        stated |= _turns(options, family) if in_turns else _window(options, family)
        stated |= _gemma(options) if in_turns and options.norm.centered_scales else {}
        stated |= _rope_layer_keys(options) if family == SMOLLM3 else {}
        stated |= _latent(options, stated) if options.latent.dim else {}
        stated |= _experts(options, family) if options.moe.num_experts and not options.latent.dim else {}
        stated |= {"use_bias": True} if options.biases else {}
    else:
        stated["n_positions"] = options.max_positions or length
    stated |= {"bos_token_id": None, "eos_token_id": end_id if end_id >= 0 else None}
    stated |= {"initializer_range": options.init_std, "use_cache": True}
    if family in IN_HALVES:
        stated |= _ropes_in_turns(options, stated, family)
    ignored = {"meshtrain_ignored": in_no_table(original)} if in_no_table(original) else {}
    # The original config.json may tie the output head although its files have a separate head.
    untied = {} if stated[TIED] else {TIED: False}
    of_run = {COEFFICIENT: stated[COEFFICIENT]} if COEFFICIENT in stated else {}
    return stated | _both_ropes(original, stated) | of_run | untied | ignored | {"dtype": dtype, "torch_dtype": dtype}


def _rope(options: DecoderOptions) -> JsonObject:
    """Returns the RoPE settings of a decoder twice: as the newer key `rope_parameters`, and as older keys.

    The older keys are `rope_scaling` and `rope_theta`.
    """
    theta, scaling = {"rope_theta": options.rope.base}, None
    if options.rope.factor != 1.0:
        kind = options.rope.scaling
        values = {key: operator.attrgetter(name)(options) for key, name in SCALINGS[kind].items()}
        scaling = {"rope_type": kind, **{key: value for key, value in values.items() if value != 0.0 or value is False}}
    return {"rope_parameters": (scaling or {"rope_type": "default"}) | theta, "rope_scaling": scaling, **theta}


def _ropes_in_turns(options: DecoderOptions, stated: Mapping[str, Json], family: str) -> JsonObject:
    """Returns the RoPE keys of Gemma 3 and OLMo 3: separate settings for layers with and without a sliding window.

    Args:
      options: the options of the decoder.
      stated: the keys that `as_json` has created so far. Their `rope_parameters` become the settings of layers without
        a window.
      family: a key of `FAMILIES`. Gemma 3 also gets the older key `rope_local_base_freq`.
    """
    has_own = options.window > 0 and options.rope.local_base > 0
    base = options.rope.local_base if has_own else options.rope.base
    local = {"rope_type": "default", "rope_theta": base}
    halves: JsonObject = {"rope_parameters": {FULL: stated["rope_parameters"], WINDOWED: local}}
    return halves | ({LOCAL_BASE: base} if family == GEMMA3 else {})


def _turns(options: DecoderOptions, family: str) -> JsonObject:
    """Returns the window keys of a family that alternates layers with a sliding window and layers with full attention.

    If the options have no window, all layers have full attention.
    """
    every = options.global_every if options.window else 1
    stated: JsonObject = {"sliding_window": options.window or None, "layer_types": turns(options.num_layers, every)}
    return stated | ({"sliding_window_pattern": every} if family == GEMMA3 and every else {})


def _latent(options: DecoderOptions, stated: Mapping[str, Json]) -> JsonObject:
    """Returns the latent-attention keys of DeepSeek.

    Some of them replace keys for heads and RoPE in `stated`, which contains the keys that `as_json` has created so far.
    """
    found: JsonObject = {name: values[0] for name, values in FAMILIES[DEEPSEEK].only.items()}
    found |= {"head_dim": options.latent.rope_dim, "v_head_dim": options.width_of_values, "attention_bias": False}
    found |= {"qk_nope_head_dim": options.width_of_head - options.latent.rope_dim}
    found |= {"q_lora_rank": options.latent.query_dim or None}
    for key in ("rope_parameters", "rope_scaling"):
        inner = stated[key]
        found[key] = {**inner, **MSCALES} if isinstance(inner, dict) and inner["rope_type"] == "yarn" else inner
    return found


def _rope_layer_keys(options: DecoderOptions) -> JsonObject:
    """Returns the keys that state which layers of SmolLM 3 use RoPE, and that no layer has a sliding window."""
    every = options.rope.unrotated_every
    layers: JsonObject = {"no_rope_layers": rope_layers(options.num_layers, every), "use_sliding_window": False}
    return layers | ({"no_rope_layer_interval": every} if every else {})


def _gemma(options: DecoderOptions) -> JsonObject:
    """Returns the keys of Gemma 2 and 3 for the query scale, soft caps of logits, and biases.

    A cap of 0, which means no cap, becomes null.
    """
    return {
        "query_pre_attn_scalar": options.attention_scalar or options.width_of_head,
        "attn_logit_softcapping": options.attention_cap or None,
        "final_logit_softcapping": options.logit_cap or None,
        "attention_bias": False,
    }


def _experts(options: DecoderOptions, family: str) -> JsonObject:
    """Returns the keys of a mixture-of-experts family (not DeepSeek) whose values are constant.

    The options of a decoder do not change these values, such as `output_router_logits` = False.
    """
    stated: JsonObject = {"output_router_logits": False}
    if family != "qwen3_moe":
        return stated | ({"router_jitter_noise": 0.0} if family == "mixtral" else {})
    stated |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return stated | {"sliding_window": None, "use_sliding_window": False}


def _window(options: DecoderOptions, family: str) -> JsonObject:
    """Returns the sliding-window keys of a family whose layers are all equal; {} if the family has no such keys."""
    window = options.window or None
    stated = {
        "sliding_window": window,
        "use_sliding_window": bool(window),
        "max_window_layers": 0 if window else options.num_layers,
        "layer_types": [WINDOWED if window else FULL] * options.num_layers,
    }
    own = WINDOW_KEYS[family] if family in WINDOW_KEYS else ()
    return {key: value for key, value in stated.items() if key in own}


def _both_ropes(original: Mapping[str, Json], stated: Mapping[str, Json]) -> JsonObject:
    """Returns the original config.json without its quantization, and without RoPE keys whose value is null.

    The original's values replace exported values, so a null would remove the exported RoPE settings.

    Args:
      original: the config.json of the folder that the model was imported from.
      stated: the exported keys and values, without the original.
    """
    kept = {key: value for key, value in original.items() if key != QUANTIZED}
    if kept.get("rope_parameters") is None:
        kept.pop("rope_parameters", None)
    if kept.get("rope_scaling") is None and stated.get("rope_scaling") is not None:
        kept.pop("rope_scaling", None)
    return kept
