"""Built-in names that side rooms bring: the core imports none of them, but what a name stands for once it is used."""

import functools
import importlib
import importlib.util
from collections.abc import Mapping

from meshtrain.errors import UserError
from meshtrain.options import Imported

# Seam, as the option is called -> name -> `package.module:attribute`.
SIDE_ROOMS: Mapping[str, Mapping[str, str]] = {
    "task": {
        "seq2seq": "meshtrain.examples.seq2seq_task:built_in",
        "convnet": "meshtrain.examples.convnet:built_in",
    },
    "data.source": {
        "digits": "meshtrain.examples.images:digits",
        "idx": "meshtrain.examples.images:idx",
        "numbers": "meshtrain.examples.numbers:numbers",
    },
    "reduction.name": {
        "int8": "meshtrain.lab.compression:int8",
        "topk": "meshtrain.lab.compression:topk",
        "one_step_late": "meshtrain.lab.one_step_late:one_step_late",
    },
    "local_steps.period": {"apart": "meshtrain.lab.local_steps:apart"},
}


@functools.cache
def names(seam: str) -> tuple[str, ...]:
    """Returns the names that the side rooms which are there bring to a seam."""
    rooms = {name: ".".join(place.split(".")[:2]) for name, place in SIDE_ROOMS[seam].items()}
    return tuple(name for name, room in rooms.items() if importlib.util.find_spec(room))


def found(seam: str, name: str) -> Imported:
    """Imports and returns what one of `names` stands for."""
    module, _, attribute = SIDE_ROOMS[seam][name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def apart(period: int) -> Imported:
    """Returns (configuration, replicas, placement, logical axes of the batch) -> `Apart`; None for a period of 0.

    Raises:
      UserError: one line: the side room's folder is not there.
    """
    key = "local_steps.period"
    if period and not names(key):
        raise UserError(f"{key}: got {period}; allowed: 0, as meshtrain/lab is not here; nearest: 0")
    return found(key, "apart") if period else None
