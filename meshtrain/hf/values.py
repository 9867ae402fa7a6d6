"""Converts values of a config.json to the types of the decoder's options; formats errors about other values."""

import typing

from meshtrain.cli import flags
from meshtrain.files import Json
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.options import Values

NO_WAY = "nearest: none, this model cannot be imported"
PUBLISHED = "nearest: the config.json that was published with the weights"
UNQUANTIZED = "nearest: the copy of this model that is not quantized, in bfloat16 or float32"


def take(fields: Values, problems: list[str], name: str, key: str, value: Json) -> None:
    """Adds an option of the decoder to `fields`; if the value has the wrong type, adds an error line to `problems`."""
    kind = typing.get_type_hints(DecoderOptions)[name]
    if value is None:
        problems.append(f"{key}: got nothing; allowed: {kind.__name__}; {PUBLISHED}")
        return
    try:
        fields[name] = flags.typed(value, kind)
    except ValueError as error:
        problems.append(f"{key}: {error}" if "nearest: " in str(error) else f"{key}: {error}; {PUBLISHED}")


def refusal(key: str, value: Json, allowed: str, near: str = NO_WAY) -> str:
    """Returns the error line about a key whose value the decoder does not support."""
    return f"{key}: got {shown(value)}; allowed: {allowed}; {near}"


def shown(value: Json) -> str:
    """Returns a value as text, truncated to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
