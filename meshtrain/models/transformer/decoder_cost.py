"""Costs of the decoder's attention and experts for a microbatch on a device, by formula: bytes sent and saved.

n: devices along context or expert, t: devices along tensor, b: tokens of a microbatch on a device, a: bytes of a
number, D: width, N: query heads, G: key heads (and value heads), G': key heads including copies that are sent, H: head
dim, E: experts, k: experts per token.

    context   attention by heads: (n - 1) / n of (2 N + 2 G') / t x H x a b in one pass of a layer: queries, keys and
              values before attention, heads after it. G' / t is the least common multiple of G / t and n: heads are
              repeated if n does not divide them. The backward pass sends the same, and repeats the forward pass
              unless `remat.policy` is none. Bytes of an all-to-all as in Jacobs et al. 2023
    expert    tokens: (n - 1) b D a bytes in each gather and each scatter of a layer. Forward: tokens are gathered,
              results scattered. Backward: the transposes of both. Unless `remat.policy` is none, tokens are gathered
              once more. Choices: (n - 1) b k numbers of 4 bytes in each gather and scatter: experts and gates are
              gathered, and the gates' cotangents scattered. Experts and gates are gathered once more unless
              `remat.policy` is none
    rows      number of rows (a row: one token's activations for one expert) in one part (`moe/chunks.py`): 1.25 b k and
              some padding
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.hardware.accelerators import Capability
from meshtrain.hardware.links import wire_share
from meshtrain.models.attention.select import Case, chosen, exchange, fallback, gathers_keys
from meshtrain.models.cost import ATTENTION, EXPERTS, KEPT_SEEN, LOOP, Cost, Kernel, of_transformer
from meshtrain.models.decoder_options import DecoderOptions
from meshtrain.models.fallback import Fallback
from meshtrain.models.moe import chunks, grouped_matmul
from meshtrain.models.moe.chunks import Parts
from meshtrain.models.remat import RematOptions
from meshtrain.models.transformer.decoder import LOCAL_OR_GLOBAL
from meshtrain.sharding.param_sharding import num_parts
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.rules import CONTEXT, EXPERT, PIPELINE, TENSOR, expert_axes

PASSES = 2  # forward and backward
OF_TOKENS, OF_CHOICES = 4, 3  # gathers and scatters of a layer, forward and backward
TOKENS_AGAIN, CHOICES_AGAIN = 1, 2
CHOICE_BYTES = 4
_BY = {"gpu": "products by Pallas", "mosaic": "products by Mosaic", "tpu": "products by megablox"}
_WHY = {
    "gpu": "meshtrain's GPU kernels support these shapes",
    "mosaic": "JAX has no Triton, and its Mosaic kernels support these shapes",
    "tpu": "JAX's TPU kernels support these shapes",
}
IN_LOOP = "slower than a kernel, because blocks of rows are multiplied one after the other; not measured"


def cost(
    options: DecoderOptions,
    sequence_length: int,
    dtype: DTypeLike,
    output_dtype: DTypeLike,
    remat: RematOptions,
    placement: Placement,
    mesh_shape: Mapping[str, int],
    units: float,
) -> Cost:
    """Returns the cost of a decoder for one microbatch on one device, without compiling it; see `Task.cost`.

    Args:
      options: options of the decoder.
      sequence_length: tokens per sequence.
      dtype: dtype of activations.
      output_dtype: dtype of logits.
      remat: activations that the backward pass recomputes.
      placement: determines the shardings of activations and the platform.
      mesh_shape: mesh axis -> size.
      units: tokens of a microbatch on a device.
    """
    found = of_transformer(options, options.num_layers, dtype, output_dtype, remat, placement, mesh_shape, units)
    layers, itemsize = options.num_layers / mesh_shape[PIPELINE], jnp.dtype(dtype).itemsize
    again = 0.0 if remat.policy == "none" else 1 / remat.every
    devices = placement.mesh is not None
    kept = working = 0.0
    of_experts = options.num_repeated / options.num_layers
    if options.moe.num_experts:
        cut, num_turns, _, _ = _parts(options, mesh_shape, units)
        rows = num_turns * cut.num_rows
        wide, inner = options.embed_dim * itemsize, options.moe.expert_dim / mesh_shape[TENSOR] * itemsize
        if remat.policy in ("none", "selective", "dots"):
            kept = rows * 2 * inner  # outputs of both products with a row
        if remat.policy == "none":
            kept += mesh_shape[EXPERT] * units * wide + rows * (wide + inner)  # inputs of the products
        working = rows * (2 * wide + 3 * inner)
    return dataclasses.replace(
        found,
        layer_bytes={
            **found.layer_bytes,
            CONTEXT: layers * _exchange_bytes(options, itemsize, again, mesh_shape, units),
            EXPERT: layers * of_experts * _token_bytes(options, itemsize, again, mesh_shape, units),
        },
        kept_bytes=found.kept_bytes + layers * of_experts * kept,
        # While a layer computes, all rows of a part and some cotangents are in memory.
        working_bytes=found.working_bytes + KEPT_SEEN * working,
        shares=_shares(options, mesh_shape, units),
        kernels=kernels(
            options, sequence_length, dtype, placement.platform, mesh_shape, units, placement.compute_capability
        )
        if devices
        else (),
    )


def _exchange_bytes(
    options: DecoderOptions, itemsize: int, again: float, mesh_shape: Mapping[str, int], units: float
) -> float:
    """Returns the bytes that a device sends along the context axis for attention in a layer; 0 if the axis has size 1.

    Args:
      options: options of the decoder.
      itemsize: bytes of a number.
      again: how often the backward pass repeats the forward pass, a mean over layers from 0 to 1.
      mesh_shape: mesh axis -> size.
      units: tokens of a microbatch on a device.
    """
    parts = mesh_shape[CONTEXT]
    # Queries and keys, values and results.
    one_head = wire_share("all-to-all", parts) * units * (options.width_of_head + options.width_of_values) * itemsize
    heads, kv_heads = (num // mesh_shape[TENSOR] for num in (options.num_heads, options.num_kv_heads))
    return (heads + math.lcm(kv_heads, parts)) * (PASSES + again) * one_head


def _token_bytes(
    options: DecoderOptions, itemsize: int, again: float, mesh_shape: Mapping[str, int], units: float
) -> float:
    """Returns the bytes that a device sends along the expert axis in one layer with experts; 0 without experts.

    Args:
      options: options of the decoder.
      itemsize: bytes of a number.
      again: how often the backward pass repeats the forward pass, a mean over layers from 0 to 1.
      mesh_shape: mesh axis -> size.
      units: tokens of a microbatch on a device.
    """
    if not options.moe.num_experts:
        return 0.0
    of_tokens = (OF_TOKENS + TOKENS_AGAIN * again) * options.embed_dim * itemsize
    of_choices = (OF_CHOICES + CHOICES_AGAIN * again) * options.moe.experts_per_token * CHOICE_BYTES
    return (mesh_shape[EXPERT] - 1) * units * (of_tokens + of_choices)


def _shares(options: DecoderOptions, mesh_shape: Mapping[str, int], units: float) -> dict[str, float]:
    """Returns the expected share of executed work by name scope, for an even load of experts; see `Cost.shares`.

    If only some layers have a window, an entry states the share of layers without a window. With experts there are
    three entries: the share of blocks that have rows, the share of the tokens' chosen experts that are on the device,
    and the number of iterations of the loop over further parts (`moe/chunks.py`), which is 0.

    Args:
      options: options of the decoder.
      mesh_shape: mesh axis -> size.
      units: tokens of a microbatch on a device.
    """
    result = {LOCAL_OR_GLOBAL: options.num_global / options.num_layers} if options.alternates else {}
    if options.moe.num_experts:
        cut, _, num_here, num_tokens = _parts(options, mesh_shape, units)
        here = num_here / options.moe.num_experts
        # On average half of an expert's last block is padding.
        used = round(num_tokens * options.moe.experts_per_token * here / cut.block_rows + num_here / 2)
        result[grouped_matmul.WITH_ROWS] = max(1, min(used, cut.num_blocks)) / cut.num_blocks
        result |= {chunks.CHOICES: here, chunks.FURTHER: 0.0}
    return result


def _parts(options: DecoderOptions, mesh_shape: Mapping[str, int], units: float) -> tuple[Parts, int, int, int]:
    """Returns the split of the rows of a device's experts into parts, and the numbers on which it depends.

    The result is (split of a turn's rows into parts, number of turns, number of experts on the device, number of tokens
    in a turn on all devices that share the experts); see `moe/chunks.py`.

    Args:
      options: options of the decoder.
      mesh_shape: mesh axis -> size.
      units: tokens of a microbatch on a device.
    """
    num_here, sharing = options.moe.num_experts // num_parts(expert_axes(), mesh_shape), mesh_shape[EXPERT]
    num_turns = chunks.num_turns(int(units), sharing, options.moe.experts_per_token, options.moe.num_experts)
    # The devices along the expert axis gather their tokens.
    num_tokens = max(1, int(units * sharing)) // num_turns
    cut = Parts.of(num_tokens, options.moe.experts_per_token, num_here, options.moe.num_experts)
    return cut, num_turns, num_here, num_tokens


def kernels(
    options: DecoderOptions,
    sequence_length: int,
    dtype: DTypeLike,
    platform: str,
    mesh_shape: Mapping[str, int],
    units: float,
    capability: Capability | None = None,
) -> tuple[Kernel, ...]:
    """Returns a `Kernel` that describes attention in training, and with experts a `Kernel` for their products.

    Args:
      options: options of the decoder.
      sequence_length: tokens per sequence.
      dtype: dtype of activations.
      platform: platform of the devices as JAX names it.
      mesh_shape: mesh axis -> size.
      units: tokens of a microbatch on a device.
      capability: compute capability of the GPUs, see `Placement.compute_capability`; None: unknown, or no GPUs.
    """
    attention, lengths = options.attends, (sequence_length, sequence_length)
    gathers = gathers_keys(attention, mesh_shape)
    case = Case(attention, lengths, dtype, platform, options.within_documents, False, gathers, capability)
    widths = options.width_of_head + options.width_of_values
    everywhere = 6.0 * options.num_layers * options.num_heads * widths * sequence_length
    more = 2 * everywhere / attention_flops_per_token(options, sequence_length)
    found = Kernel(ATTENTION, *chosen(case), exchange(attention, more, mesh_shape), fallback(case))
    if not options.moe.num_experts:
        return (found,)
    return found, _of_experts(options, dtype, platform, mesh_shape, units, capability)


def _of_experts(
    options: DecoderOptions,
    dtype: DTypeLike,
    platform: str,
    mesh_shape: Mapping[str, int],
    units: float,
    capability: Capability | None,
) -> Kernel:
    cut, _, num_here, _ = _parts(options, mesh_shape, units)
    sizes = (num_here, options.embed_dim, options.moe.expert_dim // mesh_shape[TENSOR])
    given = platform, (cut.num_rows, options.embed_dim), sizes, cut.block_rows, dtype, capability
    over = expert_axes()
    sent = num_parts(over, mesh_shape) > 1
    exchanged = f"tokens gathered over {'+'.join(over)}, results reduce-scattered" if sent else ""
    refusal = grouped_matmul.no_kernel(*given)
    if refusal is None:
        by = grouped_matmul.kernel_for(*given)
        return Kernel(EXPERTS, _BY[by], _WHY[by], exchanged)
    why, change = refusal
    return Kernel(EXPERTS, LOOP, why, exchanged, Fallback(LOOP, why, IN_LOOP, change) if change else None)


def attention_flops_per_token(options: DecoderOptions, sequence_length: int) -> float:
    """Returns the FLOPs of full attention, forward and backward, for one token: 6 L K N (H + width of values).

    L is the number of layers, N the number of query heads, H the width of a query head, K a number of keys. In each
    layer the product of queries and keys takes 2 K N H FLOPs forward. The product of probabilities and values takes 2 K
    N (width of values). Both take twice these FLOPs backward. Without a window K is T, the tokens of a sequence. With a
    window of W tokens a query attends to W (2 T - W) / 2 T keys on average, and K is twice this number. Causal
    attention needs half of the returned FLOPs in both cases.
    """
    num_keys: float = sequence_length
    if 0 < options.window < sequence_length:
        num_keys = options.window * (2 * sequence_length - options.window) / sequence_length
    num_global = options.num_global
    in_all_layers = num_global * sequence_length + (options.num_layers - num_global) * num_keys
    return 6.0 * in_all_layers * options.num_heads * (options.width_of_head + options.width_of_values)
