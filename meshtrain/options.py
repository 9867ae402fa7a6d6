"""Defines options: dataclass fields with a description, bounds, and the conditions under which they have an effect."""

import contextlib
import dataclasses
import functools
import operator
import typing
from collections.abc import Container, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from meshtrain.errors import Problem, UserError, unknown
from meshtrain.files import url_problems
from meshtrain.user_functions import (
    EXTENSION_POINTS,
    UserObject,
    function_name,
    function_problems,
    import_function,
    plugin_names,
)

# Options are used in int32 and float32 arrays, where larger values would overflow.
MOST = {int: 2**31 - 1, float: 3.4e38}

WITH_OPTIONS = "function with options"  # a value of the argument `names` of `option`

Value: TypeAlias = Any  # an option's value: a number, a bool or a text; of any type until it is checked
Values: TypeAlias = dict[str, Value]  # key of an option -> value; keys are dotted if groups are flattened
Options: TypeAlias = Any  # a frozen dataclass of `option`s, whose class depends on the configuration
OptionsClass: TypeAlias = Any  # the class of `Options`
_T = TypeVar("_T")

Conditions = Mapping[str, Container[object]]


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
    """Returns dotted key -> reason for each option without effect, because a condition in its `only_for` is false.

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
    """Returns the last of the conditions that is false, as `key=value` or a statement; '' if all conditions are true.

    Args:
      conditions: the argument `only_for` of an option.
      groups: (path, options) of the option's class and of the groups that contain it, the innermost first.
      known: condition -> value, for conditions that are not fields.
    """
    reason = ""
    for name, values in conditions.items():
        key, value = _named(name, groups, known)
        if key and value not in values:
            # Statements have no value, and the value of a text that must be empty may be too long to show.
            reason = key if " " in key or values == ("",) else f"{key}={value}"
    return reason


def _named(name: str, groups: Sequence[tuple[str, Options]], known: Mapping[str, Value]) -> tuple[str, Value]:
    """Returns the dotted key and the value of the field that a condition names; ('', None) if no such field is known.

    A field of the option's class takes precedence over `known`, and `known` over fields of the surrounding groups.

    Args:
      name: the condition, a key of `only_for`.
      groups: (path, options) of the option's class and of the groups that contain it, the innermost first.
      known: condition -> value, for conditions that are not fields.
    """
    if name in known and not hasattr(groups[0][1], name):
        return name, known[name]
    for path, options in groups:
        with contextlib.suppress(AttributeError):
            return f"{path}.{name}" if path else name, operator.attrgetter(name)(options)
    return "", None


def dims(options: Options, path: str) -> dict[str, tuple[str, Value]]:
    """Returns logical axis -> (dotted key, value) of the option that sets the axis's size, also in nested groups."""
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
    """Returns default options of a group, extended by the options of the function that the group names.

    The class of the result inherits from the function's options class and from the class of `options`. So a function
    that is called with the group gets an object of its options class.

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
                got=f"'{name}', whose option '{field.name}' is not an {kind}",
                allowed=wanted,
                nearest=f"{field.name}: int = option(1, 'what it means')",
            )
    return None


def _shared_problem(path: str, own: type, group: Options) -> Problem | None:
    """Returns a problem if a user's function changes the default of a built-in option, else None.

    A group is a dataclass of built-in options, such as `optimizer`. One option, such as `optimizer.name`, selects the
    function. The function's options class adds options to the group. If it defines an option that the group also has,
    both defaults must be equal; otherwise the option would have two defaults. A saved configuration contains the values
    of all options, so nobody could see whether the user or a default set the value.

    Args:
      path: the dotted key of the group in the configuration.
      own: the options class of the user's function.
      group: the default built-in options of the group.
    """
    for field in dataclasses.fields(own):
        default = getattr(group, field.name, field.default)
        if repr(default) != repr(field.default):
            return Problem(
                f"{path}.{field.name}",
                got=f"{field.default!r} as the default in {function_name(own)}",
                allowed=f"{default!r}, the default of meshtrain's option with this name, or another name",
                nearest=f"own_{field.name}",
            )
    return None


def problems(options: Options, path: str) -> list[Problem]:
    """Returns a problem for each option that violates its choices or bounds, or is an unsupported URL.

    If an option names a function, the function is imported for the check.

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
