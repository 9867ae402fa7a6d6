"""What a source of data by name is made of, and the built-in ones of packed tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from meshtrain.data.chat import as_examples, lines_of, losses, open_chat, tokenized
from meshtrain.data.corpus import Corpus, open_corpus, stream_of, tokenizer_for, vocabulary_of, vocabulary_problems
from meshtrain.data.loader import Examples, Shaped
from meshtrain.data.own_source import Data
from meshtrain.data.packing import TokenStream, pack
from meshtrain.data.sources import INPUTS, DataOptions, check
from meshtrain.data.text import find_files, read_documents, tokens_as_text
from meshtrain.data.token_files import open_token_files
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import Problems, UserError, warn
from meshtrain.launch import peers
from meshtrain.options import Options

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

    batch: Mapping[str, Shaped]
    limits: Mapping[str, int]
    sequence_length: int
    vocab_size: int
    seed: int

    @property
    def ids_below(self) -> int:
        """The number that every id has to be below."""
        return self.vocab_size or ANY_VOCABULARY


@dataclasses.dataclass(frozen=True)
class Source:
    """A source of data, as `data.source` names it.

    Attributes:
      open: (options, what a run asks) -> its examples. It raises UserError where they are missing, wrong, or fit no
        such task.
      check: (options, whether their files must exist on this machine) -> one line for each problem that can be seen
        before the data are opened.
      tokenizer: (options, the task's vocabulary) -> what encodes and decodes text; it reads no examples.
      vocab_size: options -> the vocabulary of a model that is as large as the data's.
      options: the frozen dataclass under `config.data`, each field an `option(default, text)`.
      open_files: (options, what a run asks) -> each file of `data.path` whole, by its path; None: it reads no files.
    """

    open: Callable[[Options, Asked], Corpus | Data]
    check: Callable[[Options, bool], list[str]]
    tokenizer: Callable[[Options, int], Tokenizer]
    vocab_size: Callable[[Options], int]
    options: type[DataOptions] = DataOptions
    open_files: Callable[[Options, Asked], Mapping[str, Examples]] | None = None


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


def open_whole(options: DataOptions, asked: Asked) -> Mapping[str, Examples]:
    """Returns the path of each file -> its examples, in which every token but a document's first is a target once.

    Of fine-tuning data, tokens of answers alone are targets; a warning says where lines were truncated or dropped.
    Documents are packed whole into padded rows (`first_fit`), whatever `data.packing` says: windows of a stream would
    leave out the tokens after the last whole window.

    Args:
      options: of a source of packed tokens that reads `path`, checked.
      asked: by the run.

    Raises:
      UserError: a line for each thing wrong with the files, and for each file without a document of two tokens.
    """
    sequence_length, vocab_size = asked.sequence_length, asked.ids_below
    files, problems = find_files(options.path)
    if problems:
        raise UserError(*problems)
    tokenizer = tokenizer_for(options, vocab_size)
    if options.source == "chat":
        return _chats(options, files, tokenizer, sequence_length, vocab_size)
    if options.source == "tokens":
        arrays, _ = open_token_files(files, vocab_size)
        streams = [TokenStream((array,), tokenizer.end_id) for array in arrays]
    else:
        streams = _text_streams(options, files, tokenizer, vocab_size)
    found = {str(path): pack(stream, sequence_length, "first_fit") for path, stream in zip(files, streams, strict=True)}
    empty = [
        f"data.path: '{path}' has no document of two tokens; allowed: files with a token to predict; nearest: leave it "
        "out"
        for path, examples in found.items()
        if not len(examples)
    ]
    if empty:
        raise UserError(*Problems(empty).lines())
    return found


def _chats(
    options: DataOptions, files: list[Path], tokenizer: Tokenizer, sequence_length: int, vocab_size: int
) -> Mapping[str, Examples]:
    examples: dict[str, Examples] = {}
    empty = Problems()
    for path in files:
        lines = tokenized(tokenizer, lines_of(options, [path], tokenizer, vocab_size))
        one = as_examples(lines, sequence_length, tokenizer)
        examples[str(path)] = one.examples
        if not one.num_lines:
            empty.add(
                f"data.path: '{path}' has no line with a token of an answer; allowed: files with an answer; nearest: "
                "leave it out"
            )
        elif (one.num_truncated or one.num_dropped) and peers.is_main_process():
            warn(f"{path}: {losses([one])}")
    if empty.count:
        raise UserError(*empty.lines())
    return examples


def _text_streams(options: DataOptions, files: list[Path], tokenizer: Tokenizer, vocab_size: int) -> list[TokenStream]:
    problems = Problems([*vocabulary_problems(tokenizer, vocab_size), *tokens_as_text(files)])
    texts = []
    for path in files if not problems.count else ():
        texts.append([text for text, _ in read_documents(path, options.text_field, problems)])
        if problems.is_enough():
            break
    if problems.count:
        raise UserError(*problems.lines())
    return [stream_of(tokenizer, documents) for documents in texts]


SOURCES: Mapping[str, Source] = {
    name: Source(
        open=_chat if name == "chat" else _packed,
        check=check,
        tokenizer=tokenizer_for,
        vocab_size=vocabulary_of,
        open_files=open_whole if "path" in inputs else None,
    )
    for name, inputs in INPUTS.items()
}
