"""Imports at the start of a program, without the garbage collector.

Imported modules live until the program ends, but each collection walks all their objects: with JAX and Orbax a tenth of
the seconds that the imports take.
"""

import gc
import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from meshtrain.words.errors import UserError

_PACKAGE = str(Path(__file__).parents[1])


def imported(*names: str) -> list[ModuleType]:
    """Imports modules by name and returns them; their objects are left out of all later collections (`gc.freeze`).

    Nothing is frozen where all were imported before: in a notebook it would also keep the user's garbage.

    Args:
      names: dotted names, imported in this order.

    Raises:
      UserError: JAX refuses a variable, or a package that is found first is broken or another one.
    """
    if all(name in sys.modules for name in names):
        return [sys.modules[name] for name in names]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        modules = [importlib.import_module(name) for name in names]
        gc.freeze()
    except Exception as error:
        if line := _refusal(error):
            raise UserError(line) from error
        raise
    finally:
        if was_enabled:
            gc.enable()
    return modules


def _refusal(error: Exception) -> str:
    """Returns the line about a variable or a package that keeps modules from being imported; empty for our own bugs."""
    named = [name for name in os.environ if name.startswith("JAX_") and name.lower() in str(error).lower()]
    if named:
        name = max(named, key=len)
        return f"{name}: got {os.environ[name]}; allowed: what JAX takes ({error}); nearest: leave {name} out"
    loading = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    # A name that a package lacks is looked for by another file.
    missing = getattr(error.obj, "__name__", "") if isinstance(error, AttributeError) else getattr(error, "name", None)
    package = str(missing).partition(".")[0]
    file = getattr(sys.modules[package], "__file__", None) if package in sys.modules else None
    file = file or getattr(error, "filename", None) or [_PACKAGE, *loading][-1]
    if file.startswith(_PACKAGE):
        return ""
    what = f"packages: got {type(error).__name__}: {error}, from {file}; allowed: the packages that pip has installed"
    return f"{what}; nearest: take that folder off PYTHONPATH, or install the package again"
