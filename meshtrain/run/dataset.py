"""Opens a run's data: from the source in `config.data`, or from the user's data function."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax

from meshtrain import user_functions
from meshtrain.assembly.assemble import Assembly
from meshtrain.config import data_sources
from meshtrain.config.schema import Config
from meshtrain.data.corpus import Corpus, tokenizer_for
from meshtrain.data.dataset import Dataset, MakeData, open_user_data
from meshtrain.data.loader import (
    Examples,
    batches,
    content_hash,
    example_problems,
    next_sample,
    order_hash,
    samples_per_source,
)
from meshtrain.data.packing import Parts
from meshtrain.data.sources import DataRequest, is_own
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Problem, UserError, refuse, warn
from meshtrain.files import Json
from meshtrain.launch import peers
from meshtrain.models.task import Task, entries, limits
from meshtrain.observe.run_files import EPOCHS

MOST_EPOCHS = 4
_SHOWN = 16  # digits of a hash in an error line


def request(config: Config, task: Task) -> DataRequest:
    """Returns a run's request to its data source.

    The request states the entries of a batch, the bounds of their values, the sequence length, the vocabulary size and
    the seed.
    """
    batch = entries(task, config.batch_size)
    return DataRequest(batch, limits(task), config.sequence_length, task.vocab_size, config.seed)


def open_data(config: Config, task: Task, make_data: MakeData | None = None) -> Dataset:
    """Opens the data of a run, and checks that the first example fits the task's batch.

    Args:
      config: the configuration, from `resolve`.
      task: the task, which defines the batch entries and the vocabulary size.
      make_data: the caller's data function config -> `Dataset`; None: the source or function in `config.data.source`.

    Raises:
      UserError: the data are missing, wrong, or do not fit the task's batch; one line for each problem.
    """
    wanted = request(config, task)
    if make_data is None and is_own(config.data):
        make_data = _function(config)
    if make_data is not None:
        result = make_data(config)
    else:
        result = data_sources.find(config.data.source).open(config.data, wanted)
    if not isinstance(result, Corpus):
        return open_user_data(result, wanted.batch, wanted.limits, config.num_eval_batches)
    where = f"data.source={config.data.source}, an example"
    refuse(example_problems(result.train[0], wanted.batch, wanted.limits, where))
    return result


def refuse_unequal_data(config: Config, corpus: Dataset, start_step: int) -> None:
    """Checks that all processes have the same data in the same order. All processes call it.

    Each process reads its own files, which may differ.

    Args:
      config: the run's configuration.
      corpus: the data of this process.
      start_step: the step of the newest checkpoint; 0 for a new run.

    Raises:
      UserError: the data of a process differ from process 0's data, or their order does; every process raises the same
        line.
    """
    if peers.count() == 1:
        return
    answers = peers.gather_values("data", data_facts(config, corpus, start_step))
    # Another file changes most of the facts: the first line suffices.
    refuse(peers.differences("data", answers, peers.SAME_FILES)[:1])


def data_facts(config: Config, corpus: Dataset, start_step: int) -> dict[str, Json]:
    """Returns the values by which `refuse_unequal_data` compares the data of processes: name -> JSON value.

    They are the numbers of examples, hashes of their content, the tokenizer's ids, the prompts, and a hash of the order
    of the training examples that follow `start_step`.
    """
    first_sample = next_sample(start_step, config.batch_size)
    order = order_hash(corpus.train, seed=config.seed, first_sample=first_sample)
    facts: dict[str, Json] = {"fingerprint": corpus.fingerprint[:_SHOWN], "hash of the order": order[:_SHOWN]}
    for split, examples in (("training", corpus.train), ("validation", corpus.validation)):
        facts[f"number of {split} examples"] = len(examples)
        facts[f"hash of some {split} examples"] = content_hash(examples)[:_SHOWN]
    if corpus.text is not None:
        facts["ids of the tokenizer"] = [corpus.text.vocab_size, corpus.text.end_id, *corpus.text.also_end]
    return {**facts, "prompts": list(corpus.prompts)}


def with_steps(config: Config, corpus: Dataset) -> tuple[Config, str]:
    """Replaces `num_epochs` by the equivalent `num_steps`; returns the new configuration, and a line about the change.

    `num_steps` is rounded up, so the last step may start another epoch.

    Raises:
      UserError: the data are a mixture, whose sources have separate epochs.
    """
    num_epochs, num_examples = config.num_epochs, len(corpus.train)
    num_steps = max(math.ceil(num_epochs * num_examples / config.batch_size), 1)
    if isinstance(corpus.train, Parts) and corpus.train.weights:
        raise UserError(
            Problem(
                "num_epochs",
                got=f"{num_epochs:g} with weights in data.path, so that sources have separate epochs",
                allowed="num_steps",
                nearest=f"num_epochs=0 and num_steps={num_steps}",
            )
        )
    text = f"{num_steps:,} steps are {num_epochs:g} epochs of {num_examples:,} examples"
    return dataclasses.replace(config, num_steps=num_steps, num_epochs=0.0), text


def examples_consumed(config: Config, task: Task, corpus: Dataset, step: int) -> dict[str, float]:
    """Returns the epochs and tokens of each source of a mixture that a run has consumed after a step.

    The keys are `epochs/NAME` and `tokens/NAME` for the source NAME; if the task has another unit, this unit replaces
    `tokens`. The values are computed from the number of the step. The result is empty if the data are not a mixture.
    """
    if not (isinstance(corpus.train, Parts) and corpus.train.weights):
        return {}
    counts = samples_per_source(corpus.train.weights, next_sample(step, config.batch_size))
    values = dict[str, float]()
    for (name, part), count in zip(corpus.train.parts.items(), counts, strict=True):
        values[f"{EPOCHS}{name}"] = float(count / len(part))
        values[f"{task.unit}/{name}"] = int(count) * task.num_units // config.batch_size
    return values


def warn_many_epochs(config: Config, task: Task, corpus: Dataset) -> None:
    """Warns of each source of a mixture that a run repeats more than four times; process 0 prints the warnings.

    More than four epochs improve a model little: Muennighoff et al., Scaling data-constrained language models, 2023.
    """
    for name, value in examples_consumed(config, task, corpus, config.num_steps).items():
        if name.startswith(EPOCHS) and value > MOST_EPOCHS and peers.is_main_process():
            warn(f"data.path: {name.removeprefix(EPOCHS)} is repeated {value:.1f} times in num_steps = "
                 f"{config.num_steps:,}; nearest: a smaller weight for it, or more data")  # fmt: skip


def training_batches(assembly: Assembly, corpus: Dataset, start_step: int) -> Iterator[dict[str, jax.Array]]:
    """Yields the global batch of each step after `start_step`, up to `num_steps`: entry name -> sharded array."""
    config = assembly.config
    return batches(
        corpus.train,
        batch=assembly.batch,
        limits=limits(assembly.task),
        seed=config.seed,
        start_step=start_step,
        end_step=config.num_steps,
        num_threads=config.data.num_threads,
        num_prefetch_batches=config.data.num_prefetch_batches,
    )


def open_files(config: Config, task: Task) -> Mapping[str, Examples] | None:
    """Opens every file of `data.path`, without a validation split, for an evaluation.

    Returns:
      The examples of each file by its path; None if the data source reads no files.

    Raises:
      UserError: a file is missing or wrong, or does not fit the task's batch.
    """
    if is_own(config.data) or (open_each := data_sources.find(config.data.source).open_files) is None:
        return None
    return open_each(config.data, request(config, task))


def text_of(config: Config, task: Task) -> Tokenizer:
    """Returns the tokenizer of a run. The data are opened only if their source is a user's function.

    Raises:
      UserError: a file that the tokenizer needs is missing or wrong, or the data have no tokenizer.
    """
    if not is_own(config.data):
        return data_sources.find(config.data.source).tokenizer(config.data, task.vocab_size)
    text: Tokenizer | None = getattr(_function(config)(config), "text", None)
    return tokenizer_for(config.data, task.vocab_size) if text is None else text


def _function(config: Config) -> MakeData:
    function: MakeData = user_functions.import_function(data_sources.KEY, config.data.source, data_sources.names())
    return function
