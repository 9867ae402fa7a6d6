"""The sources of packed tokens: text, token files, fine-tuning data, synthetic data; and a bigram model of them.

Shapes: T sequence_length, V vocabulary.
"""

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from meshtrain.data import chat
from meshtrain.data.own_source import Data
from meshtrain.data.packing import Example, Examples, Parts, TokenPairs, TokenStream, pack
from meshtrain.data.parts import PATH, Part, joined, named_parts, read_each, uses
from meshtrain.data.sources import INPUTS, Asked, DataOptions, Source, check, checked_parts, is_own
from meshtrain.data.text import read_documents, share, standard_library
from meshtrain.data.token_files import open_token_files, read_sidecar, token_file_tokenizer
from meshtrain.data.tokenizer import Tokenizer, byte_tokenizer, number_tokenizer, open_tokenizer, vocabulary_problems
from meshtrain.errors import Problems, UserError

# Fewer documents than this are split at one position instead of by hash: the share of few hashes would be far off.
_SPLIT_BY_HASH_FROM = 100
# Of synthetic data.
NUM_TRAIN_EXAMPLES, NUM_VALIDATION_EXAMPLES = 1 << 20, 1 << 10
_LARGEST_STEP, _NOISE = 4, 0.1
LARGEST_VOCAB = 512  # of a bigram model
# Synthetic data has a million examples: this many chunks are enough for V x V counts.
_MOST_TRAIN_CHUNKS = 1 << 12
_STRENGTHS = tuple(2.0**power for power in range(-6, 13))


@dataclasses.dataclass(frozen=True)
class Corpus(Data):
    """Data whose examples are packed tokens, of which a bigram model can count the pairs.

    An example has tokens, targets, segment_ids, positions (int32 [T]) and weights (float32 [T]). Validation examples
    are from documents or tokens that `train` does not hold. The fingerprint is a hexadecimal sha256 over the ids and
    the position of the split.
    """

    train: Examples
    validation: Examples


def tokenizer_for(options: DataOptions, vocab_size: int) -> Tokenizer:
    """Returns the tokenizer of a source without reading its data.

    Args:
      options: as for training.
      vocab_size: the model's, which is also that of synthetic data.

    Raises:
      UserError: a file that it needs is missing or wrong.
    """
    if options.source == "synthetic":
        return number_tokenizer(vocab_size)
    if is_own(options):
        raise UserError(
            f"data.source: got '{options.source}', which brings no tokenizer; allowed here: python, text, tokens, "
            "synthetic; nearest: --config.data.source=python, whose tokens are bytes"
        )
    if options.source == "tokens":
        first = _first_file(options)
        return token_file_tokenizer(first, read_sidecar(first))
    return open_tokenizer(options.tokenizer, options.end_token)


def vocabulary_of(options: DataOptions) -> int:
    """Returns the vocabulary size of a source; for synthetic data, which has any, 257 as for bytes.

    Raises:
      UserError: the tokenizer or the description of the tokens is missing or wrong.
    """
    if options.source == "tokens":
        return read_sidecar(_first_file(options)).vocab_size
    return tokenizer_for(options, byte_tokenizer().vocab_size).vocab_size


def _first_file(options: DataOptions) -> Path:
    parts, problems = named_parts(options.path, "")
    if problems:
        raise UserError(*problems)
    return parts[0].files[0]


def stream_of(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenStream:
    """Returns the ids of documents end to end, each followed by the end id."""
    pieces: list[np.ndarray] = []
    end = np.asarray([tokenizer.end_id], tokenizer.dtype)
    for ids in tokenizer.encode_documents(texts):
        pieces += [ids, end]
    array = np.concatenate(pieces, dtype=tokenizer.dtype, casting="same_kind") if pieces else end[:0]
    return TokenStream((array,), tokenizer.end_id)


def _texts(options: DataOptions, files: Sequence[Path]) -> list[list[str]]:
    """Returns the documents of each file.

    Raises:
      UserError: a line for each file, or line of one, that holds none.
    """
    problems, texts = Problems(), []
    for path in files:
        texts.append([text for text, _ in read_documents(path, options.text_field, problems)])
        if problems.is_enough():
            break
    if problems.count:
        raise UserError(*problems.lines())
    return texts


def _text_streams(options: DataOptions, files: Sequence[Path], tokenizer: Tokenizer) -> tuple[TokenStream, TokenStream]:
    """Returns the streams of both splits: of each document by a hash, or one stream of few documents cut in two.

    The hash is of a document's content, which keeps its split when its file is renamed or copied; of the standard
    library's, it is of the path.
    """
    if options.source == "python":
        documents = standard_library()
    else:
        documents = [(text, text) for texts in _texts(options, files) for text in texts]
    if len(documents) < _SPLIT_BY_HASH_FROM:
        return _cut(stream_of(tokenizer, [text for _, text in documents]), options.validation_fraction)
    splits: tuple[list[str], list[str]] = ([], [])
    for key, text in documents:
        splits[share(key) < options.validation_fraction].append(text)
    return stream_of(tokenizer, splits[0]), stream_of(tokenizer, splits[1])


def _cut(stream: TokenStream, validation_fraction: float) -> tuple[TokenStream, TokenStream]:
    """Splits a stream at one position; the part after it is for validation."""
    place = len(stream) - int(len(stream) * validation_fraction)
    return stream.cut(0, place), stream.cut(place, len(stream))


def _streams(
    options: DataOptions, files: Sequence[Path], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[TokenStream, TokenStream], str]:
    """Returns the streams of both splits, and the digest of their ids."""
    if options.source == "tokens":
        arrays, digest = open_token_files(files, vocab_size, read_sidecar(_first_file(options)))
        return _cut(TokenStream(tuple(arrays), tokenizer.end_id), options.validation_fraction), digest
    train, validation = _text_streams(options, files, tokenizer)
    ids = hashlib.sha256()
    for part in (*train.parts, *validation.parts):
        ids.update(np.ascontiguousarray(part).data)
    return (train, validation), ids.hexdigest()


def _what(options: DataOptions, parts: Sequence[Part]) -> str:
    """Returns a description of the source."""
    if options.source == "tokens":
        return f"{sum(len(part.files) for part in parts if part.key == PATH)} token file(s)"
    version = ".".join(str(number) for number in sys.version_info[:3])
    return f"standard library of Python {version}" if options.source == "python" else f"text of {options.path}"


def open_corpus(options: DataOptions, asked: Asked) -> Corpus:
    """Opens the data. Token files stay on disk; text is held as ids.

    Args:
      options: of `python`, `text`, `tokens` or `synthetic` data; real data does not depend on the run's seed.
      asked: by the run.

    Raises:
      UserError: a line for each thing wrong with the data: missing, empty, unreadable, not UTF-8, ids past the
        vocabulary, too little for one sequence.
    """
    parts = checked_parts(options)
    if options.source == "synthetic":
        return _synthetic(asked)
    tokenizer = tokenizer_for(options, asked.ids_below)
    if options.source != "tokens" and (problems := vocabulary_problems(tokenizer, asked.ids_below)):
        raise UserError(*problems)
    if options.validation_path:
        options = dataclasses.replace(options, validation_fraction=0.0)
    found = read_each(parts, lambda part: _streams(options, part.files, tokenizer, asked.ids_below))
    streams = [pair for pair, _ in found]
    packed = [tuple(pack(stream, asked.sequence_length, options.packing) for stream in pair) for pair in streams]
    problems = [
        f"data: {len(stream)} tokens are left for {what}{part.name and f' of {part.name}'}; allowed: at least one "
        f"sequence, sequence_length + 1 = {asked.sequence_length + 1} tokens; nearest: a smaller sequence_length, more "
        "data, or another validation_fraction"
        for part, pair, both in zip(parts, streams, packed, strict=True)
        for what, stream, examples in zip(uses(part, options.validation_fraction), pair, both, strict=False)
        if not len(examples)
    ]
    if problems:
        raise UserError(*problems)
    train, validation = joined(parts, [(first, second) for first, second in packed])
    lengths = [len(stream) for pair in streams for stream in pair]
    weights = train.weights if isinstance(train, Parts) else ()
    told = (*(digest for _, digest in found), *lengths, tokenizer.end_id, *weights)
    return Corpus(
        train=train,
        validation=validation,
        fingerprint=hashlib.sha256(" ".join(map(str, told)).encode()).hexdigest(),
        summary=f"{_what(options, parts)}: {sum(lengths):,} tokens, {len(train):,} + {len(validation):,} sequences"
        + (train.shares() if isinstance(train, Parts) else ""),
        text=tokenizer,
    )


def _synthetic(asked: Asked) -> Corpus:
    if not asked.vocab_size:
        raise UserError(
            "data.source: got synthetic, and this task states no vocabulary (Task.vocab_size = 0); allowed: a task "
            "with a vocabulary, or other data; nearest: data.source=python"
        )
    if asked.vocab_size < 2:
        raise UserError(f"model.vocab_size: got {asked.vocab_size}; allowed for synthetic data: at least 2; nearest: 2")
    made = (asked.sequence_length, asked.vocab_size, asked.seed)
    return Corpus(
        train=SyntheticExamples(NUM_TRAIN_EXAMPLES, *made, split=0),
        validation=SyntheticExamples(NUM_VALIDATION_EXAMPLES, *made, split=1),
        fingerprint=hashlib.sha256(" ".join(map(str, ("synthetic", *made))).encode()).hexdigest(),
        summary=f"synthetic counting, {asked.vocab_size} ids",
    )


def open_whole(options: DataOptions, asked: Asked) -> Mapping[str, Examples]:
    """Returns the path of each file -> its examples, in which every token but a document's first is a target once.

    Of fine-tuning data, tokens of answers alone are targets; a warning says where lines were truncated or dropped.
    Documents are packed whole into padded rows (`first_fit`), whatever `data.packing` says: windows of a stream would
    leave out the tokens after the last whole window.

    Args:
      options: of a source of packed tokens that reads `path`.
      asked: by the run.

    Raises:
      UserError: a line for each thing wrong with the files, and for each file without a document of two tokens.
    """
    parts, vocab_size = checked_parts(dataclasses.replace(options, validation_path="")), asked.ids_below
    if len(parts) > 1:
        raise UserError(
            f"data.path: got weights in '{options.path}'; allowed: files, each of which is scored by itself; nearest: "
            + ",".join(str(path) for part in parts for path in part.files)
        )
    files = parts[0].files
    tokenizer = tokenizer_for(options, vocab_size)
    if options.source == "chat":
        return chat.open_whole(options, files, tokenizer, asked)
    if options.source == "tokens":
        streams = [TokenStream((array,), tokenizer.end_id) for array in open_token_files(files, vocab_size)[0]]
    elif problems := vocabulary_problems(tokenizer, vocab_size):
        raise UserError(*problems)
    else:
        streams = [stream_of(tokenizer, texts) for texts in _texts(options, files)]
    packed = [pack(stream, asked.sequence_length, "first_fit") for stream in streams]
    empty = [
        f"data.path: '{path}' has no document of two tokens; allowed: files with a token to predict; nearest: leave it "
        "out"
        for path, examples in zip(files, packed, strict=True)
        if not len(examples)
    ]
    if empty:
        raise UserError(*Problems(empty).lines())
    return {str(path): examples for path, examples in zip(files, packed, strict=True)}


SOURCES: Mapping[str, Source] = {
    name: Source(
        open=chat.open_chat if name == "chat" else open_corpus,
        check=check,
        tokenizer=tokenizer_for,
        vocab_size=vocabulary_of,
        open_files=open_whole if "path" in inputs else None,
    )
    for name, inputs in INPUTS.items()
}


@dataclasses.dataclass(frozen=True)
class SyntheticExamples:
    """Example i counts up by a step of 1 .. 4, from a random start, modulo the vocabulary.

    One token in ten is replaced by a random one, so that even a perfect model has a positive loss. Each sequence has
    its own step: a model has to look at two tokens to predict the next one, which a bigram model cannot.

    Attributes:
      num_examples: number of examples.
      sequence_length: T.
      vocab_size: ids are below it.
      seed: the examples depend on it and on `split`.
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
        """Yields (token, target) for every position."""
        for index in range(len(self)):
            example = self[index]
            yield example["tokens"], example["targets"]


def _count(pairs: TokenPairs) -> np.ndarray | None:
    """Returns how often each token follows each other one, float64 [512, 512]; None if an id is above 511."""
    counts = np.zeros(LARGEST_VOCAB * LARGEST_VOCAB)
    for tokens, targets in pairs:
        if max(tokens.max(initial=0), targets.max(initial=0)) >= LARGEST_VOCAB:
            return None
        counts += np.bincount(tokens.astype(np.int64) * LARGEST_VOCAB + targets, minlength=len(counts))
    return counts.reshape(LARGEST_VOCAB, LARGEST_VOCAB)


def _scored(examples: Examples, indices: Iterable[int]) -> TokenPairs:
    for index in indices:
        example = examples[int(index)]
        counted = example["weights"] > 0
        yield example["tokens"][counted], example["targets"][counted]


def _probabilities(counts: np.ndarray, strength: float) -> np.ndarray:
    """Returns P(b | a) = (c(a, b) + s p(b)) / (c(a) + s), with p the add-one unigram; [V, V].

    Source: MacKay and Peto, A hierarchical Dirichlet language model, 1995, equation for the predictive distribution.
    """
    followed = counts.sum(0)
    unigram = (followed + 1) / (followed.sum() + len(followed))
    return (counts + strength * unigram) / (counts.sum(1, keepdims=True) + strength)


def _strength(counts: np.ndarray) -> float:
    """Returns the smoothing strength with the largest leave-one-out likelihood of the training pairs."""
    seen = counts > 0
    unigram = (counts.sum(0) + 1) / (counts.sum() + len(counts))
    rest, follows = counts - 1, np.maximum(counts.sum(1, keepdims=True) - 1, 0)

    def likelihood(strength: float) -> float:
        left_out = (rest + strength * unigram) / (follows + strength)
        return float((counts[seen] * np.log(left_out[seen])).sum())

    return max(_STRENGTHS, key=likelihood)


def bigram_loss(train: Examples, validation: Examples, *, indices: Iterable[int] | None = None) -> float | None:
    """Returns the validation loss of a smoothed bigram model, in nats per token.

    Counts and smoothing are fitted to the training tokens. The loss is taken over the tokens that an evaluation uses.

    Args:
      train: examples to count in.
      validation: examples to score.
      indices: which validation examples; None is all.

    Returns:
      The mean over the positions with weight 1; None for more than 512 ids, or without any such position.
    """
    counts = _count(itertools.islice(train.pairs(), _MOST_TRAIN_CHUNKS))
    asked = _count(validation.pairs() if indices is None else _scored(validation, indices))
    if counts is None or asked is None or not counts.sum() or not asked.sum():
        return None
    # Smoothing must give no probability to ids that never occur.
    size = int(np.flatnonzero((counts + asked).sum(0) + (counts + asked).sum(1)).max()) + 1
    counts, asked = counts[:size, :size], asked[:size, :size]
    log_probabilities = np.log(_probabilities(counts, _strength(counts)))
    return float(-(asked * log_probabilities).sum() / asked.sum())
