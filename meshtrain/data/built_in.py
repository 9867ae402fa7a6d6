"""What a source of data by name is made of, and the built-in ones of packed tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from meshtrain.data.answers import open_chat
from meshtrain.data.corpus import Corpus, open_corpus, tokenizer_for, vocabulary_of
from meshtrain.data.loader import Examples
from meshtrain.data.own import Data
from meshtrain.data.sources import INPUTS, DataOptions, check
from meshtrain.data.tokenize import Tokenizer
from meshtrain.data.whole_files import open_whole
from meshtrain.words.errors import UserError

ANY_VOCABULARY = 2**31 - 1  # ids are int32: every id is legal if the task states no vocabulary


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a run asks of its data.

    Attributes:
      batch: the entries of the global batch, each with shape [B, ...] and dtype.
      limits: name -> the number that the entry's integers have to be below.
      sequence_length: T, tokens an example.
      vocab_size: the task's, which every id must be below; 0: it states none.
      seed: of the run.
    """

    batch: Mapping[str, Any]
    limits: Mapping[str, int]
    sequence_length: int
    vocab_size: int
    seed: int

    @property
    def ids_below(self) -> int:
        """The number that every id has to be below."""
        return self.vocab_size or ANY_VOCABULARY


class Check(Protocol):
    """Options -> one line for each problem that can be seen before the data are opened."""

    def __call__(self, options: Any, *, reads_data: bool) -> list[str]:
        """Returns the lines; without `reads_data` only those about the options themselves."""
        ...


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of data, as `data.source` names it.

    Attributes:
      open: (options, what a run asks) -> its examples. It raises UserError where they are missing, wrong, or fit no
        such task.
      check: of the options, see there.
      tokenizer: (options, the task's vocabulary) -> what encodes and decodes text; it reads no examples.
      vocab_size: options -> the vocabulary of a model that is as large as the data's.
      options: the frozen dataclass under `config.data`, each field an `option(default, text)`.
      open_files: (options, what a run asks) -> each file of `data.path` whole, by its path; None: it reads no files.
    """

    open: Callable[[Any, Asked], Corpus | Data]
    check: Check
    tokenizer: Callable[[Any, int], Tokenizer]
    vocab_size: Callable[[Any], int]
    options: type[DataOptions] = DataOptions
    open_files: Callable[[Any, Asked], Mapping[str, Examples]] | None = None


def _packed(options: DataOptions, asked: Asked) -> Corpus:
    if options.source == "synthetic" and not asked.vocab_size:
        raise UserError(
            "data.source: got synthetic, and this task states no vocabulary (Task.vocab_size = 0); allowed: a task "
            "with a vocabulary, or other data; nearest: data.source=python"
        )
    return open_corpus(options, sequence_length=asked.sequence_length, vocab_size=asked.ids_below, seed=asked.seed)


def _chat(options: DataOptions, asked: Asked) -> Data:
    if "weights" not in asked.batch:
        raise UserError(
            "data.source: got chat, whose answers alone count, with a task whose batch has no 'weights'; allowed: a "
            "task whose loss is weighted by them; nearest: task=decoder"
        )
    return open_chat(options, sequence_length=asked.sequence_length, vocab_size=asked.ids_below)


def _whole(options: DataOptions, asked: Asked) -> Mapping[str, Examples]:
    return open_whole(options, sequence_length=asked.sequence_length, vocab_size=asked.ids_below)


SOURCES: Mapping[str, Source] = {
    name: Source(
        open=_chat if name == "chat" else _packed,
        check=check,
        tokenizer=tokenizer_for,
        vocab_size=vocabulary_of,
        open_files=_whole if "path" in inputs else None,
    )
    for name, inputs in INPUTS.items()
}
