"""Imports tasks by name and calls them: built-in tasks, and a user's function as `package.module:function`.

A task function is (config, placement) -> Task. Its attribute `options` is the frozen dataclass of its options, which
becomes `config.model`; each field is an `option(default, text)`. It may have an attribute `check`, a function (config,
mesh_shape) -> an error line for each problem. For a built-in task, an object of `BuiltIn` is the function with both
attributes.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypedDict

from jax.typing import DTypeLike

from meshtrain import options, user_functions
from meshtrain.config.data_sources import names as source_names
from meshtrain.config.schema import Config
from meshtrain.data.sources import TOKENS, DataOptions, reads_documents
from meshtrain.data.tokenizer import NUM_BYTES
from meshtrain.errors import Problem, UserError, refuse
from meshtrain.models import lora, problems, remat
from meshtrain.models.lora import LoraOptions, with_adapters
from meshtrain.models.remat import RematOptions
from meshtrain.models.task import Task, kind_problems
from meshtrain.models.transformer import task as decoder_task
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.observe.trackers import ACTIVATIONS
from meshtrain.options import Options
from meshtrain.pipeline.schedules import layers_in_chunk
from meshtrain.sharding.param_sharding import params_with_axes
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.trees import Arrays, NamesTree
from meshtrain.step.precision import compute_dtype, compute_name, in_fp8, output_dtype
from meshtrain.user_functions import UserObject

MakeTask = Callable[[Config, Placement], Task]
Check = Callable[[Config, Mapping[str, int]], list[Problem]]
KEY = "task"


class NamedTask(Protocol):
    """The interface of a task function with an attribute `options`, which a configuration can name."""

    @property
    def options(self) -> type:
        """The class of the task's options, a frozen dataclass."""
        ...

    def __call__(self, config: Config, placement: Placement) -> Task:
        """Returns the task of a configuration."""
        ...


@dataclasses.dataclass(frozen=True)
class BuiltIn:
    """A built-in task function, with properties that are known before it is called.

    Attributes:
      name: the value of `config.task` that selects this task.
      make: the function (config, placement) -> Task.
      options: the class of the task's options, a frozen dataclass.
      check: the function (config, mesh_shape) -> an error line for each contradiction of options, data and mesh.
      takes_adapters: whether the task's layers support the adapters of `config.lora`; `make` then adds the adapters.
      unread: the dotted keys of options, or groups of options, that the task never reads.
    """

    name: str
    make: MakeTask
    options: type
    check: Check
    takes_adapters: bool = False
    unread: tuple[str, ...] = ()

    def __call__(self, config: Config, placement: Placement) -> Task:
        """Returns the task of a configuration."""
        return self.make(config, placement)


class TextSettings(TypedDict):
    """The arguments that all built-in text tasks share.

    Attributes:
      batch_size: sequences in the global batch.
      sequence_length: tokens in a sequence.
      dtype: the dtype of computations.
      output_dtype: the dtype of logits.
      remat: options for what the backward pass recomputes.
      placement: where arrays are stored on the mesh.
    """

    batch_size: int
    sequence_length: int
    dtype: DTypeLike
    output_dtype: DTypeLike
    remat: RematOptions
    placement: Placement


def of_text(config: Config, placement: Placement) -> TextSettings:
    """Returns the arguments that all built-in text tasks share."""
    return {
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "dtype": compute_dtype(config.precision),
        "output_dtype": output_dtype(config.precision),
        "remat": config.remat,
        "placement": placement,
    }


def _decoder(config: Config, placement: Placement) -> Task:
    rate = config.optimizer.balance_rate
    watches = config.observe.layers == ACTIVATIONS
    task = decoder_task.decoder(config.model, **of_text(config, placement), balance_rate=rate, watches=watches)
    return with_adapters(task, config.lora, config.model.share_of_experts)


def _check_decoder(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each contradiction of a decoder's options with each other, the data or the mesh.

    Args:
      config: a configuration of the task `decoder`, whose fields are within their bounds.
      mesh_shape: the size of each mesh axis.
    """
    return source_problems(config, TOKENS, "packed tokens") + model_problems(config, mesh_shape)


def model_problems(config: Config, mesh_shape: Mapping[str, int]) -> list[Problem]:
    """Returns an error line for each contradiction between a decoder's options, other options, and the mesh.

    `source_problems` checks whether the data source provides tokens; this function does not.

    Args:
      config: a configuration whose `model` is `DecoderOptions`; its fields are within their bounds.
      mesh_shape: the size of each mesh axis.
    """
    size, num_layers = mesh_shape["pipeline"], config.model.num_repeated
    in_chunk = layers_in_chunk(num_layers, size, config.pipeline.num_chunks) if size > 1 else 0
    computes_in = compute_name(config.precision), in_fp8(config.precision)
    return [
        *problems.of_decoder(config.model, config.sequence_length, *computes_in, mesh_shape),
        *_vocabulary_problems(config.model, config.data),
        *remat.check(config.remat, num_layers, size, in_chunk=in_chunk),
    ]


def source_problems(config: Config, allowed: Sequence[str], what: str) -> list[Problem]:
    """Returns an error line if the configuration's built-in data source does not provide the examples of its task.

    Args:
      config: the configuration.
      allowed: the names of the built-in sources that fit the task.
      what: a description of the examples that the task takes, for the error line.
    """
    source = config.data.source
    if source in allowed or source not in source_names():
        return []
    return [
        Problem(
            "data.source",
            got=f"{source} with task={config.task}, which trains on {what}",
            allowed=f"{', '.join(allowed)}, or package.module:function",
            nearest=f"data.source={allowed[0]}",
        )
    ]


def _vocabulary_problems(model: Options, data: DataOptions) -> list[Problem]:
    """Returns an error line if the byte tokenizer has more tokens than the model.

    Other tokenizers are checked when the data are opened.
    """
    if not reads_documents(data) or data.tokenizer != "bytes" or model.vocab_size > NUM_BYTES:
        return []
    return [
        Problem(
            "model.vocab_size",
            got=model.vocab_size,
            condition="with data.tokenizer = bytes",
            allowed=f"at least {NUM_BYTES + 1}, the 256 bytes and the end of a document",
            nearest=NUM_BYTES + 1,
            depends_on=["data.tokenizer"],
        )
    ]


decoder = BuiltIn("decoder", _decoder, DecoderOptions, _check_decoder, takes_adapters=True)


def names() -> list[str]:
    """Returns the names of the built-in tasks, including tasks of installed optional packages."""
    return [decoder.name, *user_functions.plugin_names(KEY)]


def find(name: str) -> NamedTask:
    """Returns the task function that a value of `config.task` names.

    The name is the name of a built-in task, or `package.module:function`; then the module is imported.

    Raises:
      UserError: the function cannot be imported, or its attribute `options` is missing or invalid.
    """
    if name == decoder.name:
        return decoder
    function = user_functions.import_function(KEY, name, names())
    refuse_options(name, function)
    return typing.cast(NamedTask, function)


def refuse_options(name: str, function: UserObject) -> None:
    """Checks the attribute `options` of a task function.

    Args:
      name: the value of `config.task` that names the function, for errors.
      function: the task function.

    Raises:
      UserError: the attribute is missing, or is not a frozen dataclass of `option`s.
    """
    if not hasattr(function, "options"):
        raise UserError(
            Problem(
                "task",
                got=f"'{name}', which has no attribute 'options'",
                allowed="a frozen dataclass whose fields are option(default, text)",
                nearest=f"{getattr(function, '__name__', 'function')}.options = MyOptions",
            )
        )
    if line := options.options_problem(KEY, name, function.options):
        raise UserError(line)


def name_of(make_task: MakeTask) -> str:
    """Returns the value of `config.task` for a task function: a built-in name, or `package.module:function`."""
    return make_task.name if isinstance(make_task, BuiltIn) else user_functions.function_name(make_task)


def make_task_of(config: Config, placement: Placement, make_task: MakeTask | None = None) -> Task:
    """Calls the task function of a configuration and returns its task.

    Args:
      config: a resolved configuration.
      placement: where arrays are stored on the mesh.
      make_task: the caller's task function; None: the function that `config.task` names.

    Raises:
      UserError: a user's task function does not return a `Task`, or returns an invalid `Task`.
    """
    function = make_task or find(config.task)
    task = function(config, placement)
    if isinstance(function, BuiltIn):
        return task
    if not isinstance(task, Task):
        raise UserError(
            Problem(
                "task",
                got=f"'{name_of(function)}', which returns {getattr(task, '__name__', type(task).__name__)}",
                allowed="a Task",
                nearest="return Task(init, loss, batch)",
            )
        )
    refuse(kind_problems(task))
    # JAX caches traces by function, but values that a notebook's `init` reads may have changed.
    return dataclasses.replace(task, init=lambda rng: task.init(rng))


def abstract_task(config: Config, make_task: MakeTask | None = None) -> Task:
    """Returns the task of a configuration, placed on a single device, for callers that need only its shapes.

    It needs no mesh and no device, so checks can call it before JAX has started.

    Args:
      config: a resolved configuration.
      make_task: the caller's task function; None: the function that `config.task` names.
    """
    return make_task_of(config, Placement.single_device(), make_task)


def abstract_weights(
    config: Config, make_task: MakeTask, *, on_one_device: bool = False
) -> tuple[Task, Arrays, NamesTree]:
    """Returns (task, abstract parameters, logical axes of the parameters) of a configuration, for a single device.

    Stacked layers are in layer order, not grouped by pipeline stage. No device is used. Results for built-in tasks are
    cached, because the planner calls this function for many meshes.

    Args:
      config: a resolved configuration.
      make_task: the task function.
      on_one_device: whether weights of a user's task may lack logical axes, because the run has a single device.
    """
    if not isinstance(make_task, BuiltIn):
        task = abstract_task(config, make_task)
        return task, *params_with_axes(task.init, on_one_device=on_one_device)
    # Only these fields change shapes of weights; leaving out the others makes the cache effective.
    alone = Config(
        task=config.task,
        model=config.model,
        lora=config.lora,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
    )
    return _built_in_weights(alone, make_task)


def lora_problems(config: Config, make_task: MakeTask) -> list[Problem]:
    """Returns an error line for each reason why a task cannot have the adapters of `config.lora`; [] without adapters.

    This function uses no device.
    """
    if not config.lora.rank:
        return []
    if not (isinstance(make_task, BuiltIn) and make_task.takes_adapters):
        able = " and ".join(name for name in names() if getattr(find(name), "takes_adapters", False))
        return [
            Problem(
                "lora.rank",
                got=f"{config.lora.rank} with task={name_of(make_task)}",
                allowed=f"0, or the tasks {able}, whose layers support adapters",
                nearest="lora.rank=0",
            )
        ]
    _, params, axes = abstract_weights(dataclasses.replace(config, lora=LoraOptions()), make_task)
    return lora.problems(config.lora, params, axes)


def watch_problems(config: Config, make_task: MakeTask) -> list[Problem]:
    """Returns an error line if `observe.layers` asks for statistics of activations, and the task is not the decoder."""
    if config.observe.layers != ACTIVATIONS or make_task is decoder:
        return []
    return [
        Problem(
            "observe.layers",
            got=f"{ACTIVATIONS} with task={name_of(make_task)}",
            allowed=f"off, norms, or the task {decoder.name}",
            nearest="observe.layers=norms",
        )
    ]


@functools.lru_cache(maxsize=8)
def _built_in_weights(config: Config, make_task: BuiltIn) -> tuple[Task, Arrays, NamesTree]:
    task = abstract_task(config, make_task)
    return task, *params_with_axes(task.init)
