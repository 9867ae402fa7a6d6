"""Built-in names that side rooms bring: the core imports none of them, but what a name stands for once it is used."""

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

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
}


@functools.cache
def names(seam: str) -> tuple[str, ...]:
    """Returns the names that the side rooms which are there bring to a seam."""
    rooms = {name: ".".join(place.split(".")[:2]) for name, place in SIDE_ROOMS[seam].items()}
    return tuple(name for name, room in rooms.items() if importlib.util.find_spec(room))


def found(seam: str, name: str) -> Any:
    """Imports and returns what one of `names` stands for."""
    module, _, attribute = SIDE_ROOMS[seam][name].partition(":")
    return getattr(importlib.import_module(module), attribute)
