"""A configuration from a file, a notebook or a command line: typed, checked as a whole, and written as text.

Inside the program a configuration is the frozen `Config`. An ml_collections.ConfigDict is used only in this module, for
files that edit the defaults:

    from meshtrain.config import default

    def get_config():
        config = default()
        config.mesh.data = 2
        return config

Checks return lines: got, allowed, nearest fix. They take the sizes of the mesh as {axis: size}. An axis of unknown size
is passed as 1, which can only weaken a check. Those of one task stand beside it (`tasks.py`).
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import ml_collections

from meshtrain.cli import flags
from meshtrain.config import data_sources, former, meanings, reductions, tasks
from meshtrain.config.fields import CONFIG_FILE as CONFIG_FILE
from meshtrain.config.fields import Config as Config
from meshtrain.config.tasks import MakeTask
from meshtrain.data.sources import DataOptions, is_own
from meshtrain.data.tokenizer import NUM_BYTES
from meshtrain.errors import Problem, UserError, first_line, nearest_multiple, refuse
from meshtrain.models.lora import LoraOptions
from meshtrain.models.task import Task, entries, stack_problems
from meshtrain.observe import profiler
from meshtrain.optim import learning_rate, moments, optimizers
from meshtrain.options import Options, Value, Values, naming, own_check, problems, with_own
from meshtrain.pipeline import check as pipeline_check
from meshtrain.pipeline.stages import Stack, stack_of
from meshtrain.sharding import mesh, trainable
from meshtrain.sharding.rules import CONTEXT, DATA, PIPELINE, Rules, default_rules, expert_axes
from meshtrain.sharding.stored import MAX_LEVEL, level_problems, num_parts, rules_of_level
from meshtrain.sharding.tree_problems import tree_problems
from meshtrain.sharding.trees import Arrays, NamesTree, select
from meshtrain.step import early_stop, loss_scale
from meshtrain.step.precision import compute_name

# What a configuration file returns; fields that a mapping lacks have their defaults.
Given: TypeAlias = Config | ml_collections.ConfigDict | Mapping[str, Value]


class _Defaults(ml_collections.ConfigDict):
    """Defaults in which a file may set the fields of a group of a former version: `config.compression.kind`."""

    def __getitem__(self, key: str) -> Value:
        """Returns a field or a group; a former group is there once it is asked for."""
        if key in former.GROUPS and key not in self:
            self[key] = ml_collections.ConfigDict(type_safe=False)
        return super().__getitem__(key)


def default(task: str = "decoder") -> ml_collections.ConfigDict:
    """Returns the defaults for a configuration file to edit.

    The ConfigDict accepts any key and any value, so that `resolve` can report all wrong ones together. A locked and
    typed ConfigDict would raise at the first.

    >>> config = default()
    >>> config.mesh.data = 2
    >>> config.learning_rate.name = "linear"
    >>> resolve(config).mesh.data
    2

    Args:
      task: the name of a task; its options become the fields of `model`.

    Raises:
      UserError: no such task, see `tasks.find`.
    """
    config = Config(task=task, model=tasks.find(task).options())
    return _Defaults(dataclasses.asdict(config), type_safe=False)


def resolve(
    given: Given,
    overrides: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
    *,
    make_task: MakeTask | None = None,
    rules: Rules | None = None,
    reads_data: bool = True,
) -> Config:
    """Returns the configuration with every value checked, and its placement where it states all sizes of the mesh.

    >>> resolve({"mesh": {"data": 2}}, {"batch_size": "64"}).batch_size
    64
    >>> resolve({"learning_rate": {"name": "cosin"}})
    Traceback (most recent call last):
    meshtrain.errors.UserError: learning_rate.name: got 'cosin'; allowed: constant, linear, cosine, inverse_sqrt,
    noam, warmup_stable_decay, or package.module:function; did you mean 'cosine'?

    Args:
      given: what a configuration file returns; missing fields have their defaults.
      overrides: dotted key -> text as on the command line; takes precedence over `given`.
      also: problems found elsewhere, to be reported together with those found here.
      make_task: the caller's task function, instead of the one that `task` names. If it has no `options`, `model` holds
        the options of the task that the configuration names; they are checked one by one, not against other fields.
      rules: logical axis -> mesh axes for the task's weights; None: the built-in table.
      reads_data: whether the data files must exist on this machine; a plan for another cluster does not need them.

    Raises:
      UserError: unknown keys, wrong types, values outside their bounds, and what `check` finds; all of them.
    """
    config, found = built(given, overrides or {}, make_task)
    read_elsewhere = ("data.path", "data.validation_path") if is_own(config.data) else ()  # URLs too
    found += [problem for problem in problems(config, "") if problem.key not in read_elsewhere]
    schema = flags.schema(start := defaults_of(config))
    faulty = {problem.key for problem in found}
    faulty |= {key for key in schema for group in faulty if key.startswith(f"{group}.")}  # of a value that is no group
    # The checks across fields need legal values: a wrong one is replaced by its default, problems that depend on it are
    # dropped.
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
    is_open = -1 in sizes.values() and not (found or across or also)  # all problems come at once
    across += _on_mesh(mended, {axis: max(size, 1) for axis, size in sizes.items()}, function, rules, is_open=is_open)
    found += [problem for problem in across if not faulty & {problem.key, *problem.depends_on}]
    refuse([*also, *found])
    return mended


def _with_vocabulary(config: Config, *, reads_data: bool) -> tuple[Config, list[Problem]]:
    """Returns the configuration with `model.vocab_size=0` filled in, and a line for each reason why it is unknown.

    It means as many tokens as the data's tokenizer has. If that is unknown, the size for bytes is filled in, so that
    other checks can run.

    Args:
      config: each field within its own bounds; the options of its task may have a field `vocab_size`.
      reads_data: as in `resolve`. If so, lines of `data_sources.check` are not repeated.
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
                    got=f"0, as many tokens as the data have, which are not known here ({why})",
                    allowed="a number, or data that are here",
                    nearest=50257,
                    depends_on=[error.problems[0].key],
                )
            ]
        elif not data_sources.check(config.data):
            problems = list(error.problems)
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model), problems


def _length_problems(config: Config) -> list[Problem]:
    """Returns one line for each contradiction in how long a run is; the default of `num_steps` is no choice."""
    found = learning_rate.check(config.learning_rate) + early_stop.check(config.early_stop, config.eval_every)
    if not config.num_epochs or config.num_steps == Config.num_steps:
        return found
    return [
        *found,
        Problem(
            "num_epochs",
            got=f"{config.num_epochs:g} with num_steps={config.num_steps}",
            allowed="one of both",
            nearest=f"num_epochs=0, or num_steps={Config.num_steps}, the default",
            depends_on=["num_steps"],
        ),
    ]


def _base_problems(config: Config) -> list[Problem]:
    """Returns one line if `init_base` would not be read, because nothing is loaded."""
    if config.init_from or not config.init_base:
        return []
    return [
        Problem(
            "init_base",
            got=f"'{config.init_base}' without init_from",
            allowed="'', or the folder of the model that the adapters of init_from belong to",
            nearest="''",
            depends_on=["init_from"],
        )
    ]


def check(
    config: Config, mesh_shape: Mapping[str, int], make_task: MakeTask | None = None, rules: Rules | None = None
) -> list[Problem]:
    """Returns one line for each reason why a resolved configuration does not fit a mesh of these sizes.

    For the task function and the rules see `resolve`.
    """
    return _on_mesh(config, mesh_shape, make_task or tasks.find(config.task), rules)


def check_filled(
    config: Config, mesh_shape: Mapping[str, int], make_task: MakeTask | None = None, rules: Rules | None = None
) -> list[Problem]:
    """Returns the lines of `check` for a mesh with an axis of -1, now filled in; none if `resolve` has checked."""
    is_open = -1 in dataclasses.astuple(config.mesh)
    return check(config, mesh_shape, make_task, rules) if is_open else []


def _on_mesh(
    config: Config,
    mesh_shape: Mapping[str, int],
    function: MakeTask | None,
    rules: Rules | None,
    *,
    is_open: bool = False,
) -> list[Problem]:
    """Returns the lines of `check`; without a task function only those that do not depend on the task.

    Those of the weights' placement are left out for an open mesh that has no other problem: `check_filled` has them.
    """
    rules = rules_of_level(rules or default_rules(config.layout), config.zero.effective_level)
    num_groups = config.local_steps.groups if config.local_steps.period else 0
    num_parts = num_microbatches(config, mesh_shape)
    problems = batch_problems(config.batch_size, rules, mesh_shape, num_parts, num_groups)
    problems += sequence_problems(config.sequence_length, rules, mesh_shape)
    problems += level_problems(config.zero, config.mesh.data, config.mesh.fsdp)
    problems += reductions.problems(config, mesh_shape)
    if function is None:
        return problems
    own = own_check("task", tasks.name_of(function), function, (config, mesh_shape))
    problems += own + tasks.watch_problems(config, function)
    on_one_device = math.prod(mesh_shape.values()) == 1
    if on_one_device and not config.optimizer.trainable and not config.lora.rank and not rules.own:
        return problems
    try:
        if unfit := tasks.lora_problems(config, function):
            problems += unfit
            config = dataclasses.replace(config, lora=LoraOptions())
        if is_open and not problems:
            return problems
        task, params, axes = tasks.abstract_weights(config, function, on_one_device=on_one_device)
        if mesh_shape[CONTEXT] > 1:
            problems += _parts_of_sequences(config, task, rules, mesh_shape)
        if mesh_shape[PIPELINE] > 1:
            has_option = hasattr(getattr(function, "options", None), "num_layers")
            problems += _in_stages(config, mesh_shape, task, has_option=has_option)
    except Exception:
        if own:
            return problems  # contradictory options, reported above, may make tracing the weights fail
        raise
    if stack := stack_of(task.stages, mesh_shape[PIPELINE], config.pipeline.num_chunks):
        if unstacked := stack_problems(stack.num_layers, params, axes):
            return problems + unstacked
        problems += optimizers.storage_problems(config.optimizer, stack.num_layers, stack.shape)
        problems += _rounding_problems(config, stack)
        params = {**params, "layers": stack.places(params["layers"])}
    return problems + weight_problems(config, mesh_shape, params, axes, rules)


def _in_stages(config: Config, mesh_shape: Mapping[str, int], task: Task, *, has_option: bool) -> list[Problem]:
    """Returns one line for each reason why a pipeline of this size cannot run the task."""
    size = mesh_shape["pipeline"]
    if task.stages is None:
        return [
            Problem(
                "mesh.pipeline",
                got=f"{size}, and this task has no stages",
                allowed=1,
                nearest="mesh.pipeline=1",
                depends_on=["task"],
            )
        ]
    return pipeline_check.check(
        config.pipeline,
        num_stages=size,
        num_layers=task.stages.num_layers,
        num_microbatches=num_microbatches(config, mesh_shape),
        key="model.num_layers" if has_option else "Task.stages.num_layers",
    )


def _rounding_problems(config: Config, stack: Stack) -> list[Problem]:
    """Returns one line for each array that is rounded at random, if layers are spread over the stages.

    Random bits depend on the place in memory, which is then another one than on one device.
    """
    if stack.places_of_layers is None:
        return []
    spread = f"with {stack.num_layers} layers spread over {stack.num_stages} stages x {stack.num_chunks} chunks, whose "
    spread += "random rounding would be another one than on one device"
    values = {
        "optimizer.moments": (config.optimizer.moments, "float32"),
        "precision.param_dtype": (config.precision.param_dtype.replace("auto", "float32"), "float32"),
    }
    return [
        Problem(
            key,
            got=f"{value} {spread}",
            allowed=f"{fix}, or stages that divide the layers",
            nearest=f"{key}={fix}",
            depends_on=["mesh.pipeline", "pipeline.num_chunks", "model.num_layers"],
        )
        for key, (value, fix) in values.items()
        if value != fix
    ]


def _parts_of_sequences(config: Config, task: Task, rules: Rules, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns one line if `context`, larger than 1, should split sequences, and the task's batch has none."""
    split = {name for name, axes in rules.activations.items() if CONTEXT in axes}
    if any(split & set(entry.axes) for entry in entries(task, config.batch_size).values()):
        return []
    return [
        Problem(
            f"mesh.{CONTEXT}",
            got=f"{mesh_shape[CONTEXT]}, and no entry of this task's batch has a dim 'sequence'",
            allowed=1,
            nearest=f"mesh.{CONTEXT}=1",
            depends_on=["task"],
        )
    ]


def batch_problems(
    batch_size: int, rules: Rules, mesh_shape: Mapping[str, int], num_microbatches: int, num_groups: int = 0
) -> list[Problem]:
    """Returns one line where the global batch does not divide by its shards (data x fsdp) x microbatches.

    Args:
      batch_size: sequences.
      rules: the axes that split an activation's `batch` dim count.
      mesh_shape: the size of each mesh axis.
      num_microbatches: parts that are computed one after the other.
      num_groups: that train apart, which then divide the batch in place of the data axis; 0: none.
    """
    sizes = batch_shards(rules, mesh_shape)
    if num_groups:
        sizes = {"local_steps.groups": num_groups} | {name: n for name, n in sizes.items() if name != f"mesh.{DATA}"}
    divisor = math.prod(sizes.values()) * num_microbatches
    if batch_size % divisor == 0:
        return []
    factors = " x ".join([*(f"{name} {size}" for name, size in sizes.items()), f"{num_microbatches} microbatches"])
    return [
        Problem(
            "batch_size",
            got=batch_size,
            allowed=f"a multiple of {divisor} = {factors}",
            nearest=nearest_multiple(batch_size, divisor),
            depends_on=[*sizes, "accumulation_steps", "pipeline.num_microbatches"],
        )
    ]


def batch_shards(rules: Rules, mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Returns option -> size of each mesh axis that splits the sequences of a batch; see `batch_problems`."""
    # An axis that is there for experts alone is left out where it has size 1.
    axes = [axis for axis in rules.activations["batch"] if axis not in expert_axes() or mesh_shape[axis] > 1]
    return {f"mesh.{axis}": mesh_shape[axis] for axis in axes}


def sequence_problems(
    sequence_length: int, rules: Rules, mesh_shape: Mapping[str, int], name: str = "sequence_length"
) -> list[Problem]:
    """Returns one line where a rule splits the sequence of an activation into unequal shards.

    Args:
      sequence_length: in tokens.
      rules: the axes that split `sequence`, and between layers `residual_sequence`, count.
      mesh_shape: the size of each mesh axis.
      name: the option that holds the length.
    """
    for rule in ("residual_sequence", "sequence"):  # what fits the first fits the second
        axes = rules.activations[rule] if rule in rules.activations else ()
        parts = num_parts(axes, mesh_shape)
        if sequence_length % parts:
            over = " x ".join(f"mesh.{axis} = {mesh_shape[axis]}" for axis in axes if mesh_shape[axis] > 1)
            return [
                Problem(
                    name,
                    got=sequence_length,
                    allowed=f"a multiple of {parts}, as rule '{rule}' splits it over {over}",
                    nearest=nearest_multiple(sequence_length, parts),
                    depends_on=[f"mesh.{axis}" for axis in axes],
                )
            ]
    return []


def weight_problems(
    config: Config, mesh_shape: Mapping[str, int], params: Arrays, axes: NamesTree, rules: Rules
) -> list[Problem]:
    """Returns one line for each reason why a task's weights cannot be stored on a mesh of these sizes.

    The dim `layers` is left out: what stacks layers outside of a pipeline's stages is the task's own.

    Args:
      config: the configuration. The lines name the options in `config.model` that set the size of a dim.
      mesh_shape: the size of each mesh axis.
      params: abstract parameters in layer order, with a pipeline's empty places.
      axes: their logical axes.
      rules: the table, with the storage axes of the ZeRO level.
    """
    mask, problems, chosen = None, list[Problem](), config.optimizer
    if not trainable.check(chosen.trainable):  # which `optimizers.check` reports
        try:
            mask = trainable.trained_mask(chosen.trainable, params, has_adapters=config.lora.rank > 0)
        except UserError as error:
            problems = list(error.problems)
    if chosen.moments == moments.EIGHT_BITS and not moments.check_block(chosen.moment_block):
        (of_trained, _), (axes_of_trained, _) = select(params, mask), select(axes, mask)
        problems += moments.problems(chosen.moment_block, of_trained, axes_of_trained, rules.parameters, mesh_shape)
    sizes = {
        field.metadata["dim"]: (f"model.{field.name}", getattr(config.model, field.name))
        for field in dataclasses.fields(config.model)
        if field.metadata and field.metadata["dim"]
    }
    level = min(config.zero.effective_level, MAX_LEVEL)
    return problems + tree_problems(
        params, axes, rules, mesh_shape, level, options=sizes, trained=mask, elsewhere=("layers",)
    )


def num_microbatches(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """Returns the number of microbatches of a step: accumulation steps times, with a pipeline, its microbatches."""
    in_pipeline = config.pipeline.num_microbatches if mesh_shape["pipeline"] > 1 else 1
    return config.accumulation_steps * in_pipeline


def units_on_device(config: Config, task: Task, rules: Rules, mesh_shape: Mapping[str, int]) -> float:
    """Returns how many units (tokens, images) of a step a device computes.

    They are split over the batch's axes, and along sequences where an entry of the task's batch has them.
    """
    has_sequence = any("sequence" in entry.axes for entry in entries(task, config.batch_size).values())
    split = (*rules.activations["batch"], *(rules.activations["sequence"] if has_sequence else ()))
    return task.num_units / num_parts(split, mesh_shape)


def built(
    given: Given, overrides: Mapping[str, str], make_task: MakeTask | None = None
) -> tuple[Config, list[Problem]]:
    """Returns a configuration of the right types, and one line for each key or value that was left out.

    The task is read first, because the fields of `model` are those of its options, and likewise the reduction.
    """
    right = Problem(
        "--config", allowed="what meshtrain.config.default() returns, a value in each place", nearest="return config"
    )
    try:
        options = type(given.model) if isinstance(given, Config) else type(Config().model)
        given = given.to_dict() if isinstance(given, ml_collections.ConfigDict) else given
        given = dataclasses.asdict(given) if isinstance(given, Config) else given
        values = flags.flatten(meanings.without_version(given)) if isinstance(given, Mapping) else None
    except ml_collections.config_dict.RequiredValueError as error:
        raise UserError(right.with_parts(got=f"no value where one is required ({error})")) from error
    except Exception as error:  # whatever a mapping of the user's raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(right.with_parts(got=f"a mapping that cannot be read ({reason})")) from error
    if values is None:
        raise UserError(right.with_parts(got=f"{type(given).__name__} from get_config()"))
    texts, problems = dict(overrides), list[Problem]()
    given_data = [key.removeprefix("data.") for key in (*values, *texts) if key.startswith("data.")]
    source = _named("data.source", values, texts, DataOptions.source)
    data = data_sources.options_of(source, given_data)()
    try:
        name = _named("task", values, texts, Config.task)
        if make_task is None:
            start = Config(task=name, model=tasks.find(name).options(), data=data)
        else:
            start = Config(task=tasks.name_of(make_task), model=_options_of(make_task, name, options)(), data=data)
            values["task"] = start.task
            texts.pop("task", None)
    except UserError as error:
        # Which fields `model` has is not known without the task.
        problems, start = list(error.problems), Config(data=data)
        for given_here in (values, texts):
            for key in [key for key in given_here if key == "task" or key == "model" or key.startswith("model.")]:
                del given_here[key]
    if isinstance(values.get("model"), Mapping) and not dataclasses.fields(start.model):
        del values["model"]  # the task has options, and none of them
    problems += _drop_other_defaults(start, values, texts)
    problems += former.rename(values, texts, flags.flatten(dataclasses.asdict(start))).values()
    start, lines = _with_own_options(start, values, texts)
    problems += lines
    typed, wrong = flags.collect(flags.schema(start), values, texts)
    return flags.construct(start, typed), problems + wrong


def defaults_of(config: Config) -> Config:
    """Returns the defaults of the configuration's task, source of data, and of the functions that it names."""
    return Config(task=config.task, **{name: type(options)() for name, options in groups(config).items()})


def _named(key: str, values: Mapping[str, Value], texts: Mapping[str, str], default: str) -> str:
    """Returns the text that dotted keys, texts first, have for an option; its default where they have none."""
    given = [among[key] for among in (texts, values) if key in among]
    return next((name for name in given if isinstance(name, str)), default)


def _options_of(make_task: MakeTask, name: str, options: type) -> type:
    """Returns the options class of the caller's task function; if it has none, that of the task named `name`."""
    if hasattr(make_task, "options"):
        tasks.refuse_options(tasks.name_of(make_task), make_task)
        return make_task.options
    return options if name == tasks.name_of(make_task) else tasks.find(name).options


def _with_own_options(start: Config, values: Values, texts: dict[str, str]) -> tuple[Config, list[Problem]]:
    """Returns defaults in which the options of each user's function stand beside the one that names it.

    Takes out of `values`, in place, the options of a function in whose place `texts` names another. Where a function is
    wrong, its options are not known: they are taken out of both, and a line says what is wrong.
    """
    problems = list[Problem]()
    for name, options in groups(start).items():
        if not naming(options):
            continue
        key = f"{name}.{naming(options)}"
        chosen = [given[key] for given in (texts, values) if key in given] or [getattr(options, naming(options))]
        strange: list[Values] = [values] if chosen[0] != chosen[-1] else []
        try:
            options = with_own(options, name, chosen[0])
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
    """Returns name -> options of each group of a configuration."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}


def _drop_other_defaults(start: Config, values: Values, texts: Mapping[str, str]) -> list[Problem]:
    """Takes another task's defaults out of `values`, in place; returns one line where that is ambiguous.

    A file that begins with `default()` and then names another task holds the whole `model` of the decoder. A value that
    equals the decoder's default was not chosen by the user. It is ambiguous if this task has a field of the same name
    with another default.
    """
    own = flags.flatten({"model": dataclasses.asdict(start.model)})
    held = {key for key in values if key.startswith("model.")}
    # A configuration that has just this task's options begins with no other's, whose modules may be dear to import.
    for name in tasks.names() if held and held != set(own) else ():
        others = flags.flatten({"model": dataclasses.asdict(tasks.find(name).options())})
        only_here = set(own) - set(others)
        if not held >= set(others) or set(own) == set(others) or (only_here and held >= only_here):
            continue  # not all of the other task's fields, or this task's
        # A comparison with an array, or with an object of the user's, may raise.
        plain = [key for key in others if isinstance(values[key], int | float | str)]
        same = [key for key in plain if values[key] == others[key]]
        unclear = [key for key in same if key in own and own[key] != others[key] and key not in texts]
        for key in same:
            del values[key]
        begins = f"'{start.task}' in a configuration that begins with the options of '{name}'"
        return [
            Problem(
                "task",
                got=f"{begins}, and {key} = {others[key]} is a default of both or a choice",
                allowed=f"default(task='{start.task}'), whose model is this task's",
                nearest="that",
            )
            for key in unclear[:1]
        ]
    return []


def file_content(path: str | None) -> Given:
    """Returns what a configuration file returns, see `flags.load`.

    Without a file it is {}: nothing was chosen, and `task` alone decides which fields `model` has.
    """
    return {} if path is None else flags.load(path, list(flags.schema(Config())))


def configure(arguments: argparse.Namespace, also: Sequence[str] = (), *, reads_data: bool = True) -> Config:
    """Returns the configuration that a command line asks for.

    Args:
      arguments: what `flags.arguments` returns.
      also: see `resolve`.
      reads_data: see `resolve`.

    Raises:
      UserError: all problems of the file, of the overrides and of the two together.
    """
    also = [*arguments.problems, *also]
    try:
        given = file_content(arguments.config)
        built(given, {})  # raises where the file returns something other than a configuration
    except UserError as error:
        # Without the file its values are not known, but the overrides' names and types are.
        _, problems = built(default(), arguments.overrides)
        raise UserError(*also, *error.problems, *problems) from error
    return resolve(given, arguments.overrides, also, reads_data=reads_data)


def parse(
    argv: Sequence[str], extra: argparse.ArgumentParser | None = None, *, reads_data: bool = True
) -> tuple[Config, argparse.Namespace]:
    """Returns the configuration, and the namespace of `flags.arguments`, for an entry point.

    Args:
      argv: the words after the program's name.
      extra: the entry point's own arguments.
      reads_data: see `resolve`.

    Raises:
      UserError: a wrong argument, or all problems of the configuration.
    """
    arguments = flags.arguments(argv, extra)
    return configure(arguments, reads_data=reads_data), arguments


def to_json(config: Config) -> str:
    """Returns the configuration as the text of `config.json`, see `meanings.record`."""
    return json.dumps(meanings.record(config), indent=2) + "\n"
