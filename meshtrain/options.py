"""Defines options (dataclass fields with a description and bounds), and imports functions and modules by name.

An option can name a function of an optional package or of the user's code. The modules of a command are imported here
too, when the command starts.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import inspect
import operator
import os
import sys
import traceback
import typing
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

from meshtrain.errors import Problem, UserError, first_line, nearest, refusals, unknown
from meshtrain.files import url_problems

# Options are used in int32 and float32 arrays, where larger values would overflow.
MOST = {int: 2**31 - 1, float: 3.4e38}

WITH_OPTIONS = "function with options"  # a value of the argument `names` of `option`

Value: TypeAlias = Any  # an option's value: a number, a bool or a text; of any type until it is checked
Values: TypeAlias = dict[str, Value]  # key of an option -> value; keys are dotted if groups are flattened
Options: TypeAlias = Any  # a frozen dataclass of `option`s, whose class depends on the configuration
OptionsClass: TypeAlias = Any  # the class of `Options`
UserObject: TypeAlias = Any  # an object that a configuration names; may have any type until it is checked
_T = TypeVar("_T")

Conditions = Mapping[str, Container[object]]

FORM = "package.module:function"
_PACKAGE = str(Path(__file__).parent)


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


# Flag of a command of the core -> the module of an optional package that implements the flag.
FLAGS: Mapping[str, str] = {
    "--html": "meshtrain.report.plan_pages",
    "--scaling": "meshtrain.report.scaling.command",
}


@dataclasses.dataclass(frozen=True)
class Except:
    """A container of all values except `value`, for the argument `only_for` of `option`."""

    value: object

    def __contains__(self, value: object) -> bool:
        """Returns whether a value differs from the excluded value."""
        return value != self.value


def option(
    default: _T,
    text: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    only_for: Conditions | None = None,
    dim: str = "",
    names: str = "",
) -> _T:
    """Returns a dataclass field with its default, one line of description, and its bounds.

    Args:
      default: the value that the option has if the user does not set it.
      text: a description of one line, with the unit; `python -m meshtrain config` prints it.
      choices: the legal names if the option is one of several names; if it can also name a function (see `names`), the
        built-in names.
      minimum: the smallest legal number.
      maximum: the largest legal number; None for the largest int32 or float32.
      only_for: condition -> the values of the condition for which this option is used; None: it is always used. A
        condition is the name of a field of the same class or of a group that contains it, the dotted key of another
        field, `mesh.NAME`, or a statement such as "all weights are trained" (see `config/unused_options.py`). If
        several conditions fail, users see the last of them as the reason.
      dim: the logical axis of weights whose size is this number or a multiple of it; error lines about that size name
        this option. '': the option sets no size.
      names: the kind of name in a text: `path` (not a URL), `function` (imported from `package.module:function`),
        WITH_OPTIONS (a function whose attribute `options` adds options to this group, see `add_user_options`), or ''.
        The key of an option that names a function is listed in `EXTENSION_POINTS`.
    """
    if maximum is None and type(default) in MOST:
        maximum = MOST[type(default)]
    metadata = {
        "text": text,
        "choices": tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
        "only_for": dict(only_for or {}),
        "dim": dim,
        "names": names,
    }
    return dataclasses.field(default=default, metadata=metadata)


def unused(
    options: Options,
    path: str,
    known: Mapping[str, Value] | None = None,
    *,
    around: Sequence[tuple[str, Options]] = (),
    inherited: str = "",
) -> dict[str, str]:
    """Returns dotted key -> reason for each option that has no effect because a condition in its `only_for` fails.

    The reason is the failed condition: `key=value`, or a statement.

    Args:
      options: a frozen dataclass of options; nested dataclasses are included.
      path: the dotted key of `options` in the configuration; '' for a complete configuration.
      known: condition -> value, for conditions that are not fields of `options`. Conditions without a value are
        considered true.
      around: (path, options) of the groups that contain these options, the innermost first.
      inherited: the reason why the group of these options is unused; '' if it is used.
    """
    result, groups = dict[str, str](), [(path, options), *around]
    for field in dataclasses.fields(options):
        key = f"{path}.{field.name}" if path else field.name
        reason = inherited or _reason(field.metadata.get("only_for") or {}, groups, known or {})
        if dataclasses.is_dataclass(inner := getattr(options, field.name)):
            result |= unused(inner, key, known, around=groups if path or not known else (), inherited=reason)
        elif reason:
            result[key] = reason
    return result


def _reason(conditions: Conditions, groups: Sequence[tuple[str, Options]], known: Mapping[str, Value]) -> str:
    """Returns the last condition that is false, as `key=value` or a statement; '' if all are true."""
    reason = ""
    for name, values in conditions.items():
        key, value = _named(name, groups, known)
        if key and value not in values:
            # Statements have no value, and the value of a text that must be empty may be too long to show.
            reason = key if " " in key or values == ("",) else f"{key}={value}"
    return reason


def _named(name: str, groups: Sequence[tuple[str, Options]], known: Mapping[str, Value]) -> tuple[str, Value]:
    """Returns key and value of the field that a condition names; ('', None) if there is none.

    A field of the same class comes first, then `known`, then fields of the groups around it.
    """
    if name in known and not hasattr(groups[0][1], name):
        return name, known[name]
    for path, options in groups:
        with contextlib.suppress(AttributeError):
            return f"{path}.{name}" if path else name, operator.attrgetter(name)(options)
    return "", None


def dims(options: Options, path: str) -> dict[str, tuple[str, Value]]:
    """Returns logical axis -> (dotted key, value) of the option that sets its size; groups are included."""
    result = dict[str, tuple[str, Value]]()
    for field in dataclasses.fields(options):
        key, value = f"{path}.{field.name}", getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            result |= dims(value, key)
        elif field.metadata and field.metadata["dim"]:
            result[field.metadata["dim"]] = key, value
    return result


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """An empty options class, for a user's function without an attribute `options`."""


def function_field(options: Options) -> str:
    """Returns the name of the field that selects a function with additional options; '' if there is no such field."""
    fields = [one.name for one in dataclasses.fields(options) if one.metadata.get("names") == WITH_OPTIONS]
    return fields[0] if fields else ""


def add_user_options(options: Options, path: str, name: Value) -> Options:
    """Returns default options, extended by the options of the function that the field `function_field(options)` names.

    The class of the result inherits from the function's options class and from the class of `options`, so the function
    gets an object of its options class.

    Args:
      options: the default options of a group, such as `optimizer`, with the field that selects the function.
      path: the dotted key of the group in the configuration.
      name: the value of this field: `package.module:function`, or a built-in name. For a built-in name of the core, the
        result is `options`.

    Raises:
      UserError: one line: there is no such function, or its options are invalid.
    """
    field = next(one for one in dataclasses.fields(options) if one.name == function_field(options))
    key, names = f"{path}.{field.name}", field.metadata["choices"]
    is_core = name in names and name not in plugin_names(key)
    if not isinstance(name, str) or is_core or not (":" in name or EXTENSION_POINTS[key].optional_names):
        return options
    function = import_function(key, name, names, str(field.default))
    own = function.options if hasattr(function, "options") else NoOptions
    if line := options_problem(key, name, own) or _shared_problem(path, own, options):
        raise UserError(line)
    group: OptionsClass = type(options)
    return _join_classes(own, group)()


@functools.cache
def _join_classes(own: OptionsClass, group: OptionsClass) -> OptionsClass:
    return dataclasses.dataclass(frozen=True)(type(group.__name__, (own, group), {"__doc__": group.__doc__}))


def user_options(options: Options) -> Values:
    """Returns name -> value of the options that `add_user_options` has added to a group."""
    own: OptionsClass = type(options).__bases__[0]
    names = [field.name for field in dataclasses.fields(own)] if dataclasses.is_dataclass(own) else []
    return {name: getattr(options, name) for name in names if name != function_field(options)}


def options_problem(key: str, name: str, options: UserObject) -> Problem | None:
    """Returns a problem if the options of a user's function are not a frozen dataclass of `option`s, else None.

    A field may also be a group: another such dataclass.

    Args:
      key: the option that names the function.
      name: `package.module:function`.
      options: the function's attribute `options`.
    """
    wanted = "a frozen dataclass whose fields are option(default, text)"
    is_class = isinstance(options, type) and dataclasses.is_dataclass(options)
    if not is_class or not options.__dataclass_params__.frozen:
        got = f"'{name}', whose options are {options!r}"
        return Problem(key, got=got, allowed=wanted, nearest="@dataclass(frozen=True)")
    kinds = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        has_default = not field.default is field.default_factory is dataclasses.MISSING
        if dataclasses.is_dataclass(kinds[field.name]) and has_default:
            if problem := options_problem(key, name, kinds[field.name]):
                return problem
        elif kinds[field.name] not in (int, float, bool, str) or "text" not in field.metadata:
            kind = "option(default, text) of type int, float, bool or str"
            return Problem(
                key,
                got=f"'{name}', whose option '{field.name}' is no {kind}",
                allowed=wanted,
                nearest=f"{field.name}: int = option(1, 'what it means')",
            )
    return None


def _shared_problem(path: str, own: type, group: Options) -> Problem | None:
    """Returns a problem if a function's option has the name of an existing option but another default, else None.

    A saved configuration contains all defaults. It would contain the existing default, and nobody could see whether the
    user chose it.

    Args:
      path: the dotted key of the group in the configuration.
      own: the options class of the function.
      group: the default options of the group.
    """
    for field in dataclasses.fields(own):
        default = getattr(group, field.name, field.default)
        if repr(default) != repr(field.default):
            return Problem(
                f"{path}.{field.name}",
                got=f"{field.default!r} as its default in {function_name(own)}",
                allowed=f"{default!r}, its default without it, or another name",
                nearest=f"own_{field.name}",
            )
    return None


def problems(options: Options, path: str) -> list[Problem]:
    """Returns a problem for each option that violates its choices or bounds, or is an unsupported URL.

    A function that an option names is imported.

    Args:
      options: a frozen dataclass of options; nested dataclasses are included.
      path: the dotted key of `options` in the configuration; '' for a complete configuration.
    """
    found = list[Problem]()
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            found += problems(value, name)
            continue
        choices, minimum, maximum = (field.metadata.get(what) for what in ("choices", "minimum", "maximum"))
        if field.metadata.get("names") == "path":
            found += url_problems(name, value)
        if choices and field.metadata["names"].startswith("function"):
            found += function_problems(name, value, choices, str(field.default))
        elif choices and value not in choices:
            found.append(unknown(name, value, choices, f"'{field.default}', the default"))
        if minimum is not None and value is not None and value < minimum:
            found.append(Problem(name, got=value, allowed=f"at least {minimum}", nearest=minimum))
        if maximum is not None and value is not None and value > maximum:
            found.append(Problem(name, got=f"{value:.12g}", allowed=f"at most {maximum}", nearest=maximum))
    return found


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
      UserError: one line: the name has another form, its module cannot be imported, or the module has no such function.
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
            got = f"'{name}', and {module_name} has no '{path}'"
            fix = nearest(part, _fitting(module, len(EXTENSION_POINTS[key].takes)))
            raise UserError(Problem(key, got=got, allowed=allowed, fix=fix, nearest=f"{key}={near}"))
        found = getattr(found, part)
    if not callable(found):
        raise UserError(
            Problem(
                key,
                got=f"'{name}', which is no function but {type(found).__name__}",
                allowed=allowed,
                nearest=f"def {path}(...)",
            )
        )
    return found


def _fitting(module: ModuleType, num_arguments: int) -> list[str]:
    """Returns the names of a module's functions and classes that can be called with this number of arguments."""
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
      call: the values of the arguments as text, which errors contain after the exception.

    Raises:
      UserError: the function raises it; or one line: there is no such function, it takes other arguments, or it raises
        another exception.
    """
    function = import_function(key, name, names)
    try:
        inspect.signature(function).bind(*given)
    except (TypeError, ValueError) as error:
        raise UserError(
            Problem(
                key,
                got=f"'{name}', which does not take {takes} ({error})",
                allowed="a function that does",
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
    """Context manager: converts an exception of a user's code in the block to a UserError.

    Args:
      problem: the problem, to whose fault the exception is added.
      call: a text that follows the exception, such as the arguments of the call.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # any exception
        fault = f"{problem.fault} raises {_exception_text(error)}{call}"
        raise UserError(problem.with_parts(fault=fault)) from error


def _exception_text(error: BaseException) -> str:
    """Returns the type and first line of an exception in a user's code, and its file and line."""
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
                    got=f"'{name}', and there is no module '{missing}' in {here} or on Python's path",
                    allowed=allowed,
                    nearest=near,
                )
            ) from error
        raise UserError(
            Problem(
                key,
                got=f"'{name}', and {module_name} cannot be imported: {_exception_text(error)}",
                allowed="a module that Python can import",
                nearest=f"python -c 'import {module_name}'",
            )
        ) from error


def function_name(given: UserObject) -> str:
    """Returns `package.module:function`, the name with which `import_function` imports it."""
    kind = given if hasattr(given, "__qualname__") else type(given)
    return f"{kind.__module__}:{kind.__qualname__}"


def flag_problems(flag: str, value: str) -> list[Problem]:
    """Returns an error line if the user sets a flag in `FLAGS` whose optional package is not installed, else []."""
    package = ".".join(FLAGS[flag].split(".")[:2])
    if not value or importlib.util.find_spec(package):
        return []
    return [
        Problem(
            flag,
            got=f"'{value}', and {package.replace('.', '/')} is not here",
            allowed="flags of folders that are",
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
    """Returns the problem of the environment variable or package that made an import fail; None for a bug."""
    named = [name for name in os.environ if name.startswith("JAX_") and name.lower() in str(error).lower()]
    if named:
        name = max(named, key=len)
        return Problem(name, got=os.environ[name], allowed=f"what JAX takes ({error})", nearest=f"leave {name} out")
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
        nearest="take that folder off PYTHONPATH, or install the package again",
    )
