"""How a room declares its options: frozen dataclasses whose fields carry one line of text and their bounds."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from meshtrain.errors import unknown


def option(default: Any, text: str, *, choices: Sequence[str] = (), minimum: float | None = None) -> Any:
    """Returns a dataclass field with its default, one line of text, and what is allowed.

    Args:
      default: the value where nothing is said; its type (or the annotation's) is the option's type.
      text: one line for `python -m meshtrain.config`, with the unit where there is one.
      choices: the legal names, where the option is one of a list.
      minimum: the smallest legal number.
    """
    return dataclasses.field(default=default, metadata={"text": text, "choices": tuple(choices), "minimum": minimum})


def problems(options: Any, path: str) -> list[str]:
    """Returns one line for each field of a frozen dataclass that is outside its choices or below its minimum."""
    found = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            found += problems(value, name)
            continue
        choices, minimum = field.metadata.get("choices"), field.metadata.get("minimum")
        if choices and value not in choices:
            found.append(unknown(name, value, choices))
        if minimum is not None and value is not None and value < minimum:
            found.append(f"{name}: got {value}; allowed: at least {minimum}; nearest: {minimum}")
    return found
