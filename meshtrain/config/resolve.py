"""Turns a configuration from a file, a notebook or a command line into a checked `Config`, and writes it as text.

All problems are reported together. `build` reads the values, `mesh_checks` checks them against a mesh, and the checks
of one task are defined next to the task (`tasks`).
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence

from meshtrain.cli import flags
from meshtrain.config import data_sources, tasks
from meshtrain.config.build import ConfigLike, build, default, defaults_of, file_content
from meshtrain.config.mesh_checks import on_mesh
from meshtrain.config.records import record
from meshtrain.config.schema import Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.sources import is_own
from meshtrain.data.tokenizer import NUM_BYTES
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.observe import profiler
from meshtrain.optim import learning_rate, optimizers
from meshtrain.options import problems
from meshtrain.sharding import mesh
from meshtrain.sharding.rules import Rules
from meshtrain.step import early_stop, loss_scale
from meshtrain.step.precision import compute_name


def resolve(
    given: ConfigLike,
    overrides: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
    *,
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
    reads_data: bool = True,
) -> Config:
    """Returns the checked configuration; if no axis of the mesh has size -1, also checks the placement of weights.

    >>> resolve({"mesh": {"data": 2}}, {"batch_size": "64"}).batch_size
    64
    >>> resolve({"learning_rate": {"name": "cosin"}})
    Traceback (most recent call last):
    meshtrain.errors.UserError: learning_rate.name: got 'cosin'; allowed: constant, linear, cosine, inverse_sqrt,
    noam, warmup_stable_decay, or package.module:function; did you mean 'cosine'?

    Args:
      given: the value that a configuration file returns; missing fields get their defaults.
      overrides: dotted key -> text as on the command line; takes precedence over `given`.
      also: error lines of the caller, which are reported together with the problems of the configuration.
      make_task: the caller's task function, which replaces the function that `task` names. If it has no attribute
        `options`, `model` has the options of the task that the configuration names, and only their bounds are checked.
      rules: logical axis -> mesh axes for the task's weights; None: the built-in table.
      reads_data: whether the data files must exist on this machine; a plan for another cluster does not need them.

    Raises:
      UserError: lists all unknown keys, wrong types, values outside their bounds, and contradictions between options.
    """
    config, found = build(given, overrides or {}, make_task)
    read_elsewhere = ("data.path", "data.validation_path") if is_own(config.data) else ()  # may be URLs
    found += [problem for problem in problems(config, "") if problem.key not in read_elsewhere]
    schema = flags.schema(start := defaults_of(config))
    faulty = {problem.key for problem in found}
    faulty |= {key for key in schema for group in faulty if key.startswith(f"{group}.")}  # a group set to one value
    # The checks across fields need legal values. So a wrong value is replaced by its default, and problems that depend
    # on this value are dropped.
    defaults = {key: entry.default for key, entry in schema.items() if key in faulty}
    mended = flags.construct(start, flags.flatten(dataclasses.asdict(config)) | defaults)
    mended, no_vocabulary = _with_vocabulary(mended, reads_data=reads_data)
    if make_task is not None and not hasattr(make_task, "options"):
        no_vocabulary = []  # this task function may not read `model`
    function = None if "task" in faulty else make_task or tasks.find(config.task)
    across = [
        *no_vocabulary,
        *mesh.check(mended.mesh),
        *data_sources.check(mended.data, reads_data=reads_data),
        *optimizers.check(mended.optimizer),
        *_length_problems(mended),
        *_base_problems(mended),
        *profiler.check(mended.profile),
        *loss_scale.check(mended.loss_scale, computes_in_float16=compute_name(mended.precision) == "float16"),
    ]
    sizes = dataclasses.asdict(mended.mesh)
    is_open = -1 in sizes.values() and not (found or across or also)  # otherwise report placement, too
    across += on_mesh(mended, {axis: max(size, 1) for axis, size in sizes.items()}, function, rules, is_open=is_open)
    found += [problem for problem in across if not faulty & {problem.key, *problem.depends_on}]
    refuse([*also, *found])
    return mended


def _with_vocabulary(config: Config, *, reads_data: bool) -> tuple[Config, list[Problem]]:
    """Replaces `model.vocab_size=0` by the number of tokens of the data's tokenizer.

    If the number is unknown, the size for bytes (257) is used, so that other checks can run.

    Args:
      config: a configuration whose fields are within their bounds. The options of its task may lack `vocab_size`.
      reads_data: whether the data files must exist on this machine. If true, problems that `data_sources.check` also
        returns are left out.

    Returns:
      The changed configuration, and the problems that prevent the number from being known.
    """
    if getattr(config.model, "vocab_size", None) != 0:
        return config, []
    size, problems = NUM_BYTES + 1, list[Problem]()
    try:
        size = data_sources.vocabulary_of(config.data)
    except UserError as error:
        why = f"{error.problems[0].key}: {error.problems[0].fault}"
        if not reads_data:
            problems = [
                Problem(
                    "model.vocab_size",
                    got=f"0 (the vocabulary of the data), which is unknown on this machine ({why})",
                    allowed="a number, or data on this machine",
                    nearest=50257,
                    depends_on=[error.problems[0].key],
                )
            ]
        elif not data_sources.check(config.data):
            problems = list(error.problems)
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model), problems


def _length_problems(config: Config) -> list[Problem]:
    """Returns a problem for each contradiction between the options that set the length of a run.

    A `num_steps` that equals its default does not contradict `num_epochs`.
    """
    found = learning_rate.check(config.learning_rate) + early_stop.check(config.early_stop, config.eval_every)
    if not config.num_epochs or config.num_steps == Config.num_steps:
        return found
    return [
        *found,
        Problem(
            "num_epochs",
            got=f"{config.num_epochs:g} with num_steps={config.num_steps}",
            allowed="one of the two options",
            nearest=f"num_epochs=0, or num_steps={Config.num_steps}, the default",
            depends_on=["num_steps"],
        ),
    ]


def _base_problems(config: Config) -> list[Problem]:
    """Returns a problem if `init_base` is set without `init_from`; nothing would read `init_base`."""
    if config.init_from or not config.init_base:
        return []
    return [
        Problem(
            "init_base",
            got=f"'{config.init_base}' without init_from",
            allowed="'', or the folder of the base model of init_from's adapters",
            nearest="''",
            depends_on=["init_from"],
        )
    ]


def configure(arguments: argparse.Namespace, also: Sequence[str] = (), *, reads_data: bool = True) -> Config:
    """Returns the checked configuration for a command line.

    Args:
      arguments: the namespace that `flags.arguments` returns.
      also: error lines of the caller, which are reported together with the problems of the configuration.
      reads_data: whether the data files must exist on this machine.

    Raises:
      UserError: lists all problems of the arguments, of the file, and of their combination.
    """
    also = [*arguments.problems, *also]
    try:
        given = file_content(arguments.config)
        build(given, {})  # raises if the file does not return a configuration
    except UserError as error:
        # Without the file its values are not known, but the overrides' names and types are.
        _, problems = build(default(), arguments.overrides)
        raise UserError(*also, *error.problems, *problems) from error
    return resolve(given, arguments.overrides, also, reads_data=reads_data)


def parse(
    argv: Sequence[str], extra: argparse.ArgumentParser | None = None, *, reads_data: bool = True
) -> tuple[Config, argparse.Namespace]:
    """Parses the command line of an entry point; returns the checked configuration and all arguments.

    Args:
      argv: the words after the program's name.
      extra: a parser with the additional arguments of the entry point.
      reads_data: whether the data files must exist on this machine.

    Raises:
      UserError: an argument is wrong, or the configuration has problems; lists all of them.
    """
    arguments = flags.arguments(argv, extra)
    return configure(arguments, reads_data=reads_data), arguments


def to_json(config: Config) -> str:
    """Returns the content of a run's config.json as text: the version, and every field of the configuration."""
    return json.dumps(record(config), indent=2) + "\n"
