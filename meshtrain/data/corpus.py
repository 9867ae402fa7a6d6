"""Sources of packed tokens: text, token files, fine-tuning data, synthetic data; and a bigram model as a baseline.

Shapes: T sequence_length, V vocabulary.
"""

import dataclasses
import functools
import hashlib
import itertools
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from meshtrain.data import chat
from meshtrain.data.dataset import Dataset
from meshtrain.data.packing import Example, Examples, Parts, TokenPairs, TokenStream, inner_ends, num_inputs, pack
from meshtrain.data.sources import (
    INPUTS,
    DataOptions,
    DataRequest,
    Source,
    check,
    check_files,
    is_own,
    tokenizer_of,
    url_problems_of,
)
from meshtrain.data.text import SPLIT_BY_HASH_FROM, only_empty, read_documents, split_by_hash, standard_library
from meshtrain.data.token_files import (
    TOKENIZER_FIELDS,
    document_ends,
    ends_inside,
    open_token_files,
    read_sidecar,
    token_file_tokenizer,
)
from meshtrain.data.tokenizer import Tokenizer, byte_tokenizer, number_tokenizer, vocabulary_problems
from meshtrain.data.weighted_paths import PATH, Part, named_parts
from meshtrain.errors import Problem, Problems, UserError, refuse
from meshtrain.store.buckets import Place

# Synthetic data: numbers of examples, largest step of the counting, share of random tokens.
NUM_TRAIN_EXAMPLES, NUM_VALIDATION_EXAMPLES = 1 << 20, 1 << 10
_LARGEST_STEP, _NOISE = 4, 0.1
LARGEST_VOCAB = 512  # largest vocabulary of a bigram model
# Synthetic data has a million examples: this many chunks are enough for V x V counts.
_MOST_TRAIN_CHUNKS = 1 << 12
_STRENGTHS = tuple(2.0**power for power in range(-6, 13))


@dataclasses.dataclass(frozen=True)
class Corpus(Dataset):
    """A dataset of packed tokens, to which a bigram model can be fitted.

    An example has tokens, targets, segment_ids, positions (int32 [T]) and weights (float32 [T]). Validation examples
    come from documents or tokens that are not in `train`. The fingerprint is a hexadecimal sha256 over the ids, the
    number of tokens in each split, and the end id. For synthetic data, which have no ids before they are read, it is a
    sha256 over the attributes of `SyntheticExamples`.
    """

    train: Examples
    validation: Examples


def tokenizer_for(options: DataOptions, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of a data source without reading the data.

    Args:
      options: the data options, of which `source`, `path`, `tokenizer` and the options of special tokens are read.
      vocab_size: the model's vocabulary size, which is also the vocabulary size of synthetic data.

    Raises:
      UserError: a file of the tokenizer is missing or invalid, or the source is a user's function.
    """
    if options.source == "synthetic":
        return number_tokenizer(vocab_size)
    if is_own(options):
        raise UserError(
            Problem(
                "data.source",
                got=f"'{options.source}', which has no tokenizer",
                condition="here",
                allowed="python, text, tokens, synthetic",
                nearest="--config.data.source=python, whose tokens are bytes",
            )
        )
    if options.source == "tokens":
        first = _first_file(options)
        return token_file_tokenizer(first, read_sidecar(first))
    return tokenizer_of(options)


def vocabulary_of(options: DataOptions) -> int:
    """Returns the vocabulary size of a data source; for synthetic data 257, the vocabulary size of the byte tokenizer.

    Raises:
      UserError: the tokenizer or the description of the token files is missing or invalid.
    """
    if options.source == "tokens":
        return read_sidecar(_first_file(options)).vocab_size
    return tokenizer_for(options, byte_tokenizer().vocab_size).vocab_size


def _first_file(options: DataOptions) -> Path:
    refuse(url_problems_of(options))
    parts, problems = named_parts(options.path, "")
    refuse(problems)
    return parts[0].files[0]


def stream_of(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenStream:
    """Tokenizes documents; returns the concatenated ids, with the end id after each document."""
    pieces: list[np.ndarray] = []
    end = np.asarray([tokenizer.end_id], tokenizer.dtype)
    documents = tokenizer.encode_documents(texts)
    for ids in documents:
        pieces += [ids, end]
    array = np.concatenate(pieces, dtype=tokenizer.dtype, casting="same_kind") if pieces else end[:0]
    return TokenStream((array,), tokenizer.end_id, inner_ends=inner_ends(documents, tokenizer.end_id))


def _texts(options: DataOptions, files: Sequence[Place]) -> list[list[str]]:
    """Reads the documents of text files; returns a list of documents for each file.

    Raises:
      UserError: has one line for each file that cannot be read, and for each line or row without a document.
    """
    problems, texts = Problems(), list[list[str]]()
    for path in files:
        texts.append([text for text, _ in read_documents(path, options.text_field, problems)])
        if problems.is_enough():
            break
    refuse(problems.lines())
    return texts


def _text_streams(
    options: DataOptions, files: Sequence[Place], tokenizer: Tokenizer
) -> tuple[TokenStream, TokenStream, str]:
    """Reads and tokenizes text; returns the training stream, the validation stream, and a text for the data's summary.

    Documents are assigned to a split by a hash of their content, so a document keeps its split if its file is renamed
    or copied. The built-in corpus of source `python` consists of the .py files of Python's standard library; they are
    assigned by a hash of their paths. If there are fewer than 100 documents, their concatenation is split at one
    position instead. The text states the number of special tokens in the documents.
    """
    if options.source == "python":
        documents = standard_library()
    else:
        documents = [(text, text) for texts in _texts(options, files) for text in texts]
        if documents and not any(text for text, _ in documents):
            raise UserError(only_empty(len(documents)))
    keys, texts = [key for key, _ in documents], [text for _, text in documents]
    counted = tokenizer.special.counted(tokenizer.special.count(texts))
    if len(texts) < SPLIT_BY_HASH_FROM:
        return *_split_stream(stream_of(tokenizer, texts), options.validation_fraction), counted
    train, validation = split_by_hash(texts, keys, options.validation_fraction)
    return stream_of(tokenizer, train), stream_of(tokenizer, validation), counted


def _split_stream(stream: TokenStream, validation_fraction: float) -> tuple[TokenStream, TokenStream]:
    """Splits a stream at one position into (training, validation); validation is the given fraction at the end."""
    place = len(stream) - int(len(stream) * validation_fraction)
    return stream.cut(0, place), stream.cut(place, len(stream))


def _streams(
    options: DataOptions, files: Sequence[Place], tokenizer: Tokenizer, vocab_size: int
) -> tuple[TokenStream, TokenStream, str, str]:
    """Opens text or token files; returns the training stream, the validation stream, a hash of the ids, and a summary.

    Args:
      options: the options of the source.
      files: the files of `data.path`.
      tokenizer: the tokenizer of the source.
      vocab_size: the model's vocabulary size; all ids must be below it.
    """
    if options.source == "tokens":
        arrays, digest = open_token_files(files, vocab_size)
        find_ends = functools.partial(document_ends, files)
        stream = TokenStream(tuple(arrays), tokenizer.end_id, find_ends, ends_inside(files))
        train, validation = _split_stream(stream, options.validation_fraction)
        num_special = sum(read_sidecar(path).num_special for path in files)
        return train, validation, digest, f"{len(files)} token file(s){tokenizer.special.counted(num_special)}"
    refuse(vocabulary_problems(tokenizer, vocab_size))
    train, validation, counted = _text_streams(options, files, tokenizer)
    ids = hashlib.sha256()
    for part in (*train.parts, *validation.parts):
        ids.update(np.ascontiguousarray(part).data)
    for stream in (train, validation):  # the same ids may form different documents
        ids.update(stream.inner_ends.astype("<i8").data)
    version = ".".join(str(number) for number in sys.version_info[:3])
    what = f"standard library of Python {version}" if options.source == "python" else f"text of {options.path}"
    return train, validation, ids.hexdigest(), f"{what}{counted}"


def open_corpus(options: DataOptions, asked: DataRequest) -> Corpus:
    """Opens `python`, `text`, `tokens` or `synthetic` data as packed examples.

    Token files stay on disk; the ids of text are stored in memory. Only synthetic data depends on the run's seed.

    Args:
      options: the options of the source, with one source in `path`.
      asked: the run's requirements for its data, such as the sequence length and the vocabulary size.

    Raises:
      UserError: has one line for each problem: the data are missing, empty, unreadable, not UTF-8, too short for one
        sequence, or have ids outside the vocabulary.
    """
    files = check_files(options)
    if options.source == "synthetic":
        return _synthetic(asked)
    tokenizer = tokenizer_for(options, asked.ids_below)
    *streams, digest, what = _streams(options, files, tokenizer, asked.ids_below)
    names = ("training", "validation") if options.validation_fraction else ("training",)
    splits = [pack(stream, asked.sequence_length, options.packing) for stream in streams]
    problems = [
        Problem(
            "data",
            fault=f"only {len(stream)} tokens for {name}",
            allowed=f"at least one sequence, sequence_length + 1 = {asked.sequence_length + 1} tokens",
            nearest="a smaller sequence_length, more data, or another validation_fraction",
        )
        for name, stream, examples in zip(names, streams, splits, strict=False)
        if not len(examples)
    ]
    refuse(problems)
    (train, validation), lengths = splits, [len(stream) for stream in streams]
    return Corpus(
        train=train,
        validation=validation,
        fingerprint=hashlib.sha256(f"{digest} {lengths[0]} {lengths[1]} {tokenizer.end_id}".encode()).hexdigest(),
        summary=f"{what}: {sum(lengths):,} tokens, {len(train):,} + {len(validation):,} sequences",
        text=tokenizer,
    )


def open_parts(
    open_one: Callable[[DataOptions, DataRequest], Dataset], options: DataOptions, asked: DataRequest
) -> Dataset:
    """Opens all sources of `data.path` and all validation sets of `data.validation_path`; combines them to one dataset.

    Args:
      open_one: a function that opens one source or set, such as `open_corpus`.
      options: the options of the sources; `path` may be a mixture.
      asked: the run's requirements for its data, such as the sequence length and the vocabulary size.

    Raises:
      UserError: has one line for each problem of each source or set.
    """
    parts, problems = named_parts(options.path, options.validation_path)
    if problems and options.path:  # some sources read no files
        raise UserError(*Problems(problems).lines())
    fraction = 0.0 if options.validation_path else options.validation_fraction
    own = dataclasses.replace(options, validation_path="", validation_fraction=fraction)
    of_each = [dataclasses.replace(own, path=part.paths) for part in parts]
    if len(parts) == 1:
        return open_one(of_each[0], asked)
    opened = list[Dataset]()
    for part, its_options in zip(parts, of_each, strict=True):
        try:
            opened.append(open_one(its_options, asked))
        except UserError as error:
            problems += [one.with_parts(key=one.key.replace(PATH, part.key, 1)) for one in error.problems]
    if not problems and options.source == "tokens":
        problems = _tokenizer_problems(parts)
    refuse(Problems(dict.fromkeys(problems)).lines())
    return _join(parts, opened)


def _tokenizer_problems(parts: Sequence[Part]) -> list[Problem]:
    """Returns an error line for each source or set of token files whose tokenizer differs from the first source's."""
    files = [read_sidecar(part.files[0]) for part in parts]
    written = [tuple(getattr(file, name) for name in TOKENIZER_FIELDS) for file in files]
    return [
        Problem(
            part.key,
            got=f"'{part.paths}', prepared with another tokenizer than '{parts[0].paths}'",
            allowed="files prepared with one tokenizer",
            nearest="prepare them again",
        )
        for part, one in zip(parts, written, strict=True)
        if one != written[0]
    ]


def _join(parts: Sequence[Part], opened: Sequence[Dataset]) -> Dataset:
    """Combines datasets: a mixture of the sources for training, and the validation sets by name.

    Args:
      parts: the sources and validation sets.
      opened: the dataset of each part. Without validation sets, the validation split of each source is used.
    """
    named = [(part, typing.cast(Examples, data.train)) for part, data in zip(parts, opened, strict=True)]
    sources = {part.name: examples for part, examples in named if part.key == PATH}
    sets = {part.name: examples for part, examples in named if part.key != PATH}
    if not sets:
        sets = {name: typing.cast(Examples, data.validation) for name, data in zip(sources, opened, strict=True)}
    weights = [part.weight for part in parts if part.key == PATH]
    tokens = [weight * num_inputs(one) / len(one) for weight, one in zip(weights, sources.values(), strict=True)]
    shares = [
        f"{weight / sum(weights):.2%} of sequences, {one / sum(tokens):.2%} of tokens,"
        for weight, one in zip(weights, tokens, strict=True)
    ]
    hows = [*(shares if len(sources) > 1 else [""]), *["for validation,"] * len(sets)]
    what = [f"{part.name} {how} {data.summary}".strip() for part, how, data in zip(parts, hows, opened, strict=False)]
    told = (*(data.fingerprint for data in opened), *weights)
    return dataclasses.replace(
        opened[0],
        train=Parts(sources, tuple(weights)) if len(sources) > 1 else sources[""],
        validation=Parts(sets) if len(sets) > 1 else next(iter(sets.values())),
        fingerprint=hashlib.sha256(" ".join(map(str, told)).encode()).hexdigest(),
        summary="; ".join(what),
        prompts=opened[-1].prompts,
        are_templated=opened[-1].are_templated,
    )


def _synthetic(asked: DataRequest) -> Corpus:
    if not asked.vocab_size:
        raise UserError(
            Problem(
                "data.source",
                got="synthetic, but this task has no vocabulary (Task.vocab_size = 0)",
                allowed="a task with a vocabulary, or other data",
                nearest="data.source=python",
            )
        )
    if asked.vocab_size < 2:
        raise UserError(
            Problem(
                "model.vocab_size",
                got=asked.vocab_size,
                condition="for synthetic data",
                allowed="at least 2",
                nearest=2,
            )
        )
    made = (asked.sequence_length, asked.vocab_size, asked.seed)
    return Corpus(
        train=SyntheticExamples(NUM_TRAIN_EXAMPLES, *made, split=0),
        validation=SyntheticExamples(NUM_VALIDATION_EXAMPLES, *made, split=1),
        fingerprint=hashlib.sha256(" ".join(map(str, ("synthetic", *made))).encode()).hexdigest(),
        summary=f"synthetic counting, {asked.vocab_size} ids",
    )


def open_whole(options: DataOptions, asked: DataRequest) -> Mapping[str, Examples]:
    """Returns {path: examples of this file}, for an evaluation of complete files.

    Every token of a document except its first is a target exactly once. In fine-tuning data, only tokens of answers are
    targets; a warning counts truncated and dropped lines. Documents are packed into padded rows (`first_fit`)
    regardless of `data.packing`, because windows of a stream would leave out the tokens after the last complete window.

    Args:
      options: the options of `text`, `tokens` or `chat` data.
      asked: the run's requirements for its data, such as the sequence length and the vocabulary size.

    Raises:
      UserError: has one line for each problem of the files, and for each file without a document of two tokens.
    """
    files, vocab_size = check_files(options), asked.ids_below
    tokenizer, texts = tokenizer_for(options, vocab_size), list[list[str]]()
    if options.source == "chat":
        return chat.open_whole(options, files, tokenizer, asked)
    if options.source == "tokens":
        streams = [
            TokenStream((array,), tokenizer.end_id, functools.partial(document_ends, [path]), ends_inside([path]))
            for path, array in zip(files, open_token_files(files, vocab_size)[0], strict=True)
        ]
    else:
        refuse(vocabulary_problems(tokenizer, vocab_size))
        texts = _texts(options, files)
        streams = [stream_of(tokenizer, one) for one in texts]
    packed = [pack(stream, asked.sequence_length, "first_fit") for stream in streams]
    no_text = {path for path, one in zip(files, texts, strict=False) if one and not any(one)}
    empty = [
        Problem(
            "data.path",
            fault=f"'{path}' has no document with two tokens{'; all are empty' if path in no_text else ''}",
            allowed="files with a token to predict",
            nearest="leave it out",
        )
        for path, examples in zip(files, packed, strict=True)
        if not len(examples)
    ]
    refuse(Problems(empty).lines())
    return {str(path): examples for path, examples in zip(files, packed, strict=True)}


SOURCES: Mapping[str, Source] = {
    name: Source(
        open=functools.partial(open_parts, chat.open_chat if name == "chat" else open_corpus),
        check=check,
        tokenizer=tokenizer_for,
        vocab_size=vocabulary_of,
        open_files=open_whole if "path" in inputs else None,
    )
    for name, inputs in INPUTS.items()
}


@dataclasses.dataclass(frozen=True)
class SyntheticExamples:
    """Synthetic examples: each counts up from a random start by a random step of 1 .. 4, modulo the vocabulary size.

    One token in ten is replaced by a random token, so that even a perfect model has a positive loss. The step differs
    between examples: a model needs two previous tokens to predict the next token, and a bigram model sees only one.

    Attributes:
      num_examples: number of examples.
      sequence_length: T.
      vocab_size: the exclusive upper bound of the ids.
      seed: the seed of the random numbers; example i depends on `seed`, `split` and i.
      split: 0 for training, 1 for validation.
    """

    num_examples: int
    sequence_length: int
    vocab_size: int
    seed: int
    split: int

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        random = np.random.default_rng([self.seed, self.split, index])
        length = self.sequence_length + 1
        start, step = random.integers(self.vocab_size), random.integers(1, _LARGEST_STEP + 1)
        counted = (start + step * np.arange(length)) % self.vocab_size
        is_noise = random.random(length) < _NOISE
        tokens = np.where(is_noise, random.integers(self.vocab_size, size=length), counted).astype(np.int32)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": np.ones(length - 1, np.int32),
            "positions": np.arange(length - 1, dtype=np.int32),
            "weights": np.ones(length - 1, np.float32),
        }

    def pairs(self) -> TokenPairs:
        """Yields (tokens, targets) of each example, int32 [T] each."""
        for index in range(len(self)):
            example = self[index]
            yield example["tokens"], example["targets"]


def _count(pairs: TokenPairs) -> np.ndarray | None:
    """Counts token pairs: entry [a, b] is how often b follows a, float64 [512, 512]. None if an id is above 511."""
    counts = np.zeros(LARGEST_VOCAB * LARGEST_VOCAB)
    for tokens, targets in pairs:
        if max(tokens.max(initial=0), targets.max(initial=0)) >= LARGEST_VOCAB:
            return None
        counts += np.bincount(tokens.astype(np.int64) * LARGEST_VOCAB + targets, minlength=len(counts))
    return counts.reshape(LARGEST_VOCAB, LARGEST_VOCAB)


def _score_rows(examples: Examples, indices: Iterable[int]) -> TokenPairs:
    for index in indices:
        example = examples[int(index)]
        counted = example["weights"] > 0
        yield example["tokens"][counted], example["targets"][counted]


def _probabilities(counts: np.ndarray, strength: float) -> np.ndarray:
    """Returns the bigram probabilities P(b | a) = (c(a, b) + s p(b)) / (c(a) + s) for all tokens a and b; [V, V].

    c counts tokens and token pairs, p is the add-one unigram probability, and s is `strength`.
    Source: MacKay and Peto, A hierarchical Dirichlet language model, 1995, equation for the predictive distribution.
    """
    followed = counts.sum(0)
    unigram = (followed + 1) / (followed.sum() + len(followed))
    return (counts + strength * unigram) / (counts.sum(1, keepdims=True) + strength)


def _strength(counts: np.ndarray) -> float:
    """Returns the smoothing strength s of `_probabilities` with the largest leave-one-out likelihood of the counts."""
    seen = counts > 0
    unigram = (counts.sum(0) + 1) / (counts.sum() + len(counts))
    rest, follows = counts - 1, np.maximum(counts.sum(1, keepdims=True) - 1, 0)

    def likelihood(strength: float) -> float:
        left_out = (rest + strength * unigram) / (follows + strength)
        return float((counts[seen] * np.log(left_out[seen])).sum())

    return max(_STRENGTHS, key=likelihood)


def bigram_loss(train: Examples, validation: Examples, *, indices: Iterable[int] | None = None) -> float | None:
    """Returns the validation loss of a smoothed bigram model, in nats per token.

    Counts and smoothing are fitted to the training tokens. The loss covers the same tokens as an evaluation of the
    model, so it is a baseline for the model's loss.

    Args:
      train: the training examples.
      validation: the validation examples.
      indices: the numbers of the validation examples to score; None scores all.

    Returns:
      The mean over the positions with weight 1. None if an id is above 511, or if no position has weight 1.
    """
    counts = _count(itertools.islice(train.pairs(), _MOST_TRAIN_CHUNKS))
    asked = _count(validation.pairs() if indices is None else _score_rows(validation, indices))
    if counts is None or asked is None or not counts.sum() or not asked.sum():
        return None
    # Smoothing must give no probability to ids that never occur.
    size = int(np.flatnonzero((counts + asked).sum(0) + (counts + asked).sum(1)).max()) + 1
    counts, asked = counts[:size, :size], asked[:size, :size]
    log_probabilities = np.log(_probabilities(counts, _strength(counts)))
    return float(-(asked * log_probabilities).sum() / asked.sum())
