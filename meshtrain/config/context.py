"""Checks of a mesh whose devices compute parts of each sequence. Each returns lines: got, allowed, nearest fix."""

from collections.abc import Mapping

from meshtrain.config.fields import Config
from meshtrain.layout.axes import CONTEXT
from meshtrain.layout.rules import Rules
from meshtrain.layout.stored import num_parts
from meshtrain.models.decoder_options import TransformerShape
from meshtrain.models.exchange import has_heads
from meshtrain.models.task import Task, entries
from meshtrain.words.numbers import nearest_divisor

TAKE_PARTS = ("auto", "xla", "blockwise")  # implementations of attention that take a part of the queries with all keys


def problems(config: Config, task: Task, rules: Rules, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line for each reason why the devices of a mesh cannot compute parts of each sequence.

    Args:
      config: the configuration.
      task: what is trained.
      rules: the axes that split the dims of a batch count.
      mesh_shape: the size of each mesh axis; `context` is larger than 1.
    """
    size, found = mesh_shape[CONTEXT], list[str]()
    split = {name for name, axes in rules.activations.items() if CONTEXT in axes}
    if not any(split & set(entry.axes) for entry in entries(task, config.batch_size).values()):
        found.append(
            f"mesh.{CONTEXT}: got {size}, and no entry of this task's batch has a dim 'sequence'; allowed: 1; "
            f"nearest: mesh.{CONTEXT}=1"
        )
    return found + _kernels(config, rules, mesh_shape)


def _kernels(config: Config, rules: Rules, mesh_shape: Mapping[str, int]) -> list[str]:
    """Returns one line where keys and values are gathered, and the kernel that was asked for does not take them."""
    model = config.model
    if not isinstance(model, TransformerShape) or model.attention in TAKE_PARTS:
        return []
    axes = [axis for rule in ("sequence", "heads") for axis in rules.activations[rule] if mesh_shape[axis] > 1]
    num_shards = num_parts(axes, mesh_shape)
    if has_heads(model.num_heads, num_shards):
        return []
    over = " x ".join(f"mesh.{axis} = {mesh_shape[axis]}" for axis in axes)
    fits = nearest_divisor(model.num_heads // (num_shards // mesh_shape[CONTEXT]), mesh_shape[CONTEXT])
    return [
        f"model.attention: got {model.attention} with model.num_heads = {model.num_heads}, no multiple of "
        f"{num_shards} = {over}, so that keys are gathered for parts of the queries; allowed: {', '.join(TAKE_PARTS)}; "
        f"nearest: model.attention=auto, or mesh.{CONTEXT}={fits}"
    ]
