"""Training data from a user's function: defines `Dataset`, and checks that the data fit the task's batch.

A user passes the function to `train(config, directory, make_task, make_data)`, or names it in `config.data.source =
"package.module:function"`. It receives the configuration and returns a `Dataset`, in plain Python or Grain.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from meshtrain.data.loader import Examples, FromUser, Shaped, example_problems
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Problem, Problems, nearest, refuse

Configuration: TypeAlias = Any  # `config.schema.Config`; the package config imports this package
MakeData = Callable[[Configuration], FromUser]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset: numbered training and validation examples. Any object with these attributes is accepted.

    Attributes:
      train: the training examples, an object with `len()` and `[i]`, such as a list or a `grain.MapDataset`. An example
        is a dict of NumPy arrays with the entries of `Task.batch` without the batch dim. Several threads read examples
        at the same time.
      validation: the validation examples, in the same form as `train`; () for none.
      fingerprint: a text that differs if the data differ; a run resumes only on data with the same fingerprint.
      summary: a one-line description of the data, which a run prints.
      text: the tokenizer, which encodes prompts and decodes generated ids; None: the data are no text.
      prompts: the prompts for which a run generates sample texts at its end; () for no prompt.
      are_templated: whether a chat template wrote the prompts, including begin tokens.
    """

    train: Examples
    validation: Examples
    fingerprint: str
    summary: str = ""
    text: Tokenizer | None = None
    prompts: Sequence[str] = ()
    are_templated: bool = False


def open_user_data(
    given: FromUser, batch: Mapping[str, Shaped], limits: Mapping[str, int], num_eval_batches: int
) -> Dataset:
    """Checks the result of a user's data function and converts it to a `Dataset`.

    If the examples are a list, all of them are checked; otherwise only the first example is checked.

    Args:
      given: the result: a `Dataset`, or an object with the same attributes.
      batch: name -> entry of the global batch, an object with shape [B, ...] and dtype.
      limits: name -> the exclusive upper bound of the integers in this entry.
      num_eval_batches: number of batches in an evaluation; 0: all validation examples.

    Raises:
      UserError: has one line for each missing or invalid attribute, and for each batch entry that is missing in a
        checked example or has a wrong shape, dtype or range. Also if an evaluation would count padding as examples.
    """
    problems = []
    for name, wanted in (("train", "a sequence of examples"), ("fingerprint", "a nonempty text")):
        value = getattr(given, name, None)
        if value is None or (name == "fingerprint" and not (isinstance(value, str) and value)):
            got = f"{'no value' if value is None else repr(value)} for '{name}' of {type(given).__name__}"
            fix = nearest(name, vars(given) if hasattr(given, "__dict__") else ())
            problems.append(Problem("data", got=got, allowed=wanted, fix=fix, nearest="Dataset(train, ...)"))
    refuse(problems)
    validation, text = getattr(given, "validation", None), getattr(given, "text", None)
    if text is not None and not isinstance(text, Tokenizer):
        problems.append(
            Problem(
                "data",
                got=f"{type(text).__name__} for 'text' of {type(given).__name__}",
                allowed="a Tokenizer or None",
                nearest="data.tokenizer.open_tokenizer(path)",
            )
        )
    prompts = getattr(given, "prompts", ())
    if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        problems.append(
            Problem(
                "data",
                got=f"{prompts!r} for 'prompts' of {type(given).__name__}",
                allowed="a list of nonempty texts",
                nearest="[]",
            )
        )
    data = Dataset(
        given.train,
        () if validation is None else validation,
        given.fingerprint,
        text=text,
        prompts=prompts,
        are_templated=bool(getattr(given, "are_templated", False)),
    )
    for split, examples in (("train", data.train), ("validation", data.validation)):
        problems += _split_problems(split, examples, batch, limits)
    if not problems:
        problems = _uneven_evaluation(len(data.validation), batch, num_eval_batches)
    refuse(problems)
    summary = getattr(given, "summary", "") or f"{len(data.train):,} + {len(data.validation):,} examples"
    return dataclasses.replace(data, summary=summary)


def _split_problems(
    split: str, examples: FromUser, batch: Mapping[str, Shaped], limits: Mapping[str, int]
) -> list[Problem]:
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        return [
            Problem(
                f"data.{split}",
                got=type(examples).__name__,
                allowed="a sequence of examples, with len() and [i]",
                nearest="a list, or a grain.MapDataset",
            )
        ]
    if not len(examples):
        problem = Problem(f"data.{split}", got="no example", allowed="at least one", nearest="one example")
        return [problem] if split == "train" else []
    # Reading a complete dataset may take hours; a list is already in memory.
    number = len(examples) if isinstance(examples, list | tuple) else 1
    problems = Problems()
    for index in range(number):
        problems.add(*example_problems(examples[index], batch, limits, f"data.{split}[{index}]"))
        if problems.is_enough():
            break
    return problems.lines()


def _uneven_evaluation(num_examples: int, batch: Mapping[str, Shaped], num_eval_batches: int) -> list[Problem]:
    """Returns an error line if an evaluation would count the padding in its last batch as examples.

    The last batch is padded with examples of zeros. This is correct only if the batch has an entry `weights`, which is
    0 for padding.

    Args:
      num_examples: number of validation examples.
      batch: name -> entry of the global batch, with shape [B, ...].
      num_eval_batches: number of batches in an evaluation; 0: all validation examples.
    """
    batch_size = next(iter(batch.values())).shape[0]
    wanted = num_eval_batches * batch_size or num_examples
    rest = min(wanted, num_examples) % batch_size
    if not rest or "weights" in batch:
        return []
    fix = num_examples - rest
    return [
        Problem(
            "data.validation",
            got=f"{num_examples} examples in batches of {batch_size}, so that the last batch is padded with zeros",
            allowed=(
                f"a multiple of {batch_size}, or an entry 'weights' in Task.batch that is 1 for examples and 0 "
                "for padding"
            ),
            nearest=f"{fix or batch_size} examples",
        )
    ]
