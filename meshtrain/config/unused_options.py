"""Lists the options without effect in a configuration, because an axis, a schedule or an optimizer is not in use.

Options without effect are legal, so that users can try another mesh, schedule or optimizer by changing one field.
`explain` prints them. Each option declares the conditions for its effect: `only_for` in `options.py`.
"""

import json
from collections.abc import Mapping

from meshtrain.cli import flags
from meshtrain.cli.tables import align
from meshtrain.config import extensions, tasks
from meshtrain.config.build import defaults_of
from meshtrain.config.schema import Config
from meshtrain.data.sources import is_own
from meshtrain.options import unused
from meshtrain.step import loss_scale
from meshtrain.step.precision import compute_name


def without_effect(config: Config, mesh_shape: Mapping[str, int]) -> dict[str, str]:
    """Returns dotted key -> reason, for each option that differs from its default but has no effect on this mesh."""
    values, defaults = (flags.flatten(one) for one in (config, defaults_of(config)))
    in_float16 = compute_name(config.precision) == "float16"
    scaling = loss_scale.scaling(config.loss_scale, num_targets=1, computes_in_float16=in_float16)
    is_built_in = config.task in tasks.names()
    known = {
        # Conditions on options of the decoder are not checked for a user's task, which may have routers, for example.
        **{key: value for key, value in values.items() if is_built_in or not key.startswith("model.")},
        **{f"mesh.{axis}": size for axis, size in mesh_shape.items()},
        "the loss is not scaled": scaling is None,
        "all weights are trained": not (config.lora.rank or config.optimizer.trainable),
    }
    reasons = unused(config, "", known)
    unread = tuple(f"{key}." for key in getattr(tasks.find(config.task), "unread", ())) if is_built_in else ()
    reasons |= {key: f"task={config.task}" for key in values if f"{key}.".startswith(unread)}
    reasons |= extensions.unread(config)
    if config.zero.keeps_gathered and mesh_shape["fsdp"] > 1:
        reasons.pop("zero.strategy", None)  # also affects gathers over fsdp, not only the level over data
    # A user's data function gets the complete configuration, and may read any option of the data.
    is_read = "data." if is_own(config.data) else ()
    changed = [key for key in values if values[key] != defaults[key] and key in reasons]
    return {key: reasons[key] for key in changed if not key.startswith(is_read)}


def text(config: Config, mesh_shape: Mapping[str, int]) -> str:
    """Returns a table of the options without effect as text: key, value and reason; '' if there are none."""
    values = flags.flatten(config)
    rows = [(key, json.dumps(values[key]), why) for key, why in without_effect(config, mesh_shape).items()]
    return align(rows, ("without effect here", "value", "because")) if rows else ""
