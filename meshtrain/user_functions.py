"""Imports functions and modules of optional packages and of user code by name; converts their errors to one line.

`EXTENSION_POINTS` lists each option that can name a function. The modules of a command are imported here too, when the
command starts.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from meshtrain.errors import Problem, UserError, first_line, nearest, refusals

UserObject: TypeAlias = Any  # an object that a configuration names; may have any type until it is checked
FORM = "package.module:function"
_PACKAGE = str(Path(__file__).parent)
# Flag of a command of the core -> the module of an optional package that implements the flag.
FLAGS: Mapping[str, str] = {
    "--html": "meshtrain.report.plan_pages",
    "--scaling": "meshtrain.report.scaling.command",
}


@dataclasses.dataclass(frozen=True)
class ExtensionPoint:
    """An extension point: an option that can name a function.

    Attributes:
      takes: the names of the function's arguments, in order.
      optional_names: built-in name -> path of a function in an optional package, whose module is imported only on use.
    """

    takes: tuple[str, ...]
    optional_names: Mapping[str, str] = dataclasses.field(default_factory=dict)


# Key of an option -> its extension point. Built-in names of the core are `choices` of the option. A user's function may
# have an attribute `options` with its own options.
EXTENSION_POINTS: Mapping[str, ExtensionPoint] = {
    "task": ExtensionPoint(
        ("config", "placement"),
        {
            "seq2seq": "meshtrain.examples.seq2seq_task:built_in",
            "convnet": "meshtrain.examples.convnet:built_in",
            "preferences": "meshtrain.examples.preferences_task:built_in",
        },
    ),
    "data.source": ExtensionPoint(
        ("config",),
        {
            "digits": "meshtrain.examples.images:digits",
            "idx": "meshtrain.examples.images:idx",
            "numbers": "meshtrain.examples.numbers:numbers",
            "preferences": "meshtrain.examples.preferences:preferences",
        },
    ),
    "reduction.name": ExtensionPoint(
        ("options", "dtype"),
        {
            "int8": "meshtrain.lab.compression:int8",
            "topk": "meshtrain.lab.compression:topk",
            "one_step_late": "meshtrain.lab.one_step_late:one_step_late",
        },
    ),
    "optimizer.name": ExtensionPoint(("options", "rates", "axes")),
    "learning_rate.name": ExtensionPoint(("options",)),
    "local_steps.period": ExtensionPoint(
        ("config", "placed", "reduction"), {"local_steps": "meshtrain.lab.local_steps:local_steps"}
    ),
    "pipeline.schedule": ExtensionPoint(("stages", "microbatches", "chunks")),
    "observe.tracker": ExtensionPoint(("options", "directory", "resume_step")),
}


@functools.cache
def plugin_names(key: str) -> tuple[str, ...]:
    """Returns the built-in names that installed optional packages add to the option with this key."""
    packages = {name: ".".join(place.split(".")[:2]) for name, place in EXTENSION_POINTS[key].optional_names.items()}
    return tuple(name for name, package in packages.items() if importlib.util.find_spec(package))


def import_function(key: str, name: str, names: Sequence[str], near: str = "") -> UserObject:
    """Imports a module and returns its function with this name.

    The current folder is the last folder that is searched for the module.

    Args:
      key: the option that names the function.
      name: `package.module:function`, where dots after the colon lead into classes; or an element of `plugin_names`.
      names: the built-in values of the option, for errors.
      near: the suggested value in errors; '': the first of `names`.

    Raises:
      UserError: one line: the name is not `package.module:function`, its module cannot be imported, or the module has
        no such function.
    """
    if name in plugin_names(key):
        place, _, attribute = EXTENSION_POINTS[key].optional_names[name].partition(":")
        return getattr(importlib.import_module(place), attribute)
    allowed, near = f"{', '.join(names)}, or {FORM}", near or names[0]
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise UserError(Problem(key, got=f"'{name}'", allowed=allowed, fix=nearest(name, names), nearest=near))
    module = _import_user_module(key, name, module_name, allowed, near)
    found: UserObject = module
    for part in path.split("."):
        if not hasattr(found, part):
            got = f"'{name}', but {module_name} has no '{path}'"
            fix = nearest(part, _fitting(module, len(EXTENSION_POINTS[key].takes)))
            raise UserError(Problem(key, got=got, allowed=allowed, fix=fix, nearest=f"{key}={near}"))
        found = getattr(found, part)
    if not callable(found):
        raise UserError(
            Problem(
                key,
                got=f"'{name}', which is not a function but {type(found).__name__}",
                allowed=allowed,
                nearest=f"def {path}(...)",
            )
        )
    return found


def _fitting(module: ModuleType, num_arguments: int) -> list[str]:
    """Returns the names of a module's public functions and classes that accept `num_arguments` arguments."""
    names = []
    for name, value in vars(module).items():
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__:
            with contextlib.suppress(TypeError, ValueError):  # other arguments, or a class without a signature
                inspect.signature(value).bind(*range(num_arguments))
                names.append(name)
    return names


def function_problems(key: str, name: str, names: Sequence[str], near: str = "") -> list[Problem]:
    """Returns a problem if an option names a function that cannot be imported, else [].

    Args:
      key: the option.
      name: the value of the option; for a built-in name, nothing is imported.
      names: the built-in values of the option.
      near: the suggested value in errors; '': the first of `names`.
    """
    return [] if name in names else refusals(import_function, key, name, names, near)


def call_user_function(
    key: str,
    name: str,
    names: Sequence[str],
    given: Sequence[Any],
    *,
    takes: str,
    gives: str,
    fix: str,
    call: str = "",
) -> UserObject:
    """Imports the function that an option names, calls it and returns its result.

    Args:
      key: the option.
      name: the value of the option.
      names: the built-in values of the option, for errors.
      given: the positional arguments, as listed in `EXTENSION_POINTS`.
      takes: a description of the arguments, for errors.
      gives: a description of the required result, for errors.
      fix: the suggested fix, for errors.
      call: the values of the arguments as text, which an error line contains after the exception; '' for none.

    Raises:
      UserError: the function raises a UserError; or one line: there is no such function, it cannot be called with
        `given`, or it raises a different exception.
    """
    function = import_function(key, name, names)
    try:
        inspect.signature(function).bind(*given)
    except (TypeError, ValueError) as error:
        raise UserError(
            Problem(
                key,
                got=f"'{name}', which does not accept {takes} ({error})",
                allowed="a function with these arguments",
                nearest=f"def {name.partition(':')[2]}({', '.join(EXTENSION_POINTS[key].takes)})",
            )
        ) from error
    with wrap_user_errors(Problem(key, got=f"'{name}', which", allowed=gives, nearest=fix), call):
        return function(*given)


def user_check(key: str, name: str, function: UserObject, given: Sequence[Any]) -> list[Problem]:
    """Calls a function's attribute `check`; returns a problem for each text that it returns, [] if there is no `check`.

    An exception in a user's check is also returned as a problem.

    Args:
      key: the option that names the function.
      name: the value of the option.
      function: the function, which may have an attribute `check`.
      given: the positional arguments of `check`.
    """
    if not hasattr(function, "check"):
        return []
    problem = Problem(key, got=f"'{name}', whose check", allowed="a list of texts, one for each problem", nearest="[]")
    try:
        with (
            wrap_user_errors(problem) if ":" in name else contextlib.nullcontext()
        ):  # our own checks keep their traceback
            lines = function.check(*given)
    except UserError as error:
        return list(error.problems)
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        return [problem.with_parts(fault=f"{problem.fault} returns {lines!r}")]
    return list(map(Problem.plain, lines))


@contextlib.contextmanager
def wrap_user_errors(problem: Problem, call: str = "") -> Iterator[None]:
    """Context manager: converts an exception of a user's code in the block to a UserError; a UserError is unchanged.

    Args:
      problem: the problem of the UserError. Its `fault`, such as the name of the function, is extended by `raises` and
        the text of the exception.
      call: a text that is added after the exception, such as the arguments of the call; '' for none.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise any exception
        fault = f"{problem.fault} raises {_exception_text(error)}{call}"
        raise UserError(problem.with_parts(fault=fault)) from error


def _exception_text(error: BaseException) -> str:
    """Returns an exception of user code as text: its type, the first line of its message, and its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if "site-packages" not in one.filename), frames[-1])
    return f"{type(error).__name__}: {first_line(error)} ({frame.filename}:{frame.lineno})"


def _import_user_module(key: str, name: str, module_name: str, allowed: str, near: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise UserError(
                Problem(
                    key,
                    got=f"'{name}', but there is no module '{missing}' in {here} or on Python's path",
                    allowed=allowed,
                    nearest=near,
                )
            ) from error
        raise UserError(
            Problem(
                key,
                got=f"'{name}', but {module_name} cannot be imported: {_exception_text(error)}",
                allowed="a module that Python can import",
                nearest=f"python -c 'import {module_name}'",
            )
        ) from error


def function_name(given: UserObject) -> str:
    """Returns the name `package.module:function` of a function, or of an object's class, as for `import_function`."""
    kind = given if hasattr(given, "__qualname__") else type(given)
    return f"{kind.__module__}:{kind.__qualname__}"


def flag_problems(flag: str, value: str) -> list[Problem]:
    """Returns an error line if `flag` has a value and its optional package (see `FLAGS`) is not installed, else []."""
    package = ".".join(FLAGS[flag].split(".")[:2])
    if not value or importlib.util.find_spec(package):
        return []
    return [
        Problem(
            flag,
            got=f"'{value}', but the folder {package.replace('.', '/')} is missing",
            allowed="flags whose folder is installed",
            nearest="leave it out",
        )
    ]


def flag_module(flag: str) -> ModuleType:
    """Imports and returns the module that implements a flag in `FLAGS`; call it if `flag_problems` returns []."""
    return import_modules(FLAGS[flag])[0]


def import_modules(*names: str) -> list[ModuleType]:
    """Imports modules without garbage collection, and returns them.

    The modules live until the program ends, but each collection would traverse all their objects: with JAX and Orbax, a
    tenth of the start-up time. So later collections skip them (`gc.freeze`). Nothing is frozen if all modules were
    imported before: in a notebook, this would also keep the user's garbage.

    Args:
      names: dotted names, imported in this order.

    Raises:
      UserError: JAX rejects an environment variable, or another installed package is broken or is a different package
        of the same name.
    """
    if all(name in sys.modules for name in names):
        return [sys.modules[name] for name in names]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        result = [importlib.import_module(name) for name in names]
        gc.freeze()
    except Exception as error:
        if line := _refusal(error):
            raise UserError(line) from error
        raise
    finally:
        if was_enabled:
            gc.enable()
    return result


def _refusal(error: Exception) -> Problem | None:
    """Returns a problem that names the environment variable or package that made an import fail; None for our bug."""
    named = [name for name in os.environ if name.startswith("JAX_") and name.lower() in str(error).lower()]
    if named:
        name = max(named, key=len)
        return Problem(
            name, got=os.environ[name], allowed=f"a value that JAX accepts ({error})", nearest=f"leave {name} out"
        )
    loading = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    # If a package lacks a name, the exception comes from the importing file, so determine the package.
    missing = getattr(error.obj, "__name__", "") if isinstance(error, AttributeError) else getattr(error, "name", None)
    package = str(missing).partition(".")[0]
    file = getattr(sys.modules[package], "__file__", None) if package in sys.modules else None
    file = file or getattr(error, "filename", None) or [_PACKAGE, *loading][-1]
    if file.startswith(_PACKAGE):
        return None
    return Problem(
        "packages",
        got=f"{type(error).__name__}: {error}, from {file}",
        allowed="the packages that pip has installed",
        nearest="remove that folder from PYTHONPATH, or install the package again",
    )
