"""Builds a typed, unchecked `Config` from a mapping, a configuration file, or the defaults.

The names of the task, the data source and functions are read first, because the options of these objects are fields of
the configuration. Only this module uses `ml_collections.ConfigDict`, for files that edit the defaults:

    from meshtrain.config import default

    def get_config():
        config = default()
        config.mesh.data = 2
        return config
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import ml_collections

from meshtrain.cli import flags
from meshtrain.config import data_sources, tasks
from meshtrain.config.records import without_version
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.sources import DataOptions
from meshtrain.errors import Problem, UserError, first_line
from meshtrain.options import Options, Value, Values, add_user_options, function_field

# The value that a configuration file's get_config() returns; fields that a mapping lacks have their defaults.
ConfigLike: TypeAlias = Config | ml_collections.ConfigDict | Mapping[str, Value]


def default(task: str = "decoder") -> ml_collections.ConfigDict:
    """Returns the default configuration as a ConfigDict, which a configuration file then edits.

    The ConfigDict accepts any key and any value, so that `resolve` can report all wrong keys and values together. A
    locked and typed ConfigDict would raise at the first.

    >>> from meshtrain.config import resolve
    >>> config = default()
    >>> config.mesh.data = 2
    >>> config.learning_rate.name = "linear"
    >>> resolve(config).mesh.data
    2

    Args:
      task: the name of a task; its options become the fields of `model`.

    Raises:
      UserError: no task has this name.
    """
    config = Config(task=task, model=tasks.find(task).options())
    return ml_collections.ConfigDict(dataclasses.asdict(config), type_safe=False)


def build(
    given: ConfigLike, overrides: Mapping[str, str], make_task: MakeTask | None = None
) -> tuple[Config, list[Problem]]:
    """Returns a configuration with the right types, and a problem for each key or value that could not be used.

    Args:
      given: the value that a configuration file returns.
      overrides: dotted key -> text from the command line; takes precedence over `given`.
      make_task: the caller's task function; None: the function that the option `task` names.

    Raises:
      UserError: `given` is not a mapping, or cannot be read.
    """
    right = Problem(
        "--config",
        allowed="the result of meshtrain.config.default(), with a value for each key",
        nearest="return config",
    )
    try:
        options = type(given.model) if isinstance(given, Config) else type(Config().model)
        given = given.to_dict() if isinstance(given, ml_collections.ConfigDict) else given
        given = dataclasses.asdict(given) if isinstance(given, Config) else given
        values = flags.flatten(without_version(given)) if isinstance(given, Mapping) else None
    except ml_collections.config_dict.RequiredValueError as error:
        raise UserError(right.with_parts(got=f"a required key without a value ({error})")) from error
    except Exception as error:  # a user's mapping may raise any exception
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(right.with_parts(got=f"a mapping that cannot be read ({reason})")) from error
    if values is None:
        raise UserError(right.with_parts(got=f"{type(given).__name__} from get_config()"))
    texts, problems = dict(overrides), list[Problem]()
    given_data = [key.removeprefix("data.") for key in (*values, *texts) if key.startswith("data.")]
    source = _option_text("data.source", values, texts, DataOptions.source)
    data = data_sources.options_of(source, given_data)()
    try:
        name = _option_text("task", values, texts, Config.task)
        if make_task is None:
            start = Config(task=name, model=tasks.find(name).options(), data=data)
        else:
            start = Config(task=tasks.name_of(make_task), model=_options_of(make_task, name, options)(), data=data)
            values["task"] = start.task
            texts.pop("task", None)
    except UserError as error:
        # Without the task, the fields of `model` are not known.
        problems, start = list(error.problems), Config(data=data)
        for given_here in (values, texts):
            for key in [key for key in given_here if key == "task" or key == "model" or key.startswith("model.")]:
                del given_here[key]
    if isinstance(values.get("model"), Mapping) and not dataclasses.fields(start.model):
        del values["model"]  # the task has options, but no fields
    problems += _drop_other_defaults(start, values, is_named=make_task is None)
    start, lines = _with_own_options(start, values, texts)
    problems += lines
    typed, wrong = flags.collect(flags.schema(start), values, texts)
    return flags.construct(start, typed), problems + wrong


def defaults_of(config: Config) -> Config:
    """Returns a configuration with the fields of `config`, all at their defaults, except that `task` is unchanged."""
    return Config(task=config.task, **{name: type(options)() for name, options in groups(config).items()})


def _option_text(key: str, values: Mapping[str, Value], texts: Mapping[str, str], default: str) -> str:
    """Returns the value of an option that must be a text, before the configuration is built.

    Values of other types are skipped.

    Args:
      key: the dotted key of the option.
      values: dotted key -> value from the configuration file.
      texts: dotted key -> text from the command line; takes precedence over `values`.
      default: the result if neither sets the option.
    """
    given = [among[key] for among in (texts, values) if key in among]
    return next((name for name in given if isinstance(name, str)), default)


def _options_of(make_task: MakeTask, name: str, options: type) -> type:
    """Returns the class of the fields of `model` for the caller's task function.

    Args:
      make_task: the caller's task function. If it has an attribute `options`, this attribute is the result.
      name: the value of the option `task`. If `make_task` has no `options`, the result is the options class of the task
        with this name.
      options: the class of `model` in the caller's configuration. If `make_task` has no `options`, and `name` is the
        name of `make_task` itself, this class is the result.
    """
    if hasattr(make_task, "options"):
        tasks.refuse_options(tasks.name_of(make_task), make_task)
        return make_task.options
    return options if name == tasks.name_of(make_task) else tasks.find(name).options


def _with_own_options(start: Config, values: Values, texts: dict[str, str]) -> tuple[Config, list[Problem]]:
    """Returns the defaults, in which each group that names a user's function also has this function's options.

    The second result is a problem for each function that cannot be used. The options of such a function are unknown,
    and are removed from `values` and `texts`, in place. If `texts` names a function in place of the function in
    `values`, the options of the replaced function are removed from `values`, in place.

    Args:
      start: the defaults of the configuration, without options of user functions.
      values: dotted key -> value from the configuration file.
      texts: dotted key -> text from the command line.
    """
    problems = list[Problem]()
    for name, options in groups(start).items():
        if not function_field(options):
            continue
        key = f"{name}.{function_field(options)}"
        chosen = [given[key] for given in (texts, values) if key in given] or [
            getattr(options, function_field(options))
        ]
        strange: list[Values] = [values] if chosen[0] != chosen[-1] else []
        try:
            options = add_user_options(options, name, chosen[0])
        except UserError as error:
            problems += error.problems
            strange = [values, texts]
            for given in strange:
                given.pop(key, None)
        known = {f"{name}.{field.name}" for field in dataclasses.fields(options)}
        for given in strange:
            for other in [other for other in given if other.startswith(f"{name}.") and other not in known]:
                del given[other]
        start = dataclasses.replace(start, **{name: options})
    return start, problems


def groups(config: Config) -> dict[str, Options]:
    """Returns name -> options of each group of a configuration, such as `mesh` or `optimizer`."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}


def _drop_other_defaults(start: Config, values: Values, *, is_named: bool) -> list[Problem]:
    """Returns a problem if `values` has the decoder's options, from `default()`, although the task is another task.

    The decoder's options are removed from `values`, in place. If the caller passes a task function, decoder options
    with their defaults are no problem, because the function may have no name for `default(task=...)`.

    Args:
      start: the task's defaults.
      values: dotted key -> value from the configuration file.
      is_named: whether the option `task` selects the task; False: the caller passes a task function.
    """
    own, others = (flags.flatten({"model": dataclasses.asdict(config.model)}) for config in (start, Config()))
    strange = others.keys() - own.keys()
    if not strange or not strange <= values.keys():
        return []
    given = {key: values.pop(key) for key in others if key in values}
    is_default = all(type(value) is type(others[key]) and value == others[key] for key, value in given.items())
    if is_default and not is_named:
        return []
    return [
        Problem(
            "task",
            got=f"'{start.task}' in a configuration that starts with default(), which has the model options of "
            f"task '{Config.task}'",
            allowed=f"default(task='{start.task}'), which has the model options of this task",
            nearest=f"default(task='{start.task}')",
        )
    ]


def file_content(path: str | None) -> ConfigLike:
    """Runs the configuration file at `path` and returns the value of its `get_config()`; {} if `path` is None.

    The value {} sets no option, so only the option `task` determines the fields of `model`.

    Raises:
      UserError: one line: the file is missing, is invalid or raises an exception.
    """
    return {} if path is None else flags.load(path, list(flags.schema(Config())))
