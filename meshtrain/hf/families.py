"""Tables of config.json keys for each family: keys that set options, other keys that change results, harmless keys.

The meaning of an absent key follows the configuration classes of the package transformers (Wolf et al. 2020). A key
that is present in all published files is required.
"""

from collections.abc import Mapping
from typing import NamedTuple

from meshtrain.files import Json
from meshtrain.models.layers import CLAMP, CLAMPED_SLOPE
from meshtrain.options import Value


class Family(NamedTuple):
    """Describes how the config.json of one `model_type` maps to decoder options.

    Attributes:
      architecture: the name of the class in transformers of the language model with its output head.
      fields: key of config.json -> dotted name of the decoder option that the key sets.
      fixed: decoder option -> its value, for options that no key sets.
      absent: key -> the value that a missing key stands for; None: the option has its default. Keys of `fields` that
        are not in `absent` are required.
      length: the key that states the maximum number of positions.
      activation: the key that states the mlp's activation, and the values of this key that the decoder supports.
      is_rotary: whether the model uses RoPE.
      scales_rope: whether config.json may scale RoPE's frequencies, as for YaRN.
      off: the keys of `fields` that may be null, which means the option's default.
      only: key that sets no option but changes results -> the values that the decoder supports. If the key is missing,
        its value in `absent`, if any, is checked.
      same: key -> another name of this key in some files.
      idle: keys without an effect, if all keys in `only` have supported values.
      packed: the supported values of `quant_method` in `quantization_config`; empty: no quantization is supported.
    """

    architecture: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Value]
    absent: Mapping[str, Json]
    length: str
    activation: tuple[str, tuple[str, ...]]
    is_rotary: bool = True
    scales_rope: bool = True
    off: tuple[str, ...] = ()
    only: Mapping[str, tuple[Json, ...]] = {}
    same: Mapping[str, str] = {}
    idle: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()


_LLAMA_FIELDS = {
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm.epsilon",
    "tie_word_embeddings": "tied_embeddings",
}
_BIASES = {"attention_bias": "attention_biases", "mlp_bias": "mlp_biases"}
_NO_BIASES: Mapping[str, Json] = dict.fromkeys(_BIASES, False)
_STARCODER2_FIELDS = {
    **{key: name for key, name in _LLAMA_FIELDS.items() if name != "norm.epsilon"},
    "norm_epsilon": "norm.epsilon",
}
_GPT2_FIELDS = {
    "n_embd": "embed_dim",
    "n_inner": "mlp_dim",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_positions",
    "vocab_size": "vocab_size",
    "layer_norm_epsilon": "norm.epsilon",
    "tie_word_embeddings": "tied_embeddings",
}
_GEMMA_FIELDS = {
    **_LLAMA_FIELDS,
    "query_pre_attn_scalar": "attention_scalar",
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logit_cap",
}
_MIXTRAL_FIELDS = {
    **{key: name for key, name in _LLAMA_FIELDS.items() if name != "mlp_dim"},
    "intermediate_size": "moe.expert_dim",
    "num_local_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.experts_per_token",
}
_DEEPSEEK_FIELDS = {
    "hidden_size": "embed_dim",
    "intermediate_size": "moe.dense_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "qk_nope_head_dim": "head_dim",
    "qk_rope_head_dim": "latent.rope_dim",
    "v_head_dim": "latent.value_dim",
    "kv_lora_rank": "latent.dim",
    "q_lora_rank": "latent.query_dim",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tied_embeddings",
    "moe_intermediate_size": "moe.expert_dim",
    "n_routed_experts": "moe.num_experts",
    "n_shared_experts": "moe.shared_experts",
    "num_experts_per_tok": "moe.experts_per_token",
    "n_group": "moe.router_groups",
    "topk_group": "moe.groups_per_token",
    "routed_scaling_factor": "moe.router_scale",
    "first_k_dense_replace": "moe.dense_layers",
}
_QWEN3_MOE_FIELDS = {
    **_LLAMA_FIELDS,
    "attention_bias": "attention_biases",
    "moe_intermediate_size": "moe.expert_dim",
    "num_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.experts_per_token",
}
# The router loss does not change logits. Its coefficient means the same in transformers as `moe.balance_weight` here.
COEFFICIENT = "router_aux_loss_coef"
_BALANCE: Mapping[str, str] = {COEFFICIENT: "moe.balance_weight"}
_BALANCE_ABSENT: Mapping[str, Json] = {COEFFICIENT: 0.001}
_OF_ROUTERS = ("output_router_logits",)
_GEMMA1: Mapping[str, Value] = {"activation": "geglu", "norm.centered_scales": True, "scaled_embeddings": True}
_GEMMA: Mapping[str, Value] = {**_GEMMA1, "norm.post": True}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_TANH = ("gelu_pytorch_tanh",)
_LIKE_GEMMA = ("max_position_embeddings", ("hidden_activation", _TANH))
# Published files have both the older and the newer key.
_GEMMA_ONLY = {"hidden_act": _TANH, "use_bidirectional_attention": (False,)}
_SWIGLU = ("hidden_act", ("silu",))
_UNTIED: Mapping[str, Json] = {"head_dim": None, "tie_word_embeddings": False}
_LIKE_LLAMA = ("max_position_embeddings", _SWIGLU)
_OLMO_FIELDS = _LLAMA_FIELDS | {"attention_bias": "attention_biases"}
_OLMO: Mapping[str, Value] = {"norm.qk": True, "norm.qk_of_all": True, "norm.post": True, "norm.pre": False}
_OLMO_ABSENT: Mapping[str, Json] = {**_UNTIED, "num_key_value_heads": None, "attention_bias": False}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        _LLAMA_FIELDS | _BIASES,
        {},
        {**_UNTIED, **_NO_BIASES, "num_key_value_heads": None, "rope_theta": 10000.0},
        *_LIKE_LLAMA,
    ),
    "mistral": Family("MistralForCausalLM", _LLAMA_FIELDS, {}, {**_UNTIED, "sliding_window": 4096}, *_LIKE_LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", _LLAMA_FIELDS, {"qkv_biases": True}, _UNTIED, *_LIKE_LLAMA),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA_FIELDS | {"attention_bias": "attention_biases"},
        {"norm.qk": True},
        {"tie_word_embeddings": False, "attention_bias": False},
        *_LIKE_LLAMA,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        _LLAMA_FIELDS | {"attention_bias": "qkv_biases"},
        {},
        {"tie_word_embeddings": False, "head_dim": 128, "attention_bias": True},
        *_LIKE_LLAMA,
        only={"attention_out_bias": (False,)},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        _STARCODER2_FIELDS,
        {"norm.name": "layernorm", "activation": "gelu", "biases": True},
        {"head_dim": None, "tie_word_embeddings": True},
        "max_position_embeddings",
        ("hidden_act", _TANH),
        only={"use_bias": (True,), "mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {**_MIXTRAL_FIELDS, "attention_bias": "attention_biases", **_BALANCE},
        {"sinks": True, "moe.biases": True, "activation": "clamped_swiglu"},
        {"attention_bias": True, "tie_word_embeddings": False, **_BALANCE_ABSENT},
        *_LIKE_LLAMA,
        off=(COEFFICIENT,),
        only={"swiglu_limit": (CLAMP,), "swiglu_alpha": (CLAMPED_SLOPE,)},
        same={"num_experts_per_tok": "experts_per_token", "num_local_experts": "num_experts"},
        idle=(*_OF_ROUTERS, "initial_context_length"),
        packed=("mxfp4",),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _LLAMA_FIELDS,
        {},
        {**_UNTIED, "num_key_value_heads": None},
        *_LIKE_LLAMA,
        scales_rope=False,
        idle=("auto_map", "original_max_position_embeddings"),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _LLAMA_FIELDS | _BIASES,
        {},
        {**_NO_BIASES, "head_dim": None, "num_key_value_heads": None, "tie_word_embeddings": True},
        *_LIKE_LLAMA,
        only={"use_sliding_window": (False,)},
        idle=("sliding_window", "max_window_layers"),
    ),
    "olmo2": Family("Olmo2ForCausalLM", _OLMO_FIELDS, _OLMO, _OLMO_ABSENT, *_LIKE_LLAMA),
    "olmo3": Family("Olmo3ForCausalLM", _OLMO_FIELDS, _OLMO, _OLMO_ABSENT, *_LIKE_LLAMA),
    "gemma": Family(
        "GemmaForCausalLM",
        _LLAMA_FIELDS,
        _GEMMA1,
        {"tie_word_embeddings": True},
        "max_position_embeddings",
        ("hidden_act", (*_TANH, "gelu")),  # older files state gelu but use the tanh approximation
        only={"hidden_activation": _TANH, "use_bidirectional_attention": (False,)},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_FIELDS,
        _GEMMA,
        {"tie_word_embeddings": True},
        *_LIKE_GEMMA,
        off=_CAPS,
        only=_GEMMA_ONLY,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA_FIELDS,
        {**_GEMMA, "norm.qk": True},
        {"tie_word_embeddings": True, **dict.fromkeys(_CAPS)},
        *_LIKE_GEMMA,
        only=_GEMMA_ONLY,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**_MIXTRAL_FIELDS, **_BALANCE},
        {},
        {**_UNTIED, **_BALANCE_ABSENT},
        *_LIKE_LLAMA,
        off=(COEFFICIENT,),
        only={"router_jitter_noise": (0.0,)},
        idle=_OF_ROUTERS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_QWEN3_MOE_FIELDS, **_BALANCE},
        {"norm.qk": True},
        {"tie_word_embeddings": False, "attention_bias": False, "norm_topk_prob": False, **_BALANCE_ABSENT},
        *_LIKE_LLAMA,
        off=(COEFFICIENT,),
        only={
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            "norm_topk_prob": (True,),
            "use_sliding_window": (False,),
        },
        same={"num_experts": "num_local_experts"},
        idle=(*_OF_ROUTERS, "sliding_window", "max_window_layers"),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _DEEPSEEK_FIELDS,
        {"moe.router": "sigmoid", "norm.epsilon": 1e-6},
        {"tie_word_embeddings": False, "num_key_value_heads": None},
        *_LIKE_LLAMA,
        off=("q_lora_rank",),
        only={
            "rms_norm_eps": (1e-6,),  # transformers uses this value for the norms of latents, whatever the key states
            "rope_interleave": (True,),
            "norm_topk_prob": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        idle=(
            *_OF_ROUTERS,
            COEFFICIENT,
            "auto_map",
            "aux_loss_alpha",
            "ep_size",
            "head_dim",
            "num_nextn_predict_layers",
            "qk_head_dim",
            "seq_aux",
        ),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2_FIELDS,
        {"norm.name": "layernorm", "activation": "gelu", "positions": "learned", "biases": True},
        {"n_inner": None, "tie_word_embeddings": True},
        "n_positions",
        ("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        is_rotary=False,
    ),
}


class MultimodalFamily(NamedTuple):
    """Describes a multimodal `model_type`: its `text_config` contains the keys of the text model.

    Attributes:
      text: the `model_type` of the text model.
      absent: key of `text_config` -> the value that a missing key stands for; takes precedence over `Family.absent`.
    """

    text: str
    absent: Mapping[str, Json]


WITH_IMAGES: Mapping[str, MultimodalFamily] = {
    "gemma3": MultimodalFamily(
        "gemma3_text",
        {
            "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "rms_norm_eps": 1e-6,
            "hidden_activation": _TANH[0], "max_position_embeddings": 131072, "query_pre_attn_scalar": 256,
            "sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
    ),
    "mistral3": MultimodalFamily("mistral", {}),
}  # fmt: skip
# Keys next to `text_config` that describe only images, or both models.
_OF_IMAGES_TEXT = """
    architectures boi_token_index eoi_token_index image_token_id image_token_index mm_tokens_per_image model_type
    multimodal_projector_bias projector_hidden_act spatial_merge_size text_config vision_config vision_feature_layer
"""
OF_IMAGES = frozenset(_OF_IMAGES_TEXT.split())
# Keys that every family accepts, but only with these values; the decoder does not support others.
ONLY: Mapping[str, tuple[Json, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "use_mrope": (False,),
    "pruned_heads": ({},),
}
# Part of the model -> the keys that change it, if a family does not have the key or supports only other values of it.
# The keys of families that are not listed here change tensors.
_DIFFERENT_TEXT = {
    "attention": """
        _sliding_window_pattern alibi attention_chunk_size attention_multiplier attn_logit_softcapping layer_types
        max_window_layers no_rope_layer_interval no_rope_layers partial_rotary_factor query_pre_attn_scalar
        rope_interleaved rope_local_base_freq rope_parameters rope_scaling rope_theta rotary_pct
        scale_attn_by_inverse_layer_idx scale_attn_weights sliding_window sliding_window_pattern sliding_window_size
        use_bidirectional_attention use_mrope use_sliding_window
    """,
    "activations": """
        activation_function embedding_multiplier final_logit_softcapping hidden_act hidden_activation logits_scaling
        norm_topk_prob residual_multiplier routed_scaling_factor router_jitter_noise scoring_func
    """,
    "tensors": "architectures auto_map first_k_dense_replace n_shared_experts quantization_config text_config",
}
_OF_FAMILIES = {key for one in FAMILIES.values() for key in (*one.fields, *one.only, *one.idle, *one.same.values())}
DIFFERENT = dict.fromkeys(_OF_FAMILIES | ONLY.keys(), "tensors")
DIFFERENT |= {key: what for what, text in _DIFFERENT_TEXT.items() for key in text.split()}
# Keys that do not change the logits of a given text: names, ids, dropout, initialization, generation, outputs, tools.
_HARMLESS_TEXT = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _flash_attn_2_enabled
    _name_or_path _num_labels attention_dropout attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens
    bos_token bos_token_id cache_implementation chunk_size_feed_forward decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embd_pdrop embedding_dropout encoder_no_repeat_ngram_size eos_token eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    id2label initializer_range is_decoder is_llama_config label2id length_penalty max_length max_new_tokens
    max_position_embeddings max_sequence_length meshtrain_ignored min_length model_max_length model_type n_ctx
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores pad_token pad_token_id prefix pretraining_tp problem_type remove_invalid_values
    reorder_and_upcast_attn repetition_penalty resid_pdrop residual_dropout return_dict return_dict_in_generate
    sep_token_id summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    suppress_tokens task_specific_params temperature tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unk_token unk_token_id use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS_TEXT.split())
