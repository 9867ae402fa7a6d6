"""Which implementation of attention a configuration gets, and what devices exchange for it, with the reasons."""

import math
from collections.abc import Mapping
from typing import Any

from meshtrain.config.config import Config
from meshtrain.layout.axes import CONTEXT
from meshtrain.layout.rules import default_rules
from meshtrain.layout.stored import num_parts
from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.decoder_task import attention_flops_per_token
from meshtrain.models.exchange import has_heads
from meshtrain.models.implementation import Case, chosen
from meshtrain.models.seq2seq import Seq2SeqOptions
from meshtrain.step.precision import compute_dtype


def implementation(config: Config, platform: str, mesh_shape: Mapping[str, int]) -> tuple[str, str] | None:
    """Returns (the implementation, why it is that one) as in training; None for a task that is no decoder.

    Args:
      config: of the run, resolved.
      platform: of the devices, as JAX names it.
      mesh_shape: the size of each mesh axis.
    """
    model, length = config.model, config.sequence_length
    if not isinstance(model, DecoderOptions):
        return None
    case = Case(
        head_dim=model.width_of_head,
        lengths=(length, length),
        dtype=compute_dtype(config.precision),
        platform=platform,
        masks_documents=model.within_documents,
        window=model.window if model.window < length else 0,
        caps_scores=model.attention_cap > 0,
        gathers_keys=mesh_shape[CONTEXT] > 1 and not has_heads(model.num_heads, _num_shards(config, mesh_shape)),
    )
    return chosen(model.attention, case)


def exchanged(config: Config, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns what the devices of one sequence exchange for attention, in one line; none where they do not.

    Args:
      config: of the run, resolved.
      mesh_shape: the size of each mesh axis.
    """
    model, size = config.model, mesh_shape[CONTEXT]
    if size == 1 or not isinstance(model, DecoderOptions | Seq2SeqOptions):
        return []  # or a task whose attention the partitioner splits
    num_shards = _num_shards(config, mesh_shape)
    heads = model.num_heads
    kv_heads = model.num_kv_heads if isinstance(model, DecoderOptions) else heads
    if has_heads(heads, num_shards):
        of_tensor = kv_heads // (num_shards // size)
        times = math.lcm(of_tensor, size) // of_tensor
        repeated = f", each key and value head {times} times" if times > 1 else ""
        return [f"all-to-all over {CONTEXT}: a device attends with {heads // num_shards} of {heads} heads{repeated}"]
    return [
        f"all-gather of keys and values over {CONTEXT}, as {heads} heads are no multiple of {num_shards} devices a "
        f"sequence: a device computes its queries with all keys, {_more(model, config.sequence_length):.3g} times the "
        "products of attention"
    ]


def _num_shards(config: Config, mesh_shape: Mapping[str, int]) -> int:
    rules = default_rules(config.layout).activations
    return num_parts((*rules["sequence"], *rules["heads"]), mesh_shape)


def _more(model: Any, length: int) -> float:
    """Returns the pairs of all queries and keys, divided by those that causal attention needs."""
    if not isinstance(model, DecoderOptions):
        return 2.0
    everywhere = 12.0 * model.num_layers * model.num_heads * model.width_of_head * length
    return 2 * everywhere / attention_flops_per_token(model, length)
