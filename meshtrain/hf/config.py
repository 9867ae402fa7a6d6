"""A Hugging Face config.json as options of the decoder. What may change the numbers and is not understood is an error.

What an absent key means, and the rules for windows and rotary scaling, are those of the configuration classes of the
package transformers (Wolf et al. 2020). A key that always stands in published files has to be there.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.models.decoder import DecoderOptions
from meshtrain.words import flags, options
from meshtrain.words.errors import UserError, unknown
from meshtrain.words.paths import expanded, what_is_at

CONFIG_FILE = "config.json"
NO_WAY = "nearest: none, this model cannot be imported"
PUBLISHED = "nearest: the config.json that was published with the weights"


class Family(NamedTuple):
    """How one `model_type` describes a decoder.

    Attributes:
      architecture: the class that has the head of a language model.
      fields: key -> option of the decoder.
      fixed: options that no key states.
      absent: key -> what it means if it is missing. Other keys of `fields` have to be there.
      length: the key with the most positions.
      activation: the key with the mlp's function, and the functions that the decoder has.
      is_rotary: whether keys describe rotary positions.
    """

    architecture: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    absent: Mapping[str, Any]
    length: str
    activation: tuple[str, tuple[str, ...]]
    is_rotary: bool = True


_LLAMA_FIELDS = {
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied_embeddings",
}
_GPT2_FIELDS = {
    "n_embd": "embed_dim",
    "n_inner": "mlp_dim",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_positions",
    "vocab_size": "vocab_size",
    "layer_norm_epsilon": "norm_epsilon",
    "tie_word_embeddings": "tied_embeddings",
}
_SWIGLU = ("hidden_act", ("silu",))
_UNTIED: Mapping[str, Any] = {"head_dim": None, "tie_word_embeddings": False}
_LIKE_LLAMA = ("max_position_embeddings", _SWIGLU)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _LLAMA_FIELDS,
        {},
        {**_UNTIED, "num_key_value_heads": None, "rope_theta": 10000.0},
        *_LIKE_LLAMA,
    ),
    "mistral": Family("MistralForCausalLM", _LLAMA_FIELDS, {}, {**_UNTIED, "sliding_window": 4096}, *_LIKE_LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", _LLAMA_FIELDS, {"qkv_biases": True}, _UNTIED, *_LIKE_LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", _LLAMA_FIELDS, {"qk_norm": True}, {"tie_word_embeddings": False}, *_LIKE_LLAMA),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2_FIELDS,
        {"norm": "layernorm", "activation": "gelu", "positions": "learned", "biases": True},
        {"n_inner": None, "tie_word_embeddings": True},
        "n_positions",
        ("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        is_rotary=False,
    ),
}
# Legal in every family with these values alone; the decoder has nothing for another one.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "use_mrope": (False,),
    "pruned_heads": ({},),
}
# Keys without influence on the logits of a given text: names, ids, dropout, initialization, generation, outputs.
_HARMLESS_TEXT = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path attention_dropout attn_pdrop
    bos_token_id chunk_size_feed_forward decoder_start_token_id dtype embd_pdrop eos_token_id finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder label2id
    max_position_embeddings model_type n_ctx output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values reorder_and_upcast_attn resid_pdrop return_dict
    return_dict_in_generate sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params tie_encoder_decoder tokenizer_class torch_dtype torchscript
    transformers_version unk_token_id use_bfloat16 use_cache
"""
_HARMLESS = frozenset(_HARMLESS_TEXT.split())
_ROPE_KEYS = {"rope_type": "", "rope_theta": "rope_base"}
_LLAMA3_KEYS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low",
    "high_freq_factor": "rope_high",
    "original_max_position_embeddings": "rope_original_length",
}
_WINDOW_KEYS = {
    "mistral": ("sliding_window",),
    "qwen2": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    "qwen3": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
_ALL_LAYERS, _NO_LAYER = "sliding_attention", "full_attention"
# Options that the weights do not depend on; a user may choose them.
_FREE = ("vocab_multiple", "dropout_rate", "init_std", "attention", "within_documents")


@dataclasses.dataclass(frozen=True)
class Described:
    """What a config.json describes.

    Attributes:
      family: its `model_type`.
      options: of the decoder.
      max_length: tokens of the longest text of training; 0: it does not say.
      dtype: of the weights, as the file names it; '': it does not say.
    """

    family: str
    options: DecoderOptions
    max_length: int
    dtype: str


def is_described(directory: str | Path) -> bool:
    """Returns whether a folder is a Hugging Face model rather than a workdir: by its config.json, or its files."""
    folder = expanded(directory)
    if what_is_at(folder) != "a folder" or what_is_at(folder / "checkpoints") == "a folder":
        return False
    try:
        given = _loaded(folder / CONFIG_FILE)
    except UserError:
        return any(folder.glob("*.safetensors"))
    return "model_type" in given or "architectures" in given


def described(directory: str | Path) -> Described:
    """Returns what the config.json of a folder describes.

    Raises:
      UserError: one line for each key that is missing, wrong or not understood.
    """
    path = expanded(directory) / CONFIG_FILE
    given = _loaded(path)
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        got = kind if isinstance(kind, str) else repr(kind)
        line = unknown(f"{path}: model_type", got, list(FAMILIES))
        raise UserError(line if "did you mean" in line else f"{line}; {NO_WAY}")
    fields, found = _fields(given, FAMILIES[kind])
    found += _refused(given, kind)
    for part in (_rope(given, FAMILIES[kind]), _window(given, kind)):
        fields |= part[0]
        found += part[1]
    if not found:
        shape = DecoderOptions(**fields)
        found = [f"{line}; {PUBLISHED}" for line in options.problems(shape, "")] + _contradictions(shape)
    if found:
        raise UserError(*(f"{path}: {line}" for line in found))
    dtype = given.get("dtype") or given.get("torch_dtype")
    length = given.get(FAMILIES[kind].length)
    return Described(kind, shape, length if isinstance(length, int) else 0, dtype if isinstance(dtype, str) else "")


def differences(ours: DecoderOptions, theirs: DecoderOptions, sequence_length: int, directory: str | Path) -> list[str]:
    """Returns one line for each option with which the weights of a folder would compute something else.

    Args:
      ours: of the run.
      theirs: of the folder.
      sequence_length: of the run, in tokens; `max_positions` of 0 means it.
      directory: for the lines.
    """
    idle = {key.rpartition(".")[2] for side in (ours, theirs) for key in options.idle(side, "")}
    if ours.rope_factor == theirs.rope_factor == 1.0:
        idle |= {"rope_low", "rope_high", "rope_original_length"}
    found = []
    for field in dataclasses.fields(DecoderOptions):
        own, wanted = _effective(ours, field.name, sequence_length), _effective(theirs, field.name, sequence_length)
        if field.name not in _FREE and field.name not in idle and own != wanted:
            found.append(
                f"model.{field.name}: got {own}, and the model in {directory} has {wanted}; allowed: {wanted}; "
                f"nearest: model.{field.name}={wanted}, as `python -m meshtrain hf config {directory}` prints it"
            )
    return found


def _effective(shape: DecoderOptions, name: str, sequence_length: int) -> Any:
    if name == "head_dim":
        return shape.width_of_head
    if name == "max_positions":
        return (shape.max_positions or sequence_length) if shape.positions == "learned" else 0
    return getattr(shape, name)


def _loaded(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file."""
    if (what := what_is_at(path)) != "a file":
        raise UserError(f"{path}: got {what}; allowed: a file; {PUBLISHED}")
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); allowed: a JSON object; {PUBLISHED}") from error
    if not isinstance(given, dict):
        raise UserError(f"{path}: got {type(given).__name__}; allowed: a JSON object; {PUBLISHED}")
    return given


def _fields(given: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Returns options of the decoder, and one line for each key that is missing or has a value of another type."""
    kinds, fields, found = typing.get_type_hints(DecoderOptions), dict(family.fixed), list[str]()
    for key, name in family.fields.items():
        value = given[key] if key in given else None
        if value is None and key in family.absent:
            value = family.absent[key]
            if value is None:
                continue
        try:
            fields[name] = _typed(value, kinds[name])
        except ValueError as error:
            found.append(f"{key}: {error}")
    if "num_kv_heads" not in fields and "num_heads" in fields:
        fields["num_kv_heads"] = fields["num_heads"]
    if "mlp_dim" not in fields and "embed_dim" in fields:
        fields["mlp_dim"] = 4 * fields["embed_dim"]
    return fields, found


def _typed(value: Any, kind: type) -> Any:
    """Returns a value of JSON as this type; raises ValueError with the rest of a line."""
    if value is None:
        raise ValueError(f"got nothing; allowed: {kind.__name__}; {PUBLISHED}")
    try:
        return flags.typed(value, kind)
    except ValueError as error:
        raise ValueError(str(error) if "nearest: " in str(error) else f"{error}; {PUBLISHED}") from error


def _refused(given: Mapping[str, Any], kind: str) -> list[str]:
    """Returns one line for each key that is not understood, or has a value for which the decoder has nothing."""
    family = FAMILIES[kind]
    understood = {*family.fields, *(_WINDOW_KEYS[kind] if kind in _WINDOW_KEYS else ())}
    understood |= {"rope_theta", "rope_scaling", "rope_parameters"} if family.is_rotary else set()
    only = {**_ONLY, family.activation[0]: family.activation[1]}
    found = []
    for key, value in given.items():
        if value is None or key in understood or key in _HARMLESS:
            continue
        if key == "architectures":
            found += [] if value == [family.architecture] else [_line(key, value, repr([family.architecture]))]
        elif key not in only:
            found.append(_line(key, value, "keys that meshtrain understands, and this one may change the numbers"))
        elif not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in only[key]):
            found.append(_line(key, value, ", ".join(map(str, only[key]))))
    return found


def _line(key: str, value: Any, allowed: str) -> str:
    return f"{key}: got {_shown(value)}; allowed: {allowed}; {NO_WAY}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _rope(given: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Returns the options of rotary positions, and one line for each problem with them.

    Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`; some have both, with equal values.
    """
    if not family.is_rotary:
        return {}, []
    found, sides = list[str](), list[dict[str, Any]]()
    for key in ("rope_scaling", "rope_parameters"):
        inner = given[key] if key in given and given[key] is not None else {}
        if not isinstance(inner, dict):
            found.append(_line(key, inner, "a JSON object"))
            inner = {}
        renamed = {"rope_type" if name == "type" else name: value for name, value in inner.items()}
        sides.append({name: value for name, value in renamed.items() if value is not None})
    older, newer = sides
    if given.get("rope_theta") is not None:
        older["rope_theta"] = given["rope_theta"]
    for name in older.keys() & newer.keys():
        if older[name] != newer[name]:
            found.append(
                f"rope_parameters.{name}: got {_shown(newer[name])}, and rope_theta or rope_scaling say "
                f"{_shown(older[name])}; allowed: the same; {PUBLISHED}"
            )
    stated = {"rope_type": "default"} | ({"rope_theta": 10000.0} if "rope_theta" in family.absent else {})
    stated |= older | newer
    where = "rope_parameters" if newer else "rope_scaling"
    if stated["rope_type"] not in ("default", "llama3"):
        return {}, [*found, _line(f"{where}.rope_type", stated["rope_type"], "default, llama3")]
    wanted = _ROPE_KEYS | (_LLAMA3_KEYS if stated["rope_type"] == "llama3" else {})
    fields, kinds = dict[str, Any](), typing.get_type_hints(DecoderOptions)
    for name, option in wanted.items():
        if not option:
            continue
        try:
            fields[option] = _typed(stated[name] if name in stated else None, kinds[option])
        except ValueError as error:
            found.append(f"{'' if name == 'rope_theta' and not newer else f'{where}.'}{name}: {error}")
    for name in stated.keys() - wanted.keys():
        if (name, stated[name]) != ("partial_rotary_factor", 1.0):
            found.append(_line(f"{where}.{name}", stated[name], f"{', '.join(wanted)} with {stated['rope_type']}"))
    return fields, found


def _window(given: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the option `window`, and one line if some layers have a window and others have none."""
    if kind not in _WINDOW_KEYS:
        return {}, []
    values = {key: given[key] if key in given else None for key in _WINDOW_KEYS[kind]}
    window = values["sliding_window"]
    if "sliding_window" not in given and "sliding_window" in FAMILIES[kind].absent:
        window = FAMILIES[kind].absent["sliding_window"]
    found, layers = list[str](), {_ALL_LAYERS}
    if kind != "mistral":
        if values["use_sliding_window"] not in (None, False, True):
            found.append(_line("use_sliding_window", values["use_sliding_window"], "true, false"))
        window = window if values["use_sliding_window"] else None
        layers = _windowed_layers(values, given, window)
    if layers == {_NO_LAYER} or (window is None and layers == {_ALL_LAYERS} and values.get("layer_types") is None):
        return {}, found
    if layers != {_ALL_LAYERS} or window is None:
        key = "layer_types" if values["layer_types"] is not None else "max_window_layers"
        return {}, [*found, _line(key, values[key], "a window in all layers or in none")]
    try:
        return {"window": _typed(window, int)}, found
    except ValueError as error:
        return {}, [*found, f"sliding_window: {error}"]


def _windowed_layers(values: Mapping[str, Any], given: Mapping[str, Any], window: Any) -> set[str]:
    """Returns the kinds of layers: those of `layer_types`, otherwise a window from layer `max_window_layers` on."""
    types = values["layer_types"]
    if types is not None:
        is_list = isinstance(types, list) and all(isinstance(one, str) for one in types)
        return set(types) if is_list else {"", str(types)}  # of two kinds: no list that the decoder has
    first, num_layers = values["max_window_layers"], given.get("num_hidden_layers")
    if window is None or not isinstance(first, int) or not isinstance(num_layers, int) or first >= num_layers:
        return {_NO_LAYER}
    return {_ALL_LAYERS} if first <= 0 else {_ALL_LAYERS, _NO_LAYER}


def _contradictions(shape: DecoderOptions) -> list[str]:
    """Returns one line for each pair of values that no model can have together."""
    found = []
    if shape.num_heads % shape.num_kv_heads:
        found.append(
            f"num_key_value_heads: got {shape.num_kv_heads}; allowed: a divisor of the {shape.num_heads} heads; "
            f"{PUBLISHED}"
        )
    if not shape.head_dim and shape.embed_dim % shape.num_heads:
        found.append(f"head_dim: got nothing, and {shape.num_heads} heads do not divide a width of {shape.embed_dim}; "
                     f"allowed: a whole number; {PUBLISHED}")  # fmt: skip
    if shape.positions == "rotary" and shape.width_of_head % 2:
        found.append(f"head_dim: got {shape.width_of_head}; allowed: an even number; {PUBLISHED}")
    if shape.rope_factor != 1.0 and not shape.rope_high > shape.rope_low:
        found.append(
            f"rope_parameters.high_freq_factor: got {shape.rope_high}; allowed: above low_freq_factor="
            f"{shape.rope_low}; {PUBLISHED}"
        )
    if shape.vocab_size == 0:
        found.append(f"vocab_size: got 0; allowed: at least 1; {PUBLISHED}")
    return found
