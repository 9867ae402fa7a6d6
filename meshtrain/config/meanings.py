"""Options whose meaning has changed: what a run of a former version chose, in the words of today.

The record of a configuration (config.json, and the entry `config` of a checkpoint) has the version that wrote it. One
without a version is of 0.2 or earlier. It is read with its values converted, so that evaluating, generating, exporting
and `init_from` use what the run used. Resuming it is rejected.
"""

import dataclasses
from collections.abc import Callable, Mapping

from meshtrain import __version__
from meshtrain.config.former import IN_FORMER_RUNS
from meshtrain.config.schema import Config
from meshtrain.data.sources import DOCUMENTS
from meshtrain.files import Json, JsonObject
from meshtrain.options import Value

VERSION = "version"  # the key of a record


def _balance_weight(group: Mapping[str, Json]) -> Value | None:
    """Returns a weight of 0.2 times L / k, for L layers with experts and k experts of a token.

    Then the loss was a sum over layers divided by k; today it is a mean over layers and a sum over k.
    """
    if not group["num_experts"]:
        return None
    num_layers = float(group["num_layers"]) - float(group["dense_layers"] if "dense_layers" in group else 0)
    return float(f"{float(group['balance_weight']) * num_layers / float(group['experts_per_token']):.12g}")


def _muon_bias_correction(group: Mapping[str, Json]) -> Value | None:
    """Returns that Muon divided its momentum by 1 - momentum^t, which no option chose."""
    return True if group["name"] == "muon" else None


def _begin_token(group: Mapping[str, Json]) -> Value | None:
    """Returns that texts began with no token; a tokenizer of bytes adds none today either."""
    is_of_file = group["source"] in DOCUMENTS["source"] and group["tokenizer"] not in ("", "bytes")
    return IN_FORMER_RUNS["data.begin_token"] if is_of_file and "begin_token" not in group else None


# (group, option) -> a function (values of the group) -> today's value; None: the value means the same.
_CHANGED: Mapping[tuple[str, str], Callable[[Mapping[str, Json]], Value | None]] = {
    ("model", "balance_weight"): _balance_weight,
    ("optimizer", "muon_bias_correction"): _muon_bias_correction,
    ("data", "begin_token"): _begin_token,
}


def record(config: Config) -> JsonObject:
    """Returns a configuration for a file of a run: nested as the options are, with every field and the version."""
    return {VERSION: __version__, **dataclasses.asdict(config)}


def without_version(values: Mapping[str, Json]) -> JsonObject:
    """Returns the options of a record."""
    return {key: value for key, value in values.items() if key != VERSION}


def is_former(values: Mapping[str, Json]) -> bool:
    """Returns whether a record is of version 0.2 or earlier."""
    return VERSION not in values


def today(values: Mapping[str, Json]) -> tuple[JsonObject, dict[str, Value]]:
    """Returns the values of a record in the meaning of today, without its version.

    Also returns dotted key -> value of the options that were converted.

    Args:
      values: nested, as `read_json` returns them; anybody's, of any types.
    """
    result, converted = without_version(values), dict[str, Value]()
    for (name, option), convert in _CHANGED.items() if is_former(values) else ():
        group = result[name] if name in result else None
        if not isinstance(group, dict):
            continue
        try:
            value = convert(group)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            continue  # an option of another model, or a value that is rejected where the configuration is built
        if value is not None and (option not in group or group[option] != value):
            result[name] = {**group, option: value}
            converted[f"{name}.{option}"] = value
    return result, converted
