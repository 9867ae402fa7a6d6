"""Which options of a configuration have no effect in it, because an axis, a schedule or an optimizer is not in use.

They are legal, so that users can try another mesh, schedule or optimizer by changing one field. `explain` lists them.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from meshtrain.config.config import Config
from meshtrain.data.sources import is_own
from meshtrain.layout.axes import expert_axes
from meshtrain.layout.partition import num_parts
from meshtrain.models.convnet_options import ConvnetOptions
from meshtrain.models.decoder import DecoderOptions
from meshtrain.step import loss_scale
from meshtrain.step.precision import compute_name
from meshtrain.words import options as words
from meshtrain.words.tables import aligned

OF_EXPERTS = (
    "experts_per_token", "expert_dim", "shared_experts", "router", "router_scale", "balance_weight", "z_weight",
    "expert_room", "expert_exchange",
)  # fmt: skip


def without_effect(config: Config, mesh_shape: Mapping[str, int]) -> dict[str, str]:
    """Returns dotted key -> why it has no effect, for each field that differs from its default and is not read.

    Args:
      config: resolved.
      mesh_shape: the size of each mesh axis.
    """
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        room = getattr(config, field.name)
        # A user's data function gets the whole configuration, and may read any option of the data.
        if dataclasses.is_dataclass(room) and not (field.name == "data" and is_own(config.data)):
            found |= words.idle(room, field.name)
    if mesh_shape["pipeline"] == 1:
        found |= _changed(config.pipeline, "pipeline", "mesh.pipeline=1")
    if mesh_shape["tensor"] == 1:
        found |= _changed(config.layout, "layout", "mesh.tensor=1", only=("sequence_parallel",))
    if mesh_shape["data"] == 1:
        found |= _changed(config.zero, "zero", "mesh.data=1", only=("level",))
        # Strategies are levels over data, but this one also says how fsdp gathers.
        if not (config.zero.keeps_gathered and mesh_shape["fsdp"] > 1):
            found |= _changed(config.zero, "zero", "mesh.data=1", only=("strategy",))
        if config.compression.is_on:
            found |= _changed(config.compression, "compression", "mesh.data=1")
    elif config.compression.is_on:
        why = f"compression.kind={config.compression.kind}"
        found |= _changed(config.precision, "precision", why, only=("reduce_dtype",))
    in_float16 = compute_name(config.precision) == "float16"
    if loss_scale.scaling(config.loss_scale, num_targets=1, computes_in_float16=in_float16) is None:
        fields = ("initial", "growth_steps", "hysteresis")
        found |= _changed(config.loss_scale, "loss_scale", "the loss is not scaled", only=fields)
    if isinstance(config.model, ConvnetOptions):
        found |= _changed(config.remat, "remat", "task=convnet")
        found |= _changed(config.layout, "layout", "task=convnet", only=("sequence_parallel",))
    if config.data.source == "idx" and config.data.validation_path:
        found |= _changed(config.data, "data", "data.validation_path", only=("validation_fraction",))
    if config.remat.policy == "none":
        found |= _changed(config.remat, "remat", "remat.policy=none", only=("every",))
    if isinstance(config.model, DecoderOptions) and config.model.rope_factor == 1:
        fields = ("rope_low", "rope_high", "rope_original_length")
        found = _changed(config.model, "model", "model.rope_factor=1.0", only=fields) | found
    if isinstance(config.model, DecoderOptions) and not config.model.window:
        found |= _changed(config.model, "model", "model.window=0", only=("global_every", "rope_local_base"))
    if isinstance(config.model, DecoderOptions):
        found |= _of_experts(config, config.model, mesh_shape)
    if config.local_steps.period == 0:
        fields = ("groups", "outer_learning_rate", "outer_momentum")
        found |= _changed(config.local_steps, "local_steps", "local_steps.period=0", only=fields)
    else:
        found |= _changed(config.precision, "precision", "local_steps.period", only=("reduce_dtype",))
    if config.lora.rank == 0:
        found |= _changed(config.lora, "lora", "lora.rank=0", only=("alpha", "targets"))
        if not config.optimizer.trainable:
            found |= _changed(config.precision, "precision", "all weights are trained", only=("frozen_dtype",))
    if not config.checkpoint.keep_best:
        found |= _changed(config.checkpoint, "checkpoint", "checkpoint.keep_best=0", only=("best_metric",))
    return found


def _of_experts(config: Config, model: DecoderOptions, mesh_shape: Mapping[str, int]) -> dict[str, str]:
    """Returns the options of experts and routers that the model does not have, and of the mlp in place of experts."""
    if model.num_experts:
        found = _changed(model, "model", f"model.num_experts={model.num_experts}", only=("mlp_dim",))
        if num_parts(expert_axes(), mesh_shape) == 1:
            found |= _changed(model, "model", "mesh.expert=1", only=("expert_exchange",))
    else:
        found = _changed(model, "model", "model.num_experts=0", only=OF_EXPERTS)
    if config.task != "decoder":  # a user's own may have routers
        return found
    if not model.num_experts or model.router == "softmax":
        why = f"model.router={model.router}" if model.num_experts else "model.num_experts=0"
        found |= _changed(config.optimizer, "optimizer", why, only=("balance_rate",))
    if not model.num_experts or not model.expert_room:
        why = f"model.expert_room={model.expert_room}" if model.num_experts else "model.num_experts=0"
        found |= _changed(config.guard, "guard", why, only=("allow_left_out",))
    return found


def _changed(options: Any, path: str, why: str, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns dotted key -> `why` for the fields (those of `only`, or all) that differ from their defaults."""
    fields = [field for field in dataclasses.fields(options) if field.name in only or not only]
    return {f"{path}.{field.name}": why for field in fields if getattr(options, field.name) != field.default}


def text(config: Config, mesh_shape: Mapping[str, int]) -> str:
    """Returns a table of the options without effect; an empty string where there are none."""
    rows = []
    for key, why in without_effect(config, mesh_shape).items():
        room, _, field = key.partition(".")
        rows.append((key, json.dumps(getattr(getattr(config, room), field)), why))
    return aligned(rows, ("without effect here", "value", "because")) if rows else ""
