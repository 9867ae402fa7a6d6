"""What computes the products of experts in a configuration and how tokens reach them, and why."""

from collections.abc import Mapping

from meshtrain.config.config import Config, num_microbatches
from meshtrain.layout import axes
from meshtrain.layout.stored import num_parts
from meshtrain.models import experts
from meshtrain.models.blocks import kernel_for
from meshtrain.models.decoder import DecoderOptions
from meshtrain.step.precision import compute_dtype

LOOP = "a loop over blocks"
_NAMES = {"gpu": "Pallas", "tpu": "megablox", "loop": LOOP}
_WHY = {"gpu": "the program's own kernels for GPUs take them", "tpu": "JAX's kernels for TPUs take them"}
_WHY_NOT = {
    "cuda": "the kernels take widths on a device that are multiples of 16, and arrays of less than 2^31 numbers",
    "tpu": "the kernels take widths on a device that are multiples of 128, in float32 and bfloat16",
}


def of_experts(config: Config, platform: str, mesh_shape: Mapping[str, int]) -> tuple[str, str] | None:
    """Returns (what computes products of experts in training, why it is that); None for a model without experts.

    Args:
      config: of the run, resolved.
      platform: of the devices, as JAX names it.
      mesh_shape: the size of each mesh axis.
    """
    model = config.model
    if not isinstance(model, DecoderOptions) or not model.num_experts:
        return None
    # The devices along the expert axis gather their tokens.
    apart = {*axes.batch_axes(), *axes.sequence_axes()} - {*axes.expert_axes()}
    num_shares = num_microbatches(config, mesh_shape) * num_parts(tuple(apart), mesh_shape)
    given = (max(1, config.batch_size * config.sequence_length // num_shares), model.experts_per_token)
    num_here = model.num_experts // num_parts(axes.expert_axes(), mesh_shape)
    width = model.expert_dim // mesh_shape["tensor"]
    block_rows = experts.block_rows(round(experts.even_load(*given, num_here, model)), num_here)
    num_rows = experts.room(*given, num_here, model) + (num_here + 1) * block_rows
    sizes = (num_here, model.embed_dim, width)
    found = kernel_for(platform, (num_rows, model.embed_dim), sizes, block_rows, compute_dtype(config.precision))
    if found in _WHY:
        return _NAMES[found], _WHY[found]
    kind = "cuda" if platform == "gpu" else platform
    return _NAMES[found], _WHY_NOT[kind] if kind in _WHY_NOT else f"there is no kernel for {platform}"


def exchanged(config: Config, mesh_shape: Mapping[str, int]) -> str | None:
    """Returns how tokens reach experts of other devices; None where no expert is on another device.

    Args:
      config: of the run, resolved.
      mesh_shape: the size of each mesh axis.
    """
    model, over = config.model, axes.expert_axes()
    if not isinstance(model, DecoderOptions) or not model.num_experts or num_parts(over, mesh_shape) == 1:
        return None
    return f"tokens gathered over {'+'.join(over)}, results reduce-scattered"
