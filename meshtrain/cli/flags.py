"""Parses the command line and its configuration file, and converts values to the types of their fields.

ml_collections stops at the first wrong flag, so overrides (`--config.group.field=value`) are parsed here, and all
problems are collected. This module works with any dataclass of options. It imports only fast modules, so that `--help`
is fast.
"""

import argparse
import contextlib
import dataclasses
import inspect
import json
import pathlib
import re
import sys
import traceback
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from meshtrain.cli import words
from meshtrain.errors import MOST_LINES, Problem, UserError, first_line, fold, is_finite, nearest, refuse, unknown
from meshtrain.files import expand_user, is_url, is_utf8, url_problems, what_is_at
from meshtrain.options import MOST, Options, Value, Values
from meshtrain.user_functions import UserObject

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_OFF = ("", "false", "no", "0", "off", "none", "null")  # case-folded values that switch an option off
_PATHS = ("FILE", "DIR", "RUN")  # prefixes of the metavars of arguments that are paths, and must not be URLs
_STATED = ("text", "choices", "names", "minimum", "maximum")  # the metadata of a field, see `option`
_MOST_LISTED = 20  # the maximum number of a folder's files in an error
_DEEPEST = 20  # the maximum depth of nested groups; limits the recursion for a mapping that contains itself
_USAGE = """\
Any field of the configuration can be set on the command line: --config.mesh.tensor=4 --config.num_steps=1e3
`{} config` lists the fields with their types, defaults and meanings.
"""
EXAMPLE = "--config=3d"  # a configuration that runs from any folder


@dataclasses.dataclass(frozen=True)
class Entry:
    """A field of a configuration.

    Attributes:
      kind: the type of the field: int, float, bool or str.
      default: the default value.
      text: the description of the field.
      choices: the allowed values, or the built-in names of a field that may name a function; empty: any value of the
        type.
      names: the meaning of a text: `path`, `function`, WITH_OPTIONS (a function with options), or '' for other texts.
      bounds: the smallest and the largest whole number that an error may suggest. They are the limits of the field; a
        missing minimum is replaced by 1, a missing maximum by the largest int32.
    """

    kind: type
    default: Value
    text: str
    choices: tuple[str, ...]
    names: str = ""
    bounds: tuple[float, ...] = (1, MOST[int])


def program() -> str:
    """Returns the command that started the program: `meshtrain` if it is installed, else `python -m meshtrain`."""
    return "meshtrain" if pathlib.Path(sys.argv[0]).stem == "meshtrain" else "python -m meshtrain"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError instead of printing its usage and exiting."""

    def __init__(self, prog: str | None = None, **named: Any) -> None:
        """Creates a parser whose usage shows the program's name as the user typed it.

        Args:
          prog: the command, such as `python -m meshtrain doctor`.
          **named: the other arguments of ArgumentParser.
        """
        super().__init__(prog and prog.replace("python -m meshtrain", program()), **named)

    def error(self, message: str) -> NoReturn:
        """Raises UserError with argparse's message and the allowed arguments."""
        words = [word for action in self._actions for word in action.option_strings]
        named = re.match(r"argument (\S+?)(?:/\S+)?: (.*)", message)
        action = next((one for one in self._actions if named and named[1] in one.option_strings), None)
        fix = "--help"
        if action is not None and action.nargs != 0:
            example = [*(action.choices or ()), 1 if action.type else action.metavar or action.dest.upper()][0]
            fix = f"{action.option_strings[-1]}={action.default or example}"
        key, fault = (named[1], named[2]) if named else ("arguments", message)
        raise UserError(Problem(key, fault=fault, allowed=", ".join(words), nearest=fix))

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Returns the parsed arguments; overrides `ArgumentParser.parse_args`, with the same arguments.

        Raises:
          UserError: an argument is unknown (the error suggests the most similar known argument), or a path is a URL.
        """
        parsed, rest = self.parse_known_args(args, namespace)
        known = [word for action in self._actions for word in action.option_strings]
        refuse([*unknown_arguments(rest, known), *self.without_urls(parsed)])
        return parsed

    def without_urls(self, parsed: argparse.Namespace) -> list[Problem]:
        """Replaces each path that is a URL by the argument's default, in place; returns a problem for each URL.

        Args:
          parsed: the parsed arguments.
        """
        problems, command = list[Problem](), self.prog.split()[-1]
        for action in [action for action in self._actions if str(action.metavar).startswith(_PATHS)]:
            key, given = [action.metavar, *action.option_strings][-1], getattr(parsed, action.dest) or []
            paths = [given] if isinstance(given, str) else given
            if lines := [line for path in paths for line in url_problems(str(key), path, command)]:
                setattr(parsed, action.dest, action.default)
                problems += lines
        return problems


def arguments(argv: Sequence[str], extra: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parses the command line of a command. `--help` prints the usage and exits.

    Args:
      argv: the words after the command.
      extra: a parser with the arguments that only this command has, its `prog` and its description; None: the command
        has only the arguments of a configuration.

    Returns:
      A namespace with the arguments of `extra` and: `config` (the file or None), `workdir` (a Path or a URL; by default
      runs/NAME_OF_CONFIG), `overrides` (dotted key -> text; the last value wins), `problems` (a line for each unknown
      argument, to report together with problems of the configuration), and `command` (the words with which the user can
      repeat the command; empty without `extra`).

    Raises:
      UserError: a known argument with a wrong value, or without a value.
    """
    rest, overrides, problems = _split_words(argv)
    parser = Parser(
        prog=extra.prog if extra else None,
        description=extra.description if extra else None,
        epilog=_USAGE.format(program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[extra] if extra else [],
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a Python file with get_config(), or a name, such as 3d")
    parser.add_argument("--workdir", metavar="DIR", help="the run's folder (default: runs/ and the config's name)")
    parser.add_argument("--config.GROUP.FIELD", dest="_", metavar="VALUE", help="sets one field of the configuration")
    namespace, unknown_words = parser.parse_known_args(rest)
    del namespace._
    allowed = [word for action in parser._actions for word in action.option_strings if "." not in word]
    problems += [*unknown_arguments(unknown_words, allowed), *parser.without_urls(namespace)]
    default = default_workdir(namespace.config)
    if namespace.workdir == "" or not is_utf8(namespace.workdir or ""):
        problems.append(
            Problem("--workdir", got=f"'{namespace.workdir}'", allowed="a folder's path in UTF-8", nearest=default)
        )
    namespace.workdir = given if is_url(given := namespace.workdir or "") else expand_user(given or default)
    namespace.overrides, namespace.problems = overrides, problems
    namespace.command = [sys.orig_argv[0], *extra.prog.split()[1:], *argv] if extra else []
    return namespace


def default_workdir(config: str | None) -> pathlib.Path:
    """Returns the default workdir of a configuration file: runs/NAME, or runs/default without a file."""
    return pathlib.Path("runs") / (pathlib.Path(config).stem if config else "default")


def _split_words(argv: Sequence[str]) -> tuple[list[str], dict[str, str], list[Problem]]:
    """Splits command-line words into overrides (`--config.KEY=VALUE`) and other words.

    Returns:
      The other words; dotted key -> text for the overrides; and a problem for each override without a value.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    problems: list[Problem] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--config."):
            rest.append(word)
            continue
        key, equals, text = word.removeprefix("--config.").partition("=")
        if not equals and words and not words[0].startswith("--"):
            equals, text = "=", words.pop(0)
        if equals:
            overrides[key] = text
        else:
            problems.append(Problem(key, got="no value", allowed=f"--config.{key}=VALUE", nearest="leave it out"))
    return rest, overrides, problems


def unknown_arguments(arguments: Sequence[str], allowed: Sequence[str]) -> list[Problem]:
    """Returns a problem for each unknown flag of a command line, or for each unknown word if there is no such flag.

    Args:
      arguments: the flags (which start with a dash) and words that the command does not know.
      allowed: the flags of the command.
    """
    problems = []
    for argument in [argument for argument in arguments if argument.startswith("-")] or arguments:
        name = argument.partition("=")[0]
        if "--config" in allowed and _is_configuration(argument):
            flag = f"--config={argument}"
            got = f"'{argument}' without the flag"
            problems.append(Problem("--config", got=got, allowed="--config=FILE", nearest=flag))
            continue
        fix = _nearest_argument(argument, allowed)
        shown = argument if "." in name else name
        problem = Problem("arguments", got=f"'{shown}'", allowed=", ".join(allowed), fix=fix)
        problems.append(problem if fix else unknown("arguments", name, allowed, "--help"))
    return problems


def _nearest_argument(argument: str, allowed: Sequence[str]) -> str:
    """Returns the suggestion at the end of the error line for an unknown argument, such as `; nearest: --config.seed`.

    There is a suggestion for a short form of a flag (`-c`), for an option without `--config.`, and for an option of
    another program. Otherwise the result is ''.

    Args:
      argument: the unknown argument.
      allowed: the flags of the command.
    """
    name, equals, value = argument.partition("=")
    if len(name) == 2 and name[0] == "-":  # -c
        flags = [flag for flag in allowed if flag.startswith(f"-{name}")]
        return f"; did you mean '{flags[0]}'?" if flags else ""
    if "--config" not in allowed:
        return ""
    if name.startswith("--") and "." in name:
        return f"; did you mean '--config.{argument[2:]}'?"
    if name.startswith("--") and fold(name) in words.OPTIONS:
        ours = words.OPTIONS[fold(name)]
        if " " in ours:
            return f"; nearest: {ours}"
        return f"; nearest: --config.{ours if '=' in ours else ours + equals + value}"
    return ""


def _is_configuration(argument: str) -> bool:
    return argument in example_files() or (argument.endswith(".py") and what_is_at(argument) == "a file")


def example_files() -> dict[str, pathlib.Path]:
    """Returns name -> file of meshtrain's example configurations; an installation contains them in the package.

    >>> example_files()["3d"].name
    '3d.py'
    """
    package = pathlib.Path(__file__).parents[1]
    files = list((package / "configs").glob("*.py")) or list((package.parent / "configs").glob("*.py"))
    return {path.stem: path for path in sorted(files)}


def load(path: str, keys: Sequence[str]) -> UserObject:
    """Runs a configuration file and returns the result of its `get_config()`.

    Args:
      path: the path of a Python file, or the name of an example configuration.
      keys: the dotted keys of all fields of a configuration, to suggest a key for a misspelt name.

    Raises:
      UserError: one line: the file does not exist or is not Python, `get_config` is missing, or the file raises an
        exception (with its line number).
    """
    if (what := what_is_at(path)) != "a file":
        own = example_files()
        if path not in own:
            raise UserError(_no_file(path, what, list(own)))
        path = str(own[path])
    # Compiled rather than imported: 3d.py is not a valid module name, and an import would write a __pycache__.
    module: dict[str, UserObject] = {"__name__": pathlib.Path(path).stem, "__file__": path}
    try:
        exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), module)
        if "get_config" not in module:
            raise UserError(
                Problem(
                    "--config",
                    fault=f"'{path}' has no get_config()",
                    allowed="a function with that name",
                    fix=nearest("get_config", [name for name in module if callable(module[name])]),
                    nearest=EXAMPLE,
                )
            )
        given = module["get_config"]()
        if inspect.iscoroutine(given):
            given.close()  # an unawaited coroutine prints a warning
        return given
    except (UserError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        where = f"{path}{line}: {type(error).__name__}"
        raise UserError(Problem(where, fault=error.msg, allowed="Python in UTF-8", nearest=EXAMPLE)) from error
    except BaseException as error:  # also SystemExit: a configuration file must not end the program
        raise UserError(_raised_inside(path, error, keys)) from error


def _no_file(path: str, what: str, own: Sequence[str]) -> Problem:
    folder = pathlib.Path(path).parent
    others = []
    if what_is_at(folder) == "a folder":
        others = [str(other) for other in sorted(folder.glob("*.py")) if what_is_at(other) == "a file"]
    listed = f"; in that folder: {', '.join(others[:_MOST_LISTED])}" if others else ""
    states = {"nothing there": "does not exist", "a folder": "is not a file but a folder"}
    got = states[what] if what in states else f"cannot be read: {what}"
    return Problem(
        "--config",
        fault=f"'{path}' {got}",
        allowed=f"a Python file with get_config(), or {', '.join(own)}{listed}",
        fix=nearest(path, others) or nearest(pathlib.Path(path).stem, own),
        nearest=EXAMPLE,
    )


def _raised_inside(path: str, error: BaseException, keys: Sequence[str]) -> Problem:
    """Returns a problem that states the exception that a configuration file raised.

    Args:
      path: the path of the configuration file.
      error: the exception.
      keys: the dotted keys of all fields of a configuration, to suggest a key for a misspelt name.
    """
    names = {name for key in keys for name in key.split(".")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f"{path}:{frames[-1].lineno}" if frames else path
    reason = first_line(error)
    # ConfigDict's message for a missing key has the key in double quotation marks, followed by other keys.
    word = re.match(r'\W*(?:Key ")?(\w+)', reason)
    last_frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, (AttributeError, KeyError)) and word and "ml_collections" in last_frame.filename:
        return Problem(
            where,
            fault=f"unknown key '{word[1]}'",
            allowed=f"the keys that `{program()} config` lists",
            fix=nearest(word[1], names),
            nearest=EXAMPLE,
        )
    return Problem(
        f"{where}: {type(error).__name__}", fault=reason, allowed="a get_config() without exceptions", nearest=EXAMPLE
    )


def schema(options: Options, prefix: str = "") -> dict[str, Entry]:
    """Returns dotted key -> Entry for a dataclass of options and its nested dataclasses, in order of declaration.

    Args:
      options: the dataclass, whose values are the defaults.
      prefix: the text before each key, for a nested dataclass, such as `mesh.`.
    """
    kinds = typing.get_type_hints(type(options))
    result: dict[str, Entry] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            result |= schema(value, f"{prefix}{field.name}.")
        else:
            text, choices, names, *given = (field.metadata[what] for what in _STATED)
            bounds = tuple(other if one is None else one for one, other in zip(given, Entry.bounds, strict=True))
            result[prefix + field.name] = Entry(kinds[field.name], value, text, choices, names, bounds)
    return result


def flatten(values: Mapping[str, Value] | Options, prefix: str = "") -> Values:
    """Returns dotted key -> value for a nested mapping, or for a dataclass of options.

    A nested mapping that is empty, or nested deeper than 20 levels, is not flattened: it is the value of its key.

    >>> flatten({"seed": 1, "mesh": {"data": 2, "fsdp": 4}})
    {'seed': 1, 'mesh.data': 2, 'mesh.fsdp': 4}
    """
    flat: Values = {}
    nested = values if isinstance(values, Mapping) else dataclasses.asdict(values)
    for key, value in nested.items():
        name = f"{prefix}{key}"
        goes_on = isinstance(value, Mapping) and value and name.count(".") < _DEEPEST
        flat |= flatten(value, f"{name}.") if goes_on else {name: value}
    return flat


def collect(
    entries: Mapping[str, Entry], given: Mapping[str, Value], texts: Mapping[str, str]
) -> tuple[Values, list[Problem]]:
    """Converts values to the types of their fields.

    Args:
      entries: dotted key -> field, from `schema`.
      given: dotted key -> value from Python or JSON.
      texts: dotted key -> text from the command line; takes precedence over `given`.

    Returns:
      dotted key -> value for every entry, and a problem for each unknown key and each value of a wrong type. A wrong
      text is replaced by the value in `given`, and a wrong value by the default.
    """
    values = {key: entry.default for key, entry in entries.items()}
    all_given: Values = {**given, **texts}
    problems = _unknown_keys({key: all_given[key] for key in all_given if key not in entries}, entries)
    for key, value in all_given.items():
        if key not in entries:
            continue
        if isinstance(value, str) and (key, fold(value)) in words.VALUES and value not in entries[key].choices:
            ours = words.VALUES[key, fold(value)]
            choices = ", ".join(entries[key].choices)
            problems.append(Problem(key, got=f"'{value}'", allowed=choices, fix=f"; did you mean '{ours}'?"))
            continue
        try:
            values[key] = convert(value, entries[key].kind, is_text=key in texts, bounds=entries[key].bounds)
        except UserError as error:
            problem = error.problems[0].at(key)
            default = f"{json.dumps(entries[key].default)}, the default"
            problems.append(problem if problem.nearest else problem.with_parts(nearest=default))
            if key in texts and key in given:
                with contextlib.suppress(ValueError):
                    values[key] = convert(given[key], entries[key].kind)
    return values, problems


def convert(value: Value, kind: type, *, is_text: bool = False, bounds: tuple[float, ...] = Entry.bounds) -> Value:
    """Converts a value to int, float, bool or str.

    >>> convert("1e3", int, is_text=True), convert("yes", bool, is_text=True)
    (1000, True)

    Args:
      value: a value from Python or JSON, or the text on a command line.
      kind: the required type.
      is_text: whether the value is the text on a command line, such as 1_000, 1e3 or true.
      bounds: (smallest, largest) whole number that the error may suggest if an int is required and `value` has a
        fractional part.

    Raises:
      UserError: the value cannot be converted to this type. The error has no key; the caller adds the option's name.
    """
    if kind is str and isinstance(value, str):
        if is_utf8(value) and "\0" not in value:
            return str(value)
        raise UserError(Problem(None, got=f"{value!r}", allowed="a text that UTF-8 can encode, without zero bytes"))
    if kind is bool and is_text and value.strip().lower() in _BOOLS:
        return _BOOLS[value.strip().lower()]
    if kind is bool and isinstance(value, bool):
        return value
    allowed, closest = f"{_WORDS[kind.__name__]} ({kind.__name__})", ""
    number = typing.cast(Value, _number(value) if is_text else value)
    if kind in (int, float) and is_finite(number):
        if kind is float or number == int(number):
            return kind(number)
        closest = f"{min(max(round(number), bounds[0]), bounds[1])}"
    elif kind in (int, float) and isinstance(number, int) and not isinstance(number, bool):
        allowed += f" of at most {sys.float_info.max_10_exp} digits"
    got = f"'{value}'" if is_text else f"{_text_of(value)} ({type(value).__name__})"
    raise UserError(Problem(None, got=got, allowed=allowed, nearest=closest))


def _text_of(value: Value) -> str:
    try:
        text = repr(value)
        return text if len(text) <= 400 else f"{text[:200]}...{text[-100:]}"
    except Exception:  # noqa: BLE001  a user's __repr__ may raise anything
        return "an object whose repr() fails"


def _number(text: str) -> int | float | None:
    # int first: float would round a large whole number.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _unknown_keys(given: Mapping[str, Value], entries: Mapping[str, Entry]) -> list[Problem]:
    # More unknown keys than fields are not typing errors, and a search for fields similar to each would take minutes.
    listed = list(given)[: None if len(given) <= len(entries) else MOST_LINES]
    problems = [_unknown_key(key, given[key], entries) for key in listed]
    if len(listed) < len(given):
        problems.append(Problem.plain(f"... and {len(given) - len(listed)} more keys like these"))
    return problems


def _unknown_key(key: str, value: Value, entries: Mapping[str, Entry]) -> Problem:
    groups = {name[:place] for name in entries for place, letter in enumerate(name) if letter == "."}
    top, _, last = key.rpartition(".")
    other_names = [key, *(part for part in (last, key.partition(".")[0]) if part not in groups)]
    if any(fold(name) == fold(key) for name in entries):  # `nearest` will suggest it
        other_names = []
    ours = [words.OPTIONS[fold(name)] for name in other_names if fold(name) in words.OPTIONS]
    fix = _assignment(ours[0], value, entries) if ours else ""
    if key in groups:
        fields = [name for name in entries if name.startswith(f"{key}.")]
        if not fix and "." in key:  # a group inside `model`: the value may be meant for its first field
            assignment = _assignment(fields[0], value, entries)
            fix = "" if assignment == f"; nearest: {fields[0]}" else assignment
        return Problem(
            key,
            got=_text_of(value),
            allowed=f"a value for one of its fields: {', '.join(fields)}",
            fix=fix,
            nearest=f"{fields[0]}={entries[fields[0]].default}",
        )
    if top in entries:
        return Problem(
            key,
            fault="unknown key",
            allowed=f"'{top}', which is a value and has no fields",
            fix=f"; did you mean '{top}'?",
        )
    same_name = [name for name in entries if name.rpartition(".")[2] == last]
    if not fix and len(same_name) == 1:
        fix = f"; did you mean '{same_name[0]}'?"
    fix = fix or nearest(key, [*entries, *groups])
    if top in groups:
        inner = [name.removeprefix(f"{top}.").partition(".") for name in entries if name.startswith(f"{top}.")]
        allowed = ", ".join(dict.fromkeys(f"{top}.{name}.*" if dot else f"{top}.{name}" for name, dot, _ in inner))
    else:
        allowed = f"the keys that `{program()} config` lists"
    return Problem(key, fault="unknown key", allowed=allowed, fix=fix, nearest="leave it out")


def _assignment(ours: str, value: Value, entries: Mapping[str, Entry]) -> str:
    """Returns the suggestion `; nearest: OPTION=VALUE`, with our option for another program's option, and its value.

    If our option does not accept the value, the text contains only the option. It is '' if this configuration lacks the
    option.

    Args:
      ours: our option, a value of `words.OPTIONS`.
      value: the value that the user gave to the other program's option.
      entries: dotted key -> field of this configuration.
    """
    name, is_switch, _ = ours.partition("=")
    text = value if isinstance(value, str) else _text_of(value)
    if " " in ours:
        return f"; nearest: {ours}"
    if name not in entries:
        return ""
    if is_switch:
        return "; nearest: leave it out" if fold(text) in _OFF else f"; nearest: {ours}"
    entry = entries[name]
    same = [choice for choice in entry.choices if choice and fold(choice) == fold(text)]
    same += [words.VALUES[name, fold(text)]] if (name, fold(text)) in words.VALUES else []
    text = same[0] if same else text
    if entry.choices and text not in entry.choices:
        return f"; nearest: {name} ({', '.join(choice for choice in entry.choices if choice)})"
    try:
        number = convert(text, entry.kind, is_text=True)
        is_allowed = entry.kind is str or bool(entry.bounds[0] <= number <= entry.bounds[1])
    except ValueError:
        is_allowed = False
    return f"; nearest: {name}={text}" if is_allowed and len(text) < 400 else f"; nearest: {name}"


def construct(default: Options, values: Mapping[str, Value], prefix: str = "") -> Options:
    """Returns a copy of a dataclass, including nested dataclasses, with each field replaced by `values[dotted key]`.

    Args:
      default: the dataclass.
      values: dotted key -> value, for every field.
      prefix: the text before each key, for a nested dataclass, such as `mesh.`.
    """
    fields = {}
    for field in dataclasses.fields(default):
        inner, name = getattr(default, field.name), prefix + field.name
        fields[field.name] = construct(inner, values, f"{name}.") if dataclasses.is_dataclass(inner) else values[name]
    return dataclasses.replace(default, **fields)
