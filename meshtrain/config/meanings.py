"""Converts options of former runs whose meaning has changed to the values with the same effect today.

A configuration is recorded in config.json and in the entry `config` of a checkpoint. The record contains the version
that wrote it. A record without a version is from 0.2 or earlier, and its values are converted when it is read.
So evaluating, generating, exporting and `init_from` compute as the run did. Resuming such a run is rejected.
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
    """Returns the balance weight of version 0.2 times L / k, for L layers with experts and k experts per token.

    In version 0.2 the balance loss was a sum over layers divided by k. Today it is a mean over layers and a sum over k.
    """
    if not group["num_experts"]:
        return None
    num_layers = float(group["num_layers"]) - float(group["dense_layers"] if "dense_layers" in group else 0)
    return float(f"{float(group['balance_weight']) * num_layers / float(group['experts_per_token']):.12g}")


def _muon_bias_correction(group: Mapping[str, Json]) -> Value | None:
    """Returns True for Muon: version 0.2 always divided its momentum by 1 - momentum^t, without an option."""
    return True if group["name"] == "muon" else None


def _begin_token(group: Mapping[str, Json]) -> Value | None:
    """Returns "none" for text data without the option: version 0.2 put no token before a text.

    Returns None with the byte tokenizer, which adds no token today either.
    """
    is_of_file = group["source"] in DOCUMENTS["source"] and group["tokenizer"] not in ("", "bytes")
    return IN_FORMER_RUNS["data.begin_token"] if is_of_file and "begin_token" not in group else None


# (group, option) -> a function (values of the group) -> today's value, or None if the meaning has not changed.
_CHANGED: Mapping[tuple[str, str], Callable[[Mapping[str, Json]], Value | None]] = {
    ("model", "balance_weight"): _balance_weight,
    ("optimizer", "muon_bias_correction"): _muon_bias_correction,
    ("data", "begin_token"): _begin_token,
}


def record(config: Config) -> JsonObject:
    """Returns a configuration as JSON for a run's files: every option, nested by group, and the version."""
    return {VERSION: __version__, **dataclasses.asdict(config)}


def without_version(values: Mapping[str, Json]) -> JsonObject:
    """Returns the options of a record, without its version."""
    return {key: value for key, value in values.items() if key != VERSION}


def is_former(values: Mapping[str, Json]) -> bool:
    """Returns whether a record is of version 0.2 or earlier."""
    return VERSION not in values


def today(values: Mapping[str, Json]) -> tuple[JsonObject, dict[str, Value]]:
    """Returns the options of a record with today's meaning, without the version, and the converted options.

    Args:
      values: nested options as `read_json` returns them. Users may have edited them, so they may have any type.

    Returns:
      (nested options, dotted key -> new value of each converted option).
    """
    result, converted = without_version(values), dict[str, Value]()
    for (name, option), convert in _CHANGED.items() if is_former(values) else ():
        group = result[name] if name in result else None
        if not isinstance(group, dict):
            continue
        try:
            value = convert(group)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            continue  # an option of another model, or a bad value that is rejected when the configuration is built
        if value is not None and (option not in group or group[option] != value):
            result[name] = {**group, option: value}
            converted[f"{name}.{option}"] = value
    return result, converted
