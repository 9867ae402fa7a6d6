"""Reads the configuration of a decoder that version 0.2 trained, for commands that use the weights of a run.

In version 0.2, the options of a decoder were not in groups, some keys had other meanings, and files had no version. A
run of version 0.2 does not resume (`records.is_of_this_release`). If its configuration cannot be converted, users can
convert the weights with `hf export` of meshtrain 0.2.0, followed by `hf import` of this version.
"""

import contextlib
from collections.abc import Mapping

from meshtrain.cli import flags
from meshtrain.errors import Problem, UserError
from meshtrain.files import Json
from meshtrain.options import Values

_MOE = "num_experts experts_per_token expert_dim shared_experts router router_scale balance_weight z_weight"
_ROPE = "base factor low high original_length local_base"
# Name of an option of `model` in version 0.2 -> its dotted name in `model` now.
_MOVED: Mapping[str, str] = {
    **{name: f"moe.{name}" for name in _MOE.split()},
    **{f"rope_{name}": f"rope.{name}" for name in _ROPE.split()},
    "norm": "norm.name",
    "norm_epsilon": "norm.epsilon",
    "centered_scales": "norm.centered_scales",
    "post_norms": "norm.post",
    "qk_norm": "norm.qk",
}
# Keys of version 0.2 that no longer exist, and do not change the outputs of trained weights.
_GONE = (
    "compression.kind", "compression.block", "compression.kept", "compression.feedback", "local_steps.delay",
    "pipeline.table", "guard.allow_left_out", "model.expert_exchange", "data.numbers_below", "data.num_held_out",
    "data.spelling",
)  # fmt: skip
# Key of version 0.2 -> the only value with which this version can read the run.
_PLAIN: Mapping[str, Json] = {"task": "decoder", "model.expert_room": 0.0}


def today(record: Mapping[str, Json]) -> Values:
    """Converts a configuration of version 0.2 to this version; returns dotted key -> value.

    Args:
      record: the content of the run's config.json, a nested dict; values may have any type.

    Raises:
      UserError: one line: the task is not the decoder, or its experts dropped tokens (`model.expert_room` above 0).
    """
    values = {key: value for key, value in flags.flatten(record).items() if key not in _GONE}
    for key, plain in _PLAIN.items():
        if key in values and values[key] != plain:
            raise UserError(
                Problem(
                    "config.json",
                    got=f"{key}={values[key]} in a run of version 0.2",
                    allowed=f"{key}={plain}",
                    nearest="`hf export` with meshtrain 0.2.0, then `hf import` of this folder",
                )
            )
    values.pop("model.expert_room", None)
    moved = {f"model.{name}": f"model.{place}" for name, place in _MOVED.items()}
    renamed = {moved[key] if key in moved else key: value for key, value in values.items()}
    return {"data.begin_token": "none"} | renamed | converted(record)


def converted(record: Mapping[str, Json]) -> Values:
    """Returns each option whose meaning has changed since 0.2: dotted key -> the value that now has the same effect.

    Args:
      record: the content of the run's config.json, a nested dict; values may have any type.
    """
    values = flags.flatten(record)
    result: Values = {"optimizer.muon_bias_correction": True} if values.get("optimizer.name") == "muon" else {}
    # The balance loss was a sum over layers, divided by the experts of a token. Now it is a mean over layers, and not
    # divided.
    with contextlib.suppress(KeyError, TypeError, ArithmeticError):
        if values["model.num_experts"]:
            weight = values["model.balance_weight"] * values["model.num_layers"] / values["model.experts_per_token"]
            result["model.moe.balance_weight"] = float(f"{weight:.12g}")
    return result
