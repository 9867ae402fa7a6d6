"""Checks the options of decoder and encoder-decoder against each other and the mesh; returns error lines."""

import math
from collections.abc import Mapping

from meshtrain.errors import Problem, nearest_divisor, nearest_multiple
from meshtrain.models.attention import select
from meshtrain.models.decoder_options import DecoderOptions, TransformerShape
from meshtrain.models.layers import GATES
from meshtrain.options import MOST


def of_decoder(
    options: DecoderOptions, sequence_length: int, computes_in: str, in_fp8: bool, mesh_shape: Mapping[str, int]
) -> list[Problem]:
    """Returns an error line for each contradiction of a decoder's options with each other or the mesh.

    Args:
      options: each within its own bounds.
      sequence_length: in tokens.
      computes_in: the dtype of attention.
      in_fp8: whether products with weights are in 8 bits.
      mesh_shape: the size of each mesh axis.
    """
    problems = of_transformer(options, computes_in, mesh_shape) + _of_experts(options, in_fp8) + _of_latent(options)
    heads, kv_heads = options.num_heads, options.num_kv_heads
    if heads % kv_heads:
        problems.append(
            Problem(
                "model.num_kv_heads",
                got=kv_heads,
                allowed=f"a divisor of model.num_heads = {heads}",
                nearest=nearest_divisor(heads, kv_heads),
                depends_on=["model.num_heads"],
            )
        )
    if options.positions == "learned" and 0 < options.max_positions < sequence_length:
        problems.append(
            Problem(
                "sequence_length",
                got=sequence_length,
                allowed=f"at most model.max_positions = {options.max_positions} with learned positions",
                nearest=options.max_positions,
                depends_on=["model.max_positions", "model.positions"],
            )
        )
    scaling = options.scaling
    if scaling and scaling.kind != "linear" and not 0 < scaling.low < scaling.high:
        problems.append(
            Problem(
                "model.rope_low, model.rope_high",
                got=f"{options.rope_low}, {options.rope_high}",
                allowed="0 < rope_low < rope_high",
                nearest="1.0, 4.0",
                depends_on=["model.rope_low", "model.rope_high"],
            )
        )
    if scaling and scaling.kind == "yarn" and options.rope_base == 1.0:
        problems.append(Problem("model.rope_base", got="1.0", allowed="above 1 with YaRN", nearest="10000.0"))
    return problems


def of_transformer(options: TransformerShape, computes_in: str, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each contradiction of the options that both transformers share; see `of_decoder`."""
    problems, heads, width = [], options.num_heads, options.width_of_head
    if not options.head_dim and options.embed_dim % heads:
        step = {"learned": heads, "sinusoidal": math.lcm(heads, 2), "rotary": 2 * heads}[options.positions]
        problems.append(
            Problem(
                "model.embed_dim",
                got=options.embed_dim,
                allowed=f"a multiple of model.num_heads = {heads}, or a model.head_dim of its own",
                nearest=nearest_multiple(options.embed_dim, step),
                depends_on=["model.num_heads", "model.head_dim"],
            )
        )
    elif options.positions == "rotary" and width % 2 and width == options.width_of_rotary:
        problems.append(
            Problem(
                "model.head_dim",
                got=f"{width}{'' if options.head_dim else ' (embed_dim / num_heads)'}",
                allowed="an even number with rotary positions",
                nearest=width + 1,
                depends_on=["model.embed_dim", "model.num_heads", "model.positions"],
            )
        )
    if options.dropout_rate >= 1:
        problems.append(Problem("model.dropout_rate", got=options.dropout_rate, allowed="0 to below 1", nearest="0.9"))
    most = MOST[int] // options.vocab_multiple * options.vocab_multiple
    if options.padded_vocab_size > most:
        problems.append(
            Problem(
                "model.vocab_size",
                got=options.vocab_size,
                allowed=f"at most {most}, a multiple of model.vocab_multiple, as ids of padding are int32 too",
                nearest=most,
                depends_on=["model.vocab_multiple"],
            )
        )
    return problems + select.problems(options.attends, computes_in, mesh_shape)


def _of_latent(options: DecoderOptions) -> list[Problem]:
    """Returns an error line for each option that contradicts latent attention; [] without it."""
    if not options.latent_dim:
        return []
    problems, width, rotary = list[Problem](), options.width_of_head, options.rope_dim
    if rotary < 2 or rotary % 2:
        problems.append(
            Problem(
                "model.rope_dim",
                got=f"{rotary} with model.latent_dim = {options.latent_dim}",
                allowed="an even number, at least 2",
                nearest=max(2, rotary + 1),
                depends_on=["model.latent_dim"],
            )
        )
    if options.width_of_values > width:
        problems.append(
            Problem(
                "model.value_dim",
                got=options.value_dim,
                allowed=f"at most {width}, the width of queries and keys",
                nearest=width,
                depends_on=["model.head_dim", "model.embed_dim", "model.num_heads", "model.latent_dim"],
            )
        )
    biases = dict.fromkeys(("biases", "qkv_biases", "attention_biases"), False)
    fits = {"num_kv_heads": options.num_heads, "positions": "rotary", "qk_norm": False, **biases}
    of_heads, of_biases = "each query head has keys of its own, made of the latent", "projections of latents have none"
    for name, allowed in fits.items():
        if (got := getattr(options, name)) != allowed:
            problems.append(
                Problem(
                    f"model.{name}",
                    got=f"{got} with model.latent_dim = {options.latent_dim}",
                    allowed=f"{allowed}, as {of_biases if name in biases else of_heads}",
                    nearest=f"model.{name}={allowed}",
                    depends_on=["model.latent_dim"],
                )
            )
    return problems


def _of_groups(options: DecoderOptions) -> list[Problem]:
    """Returns an error line for each contradiction between the number of experts and the groups of the router."""
    problems = list[Problem]()
    groups, kept = options.router_groups, options.groups_per_token
    if options.num_experts % groups:
        problems.append(
            Problem(
                "model.router_groups",
                got=groups,
                allowed=f"a divisor of model.num_experts = {options.num_experts}",
                nearest=nearest_divisor(options.num_experts, groups),
                depends_on=["model.num_experts"],
            )
        )
    least = math.ceil(options.experts_per_token * groups / options.num_experts)
    if groups > 1 and not least <= kept <= groups:
        problems.append(
            Problem(
                "model.groups_per_token",
                got=kept,
                allowed=(
                    f"{least} to {groups}, model.router_groups, so that they have {options.experts_per_token} experts"
                ),
                nearest=min(max(kept, least), groups),
                depends_on=["model.router_groups", "model.experts_per_token", "model.num_experts"],
            )
        )
    return problems


def _of_experts(options: DecoderOptions, in_fp8: bool) -> list[Problem]:
    """Returns an error line for each option that contradicts the options of experts; [] without experts."""
    if not options.num_experts:
        return []
    problems = list[Problem]()
    if options.experts_per_token > options.num_experts:
        problems.append(
            Problem(
                "model.experts_per_token",
                got=options.experts_per_token,
                allowed=f"at most model.num_experts = {options.num_experts}",
                nearest=options.num_experts,
                depends_on=["model.num_experts"],
            )
        )
    problems += _of_groups(options)
    if options.dense_layers >= options.num_layers:
        problems.append(
            Problem(
                "model.dense_layers",
                got=options.dense_layers,
                allowed=f"below model.num_layers = {options.num_layers}",
                nearest=options.num_layers - 1,
                depends_on=["model.num_layers"],
            )
        )
    if options.activation not in GATES:
        problems.append(
            Problem(
                "model.activation",
                got=f"{options.activation} with model.num_experts = {options.num_experts}",
                allowed=f"{', '.join(GATES)}, as mlps of experts are gated",
                nearest="model.activation=swiglu",
                depends_on=["model.num_experts"],
            )
        )
    if options.biases:
        problems.append(
            Problem(
                "model.biases",
                got=f"True with model.num_experts = {options.num_experts}, which have none",
                allowed="False",
                nearest="model.biases=False, and model.qkv_biases=True for those of attention",
                depends_on=["model.num_experts"],
            )
        )
    if in_fp8:
        problems.append(
            Problem(
                "precision.policy",
                got=f"fp8 with model.num_experts = {options.num_experts}, whose products have no 8-bit form",
                allowed="float32, bfloat16, float16",
                nearest="precision.policy=bfloat16",
                depends_on=["model.num_experts"],
            )
        )
    return problems
