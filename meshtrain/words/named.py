"""Imports by name: functions that a configuration names as `package.module:function`, and our modules at the start."""

import gc
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from meshtrain.words.errors import UserError, first_line, nearest

FORM = "package.module:function"
_PACKAGE = str(Path(__file__).parents[1])


def function(key: str, name: str, names: Sequence[str], near: str = "") -> Any:
    """Imports a module and returns its function of that name.

    Modules in the current folder are found too: it is searched last.

    Args:
      key: the option that holds the name, for errors.
      name: `package.module:function`; dots after the colon go into classes.
      names: the other legal values of the option, for errors.
      near: the one that is suggested; '': the first.

    Raises:
      UserError: one line: the name has another form, its module cannot be imported or lacks it, or it is not callable.
    """
    allowed, near = f"{', '.join(names)}, or {FORM}", near or names[0]
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise UserError(f"{key}: got '{name}'; allowed: {allowed}{nearest(name, names) or f'; nearest: {near}'}")
    module = _imported(key, name, module_name, allowed, near)
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            here = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
            fix = nearest(part, here) or f"; nearest: {key}={near}"
            raise UserError(f"{key}: got '{name}', and {module_name} has no '{path}'; allowed: {allowed}{fix}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(
            f"{key}: got '{name}', which is no function but {type(found).__name__}; allowed: {allowed}; "
            f"nearest: def {path}(...)"
        )
    return found


def problems(key: str, name: str, names: Sequence[str], near: str = "") -> list[str]:
    """Returns the line of `function`'s error; none for one of `names`, or a function that can be imported."""
    try:
        if name not in names:
            function(key, name, names, near)
    except UserError as error:
        return list(error.problems)
    return []


def called(
    key: str, name: str, function: Callable[..., Any], given: Mapping[str, Any], *, takes: str, gives: str
) -> Any:
    """Calls a user's function and returns its result.

    Args:
      key: the option that names it.
      name: `package.module:function`.
      function: it.
      given: name -> value of what it gets, in order; it may call them otherwise.
      takes: the same in words.
      gives: the end of the line where it raises, from the words after the exception on.

    Raises:
      UserError: its own, or one line: it takes something else, or raises.
    """
    try:
        inspect.signature(function).bind(*given.values())
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key}: got '{name}', which does not take {takes} ({error}); allowed: a function that does; "
            f"nearest: def {name.partition(':')[2]}({', '.join(given)})"
        ) from error
    try:
        return function(*given.values())
    except UserError:
        raise
    except Exception as error:  # whatever the user's function raises
        raise UserError(f"{key}: got '{name}', which raises {raised(error)}{gives}") from error


def raised(error: Exception) -> str:
    """Returns the type and first line of what a user's code has raised, and the place in it."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if "site-packages" not in one.filename), frames[-1])
    return f"{type(error).__name__}: {first_line(error)} ({frame.filename}:{frame.lineno})"


def _imported(key: str, name: str, module_name: str, allowed: str, near: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # whatever the user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise UserError(
                f"{key}: got '{name}', and there is no module '{missing}' in {here} or on Python's path; allowed: "
                f"{allowed}; nearest: {near}"
            ) from error
        raise UserError(
            f"{key}: got '{name}', and {module_name} cannot be imported: {raised(error)}; allowed: a module that "
            f"Python can import; nearest: python -c 'import {module_name}'"
        ) from error


def name_of(given: Any) -> str:
    """Returns `package.module:function`, the name by which `function` imports it."""
    kind = given if hasattr(given, "__qualname__") else type(given)
    return f"{kind.__module__}:{kind.__qualname__}"


def modules(*names: str) -> list[ModuleType]:
    """Imports modules, collects no garbage meanwhile, and returns them.

    They live until the program ends, but each collection would walk all their objects: with JAX and Orbax a tenth of
    the seconds of a start. So later ones leave them out (`gc.freeze`). Nothing is frozen where all were imported
    before: in a notebook it would also keep the user's garbage.

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
        found = [importlib.import_module(name) for name in names]
        gc.freeze()
    except Exception as error:
        if line := _refusal(error):
            raise UserError(line) from error
        raise
    finally:
        if was_enabled:
            gc.enable()
    return found


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
