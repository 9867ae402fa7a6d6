"""Converts values of a config.json to the types of the decoder's options; formats errors about invalid values."""

from meshtrain.cli import flags
from meshtrain.errors import Problem, UserError
from meshtrain.files import Json
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.options import Values

_OPTIONS = flags.schema(DecoderOptions())
NO_WAY = "none, this model cannot be imported"
PUBLISHED = "the config.json that was published with the weights"
UNQUANTIZED = "the unquantized copy of this model, in bfloat16 or float32"


def take(fields: Values, problems: list[Problem], name: str, key: str, value: Json) -> None:
    """Adds an option of the decoder to `fields`; if the value has the wrong type, adds an error line to `problems`.

    Args:
      fields: dotted name of an option -> value; extended in place.
      problems: error lines; extended in place.
      name: the dotted name of the option, such as `norm.epsilon`.
      key: the key of config.json that states the value, for the error line.
      value: the value in config.json; None (missing, or null) is an error.
    """
    kind = _OPTIONS[name].kind
    if value is None:
        problems.append(Problem(key, got="nothing", allowed=kind.__name__, nearest=PUBLISHED))
        return
    try:
        fields[name] = flags.convert(value, kind)
    except UserError as error:
        problem = error.problems[0].at(key)
        problems.append(problem if problem.nearest else problem.with_parts(nearest=PUBLISHED))


def refusal(key: str, value: Json, allowed: str, near: str = NO_WAY) -> Problem:
    """Returns the error line about a key of config.json whose value the decoder does not support.

    Args:
      key: the key.
      value: its value in config.json.
      allowed: a description of the supported values.
      near: the suggested fix, printed after `nearest:`.
    """
    return Problem(key, got=text_of(value), allowed=allowed, nearest=near)


def text_of(value: Json) -> str:
    """Returns the `repr` of a value for an error line; text after 200 characters is replaced by `...`."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
