"""Evaluates a model: sums and means of loss and metrics over examples."""

import functools
import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from meshtrain.assembly.assemble import Assembly
from meshtrain.config.schema import Config
from meshtrain.data.dataset import Dataset
from meshtrain.data.loader import Examples, batches, sample_order
from meshtrain.data.packing import Parts
from meshtrain.errors import warn
from meshtrain.launch import peers
from meshtrain.models.metrics import number_to_log
from meshtrain.models.task import Params, limits
from meshtrain.observe.run_files import EVALUATED, PROMPTED_FILE
from meshtrain.observe.trackers import keep_rows_up_to
from meshtrain.sharding.trees import Arrays
from meshtrain.step.state import TrainState

Sums: TypeAlias = dict[str, Arrays]  # name -> float64 [], or a metric type of `metrics.py` with float64 leaves


def evaluate(assembly: Assembly, corpus: Dataset, state: TrainState) -> dict[str, float]:
    """Returns the mean loss and metrics over the validation examples: `eval_loss`, and `eval_` + each metric's name.

    Each call uses the same examples: once each, and at most `num_eval_batches` batches of each validation set. If there
    are several sets, the means combine all sets, and `eval_loss/NAME` is the loss of the set NAME.
    """
    count = functools.partial(sum_over, assembly, state.params, num_batches=assembly.config.num_eval_batches)
    sums = {name: count(examples) for name, examples in sets_of(corpus.validation).items()}
    values = means(add_sums(sums))
    values |= {f"loss/{name}": means(one)["loss"] for name, one in sums.items() if one and len(sums) > 1}
    return {EVALUATED + name: value for name, value in values.items()}


def evaluate_with_texts(
    assembly: Assembly,
    corpus: Dataset,
    continued: Callable[[Params], Sequence[tuple[str, str]]],
    run: Path,
    show: Callable[[str], None],
    state: TrainState,
) -> dict[str, float]:
    """Returns the result of `evaluate` for a state; also prints sample texts and appends them to `samples.jsonl`.

    Args:
      assembly: the run's assembly.
      corpus: the run's data.
      continued: weights -> pairs (prompt, generated text), from `generating.sample_texts`.
      run: the run's folder.
      show: prints a line of text.
      state: the training state to evaluate.
    """
    values, step = evaluate(assembly, corpus, state), int(state.step)
    rows = [{"step": step, "prompt": prompt, "text": text} for prompt, text in continued(state.params)]
    quoted = functools.partial(json.dumps, ensure_ascii=False)
    for row in rows:
        show(f"step {step}  {quoted(row['prompt'])} -> {quoted(row['text'])}")
    try:
        if rows and peers.is_main_process():
            keep_rows_up_to(run / PROMPTED_FILE, step - 1)  # a run that resumes may evaluate a step again
            with (run / PROMPTED_FILE).open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in rows)
    except OSError as error:
        warn(f"{run / PROMPTED_FILE}: {error}; the texts are only printed here")
    return values


def sets_of(validation: Examples, name: str = "") -> Mapping[str, Examples]:
    """Returns name -> examples for each validation set. A single set without a name gets the name `name`."""
    return validation.parts if isinstance(validation, Parts) else {name: validation}


def add_sums(sums: Mapping[str, Sums]) -> Sums:
    """Adds the sums of several sets of examples; returns an empty dict if all sets are empty.

    Args:
      sums: name of each set -> the result of `sum_over` for this set.
    """
    total = Sums()
    for one in sums.values():
        total = jax.tree.map(operator.add, total, one) if total else one
    return total


def sum_over(assembly: Assembly, params: Params, examples: Examples, num_batches: int) -> Sums:
    """Evaluates each example once; returns name -> sum over all examples, float64.

    The names are `loss`, `weight` (the sum of the targets' weights) and the names of the metrics. `means` converts the
    sums to means. The result is empty if there are no examples.

    Args:
      assembly: the run's assembly. All calls with the same assembly share one compiled evaluation step.
      params: the weights, with the shapes and shardings of `assembly.state.params`.
      examples: the set of examples; `first_examples` returns the order in which they are evaluated. The last batch is
        padded with examples of weight 0.
      num_batches: the maximum number of batches to evaluate; 0: all.
    """
    config = assembly.config
    stream = batches(
        examples,
        batch=assembly.batch,
        limits=limits(assembly.task),
        seed=config.seed,
        num_epochs=1,
        num_threads=config.data.num_threads,
    )
    total = Sums()
    for batch in itertools.islice(stream, num_batches or None):
        # The sum is float64: an evaluation may have millions of batches.
        new = jax.tree.map(np.float64, jax.device_get(dict(assembly.steps.evaluate(params, batch))))
        total = jax.tree.map(operator.add, total, new) if total else new
    return total


def means(sums: Sums) -> dict[str, float]:
    """Returns the mean loss and metrics as floats, from the result of `sum_over`; empty if the sums are empty.

    A sum is divided by the sum of the targets' weights, unless its metric type in `metrics.py` converts it differently.
    """
    return {name: float(number_to_log(value, sums["weight"])) for name, value in sums.items() if name != "weight"}


def first_examples(config: Config, num_examples: int, num_batches: int) -> list[int]:
    """Returns the indices of the examples that `sum_over` evaluates, in the order of evaluation.

    Args:
      config: sets the batch size, and the seed that shuffles the examples.
      num_examples: the number of examples in the set.
      num_batches: the maximum number of batches to evaluate; 0: all.
    """
    order = sample_order(num_examples, seed=config.seed, num_epochs=1)
    wanted = num_batches * config.batch_size or num_examples
    return [order[index] for index in range(min(wanted, num_examples))]


def first_validation(config: Config, validation: Examples) -> list[int]:
    """Returns the indices of the validation examples that an evaluation uses: `first_examples` of each validation set.

    Indices refer to the concatenation of all sets: the first index of a set follows the last index of the set before.
    """
    found, start = list[int](), 0
    for examples in sets_of(validation).values():
        found += [start + number for number in first_examples(config, len(examples), config.num_eval_batches)]
        start += len(examples)
    return found
