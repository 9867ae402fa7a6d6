"""Evaluates a run's weights: prints loss, perplexity, bits per byte and the task's metrics, per file and in total.

python -m meshtrain evaluate --config=configs/tiny.py [--config.data.source=text --config.data.path='books/*.txt']
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from tqdm import tqdm

from meshtrain.assembly.assemble import Assembly
from meshtrain.cli import flags
from meshtrain.cli.tables import align
from meshtrain.config.schema import Config
from meshtrain.data.loader import Examples
from meshtrain.data.tokenizer import Tokenizer, bytes_of_targets
from meshtrain.errors import Problem, UserError, run
from meshtrain.hf.config_json import is_described
from meshtrain.launch import peers
from meshtrain.launch.early_errors import tell_before_meeting
from meshtrain.models.task import Params, Task
from meshtrain.run.dataset import open_data, open_files, text_of
from meshtrain.run.evaluation import Sums, add_sums, first_examples, means, sets_of, sum_over
from meshtrain.run.existing_run import (
    LAST,
    add_weights_flag,
    assemble_run,
    choice_problems,
    configuration,
    restore_weights,
)
from meshtrain.sharding.mesh import describe

Values = Mapping[str, float]
NAMED = {"data.source", "data.path"}  # overrides with which the user names the files to evaluate on
VALIDATION = "validation"  # the name of the single part if the user names no files


@dataclasses.dataclass(frozen=True)
class Scored:
    """The data to evaluate on.

    Attributes:
      parts: name -> examples of a part of the data: one part for each file, or only the validation split. Each part is
        a row of the printed table.
      byte_lengths: bytes of text for each token id, int [vocabulary]; None if the targets are not text.
      tokenizer: the tokenizer of the examples; None if they are not text.
      num_batches: how many batches of each part to use; 0: all.
    """

    parts: Mapping[str, Examples]
    byte_lengths: np.ndarray | None
    tokenizer: Tokenizer | None
    num_batches: int


def open_evaluation_data(assembly: Assembly, overrides: Mapping[str, str]) -> Scored:
    """Opens the evaluation data: the complete files that the command line names, or the validation split.

    Args:
      assembly: the run's assembly.
      overrides: the command-line overrides, dotted key -> text. Without a data source or path in them, only the
        validation split of the run's data is used, because the run was trained on the other examples.

    Raises:
      UserError: the data are missing or wrong, do not fit the task, or have no validation split.
    """
    num_batches = assembly.config.num_eval_batches if "num_eval_batches" in overrides else 0
    config, task = dataclasses.replace(assembly.config, num_eval_batches=num_batches), assembly.task
    names_files = bool(NAMED & overrides.keys())
    files = open_files(config, task) if names_files else None
    parts, tokenizer = (files, text_of(config, task)) if files is not None else _validation(config, task)
    return Scored(parts, _byte_lengths(assembly, tokenizer), tokenizer, num_batches)


def _validation(config: Config, task: Task) -> tuple[Mapping[str, Examples], Tokenizer | None]:
    """Returns name -> examples of each validation set, and the tokenizer (None if the data are not text)."""
    found = open_data(config, task)
    if not len(found.validation):
        fix = "--config.data.source=text --config.data.path=FILE" if task.unit == "tokens" else "the run's own data"
        raise UserError(
            Problem(
                "data",
                got=f"no validation examples with data.source={config.data.source}",
                allowed="data with a validation split, or files of text or tokens, which are scored completely",
                nearest=fix,
            )
        )
    return sets_of(found.validation, VALIDATION), found.text


def _byte_lengths(assembly: Assembly, tokenizer: Tokenizer | None) -> np.ndarray | None:
    """Returns the number of text bytes of each token id, int [vocabulary]; None if the targets are not text.

    Ids of the model's vocabulary that the tokenizer lacks have 0 bytes.
    """
    task = assembly.task
    if tokenizer is None or tokenizer.byte_lengths is None or task.unit != "tokens":
        return None
    if not {"targets", "weights"} <= assembly.batch.keys():
        return None
    lengths = tokenizer.byte_lengths()
    return np.pad(lengths, (0, max(task.vocab_size - len(lengths), 0)))


def evaluate_parts(assembly: Assembly, params: Params, scored: Scored) -> tuple[dict[str, Values], Values]:
    """Evaluates the weights; returns name -> values for each part of the data, and the values for all parts together.

    Values are `loss`, `perplexity` (for tokens), `bits_per_byte` (for text), the task's metrics, the sum of the
    targets' weights under the name of the task's unit (`tokens`), and `bytes` (for text).

    Args:
      assembly: the run's assembly.
      params: the weights, with the shapes and shardings of `assembly.state.params`.
      scored: the data to evaluate on. All parts share one compiled step.
    """
    values, parts = dict[str, Values](), dict[str, Sums]()
    for name, examples in tqdm(scored.parts.items(), desc="evaluate", disable=None, leave=False):
        sums = sum_over(assembly, params, examples, scored.num_batches)
        if scored.byte_lengths is not None:
            indices = first_examples(assembly.config, len(examples), scored.num_batches)
            sums["bytes"] = bytes_of_targets(examples, indices, scored.byte_lengths, scored.tokenizer)
        values[name], parts[name] = _values(sums, assembly.task.unit), sums
    return values, _values(add_sums(parts), assembly.task.unit)


def _values(sums: Sums, unit: str) -> Values:
    """Converts sums over examples to the values of a row in the printed table, such as `loss` and `perplexity`.

    Bits per byte are nats / ln 2 / bytes, over the same targets.

    Args:
      sums: the result of `sum_over`, and `bytes` if the targets are text.
      unit: the task's unit, such as `tokens`.
    """
    of_task = means({name: value for name, value in sums.items() if name != "bytes"})
    values = {"loss": of_task.pop("loss")}
    if unit == "tokens":
        values["perplexity"] = math.exp(values["loss"]) if values["loss"] < math.log(sys.float_info.max) else math.inf
    if sums.get("bytes"):
        values["bits_per_byte"] = float(sums["loss"]) / math.log(2) / sums["bytes"]
    values |= {name: of_task[name] for name in sorted(of_task)}
    weight = float(sums["weight"])
    values[unit] = int(weight) if weight.is_integer() else weight
    return values | ({"bytes": sums["bytes"]} if "bytes" in sums else {})


def table(found: Mapping[str, Values], total: Values, unit: str) -> str:
    """Returns the values as a text table: a row for each part of the data, and a row `all` if there are several parts.

    Args:
      found: name -> values for each part.
      total: the values for all parts together.
      unit: the task's unit, such as `tokens`.
    """
    lines = [*found.items(), *([("all", total)] if len(found) > 1 else [])]
    names = list(dict.fromkeys(name for _, values in lines for name in values))

    def cell(name: str, values: Values) -> str:
        if name not in values:
            return ""
        return f"{values[name]:,.0f}" if name in (unit, "bytes") else f"{values[name]:.4f}"

    cells = [[part, *(cell(name, values) for name in names)] for part, values in lines]
    return align(cells, ("data", *(name.replace("_", " ") for name in names)), "<" + ">" * len(names))


def as_json(found: Mapping[str, Values], total: Values, **of_run: str | int) -> str:
    """Returns the values as a JSON object with the keys `files` and `all`; non-finite values become null.

    Args:
      found: name -> values for each part of the data; a part becomes an element of `files`.
      total: the values for all parts together, which become `all`.
      of_run: further keys of the object, such as `step`.
    """

    def numbers(values: Values) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    parts = [{"name": name, **numbers(values)} for name, values in found.items()]
    content = {**of_run, "files": parts, "all": numbers(total)}
    return json.dumps(content, allow_nan=False)


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    extra = argparse.ArgumentParser(
        prog="python -m meshtrain evaluate",
        description="Loss, perplexity, bits per byte and metrics of a run's weights, on its validation split or each "
        "file that --config.data.path names.",
        add_help=False,
    )
    extra.add_argument("--step", type=int, help="the checkpoint to evaluate (default: the newest)")
    extra.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_weights_flag(extra)
    arguments = flags.arguments(argv, extra)
    if NAMED & arguments.overrides.keys():  # only these files are evaluated
        arguments.overrides.setdefault("data.validation_path", "")
    problems = choice_problems(arguments.weights, arguments.workdir)
    if arguments.step is not None and arguments.step < 0:
        problems.append(
            Problem("--step", got=arguments.step, allowed="the step of a checkpoint", nearest="leave it out")
        )
    return arguments, configuration(arguments, problems, reads_data=True)


def main(argv: Sequence[str]) -> int:
    """Prints the evaluation of one checkpoint of a run; returns the exit code.

    Raises:
      UserError: a wrong flag, configuration, checkpoint, or data.
    """
    tell_before_meeting(os.environ)
    arguments, config = _arguments(argv)
    assembly = assemble_run(config, arguments.workdir, arguments.step)
    scored = open_evaluation_data(assembly, arguments.overrides)  # before compilation, so that errors appear early
    if is_described(arguments.workdir) and VALIDATION in scored.parts:  # a Hugging Face folder contains no data
        parts = {f"{VALIDATION} of data.source={config.data.source}": scored.parts[VALIDATION]}
        scored = dataclasses.replace(scored, parts=parts)
    params, step = restore_weights(assembly, arguments.workdir, arguments.step, arguments.weights)
    values, total = evaluate_parts(assembly, params, scored)
    if not peers.is_main_process():
        return 0
    if arguments.json:
        print(as_json(values, total, workdir=str(arguments.workdir), step=step, weights=arguments.weights))
    else:
        averages = "" if arguments.weights == LAST else "averages at "
        what = "" if is_described(arguments.workdir) else f"{averages}step {step} of "  # such folders have no steps
        print(f"{what}{arguments.workdir} on {describe(assembly.mesh)}\n")
        print(table(values, total, assembly.task.unit))
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
