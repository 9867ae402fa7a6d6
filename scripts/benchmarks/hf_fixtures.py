"""Makes the small models of tests/hf/fixtures with the package transformers, and their logits.

    scripts/bench hf_fixtures FOLDER [NAME ...]

NAME/ contains config.json, config.v4.json (the same with the keys of older files), model.safetensors with random
weights, including norms and biases, and expected.npz (input_ids int32 [2, 24], logits float32 [2, 24, vocabulary]).
teeth.json states how much the logits change if a key has another value, to prove that a tolerance of 1e-4 detects each.
If experts have 4 bits (MXFP4), unpacked.json contains the SHA-256 of each of their matrices as transformers unpacks it,
in bfloat16.

Extras: transformers
"""

import hashlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshtrain.errors import run

LENGTH, LENGTH_OF_YARN = 24, 16
ROUGHLY_ONE = ("norm.weight", "layernorm.weight")
SMALL = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": LENGTH_OF_YARN,
    "beta_fast": 2.0, "beta_slow": 0.1,
}  # fmt: skip
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 8, "n_routed_experts": 4,
    "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
    "head_dim": None,
}  # fmt: skip
HALVES = {"full_attention": YARN | {"rope_theta": 500000.0},
          "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}  # fmt: skip
OF_IMAGES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 16, "patch_size": 8}  # fmt: skip
TURNS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


class Model(NamedTuple):
    """One fixture.

    Attributes:
      kind: its `model_type`.
      options: arguments of its configuration class, in addition to `SMALL` and `DEFAULT`.
      teeth: keys with other values, grouped by their effect.
      is_packed: whether experts have 4 bits and all other weights bfloat16.
    """

    kind: str
    options: Mapping[str, Any]
    teeth: Mapping[str, Mapping[str, Any]] = {}
    is_packed: bool = False


GPT_OSS = {
    **TURNS, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
PACKED = {  # as published
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
EXPONENTS = {"gate_up_proj": 122, "down_proj": 120}  # exponents of 2, with a bias of 127; the largest are 3 more

MODELS: Mapping[str, Model] = {
    "gemma": Model("gemma", {"tie_word_embeddings": True}),
    "seed-oss": Model("seed_oss", {"attention_bias": True}),
    "starcoder2": Model(
        "starcoder2",
        {"sliding_window": 6, "tie_word_embeddings": True, "head_dim": None},
        {"without window": {"sliding_window": None}},
    ),
    "llama-biases": Model("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-biases": Model("qwen3", {"attention_bias": True}),
    "llama-linear": Model("llama", {"rope_parameters": LINEAR}, {"without scaling": {"rope_parameters": DEFAULT}}),
    "qwen2-yarn": Model(
        "qwen2",
        {"rope_parameters": YARN, "head_dim": None},
        {
            "without scaling": {"rope_parameters": DEFAULT},
            "without the attention factor": {"rope_parameters": YARN | {"attention_factor": 1.0}},
            "pairs not rounded": {"rope_parameters": YARN | {"truncate": False}},
        },
    ),
    "mistral-yarn": Model(
        "mistral",
        {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}, "sliding_window": 20},
        {"pairs rounded": {"rope_parameters": YARN | {"attention_factor": 1.3}}},
    ),
    "phi3": Model("phi3", {"sliding_window": 6, "head_dim": None}),
    "smollm3": Model(
        "smollm3",
        {"no_rope_layer_interval": 2, "rope_parameters": YARN, "tie_word_embeddings": True},
        {"all layers rotated": {"no_rope_layers": [1, 1]}},
    ),
    "gpt-oss": Model(
        "gpt_oss",
        GPT_OSS,
        {"without window": {"layer_types": ["full_attention"] * 2}, "no limit": {"swiglu_limit": 100.0}},
    ),
    "gpt-oss-mxfp4": Model("gpt_oss", GPT_OSS | {"hidden_size": 64, "intermediate_size": 32}, is_packed=True),
    "olmo2": Model("olmo2", {"head_dim": None}),
    "olmo3": Model(
        "olmo3",
        {**TURNS, "rope_parameters": HALVES, "head_dim": None},
        {
            "yarn in all layers": {"rope_parameters": dict.fromkeys(HALVES, HALVES["full_attention"])},
            "no window": {"layer_types": ["full_attention"] * 2},
        },
    ),
    "deepseek-v3": Model("deepseek_v3", DEEPSEEK | {"rope_parameters": YARN | MSCALES, "q_lora_rank": 12},
        {
            "without scaling": {"rope_parameters": DEFAULT},
            "without the scale of scores": {"rope_parameters": YARN | MSCALES | {"mscale_all_dim": 0.0}},
            "one group": {"n_group": 1, "topk_group": 1},
            "gates as they are": {"routed_scaling_factor": 1.0},
            "halves": {"rope_interleave": False},
        },
    ),
    "deepseek-v3-plain": Model(
        "deepseek_v3",
        DEEPSEEK
        | {"q_lora_rank": None, "first_k_dense_replace": 0, "num_hidden_layers": 2, "n_group": 1, "topk_group": 1},
    ),
    "gemma3-images": Model(
        "gemma3",
        {
            "text_config": SMALL | TURNS | {
                "model_type": "gemma3_text", "rms_norm_eps": 1e-5, "query_pre_attn_scalar": 20,
                "rope_parameters": {"full_attention": LINEAR,
                                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
            },
            "vision_config": {**OF_IMAGES, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4, "image_token_index": 66, "boi_token_index": 65, "eoi_token_index": 64,
        },
    ),
    "mistral3-images": Model(
        "mistral3",
        {
            "text_config": SMALL | {"model_type": "mistral", "sliding_window": 6, "rope_parameters": DEFAULT,
                                    "tie_word_embeddings": False},
            "vision_config": {**OF_IMAGES, "head_dim": 4, "model_type": "pixtral"},
            "image_token_index": 66, "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


def older(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the keys of transformers 4."""
    result = dict(stated)
    result["torch_dtype"], result["transformers_version"] = result.pop("dtype"), "4.46.0"
    if "text_config" in result:
        result["text_config"] = older({"dtype": "float32", **result["text_config"]})
    rope = result.pop("rope_parameters", None)
    if rope is None:
        return result
    everywhere = dict(rope.get("full_attention", rope))
    result["rope_theta"] = everywhere.pop("rope_theta")
    everywhere.pop("partial_rotary_factor", None)
    result["rope_scaling"] = None if everywhere == {"rope_type": "default"} else everywhere
    if result["model_type"] == "gemma3_text":
        result["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return result


def logits(folder: pathlib.Path, ids: np.ndarray) -> np.ndarray:
    """Returns the logits of a folder, float32."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager")
    model = class_of(config).from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        found: np.ndarray = model.eval()(torch.from_numpy(ids).long()).logits.numpy()
    return found


def class_of(config: Any) -> Any:
    """Returns the model class of this configuration; a class with images if the configuration has two parts."""
    import transformers

    has_images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM


def make(name: str, folder: pathlib.Path) -> None:
    """Writes one fixture."""
    import torch
    import transformers

    row = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    options = {"rope_parameters": DEFAULT, **SMALL, **row.options}
    options = {key: value for key, value in options.items() if key != "head_dim" or value is not None}
    if "text_config" in row.options:
        options = dict(row.options)
    config = transformers.AutoConfig.for_model(row.kind, **options)
    config._attn_implementation = "eager"
    model = class_of(config).from_config(config).float()
    of_matrices = 0.15 if row.is_packed else 0.3  # blocks of 32 numbers make the model wider
    for key, value in model.named_parameters():
        noise = torch.randn_like(value) * (of_matrices if value.ndim > 1 else 0.4)
        noise *= 4.0 if row.kind == "gpt_oss" and "gate_up_proj" in key else 1.0  # so that some exceed the limit
        value.data = value.data + noise if key.endswith(ROUGHLY_ONE) else noise
    for key, value in model.named_buffers():
        value.data = torch.randn_like(value) * 0.1 if key.endswith("e_score_correction_bias") else value.data
    model.save_pretrained(folder)
    if row.is_packed:
        pack(folder)
    ids = np.random.default_rng(len(name)).integers(0, 67, (2, LENGTH)).astype(np.int32)
    expected = logits(folder, ids)
    np.savez_compressed(folder / "expected.npz", input_ids=ids, logits=expected)
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.v4.json", older(stated))
    teeth = {"size of logits (std)": round(float(expected.std()), 6)}
    teeth["v4 config in transformers"] = moved(folder, ids, expected, older(stated))
    for what, changes in row.teeth.items():
        teeth[what] = moved(folder, ids, expected, stated | dict(changes))
    write_json(folder / "teeth.json", teeth)
    (folder / "generation_config.json").unlink()
    print(f"{sum(path.stat().st_size for path in folder.iterdir()):8,} bytes  {name}  {teeth}", flush=True)


def pack(folder: pathlib.Path) -> None:
    """Replaces the matrices of experts by random 4-bit matrices, and converts all other weights to bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", stated | {"dtype": "bfloat16", "quantization_config": PACKED})
    tensors, hashes = {}, {}
    for key, value in load_file(folder / "model.safetensors").items():
        kind = key.rpartition(".")[2]
        if kind not in EXPONENTS:
            tensors[key] = value.bfloat16()
            continue
        experts, rows, columns = value.shape  # transposed, as transformers stores it in memory
        groups = (experts, columns, rows // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
        scales = torch.randint(EXPONENTS[kind], EXPONENTS[kind] + 4, groups, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        unpacked = convert_moe_packed_tensors(blocks, scales).view(torch.int16).numpy()
        hashes[key] = hashlib.sha256(unpacked.tobytes()).hexdigest()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "unpacked.json", hashes)


def moved(folder: pathlib.Path, ids: np.ndarray, expected: np.ndarray, stated: Mapping[str, Any]) -> float:
    """Returns the largest difference of the logits with another config.json."""
    with tempfile.TemporaryDirectory() as other:
        write_json(pathlib.Path(other) / "config.json", stated)
        (pathlib.Path(other) / "model.safetensors").symlink_to((folder / "model.safetensors").absolute())
        return round(float(np.abs(logits(pathlib.Path(other), ids) - expected).max()), 6)


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes an object as JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Writes the named models, or all models."""
    for name in argv[1:] or MODELS:
        folder = pathlib.Path(argv[0]) / name
        folder.mkdir(parents=True, exist_ok=True)
        make(name, folder)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
