"""Declaration of options: fields of frozen dataclasses with one line of text and their bounds."""

import dataclasses
import functools
import typing
from collections.abc import Container, Mapping, Sequence
from typing import Any

from meshtrain.words import named
from meshtrain.words.errors import UserError, unknown
from meshtrain.words.paths import url_problems

# Options end up in int32 and float32 arrays: larger values would overflow there.
MOST = {int: 2**31 - 1, float: 3.4e38}

WITH_OPTIONS = "function with options"  # of what `option` takes as `names`

Conditions = Mapping[str, Container[object]]


@dataclasses.dataclass(frozen=True)
class AllBut:
    """All values but one, as `only_for` takes them.

    Attributes:
      value: the one.
    """

    value: object

    def __contains__(self, value: object) -> bool:
        """Returns whether a value is another one."""
        return value != self.value


def option(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    only_for: Conditions | None = None,
    dim: str = "",
    names: str = "",
) -> Any:
    """Returns a dataclass field with its default, one line of text, and its bounds.

    Args:
      default: the value used when none is given.
      text: one line for `python -m meshtrain config`, with the unit where there is one.
      choices: the legal names, for an option that is one of a list, or a function (see `names`).
      minimum: the smallest legal number.
      maximum: the largest legal number; None for the largest int32 or float32.
      only_for: field -> its values with which this one is read; None: this one is always read. A field of another
        class has its dotted key, an axis is `mesh.NAME`; `config/effects.py` adds facts in words. The last one that
        has another value is the reason that users see.
      dim: the logical axis of weights whose size is this number or a multiple of it; lines about that size then name
        this option. Empty: none.
      names: what a text names: `path` (which is no URL), `function` (imported from `package.module:function`),
        WITH_OPTIONS (one whose attribute `options` stands beside this option, see `with_own`), or ''.
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


def idle(
    options: Any, path: str, known: Mapping[str, Any] | None = None, inherited: Conditions | None = None
) -> dict[str, str]:
    """Returns dotted key -> the reason for each field that is not read: `key=value`, or a fact in words.

    Args:
      options: a frozen dataclass; nested dataclasses are included.
      path: its dotted key in the configuration; '' for a whole configuration.
      known: what `only_for` names outside of the class -> value; a condition on anything else holds.
      inherited: the conditions of all fields: `only_for` of the field that holds these options.
    """
    prefix, known, found = f"{path}." if path else "", known or {}, dict[str, str]()
    for field in dataclasses.fields(options):
        conditions = {**(inherited or {}), **(field.metadata.get("only_for") or {})}
        if dataclasses.is_dataclass(inner := getattr(options, field.name)):
            found |= idle(inner, f"{prefix}{field.name}", known, conditions)
            continue
        for other, values in conditions.items():
            is_beside = hasattr(options, other)
            if not is_beside and other not in known:
                continue
            key, value = (f"{prefix}{other}", getattr(options, other)) if is_beside else (other, known[other])
            if value not in values:
                # A fact speaks for itself, and a text that has to be empty may be long.
                found[f"{prefix}{field.name}"] = key if " " in key or values == ("",) else f"{key}={value}"
    return found


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a user's function that states none."""


def naming(options: Any) -> str:
    """Returns which option of a class names a function whose own options stand beside it; '' for none."""
    fields = [one.name for one in dataclasses.fields(options) if one.metadata.get("names") == WITH_OPTIONS]
    return fields[0] if fields else ""


def with_own(options: Any, path: str, name: Any) -> Any:
    """Returns default options and, beside them, those of the user's function that `naming` names.

    The class of the result has both classes as bases, so that the function gets an object of its own class.

    Args:
      options: defaults of the class with the option that names the function.
      path: their dotted key in the configuration.
      name: the value of that option; for any but `package.module:function` the result is `options`.

    Raises:
      UserError: one line: there is no such function, or its options are none.
    """
    if not (isinstance(name, str) and ":" in name):
        return options
    field = next(one for one in dataclasses.fields(options) if one.name == naming(options))
    key = f"{path}.{field.name}"
    function = named.function(key, name, field.metadata["choices"], str(field.default))
    own = function.options if hasattr(function, "options") else NoOptions
    if line := options_problem(key, name, own) or _shared_problem(path, own, options):
        raise UserError(line)
    group: Any = type(options)
    return _joined(own, group)()


@functools.cache
def _joined(own: Any, group: Any) -> Any:
    return dataclasses.dataclass(frozen=True)(type(group.__name__, (own, group), {"__doc__": group.__doc__}))


def own_values(options: Any) -> dict[str, Any]:
    """Returns field -> value for the options of the user's function beside which `with_own` has put others."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(type(options).__bases__[0])}


def options_problem(key: str, name: str, options: Any) -> str:
    """Returns one line where the options of a user's function are no frozen dataclass of `option`s; '' where they are.

    Args:
      key: the option that names the function.
      name: `package.module:function`.
      options: its attribute of that name.
    """
    wanted = "allowed: a frozen dataclass whose fields are option(default, text)"
    is_class = isinstance(options, type) and dataclasses.is_dataclass(options)
    if not is_class or not options.__dataclass_params__.frozen:
        return f"{key}: got '{name}', whose options are {options!r}; {wanted}; nearest: @dataclass(frozen=True)"
    kinds = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if kinds[field.name] not in (int, float, bool, str) or "text" not in field.metadata:
            return (
                f"{key}: got '{name}', whose option '{field.name}' is no option(default, text) of type int, float, "
                f"bool or str; {wanted}; nearest: {field.name}: int = option(1, 'what it means')"
            )
    return ""


def _shared_problem(path: str, own: type, group: Any) -> str:
    """Returns one line where a user's option has the name of one beside it and another default; '' where none has.

    A configuration that begins with all defaults holds the other one, and does not say whether it was chosen.
    """
    for field in dataclasses.fields(own):
        default = getattr(group, field.name, field.default)
        if repr(default) != repr(field.default):
            return (
                f"{path}.{field.name}: got {field.default!r} as its default in {named.name_of(own)}; allowed: "
                f"{default!r}, its default without it, or another name; nearest: own_{field.name}"
            )
    return ""


def problems(options: Any, path: str) -> list[str]:
    """Returns one line for each field of a frozen dataclass outside its choices or bounds, or that is a URL.

    A function that stands in place of a choice is imported.
    """
    found = []
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
            found += named.problems(name, value, choices, str(field.default))
        elif choices and value not in choices:
            line = unknown(name, value, choices)
            found.append(line if "did you mean" in line else f"{line}; nearest: '{field.default}', the default")
        if minimum is not None and value is not None and value < minimum:
            found.append(f"{name}: got {value}; allowed: at least {minimum}; nearest: {minimum}")
        if maximum is not None and value is not None and value > maximum:
            found.append(f"{name}: got {value:.12g}; allowed: at most {maximum}; nearest: {maximum}")
    return found
