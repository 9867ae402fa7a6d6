"""A run's data: the corpus of `config.data`, or the result of a user's data function."""

from collections.abc import Mapping
from typing import Any

from meshtrain.config.config import Config
from meshtrain.data.answers import open_chat
from meshtrain.data.corpus import Corpus, open_corpus, tokenizer_for
from meshtrain.data.images import Images, open_each, open_images
from meshtrain.data.loader import example_problems
from meshtrain.data.numbers import open_numbers
from meshtrain.data.own import Data, MakeData, opened
from meshtrain.data.sources import IMAGES, PAIRS, SOURCES, is_own
from meshtrain.data.tokenize import Tokenizer
from meshtrain.models.entry import Entry
from meshtrain.models.task import Task, entries, limits
from meshtrain.words import named
from meshtrain.words.errors import UserError

ANY_VOCABULARY = 2**31 - 1  # ids are int32: every id is legal if the task states no vocabulary


def open_data(config: Config, task: Task, make_data: MakeData | None = None) -> Corpus | Data:
    """Opens the data of a run, and compares its first example with the task's batch.

    Args:
      config: resolved.
      task: states the batch and the vocabulary.
      make_data: the caller's data function, instead of `config.data.source`.

    Raises:
      UserError: the data are missing, wrong, or do not fit the task's batch; one line for each problem.
    """
    batch = entries(task, config.batch_size)
    if make_data is None and is_own(config.data):
        make_data = named.function("data.source", config.data.source, SOURCES)
    if make_data is not None:
        return opened(make_data(config), batch, limits(task), config.num_eval_batches)
    if config.data.source == "chat":
        return opened(_chat(config, task), batch, limits(task), config.num_eval_batches)
    if config.data.source in PAIRS:
        return opened(_pairs(config, task), batch, limits(task), config.num_eval_batches)
    if config.data.source in IMAGES:
        data = open_images(config.data, **_of_images(batch))
        return opened(data, batch, limits(task), config.num_eval_batches)
    if config.data.source == "synthetic" and not task.vocab_size:
        raise UserError(
            "data.source: got synthetic, and this task states no vocabulary (Task.vocab_size = 0); allowed: a task "
            "with a vocabulary, or other data; nearest: data.source=python"
        )
    corpus = open_corpus(
        config.data,
        sequence_length=config.sequence_length,
        vocab_size=task.vocab_size or ANY_VOCABULARY,
        seed=config.seed,
    )
    where = f"data.source={config.data.source}, an example"
    if problems := example_problems(corpus.train[0], batch, limits(task), where):
        raise UserError(*problems)
    return corpus


def _chat(config: Config, task: Task) -> Data:
    if "weights" not in task.batch:
        raise UserError(
            "data.source: got chat, whose answers alone count, with a task whose batch has no 'weights'; allowed: a "
            "task whose loss is weighted by them; nearest: task=decoder"
        )
    vocab_size = task.vocab_size or ANY_VOCABULARY
    return open_chat(config.data, sequence_length=config.sequence_length, vocab_size=vocab_size)


def _pairs(config: Config, task: Task) -> Data:
    sides = ("source_tokens", "tokens")
    if missing := [name for name in sides if name not in task.batch]:
        raise UserError(
            f"data.source: got {config.data.source}, pairs of a source and a target, with a task whose batch has no "
            f"'{missing[0]}'; allowed: a task whose batch has {' and '.join(sides)}; nearest: task=seq2seq"
        )
    source_length, target_length = (task.batch[name].shape[1] for name in sides)
    vocab_size = task.vocab_size or ANY_VOCABULARY
    return open_numbers(config.data, source_length=source_length, target_length=target_length, vocab_size=vocab_size)


def open_image_files(config: Config, task: Task) -> dict[str, Images]:
    """Opens each file of images that `data.path` names, whole, for an evaluation.

    Raises:
      UserError: a file is missing or wrong, or does not fit the task's batch.
    """
    batch = entries(task, config.batch_size)
    found = open_each(config.data.path, **_of_images(batch))
    for name, images in found.items():
        opened(Data(images, images, name), batch, limits(task), num_eval_batches=0)
    return found


def _of_images(batch: Mapping[str, Entry]) -> dict[str, Any]:
    """Returns what images have to be like for a task's batch: their size [H, W, C], and the number of classes."""
    return {
        "size": batch["images"].shape[1:] if "images" in batch else (),
        "num_classes": batch["labels"].below if "labels" in batch else 0,
    }


def text_of(config: Config, task: Task) -> Tokenizer:
    """Returns what encodes and decodes text for a run; its data are opened only if they are the user's own.

    Raises:
      UserError: a file that the tokenizer needs is missing or wrong, or the data bring no tokenizer.
    """
    if is_own(config.data):
        given = named.function("data.source", config.data.source, SOURCES)(config)
        text: Tokenizer | None = getattr(given, "text", None)
        if text is not None:
            return text
    return tokenizer_for(config.data, vocab_size=task.vocab_size)
