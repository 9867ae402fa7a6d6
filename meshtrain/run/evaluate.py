"""The training batches of a run, and its validation loss."""

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import jax

from meshtrain.assemble import Assembly
from meshtrain.config.config import Config
from meshtrain.data.corpus import Corpus
from meshtrain.data.loader import batches, sample_order
from meshtrain.data.own import Data
from meshtrain.models.task import mean
from meshtrain.step.state import TrainState


def training_batches(assembly: Assembly, corpus: Corpus | Data, start_step: int) -> Iterator[dict[str, jax.Array]]:
    """Yields the global batches of the steps after `start_step`, forever."""
    config = assembly.config
    return batches(
        corpus.train,
        batch=assembly.batch,
        seed=config.seed,
        start_step=start_step,
        num_threads=config.data.num_threads,
        num_prefetch_batches=config.data.num_prefetch_batches,
    )


def evaluate(assembly: Assembly, corpus: Corpus | Data, state: TrainState) -> dict[str, float]:
    """Returns mean loss and metrics over the same validation sequences each time, each of them counted once."""
    config = assembly.config
    stream = batches(
        corpus.validation,
        batch=assembly.batch,
        seed=config.seed,
        num_epochs=1,
        num_threads=config.data.num_threads,
    )
    sums: dict[str, Any] = {}
    for batch in itertools.islice(stream, config.num_eval_batches or None):
        part = jax.tree.map(float, jax.device_get(dict(assembly.eval_step(state.params, batch))))
        sums = jax.tree.map(operator.add, sums, part) if sums else part
    weight = max(sums.pop("weight"), 1.0) if sums else 1.0
    return {f"eval_{name}": mean(metric, weight) for name, metric in sums.items()}


def evaluated_examples(config: Config, corpus: Corpus | Data) -> list[int]:
    """Returns which validation examples `evaluate` counts, so that a baseline can be scored on the same."""
    num_examples = len(corpus.validation)
    order = sample_order(num_examples, seed=config.seed, num_epochs=1)
    wanted = config.num_eval_batches * config.batch_size or num_examples
    return [order[index] for index in range(min(wanted, num_examples))]
