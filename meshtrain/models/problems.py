"""Checks the options of decoder and encoder-decoder against each other and the mesh; returns error lines."""

import math
import operator
from collections.abc import Mapping

from meshtrain.errors import Problem, nearest_divisor, nearest_multiple
from meshtrain.models.attention import select
from meshtrain.models.decoder_options import DecoderOptions, MoeOptions, RopeOptions, TransformerShape
from meshtrain.models.layers import GATES
from meshtrain.options import MOST


def of_decoder(
    options: DecoderOptions, sequence_length: int, computes_in: str, in_fp8: bool, mesh_shape: Mapping[str, int]
) -> list[Problem]:
    """Returns an error line for each contradiction of a decoder's options with each other or the mesh.

    Args:
      options: the options to check; each is within its bounds.
      sequence_length: tokens per sequence.
      computes_in: name of the compute dtype of attention, such as `bfloat16`.
      in_fp8: whether matmuls with weights use 8-bit floats.
      mesh_shape: mesh axis -> size.
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
    return problems + _of_rope(options.rope)


def _of_rope(rope: RopeOptions) -> list[Problem]:
    """Returns an error line for each contradiction between the options of rope scaling; [] without rope scaling."""
    problems, scaling = list[Problem](), rope.frequency_scaling
    if scaling and scaling.kind != "linear" and not 0 < scaling.low < scaling.high:
        problems.append(
            Problem(
                "model.rope.low, model.rope.high",
                got=f"{rope.low}, {rope.high}",
                allowed="0 < model.rope.low < model.rope.high",
                nearest="1.0, 4.0",
                depends_on=["model.rope.low", "model.rope.high"],
            )
        )
    if scaling and scaling.kind == "yarn" and rope.base == 1.0:
        problems.append(Problem("model.rope.base", got="1.0", allowed="above 1 with YaRN", nearest="10000.0"))
    return problems


def of_transformer(options: TransformerShape, computes_in: str, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each contradiction of the options that decoder and encoder-decoder share.

    Args:
      options: the options to check; each is within its bounds.
      computes_in: name of the compute dtype of attention, such as `bfloat16`.
      mesh_shape: mesh axis -> size.
    """
    problems, heads, width = [], options.num_heads, options.width_of_head
    if not options.head_dim and options.embed_dim % heads:
        step = {"learned": heads, "sinusoidal": math.lcm(heads, 2), "rotary": 2 * heads}[options.positions]
        problems.append(
            Problem(
                "model.embed_dim",
                got=options.embed_dim,
                allowed=f"a multiple of model.num_heads = {heads}, or a separate model.head_dim",
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
                allowed=f"at most {most}, a multiple of model.vocab_multiple, because ids of padding are also int32",
                nearest=most,
                depends_on=["model.vocab_multiple"],
            )
        )
    return problems + select.problems(options.attends, computes_in, mesh_shape)


def _of_latent(options: DecoderOptions) -> list[Problem]:
    """Returns an error line for each option that contradicts latent attention; [] without latent attention."""
    latent = options.latent
    if not latent.dim:
        return []
    problems, width, rotary = list[Problem](), options.width_of_head, latent.rope_dim
    with_latent = f"with model.latent.dim = {latent.dim}"
    if rotary < 2 or rotary % 2:
        problems.append(
            Problem(
                "model.latent.rope_dim",
                got=f"{rotary} {with_latent}",
                allowed="an even number, at least 2",
                nearest=max(2, rotary + 1),
                depends_on=["model.latent.dim"],
            )
        )
    if options.width_of_values > width:
        problems.append(
            Problem(
                "model.latent.value_dim",
                got=latent.value_dim,
                allowed=f"at most {width}, the width of queries and keys",
                nearest=width,
                depends_on=["model.head_dim", "model.embed_dim", "model.num_heads", "model.latent.dim"],
            )
        )
    biases = dict.fromkeys(("biases", "qkv_biases", "attention_biases"), False)
    fits = {"num_kv_heads": options.num_heads, "positions": "rotary", "norm.qk": False, **biases}
    of_heads, of_biases = (
        "each query head has separate keys, computed from the latent",
        "projections of latents have no biases",
    )
    for name, allowed in fits.items():
        if (got := operator.attrgetter(name)(options)) != allowed:
            problems.append(
                Problem(
                    f"model.{name}",
                    got=f"{got} {with_latent}",
                    allowed=f"{allowed}, because {of_biases if name in biases else of_heads}",
                    nearest=f"model.{name}={allowed}",
                    depends_on=["model.latent.dim"],
                )
            )
    return problems


def _of_groups(moe: MoeOptions) -> list[Problem]:
    """Returns an error line for each contradiction between the numbers of experts and of the router's groups."""
    problems = list[Problem]()
    groups, kept = moe.router_groups, moe.groups_per_token
    if moe.num_experts % groups:
        problems.append(
            Problem(
                "model.moe.router_groups",
                got=groups,
                allowed=f"a divisor of model.moe.num_experts = {moe.num_experts}",
                nearest=nearest_divisor(moe.num_experts, groups),
                depends_on=["model.moe.num_experts"],
            )
        )
    least = math.ceil(moe.experts_per_token * groups / moe.num_experts)
    if groups > 1 and not least <= kept <= groups:
        problems.append(
            Problem(
                "model.moe.groups_per_token",
                got=kept,
                allowed=(
                    f"{least} to {groups}, at most model.moe.router_groups, with at least "
                    f"{moe.experts_per_token} experts in total"
                ),
                nearest=min(max(kept, least), groups),
                depends_on=["model.moe.router_groups", "model.moe.experts_per_token", "model.moe.num_experts"],
            )
        )
    return problems


def _of_experts(options: DecoderOptions, in_fp8: bool) -> list[Problem]:
    """Returns an error line for each option that a model with experts does not support; [] without experts."""
    moe = options.moe
    if not moe.num_experts:
        return []
    problems, with_experts = list[Problem](), f"model.moe.num_experts = {moe.num_experts}"
    if moe.experts_per_token > moe.num_experts:
        problems.append(
            Problem(
                "model.moe.experts_per_token",
                got=moe.experts_per_token,
                allowed=f"at most {with_experts}",
                nearest=moe.num_experts,
                depends_on=["model.moe.num_experts"],
            )
        )
    problems += _of_groups(moe)
    if moe.dense_layers >= options.num_layers:
        problems.append(
            Problem(
                "model.moe.dense_layers",
                got=moe.dense_layers,
                allowed=f"below model.num_layers = {options.num_layers}",
                nearest=options.num_layers - 1,
                depends_on=["model.num_layers"],
            )
        )
    if options.activation not in GATES:
        problems.append(
            Problem(
                "model.activation",
                got=f"{options.activation} with {with_experts}",
                allowed=f"{', '.join(GATES)}, because mlps of experts are gated",
                nearest="model.activation=swiglu",
                depends_on=["model.moe.num_experts"],
            )
        )
    if options.biases:
        problems.append(
            Problem(
                "model.biases",
                got=f"True with {with_experts}, which do not support it",
                allowed="False",
                nearest="model.biases=False; model.qkv_biases=True adds biases in attention",
                depends_on=["model.moe.num_experts"],
            )
        )
    if in_fp8:
        problems.append(
            Problem(
                "precision.policy",
                got=f"fp8 with {with_experts}, whose products are not available in 8 bits",
                allowed="float32, bfloat16, float16",
                nearest="precision.policy=bfloat16",
                depends_on=["model.moe.num_experts"],
            )
        )
    return problems
