"""One configuration: the rooms' options summed up, checked together, and written down as text.

Inside the program a configuration is the frozen `Config`. An ml_collections.ConfigDict stands only at this door, for
files that edit the defaults:

    from meshtrain.config.config import default

    def get_config():
        config = default()
        config.mesh.data = 2
        return config
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from meshtrain.config import checks
from meshtrain.data import sources
from meshtrain.data.sources import DataOptions
from meshtrain.layout import mesh, zero
from meshtrain.layout.mesh import MeshOptions
from meshtrain.layout.offload import OffloadOptions
from meshtrain.layout.rules import LayoutOptions, default_rules
from meshtrain.layout.zero import ZeroOptions
from meshtrain.models import remat
from meshtrain.models.decoder import DecoderOptions
from meshtrain.models.remat import RematOptions
from meshtrain.observe import profiler
from meshtrain.observe.profiler import ProfileOptions
from meshtrain.observe.trackers import ObserveOptions
from meshtrain.optim import learning_rate, optimizers
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.pipeline import check as pipeline_check
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.step.guard import GuardOptions
from meshtrain.step.loss_scale import LossScaleOptions
from meshtrain.step.precision import PrecisionOptions
from meshtrain.store.keeping import CheckpointOptions
from meshtrain.words import flags
from meshtrain.words.config_file import load
from meshtrain.words.errors import UserError
from meshtrain.words.options import option, problems

CONFIG_FILE = "config.json"  # the resolved configuration's name inside a workdir


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run is told."""

    seed: int = option(0, "start of every random number: weights, data order, dropout", minimum=0)
    num_steps: int = option(300, "optimizer steps; the last one always saves", minimum=1)
    batch_size: int = option(32, "sequences in the global batch of a step", minimum=1)
    sequence_length: int = option(128, "tokens in a sequence", minimum=1)
    accumulation_steps: int = option(1, "parts of the batch whose gradients are added up before the update", minimum=1)
    log_every: int = option(10, "steps between log lines", minimum=1)
    eval_every: int = option(0, "steps between evaluations; 0: only after the last step", minimum=0)
    num_eval_batches: int = option(16, "batches of an evaluation; 0: the whole validation split", minimum=0)
    sample_tokens: int = option(
        -1, "tokens of text that a run draws at its end; 0: none; -1: 160 up to 10 M parameters, else none", minimum=-1
    )
    watchdog_seconds: float = option(0.0, "longest time without a step; 0: 10 x the median, at least 60", minimum=0)
    init_from: str = option("", "workdir or checkpoints of another run whose weights this one starts from; '': none")
    mesh: MeshOptions = dataclasses.field(default_factory=MeshOptions)
    layout: LayoutOptions = dataclasses.field(default_factory=LayoutOptions)
    zero: ZeroOptions = dataclasses.field(default_factory=ZeroOptions)
    offload: OffloadOptions = dataclasses.field(default_factory=OffloadOptions)
    model: DecoderOptions = dataclasses.field(default_factory=DecoderOptions)
    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)
    precision: PrecisionOptions = dataclasses.field(default_factory=PrecisionOptions)
    loss_scale: LossScaleOptions = dataclasses.field(default_factory=LossScaleOptions)
    remat: RematOptions = dataclasses.field(default_factory=RematOptions)
    guard: GuardOptions = dataclasses.field(default_factory=GuardOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    learning_rate: LearningRateOptions = dataclasses.field(default_factory=LearningRateOptions)
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    checkpoint: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)
    profile: ProfileOptions = dataclasses.field(default_factory=ProfileOptions)
    observe: ObserveOptions = dataclasses.field(default_factory=ObserveOptions)


def default() -> ml_collections.ConfigDict:
    """Returns the defaults for a configuration file to edit.

    It takes any key and any value: `resolve` refuses the wrong ones, all of them together, where a ConfigDict that is
    locked and typed would stop at the first.
    """
    return ml_collections.ConfigDict(dataclasses.asdict(Config()), type_safe=False)


def resolve(
    given: Config | ml_collections.ConfigDict | Mapping[str, Any],
    overrides: Mapping[str, str] | None = None,
    also: Sequence[str] = (),
    *,
    own_task: bool = False,
    reads_data: bool = True,
) -> Config:
    """Returns the configuration with every value checked, as far as that goes without knowing the devices.

    Args:
      given: what a configuration file returns; what is not said has its default.
      overrides: dotted key -> text as on the command line; goes before `given`.
      also: problems found elsewhere, to be reported together with those found here.
      own_task: the model is the caller's, and the options of the decoder are without effect.
      reads_data: whether the data have to be here; a plan for another cluster does without.

    Raises:
      UserError: unknown keys, wrong types, values outside their bounds, and what `check` finds; all of them.
    """
    config, found = built(given, overrides or {})
    found += problems(config, "")
    faulty = {line.partition(":")[0] for line in found}
    # The checks across fields need legal numbers: what is wrong takes its default, and lines about it are left out.
    entries = flags.schema(Config())
    defaults = {key: entry.default for key, entry in entries.items() if key in faulty}
    mended = flags.construct(Config(), flags.flatten(dataclasses.asdict(config)) | defaults)
    sizes = dataclasses.asdict(mended.mesh)
    across = [
        *mesh.check(mended.mesh),
        *(sources.check(mended.data) if reads_data else []),
        *optimizers.check(mended.optimizer),
        *learning_rate.check(mended.learning_rate),
        *profiler.check(mended.profile),
        *checks.scaling(mended.loss_scale, mended.precision),
        *([] if own_task else checks.model(mended.model, mended.precision, mended.sequence_length)),
        *([] if own_task else checks.vocabulary(mended.model, mended.data)),
        *check(mended, {axis: max(size, 1) for axis, size in sizes.items()}, own_task=own_task),
    ]
    found += [line for line in across if not any(key in line for key in faulty)]
    if found or also:
        raise UserError(*also, *found)
    return config


def check(config: Config, mesh_shape: Mapping[str, int], *, own_task: bool = False) -> list[str]:
    """Returns one line for each way in which a configuration does not fit a mesh of these sizes.

    `resolve` asks with what it knows (1 for an axis of -1); whoever knows the devices asks again before compiling.

    Args:
      config: resolved.
      mesh_shape: the size of each axis.
      own_task: the model is the caller's: only what does not depend on it is checked.
    """
    rules = default_rules(config.layout)
    found = checks.batch(config.batch_size, rules, mesh_shape, num_microbatches(config, mesh_shape))
    found += zero.problems(config.zero, config.mesh.data, config.mesh.fsdp)
    if config.layout.sequence_parallel:
        found += checks.sequence_on_mesh(config.sequence_length, mesh_shape)
    if not own_task:
        found += checks.model_on_mesh(config.model, mesh_shape)
        found += remat.check(config.remat, config.model.num_layers, mesh_shape["pipeline"])
        found += pipeline_check.check(
            config.pipeline,
            num_stages=mesh_shape["pipeline"],
            num_layers=config.model.num_layers,
            num_microbatches=num_microbatches(config, mesh_shape),
        )
    return found


def num_microbatches(config: Config, mesh_shape: Mapping[str, int]) -> int:
    """Returns into how many parts a step's batch is cut: by accumulation, and again by a pipeline if there is one."""
    in_pipeline = config.pipeline.num_microbatches if mesh_shape["pipeline"] > 1 else 1
    return config.accumulation_steps * in_pipeline


def built(
    given: Config | ml_collections.ConfigDict | Mapping[str, Any], overrides: Mapping[str, str]
) -> tuple[Config, list[str]]:
    """Returns a configuration of the right types, and one line for each key or value that had to be left out."""
    right = "allowed: what meshtrain.config.default() returns, a value in each place; nearest: return config"
    try:
        given = given.to_dict() if isinstance(given, ml_collections.ConfigDict) else given
    except ml_collections.config_dict.RequiredValueError as error:
        raise UserError(f"--config: got no value where one is required ({error}); {right}") from error
    given = dataclasses.asdict(given) if isinstance(given, Config) else given
    if not isinstance(given, Mapping):
        raise UserError(f"--config: got {type(given).__name__} from get_config(); {right}")
    values, found = flags.collect(flags.schema(Config()), flags.flatten(given), overrides)
    return flags.construct(Config(), values), found


def configure(arguments: argparse.Namespace, also: Sequence[str] = (), *, reads_data: bool = True) -> Config:
    """Returns the configuration that a command line asks for.

    Args:
      arguments: what `flags.arguments` returns.
      also: problems found elsewhere, to be reported together with the configuration's.
      reads_data: see `resolve`.

    Raises:
      UserError: all problems of the file, of the overrides and of the two together.
    """
    also = [*arguments.problems, *also]
    try:
        given = default() if arguments.config is None else load(arguments.config, list(flags.schema(Config())))
        built(given, {})  # what is no configuration at all
    except UserError as error:
        # Without the file its values are not known, but the overrides' names and types are.
        _, found = built(default(), arguments.overrides)
        raise UserError(*also, *error.problems, *found) from error
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
      UserError: everything that is wrong with either.
    """
    arguments = flags.arguments(argv, extra)
    return configure(arguments, reads_data=reads_data), arguments


def to_json(config: Config) -> str:
    """Returns the configuration as the text of `config.json`: nested as the options are, every field in it."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"
