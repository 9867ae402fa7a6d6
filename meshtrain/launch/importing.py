"""Imports at the start of a program, without the garbage collector.

Imported modules live until the program ends, but each collection walks all their objects: with JAX and Orbax a tenth of
the seconds that the imports take.
"""

import gc
import importlib
import sys
from types import ModuleType


def imported(*names: str) -> list[ModuleType]:
    """Imports modules by name and returns them; their objects are left out of all later collections (`gc.freeze`).

    Nothing is frozen where all were imported before: in a notebook it would also keep the user's garbage.

    Args:
      names: dotted names, imported in this order.
    """
    if all(name in sys.modules for name in names):
        return [sys.modules[name] for name in names]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        modules = [importlib.import_module(name) for name in names]
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
    return modules
