"""What attention sends along the context axis, and how the axes split the units of a batch.

n: devices along context, t: along tensor; N: query heads, G: key and value heads, G': the same as they are sent,
H: head dim, T: tokens a sequence, b: sequences of a microbatch on a device, a: bytes of a number.

    all-to-all   (n - 1) / n of (2 N + 2 G') / t x H x a x b T / n in one pass of a layer: queries, keys and values on
                 the way in, heads on the way out. G' / t is the least common multiple of G / t and n: heads are
                 repeated where n does not divide them. The backward pass sends the same, and repeats that of the
                 forward pass unless `remat.policy` is none
    all-gather   (n - 1) / n of 2 G / t x H x a x b T: keys and values. The backward pass scatters their gradients, and
                 gathers again where it computes a layer's attention again

Bytes of an all-to-all as Jacobs et al. 2023 count them.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from meshtrain.config.config import Config
from meshtrain.launch.links import wire_share
from meshtrain.layout.axes import CONTEXT, PIPELINE
from meshtrain.layout.rules import Rules
from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.entry import Entry
from meshtrain.step.precision import compute_dtype

PASSES = 2  # forward and backward


def unit_axes(batch: Mapping[str, Any], rules: Rules) -> tuple[str, ...]:
    """Returns the mesh axes that split the units of a batch (tokens, images) over devices.

    Args:
      batch: `Task.batch`. Those that split sequences count where an entry has a sequence.
      rules: the table of placement.
    """
    entries = [entry for entry in batch.values() if isinstance(entry, Entry)]
    has_sequence = any("sequence" in entry.axes for entry in entries)
    return (*rules.activations["batch"], *(rules.activations["sequence"] if has_sequence else ()))


def exchange_bytes(config: Config, shape: Mapping[str, int], units: float) -> float | None:
    """Returns what a device sends for attention along the axis that splits sequences: all layers of its stage.

    Args:
      config: of the run.
      shape: the size of each mesh axis.
      units: tokens that one device computes, such as those of a microbatch.

    Returns:
      Bytes; 0 where sequences are whole, None for tasks other than the decoder.
    """
    parts = shape[CONTEXT]
    if parts == 1:
        return 0.0
    model = config.model
    if not isinstance(model, DecoderOptions):
        return None
    itemsize = jnp.dtype(compute_dtype(config.precision)).itemsize
    again = 0.0 if config.remat.policy == "none" else 1 / config.remat.every
    one_head = wire_share("all-to-all", parts) * units * model.width_of_head * itemsize
    heads, kv_heads = (num // shape["tensor"] for num in (model.num_heads, model.num_kv_heads))
    each = 2 * (heads + math.lcm(kv_heads, parts)) * (PASSES + again)
    return model.num_layers / shape[PIPELINE] * each * one_head
