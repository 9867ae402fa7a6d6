"""Declaration of options: fields of frozen dataclasses with one line of text and their bounds."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshtrain.words import named
from meshtrain.words.errors import unknown
from meshtrain.words.paths import url_problems

# Options end up in int32 and float32 arrays: larger values would overflow there.
MOST = {int: 2**31 - 1, float: 3.4e38}


def option(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    only_for: Mapping[str, Sequence[object]] | None = None,
    dim: str = "",
    names: str = "",
) -> Any:
    """Returns a dataclass field with its default, one line of text, and its bounds.

    Args:
      default: the value used when none is given.
      text: one line for `python -m meshtrain config`, with the unit where there is one.
      choices: the legal names, for an option that is one of a list, or a function (see `names`).
      minimum: the smallest legal number.
      maximum: the largest legal number; None for the largest int32 or float32.
      only_for: other field of the same class -> its values with which this one is read; None: this one is always read.
      dim: the logical axis of weights whose size is this number or a multiple of it; lines about that size then name
        this option. Empty: none.
      names: what a text names: `path` (which is no URL), `function` (imported from `package.module:function`), or ''.
    """
    if maximum is None and type(default) in MOST:
        maximum = MOST[type(default)]
    metadata = {
        "text": text,
        "choices": tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
        "only_for": dict(only_for or {}),
        "dim": dim,
        "names": names,
    }
    return dataclasses.field(default=default, metadata=metadata)


def idle(options: Any, path: str) -> dict[str, str]:
    """Returns dotted key -> the other field's `key=value` for each changed field that is not read under that value.

    Args:
      options: a frozen dataclass; nested dataclasses are included.
      path: its dotted key in the configuration.
    """
    found: dict[str, str] = {}
    for field in dataclasses.fields(options):
        if dataclasses.is_dataclass(inner := getattr(options, field.name)):
            found |= idle(inner, f"{path}.{field.name}")
            continue
        for other, values in field.metadata["only_for"].items():
            value = getattr(options, other)
            if value not in values and getattr(options, field.name) != field.default:
                found[f"{path}.{field.name}"] = f"{path}.{other}={value}"
    return found


def problems(options: Any, path: str) -> list[str]:
    """Returns one line for each field of a frozen dataclass outside its choices or bounds, or that is a URL.

    A function that stands in place of a choice is imported.
    """
    found = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            found += problems(value, name)
            continue
        choices, minimum, maximum = (field.metadata.get(what) for what in ("choices", "minimum", "maximum"))
        if field.metadata.get("names") == "path":
            found += url_problems(name, value)
        if choices and field.metadata["names"] == "function":
            found += named.problems(name, value, choices)
        elif choices and value not in choices:
            line = unknown(name, value, choices)
            found.append(line if "did you mean" in line else f"{line}; nearest: '{field.default}', the default")
        if minimum is not None and value is not None and value < minimum:
            found.append(f"{name}: got {value}; allowed: at least {minimum}; nearest: {minimum}")
        if maximum is not None and value is not None and value > maximum:
            found.append(f"{name}: got {value:.12g}; allowed: at most {maximum}; nearest: {maximum}")
    return found
