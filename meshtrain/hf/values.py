"""Values of a config.json in the types of options, and the lines that refuse others."""

from meshtrain.cli import flags
from meshtrain.files import Json
from meshtrain.options import Value

NO_WAY = "nearest: none, this model cannot be imported"
PUBLISHED = "nearest: the config.json that was published with the weights"
UNQUANTIZED = "nearest: the copy of this model that is not quantized, in bfloat16 or float32"


def typed(value: Json, kind: type) -> Value:
    """Returns a value of JSON as this type.

    Raises:
      ValueError: it has another one; the text is the rest of a line.
    """
    if value is None:
        raise ValueError(f"got nothing; allowed: {kind.__name__}; {PUBLISHED}")
    try:
        return flags.typed(value, kind)
    except ValueError as error:
        raise ValueError(str(error) if "nearest: " in str(error) else f"{error}; {PUBLISHED}") from error


def refusal(key: str, value: Json, allowed: str, near: str = NO_WAY) -> str:
    """Returns the line about a key with a value for which the decoder has nothing."""
    return f"{key}: got {shown(value)}; allowed: {allowed}; {near}"


def shown(value: Json) -> str:
    """Returns a value as text of at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
