"""Reads the configuration of a decoder that version 0.2 trained, for commands that use the weights of a run.

In version 0.2 the options of a decoder were not in groups, some keys had other meanings, and records had no version.
Such a run does not resume (`records.is_of_this_release`). If its configuration cannot be read, `hf export` of meshtrain
0.2.0 and `hf import` bring its weights to this version.
"""

import contextlib
from collections.abc import Mapping

from meshtrain.cli import flags
from meshtrain.errors import Problem, UserError
from meshtrain.files import Json
from meshtrain.options import Values

_MOE = "num_experts experts_per_token expert_dim shared_experts router router_scale balance_weight z_weight"
_ROPE = "base factor low high original_length local_base"
# Option of `model` -> its dotted name in `model` today.
_MOVED: Mapping[str, str] = {
    **{name: f"moe.{name}" for name in _MOE.split()},
    **{f"rope_{name}": f"rope.{name}" for name in _ROPE.split()},
    "norm": "norm.name",
    "norm_epsilon": "norm.epsilon",
    "centered_scales": "norm.centered_scales",
    "post_norms": "norm.post",
    "qk_norm": "norm.qk",
}
# Keys that no longer exist, and do not change the outputs of trained weights.
_GONE = (
    "compression.kind", "compression.block", "compression.kept", "compression.feedback", "local_steps.delay",
    "pipeline.table", "guard.allow_left_out", "model.expert_exchange", "data.numbers_below", "data.num_held_out",
    "data.spelling",
)  # fmt: skip
# Key -> its value in a run that this version can read.
_PLAIN: Mapping[str, Json] = {"task": "decoder", "model.expert_room": 0.0}


def today(record: Mapping[str, Json]) -> Values:
    """Returns dotted key -> value of a record of version 0.2, with the keys and the meanings of today.

    Args:
      record: nested, as `read_json` returns it; values may have any type.

    Raises:
      UserError: one line: the run is not a decoder's, or its experts left tokens out.
    """
    values = {key: value for key, value in flags.flatten(record).items() if key not in _GONE}
    for key, plain in _PLAIN.items():
        if key in values and values[key] != plain:
            raise UserError(
                Problem(
                    "config.json",
                    got=f"{key}={values[key]} in a run of version 0.2",
                    allowed=f"{key}={plain}",
                    nearest="`hf export` of meshtrain 0.2.0, and `hf import` of its folder",
                )
            )
    values.pop("model.expert_room", None)
    today = {f"model.{name}": f"model.{moved}" for name, moved in _MOVED.items()}
    renamed = {today[key] if key in today else key: value for key, value in values.items()}
    return {"data.begin_token": "none"} | renamed | converted(record)


def converted(record: Mapping[str, Json]) -> Values:
    """Returns dotted key -> value with the same effect today, of each option whose meaning has changed since 0.2."""
    values = flags.flatten(record)
    result: Values = {"optimizer.muon_bias_correction": True} if values.get("optimizer.name") == "muon" else {}
    # The loss was a sum over layers, divided by the experts of a token; it is a mean over layers, and not divided.
    with contextlib.suppress(KeyError, TypeError, ArithmeticError):
        if values["model.num_experts"]:
            weight = values["model.balance_weight"] * values["model.num_layers"] / values["model.experts_per_token"]
            result["model.moe.balance_weight"] = float(f"{weight:.12g}")
    return result
