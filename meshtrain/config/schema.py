"""All fields of a configuration: the options of all packages in one frozen dataclass."""

import dataclasses

from meshtrain.checkpoint.retention import CheckpointOptions
from meshtrain.data.sources import DataOptions
from meshtrain.models.decoder_options import DecoderOptions
from meshtrain.models.lora import LoraOptions
from meshtrain.models.remat import RematOptions
from meshtrain.observe.profiler import ProfileOptions
from meshtrain.observe.run_files import CONFIG_FILE as CONFIG_FILE
from meshtrain.observe.trackers import ObserveOptions
from meshtrain.optim.learning_rate import LearningRateOptions
from meshtrain.optim.optimizers import OptimizerOptions
from meshtrain.options import Except, Options, option
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.sharding.mesh import MeshOptions
from meshtrain.sharding.offload import OffloadOptions
from meshtrain.sharding.param_sharding import ZeroOptions
from meshtrain.sharding.reduction import ReductionOptions
from meshtrain.sharding.rules import LayoutOptions
from meshtrain.step.early_stop import EarlyStopOptions
from meshtrain.step.guard import GuardOptions
from meshtrain.step.loss_scale import LossScaleOptions
from meshtrain.step.precision import PrecisionOptions

MAX_TEXT_TOKENS = 1_000_000  # tokens of a generated text: in evaluations, at a run's end, by `generate`
_IN_GROUPS = {"period": Except(0)}


@dataclasses.dataclass(frozen=True)
class LocalStepsOptions:
    """Local SGD (DiLoCo): how often replicas that train separately synchronize their weights."""

    period: int = option(
        0,
        "steps between two synchronizations of the replicas' weights (DiLoCo); 0: every step sums gradients",
        minimum=0,
    )
    groups: int = option(
        0, "replicas that train separately, each on its share of the batch; a multiple of mesh.data", minimum=0,
        only_for=_IN_GROUPS,
    )  # fmt: skip
    outer_learning_rate: float = option(
        0.7, "learning rate of the outer SGD on the replicas' mean weight change; 1: the mean weights", minimum=0.0,
        only_for=_IN_GROUPS,
    )  # fmt: skip
    outer_momentum: float = option(0.9, "Nesterov momentum of the outer SGD; 0: none", minimum=0.0, only_for=_IN_GROUPS)


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run.

    The classes of some fields depend on options. `model` has the options of the task (`DecoderOptions` for `decoder`),
    and `data` the options of its source. A field that names a user's function, or a reduction, also has the options of
    this function.
    """

    seed: int = option(0, "seed of all random numbers: initial weights, data order, dropout", minimum=0)
    num_steps: int = option(300, "optimizer steps; the run always saves after the last step", minimum=1)
    num_epochs: float = option(0.0, "passes over the training data, instead of num_steps; 0: num_steps", minimum=0)
    batch_size: int = option(32, "examples (sequences, images) in the global batch of a step", minimum=1)
    sequence_length: int = option(128, "tokens in a sequence", minimum=1)
    accumulation_steps: int = option(1, "parts into which a batch is split; their gradients are summed", minimum=1)
    log_every: int = option(10, "steps between log lines", minimum=1)
    eval_every: int = option(0, "steps between evaluations; 0: only after the last step", minimum=0)
    num_eval_batches: int = option(16, "batches of an evaluation; 0: the complete validation split", minimum=0)
    eval_prompts: str = option(
        "", 'file of prompts that each evaluation continues; lines: {"prompt": ...} or {"messages": ...}; \'\': none',
        names="path",
    )  # fmt: skip
    eval_tokens: int = option(
        40, "tokens generated after each prompt, always the most probable token", minimum=1, maximum=MAX_TEXT_TOKENS,
        only_for={"eval_prompts": Except("")},
    )  # fmt: skip
    sample_tokens: int = option(
        -1, "tokens of the text sampled at a run's end; 0: none; -1: 160 up to 10 M parameters, else none", minimum=-1,
        maximum=MAX_TEXT_TOKENS,
    )  # fmt: skip
    watchdog_seconds: float = option(
        0.0, "a longer time without a step is a hang; 0: 10 x the median, at least 60", minimum=0
    )
    init_from: str = option(
        "", "workdir or checkpoints of another run, Hugging Face folder, or peft adapters, to start from; '': none",
        names="path",
    )  # fmt: skip
    init_base: str = option(
        "", "folder of the base model of init_from's adapters; '': the folder in their file", names="path"
    )
    init_ignore: str = option("", "keys of a Hugging Face folder's config.json to ignore, comma separated")
    task: str = option(
        "decoder",
        (
            "the model and its loss: decoder, seq2seq, convnet, or a custom package.module:function; its options "
            "are `model`"
        ),
        names="function",
    )
    mesh: MeshOptions = dataclasses.field(default_factory=MeshOptions)
    layout: LayoutOptions = dataclasses.field(default_factory=LayoutOptions)
    zero: ZeroOptions = dataclasses.field(default_factory=ZeroOptions)
    reduction: ReductionOptions = dataclasses.field(default_factory=ReductionOptions)
    offload: OffloadOptions = dataclasses.field(default_factory=OffloadOptions)
    model: Options = dataclasses.field(default_factory=DecoderOptions)
    lora: LoraOptions = dataclasses.field(default_factory=LoraOptions)
    pipeline: PipelineOptions = dataclasses.field(
        default_factory=PipelineOptions, metadata={"only_for": {"mesh.pipeline": Except(1)}}
    )
    precision: PrecisionOptions = dataclasses.field(default_factory=PrecisionOptions)
    loss_scale: LossScaleOptions = dataclasses.field(default_factory=LossScaleOptions)
    remat: RematOptions = dataclasses.field(default_factory=RematOptions)
    guard: GuardOptions = dataclasses.field(default_factory=GuardOptions)
    early_stop: EarlyStopOptions = dataclasses.field(default_factory=EarlyStopOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    local_steps: LocalStepsOptions = dataclasses.field(default_factory=LocalStepsOptions)
    learning_rate: LearningRateOptions = dataclasses.field(default_factory=LearningRateOptions)
    data: Options = dataclasses.field(default_factory=DataOptions)
    checkpoint: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)
    profile: ProfileOptions = dataclasses.field(default_factory=ProfileOptions)
    observe: ObserveOptions = dataclasses.field(default_factory=ObserveOptions)
