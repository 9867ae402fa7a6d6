"""What has to divide what: checks across the rooms' options. Each gives lines of got / allowed / nearest fix.

Sizes of the mesh come as {axis: size}. Where one is not known yet, 1 stands for it: that asks for less, never for
something else.
"""

import math
from collections.abc import Mapping

from meshtrain.config.fields import Config
from meshtrain.data.sources import DataOptions
from meshtrain.data.tokenize import NUM_BYTES
from meshtrain.layout.partition import num_parts
from meshtrain.layout.rules import Rules
from meshtrain.models import remat
from meshtrain.models.decoder import DecoderOptions
from meshtrain.step import loss_scale
from meshtrain.step.loss_scale import LossScaleOptions
from meshtrain.step.precision import PrecisionOptions, compute_name


def decoder(config: Config, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each way in which a decoder's options contradict each other, the data or the mesh.

    Args:
      config: with `DecoderOptions` as its model, each field within its own bounds.
      mesh_shape: the size of each mesh axis.
    """
    return [
        *model(config.model, config.precision, config.sequence_length),
        *vocabulary(config.model, config.data),
        *model_on_mesh(config.model, mesh_shape),
        *remat.check(config.remat, config.model.num_layers, mesh_shape["pipeline"]),
    ]


def model(options: DecoderOptions, precision: PrecisionOptions, sequence_length: int) -> list[str]:
    """Returns one line for each contradiction inside a decoder's options, whatever the mesh.

    Args:
      options: each within its own bounds.
      precision: the dtype that attention computes in.
      sequence_length: in tokens.
    """
    found = []
    heads, kv_heads = options.num_heads, options.num_kv_heads
    if heads % kv_heads:
        found.append(
            f"model.num_kv_heads: got {kv_heads}; allowed: a divisor of model.num_heads = {heads}; "
            f"nearest: {nearest_divisor(heads, kv_heads)}"
        )
    if not options.head_dim and options.embed_dim % heads:
        found.append(
            f"model.embed_dim: got {options.embed_dim}; allowed: a multiple of model.num_heads = {heads}, or a "
            f"model.head_dim of its own; nearest: {nearest_multiple(options.embed_dim, heads)}"
        )
    elif options.positions == "rotary" and options.width_of_head % 2:
        width = options.width_of_head
        found.append(
            f"model.head_dim: got {width}{'' if options.head_dim else ' (embed_dim / num_heads)'}; "
            f"allowed: an even number with rotary positions; nearest: {width + 1}"
        )
    if options.positions == "learned" and 0 < options.max_positions < sequence_length:
        found.append(
            f"sequence_length: got {sequence_length}; allowed: at most model.max_positions = {options.max_positions} "
            f"with learned positions; nearest: {options.max_positions}"
        )
    if options.dropout_rate >= 1:
        found.append(f"model.dropout_rate: got {options.dropout_rate}; allowed: 0 to below 1; nearest: 0.9")
    if options.rope_factor != 1 and not 0 < options.rope_low < options.rope_high:
        found.append(
            f"model.rope_low, model.rope_high: got {options.rope_low}, {options.rope_high}; allowed: 0 < rope_low < "
            f"rope_high; nearest: 1.0, 4.0"
        )
    if options.attention == "cudnn" and compute_name(precision) == "float32":
        found.append(
            "model.attention: got cudnn computing in float32; allowed: cudnn with a 16-bit policy; nearest: "
            "model.attention=xla, or precision.policy=bfloat16"
        )
    return found


def scaling(options: LossScaleOptions, precision: PrecisionOptions) -> list[str]:
    """Returns one line for each contradiction between the loss's scale and the dtype of its gradients."""
    return loss_scale.check(options, computes_in_float16=compute_name(precision) == "float16")


def model_on_mesh(options: DecoderOptions, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each dim of the weights that the mesh cannot split evenly."""
    found = []
    split = {"tensor": ("num_heads", "num_kv_heads", "mlp_dim", "embed_dim"), "fsdp": ("embed_dim",)}
    for axis, names in split.items():
        size = mesh_shape[axis]
        dims = {name: getattr(options, name) for name in names}
        # One size of the axis that mends every line at once.
        legal = nearest_divisor(math.gcd(*dims.values()), size)
        found += [
            f"model.{name}: got {dim}; allowed: a multiple of mesh.{axis} = {size}; "
            f"nearest: {nearest_multiple(dim, size)}, or mesh.{axis}={legal}"
            for name, dim in dims.items()
            if dim % size
        ]
    tensor, pipeline = mesh_shape["tensor"], mesh_shape["pipeline"]
    parts = tensor * pipeline
    if options.padded_vocab_size % parts:
        found.append(
            f"model.vocab_multiple: got {options.vocab_multiple}, which pads the vocabulary to "
            f"{options.padded_vocab_size}; allowed: a padded vocabulary divisible by {parts} = mesh.tensor {tensor} x "
            f"mesh.pipeline {pipeline}; nearest: {nearest_multiple(options.vocab_multiple, parts)}"
        )
    return found


def vocabulary(options: DecoderOptions, data: DataOptions) -> list[str]:
    """Returns one line where the byte tokenizer has more tokens than the model; others are known once data are read."""
    if data.source not in ("python", "text") or data.tokenizer != "bytes" or options.vocab_size > NUM_BYTES:
        return []
    return [
        f"model.vocab_size: got {options.vocab_size}; allowed with data.tokenizer = bytes: at least {NUM_BYTES + 1}, "
        f"the bytes and the end of a document; nearest: {NUM_BYTES + 1}"
    ]


def batch(batch_size: int, rules: Rules, mesh_shape: Mapping[str, int], num_microbatches: int) -> list[str]:
    """Returns one line where the global batch does not divide by its shards (data x fsdp) x microbatches.

    Args:
      batch_size: sequences.
      rules: the axes that split an activation's `batch` dim count.
      mesh_shape: the size of each mesh axis.
      num_microbatches: parts that are computed one after the other.
    """
    axes = rules.activations["batch"]
    divisor = num_parts(axes, mesh_shape) * num_microbatches
    if batch_size % divisor == 0:
        return []
    factors = " x ".join([*(f"mesh.{axis} {mesh_shape[axis]}" for axis in axes), f"{num_microbatches} microbatches"])
    return [
        f"batch_size: got {batch_size}; allowed: a multiple of {divisor} = {factors}; "
        f"nearest: {nearest_multiple(batch_size, divisor)}"
    ]


def sequence_on_mesh(sequence_length: int, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line where sequence parallelism cannot split the sequence over the tensor axis."""
    tensor = mesh_shape["tensor"]
    if sequence_length % tensor == 0:
        return []
    return [
        f"sequence_length: got {sequence_length}; allowed with layout.sequence_parallel: a multiple of mesh.tensor = "
        f"{tensor}; nearest: {nearest_multiple(sequence_length, tensor)}"
    ]


def nearest_multiple(number: int, divisor: int) -> int:
    """Returns the multiple of `divisor` (at least `divisor`) that is nearest to `number`; of two the larger."""
    return divisor * max(1, (2 * number + divisor) // (2 * divisor))


def nearest_divisor(number: int, size: int) -> int:
    """Returns the divisor of `number` that is nearest to `size`; of two the larger."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return min(
        small + [number // candidate for candidate in small], key=lambda candidate: (abs(candidate - size), -candidate)
    )
