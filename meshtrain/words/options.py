"""Declaration of options: fields of frozen dataclasses with one line of text and their bounds."""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

from meshtrain.words import named
from meshtrain.words.errors import unknown
from meshtrain.words.paths import url_problems

# Options end up in int32 and float32 arrays: larger values would overflow there.
MOST = {int: 2**31 - 1, float: 3.4e38}

Conditions = Mapping[str, Container[object]]


@dataclasses.dataclass(frozen=True)
class AllBut:
    """All values but one, as `only_for` takes them.

    Attributes:
      value: the one.
    """

    value: object

    def __contains__(self, value: object) -> bool:
        """Returns whether a value is another one."""
        return value != self.value


def option(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    only_for: Conditions | None = None,
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
      only_for: field -> its values with which this one is read; None: this one is always read. A field of another
        class has its dotted key, an axis is `mesh.NAME`; `config/effects.py` adds facts in words. The last one that
        has another value is the reason that users see.
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


def idle(
    options: Any, path: str, known: Mapping[str, Any] | None = None, inherited: Conditions | None = None
) -> dict[str, str]:
    """Returns dotted key -> the reason for each field that is not read: `key=value`, or a fact in words.

    Args:
      options: a frozen dataclass; nested dataclasses are included.
      path: its dotted key in the configuration; '' for a whole configuration.
      known: what `only_for` names outside of the class -> value; a condition on anything else holds.
      inherited: the conditions of all fields: `only_for` of the field that holds these options.
    """
    prefix, known, found = f"{path}." if path else "", known or {}, dict[str, str]()
    for field in dataclasses.fields(options):
        conditions = {**(inherited or {}), **(field.metadata.get("only_for") or {})}
        if dataclasses.is_dataclass(inner := getattr(options, field.name)):
            found |= idle(inner, f"{prefix}{field.name}", known, conditions)
            continue
        for other, values in conditions.items():
            is_beside = hasattr(options, other)
            if not is_beside and other not in known:
                continue
            key, value = (f"{prefix}{other}", getattr(options, other)) if is_beside else (other, known[other])
            if value not in values:
                # A fact speaks for itself, and a text that has to be empty may be long.
                found[f"{prefix}{field.name}"] = key if " " in key or values == ("",) else f"{key}={value}"
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
