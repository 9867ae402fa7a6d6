"""Options -> Corpus: train and validation examples by number, a fingerprint, text <-> ids.

And what a bigram model makes of it.

Shapes: T sequence_length, V vocabulary.
"""

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from meshtrain.data.packing import Example, Examples, TokenPairs, TokenStream, pack
from meshtrain.data.sources import DataOptions, check, is_own
from meshtrain.data.text import find_files, read_documents, share, standard_library, tokens_as_text
from meshtrain.data.token_files import open_token_files, read_sidecar, token_file_tokenizer
from meshtrain.data.tokenizer import Tokenizer, byte_tokenizer, number_tokenizer, open_tokenizer
from meshtrain.errors import Problems, UserError
from meshtrain.options import problems as option_problems

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
class Corpus:
    """Opened data.

    Attributes:
      train: examples by number; each a dict of tokens, targets, segment_ids, positions (int32 [T]) and weights
        (float32 [T]).
      validation: the same, from documents or tokens that `train` does not hold; may have length 0.
      fingerprint: hexadecimal sha256 over the ids and the position of the split; it identifies the corpus.
      summary: one line for people.
      num_tokens: ids in both splits, end of documents included.
      vocab_size: one more than the largest id that the tokenizer can give.
      end_id: the id that ends a document; -1 where nothing does.
      encode: text -> ids.
      decode: ids -> text.
      has_text: whether `decode` gives text that people read.
    """

    train: Examples
    validation: Examples
    fingerprint: str
    summary: str
    num_tokens: int
    vocab_size: int
    end_id: int
    encode: Callable[[str], list[int]]
    decode: Callable[[Iterable[int]], str]
    has_text: bool


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
        files, problems = find_files(options.path)
        if problems:
            raise UserError(*problems)
        return token_file_tokenizer(files[0], read_sidecar(files[0]))
    return open_tokenizer(options.tokenizer, options.end_token)


def vocabulary_of(options: DataOptions) -> int:
    """Returns the vocabulary size of a source; for synthetic data, which has any, 257 as for bytes.

    Raises:
      UserError: the tokenizer or the description of the tokens is missing or wrong.
    """
    if options.source == "synthetic":
        return byte_tokenizer().vocab_size
    if options.source == "tokens":
        files, problems = find_files(options.path)
        if problems:
            raise UserError(*problems)
        return read_sidecar(files[0]).vocab_size
    return open_tokenizer(options.tokenizer, options.end_token).vocab_size


def _documents(options: DataOptions) -> list[tuple[str, str]]:
    """Returns (key whose hash decides the split, text) of each document of a text source."""
    if options.source == "python":
        return standard_library()
    files, found = find_files(options.path)
    problems = Problems(found or tokens_as_text(files))
    documents: list[tuple[str, str]] = []
    for path in files if not problems.count else []:
        # The key is the content: a document stays in its split when its file is renamed or copied.
        documents += [(text, text) for text, _ in read_documents(path, options.text_field, problems)]
        if problems.is_enough():
            break
    if problems.count:
        raise UserError(*problems.lines())
    return documents


def stream_of(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenStream:
    """Returns the ids of documents end to end, each followed by the end id."""
    pieces: list[np.ndarray] = []
    end = np.asarray([tokenizer.end_id], tokenizer.dtype)
    for ids in tokenizer.encode_documents(texts):
        pieces += [ids, end]
    array = np.concatenate(pieces, dtype=tokenizer.dtype, casting="same_kind") if pieces else end[:0]
    return TokenStream((array,), tokenizer.end_id)


def _cut(stream: TokenStream, validation_fraction: float) -> tuple[TokenStream, TokenStream]:
    """Splits a stream at one position; the part after it is for validation."""
    place = len(stream) - int(len(stream) * validation_fraction)
    return stream.cut(0, place), stream.cut(place, len(stream))


def _text_streams(options: DataOptions, tokenizer: Tokenizer) -> tuple[TokenStream, TokenStream, str]:
    documents = _documents(options)
    if len(documents) < _SPLIT_BY_HASH_FROM:
        train, validation = _cut(stream_of(tokenizer, [text for _, text in documents]), options.validation_fraction)
    else:
        splits: tuple[list[str], list[str]] = ([], [])
        for key, text in documents:
            splits[share(key) < options.validation_fraction].append(text)
        train, validation = stream_of(tokenizer, splits[0]), stream_of(tokenizer, splits[1])
    digest = hashlib.sha256()
    for stream in (train, validation):
        for part in stream.parts:
            digest.update(np.ascontiguousarray(part).data)
    return train, validation, digest.hexdigest()


def _too_little(name: str, stream: TokenStream, examples: Examples, sequence_length: int) -> list[str]:
    if len(examples):
        return []
    return [
        f"data: {len(stream)} tokens are left for {name}; allowed: at least one sequence, sequence_length + 1 = "
        f"{sequence_length + 1} tokens; nearest: a smaller sequence_length, more data, or another validation_fraction"
    ]


def _synthetic(sequence_length: int, vocab_size: int, seed: int) -> Corpus:
    if vocab_size < 2:
        raise UserError(f"model.vocab_size: got {vocab_size}; allowed for synthetic data: at least 2; nearest: 2")
    tokenizer = number_tokenizer(vocab_size)
    return Corpus(
        train=SyntheticExamples(NUM_TRAIN_EXAMPLES, sequence_length, vocab_size, seed, split=0),
        validation=SyntheticExamples(NUM_VALIDATION_EXAMPLES, sequence_length, vocab_size, seed, split=1),
        fingerprint=hashlib.sha256(f"synthetic {sequence_length} {vocab_size} {seed}".encode()).hexdigest(),
        summary=f"synthetic counting, {vocab_size} ids",
        num_tokens=(NUM_TRAIN_EXAMPLES + NUM_VALIDATION_EXAMPLES) * sequence_length,
        vocab_size=vocab_size,
        end_id=tokenizer.end_id,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        has_text=False,
    )


def vocabulary_problems(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Returns one line if the tokenizer, with its end of document, has ids that the model does not have."""
    if tokenizer.vocab_size <= vocab_size:
        return []
    return [
        f"model.vocab_size: got {vocab_size}; allowed for tokenizer '{tokenizer.name}' with its end of document: at "
        f"least {tokenizer.vocab_size}; nearest: {tokenizer.vocab_size}"
    ]


def _streams(options: DataOptions, tokenizer: Tokenizer, vocab_size: int) -> tuple[TokenStream, TokenStream, str, str]:
    """Returns the streams of both splits, the digest of their ids, and a description of the source."""
    if options.source == "tokens":
        files, _ = find_files(options.path)
        arrays, digest = open_token_files(files, vocab_size)
        train, validation = _cut(TokenStream(tuple(arrays), tokenizer.end_id), options.validation_fraction)
        return train, validation, digest, f"{len(files)} token file(s)"
    if problems := vocabulary_problems(tokenizer, vocab_size):
        raise UserError(*problems)
    train, validation, digest = _text_streams(options, tokenizer)
    version = ".".join(str(number) for number in sys.version_info[:3])
    what = f"standard library of Python {version}" if options.source == "python" else f"text of {options.path}"
    return train, validation, digest, what


def open_corpus(options: DataOptions, *, sequence_length: int, vocab_size: int, seed: int) -> Corpus:
    """Opens the data. Token files stay on disk; text is held as ids.

    Args:
      options: which data.
      sequence_length: T, tokens an example.
      vocab_size: the model's, which every id must be below.
      seed: decides synthetic examples; real data does not depend on it.

    Raises:
      UserError: a line for each thing wrong with the data: missing, empty, unreadable, not UTF-8, ids past the
        vocabulary, too little for one sequence.
    """
    problems = option_problems(options, "data") + check(options)
    if problems:
        raise UserError(*problems)
    if options.source == "synthetic":
        return _synthetic(sequence_length, vocab_size, seed)
    tokenizer = tokenizer_for(options, vocab_size=vocab_size)
    train_stream, validation_stream, digest, what = _streams(options, tokenizer, vocab_size)
    train = pack(train_stream, sequence_length, options.packing)
    validation = pack(validation_stream, sequence_length, options.packing)
    problems = _too_little("training", train_stream, train, sequence_length)
    if options.validation_fraction:
        problems += _too_little("validation", validation_stream, validation, sequence_length)
    if problems:
        raise UserError(*problems)
    split = f"{len(train_stream)} {len(validation_stream)} {tokenizer.end_id}"
    num_tokens = len(train_stream) + len(validation_stream)
    return Corpus(
        train=train,
        validation=validation,
        fingerprint=hashlib.sha256(f"{digest} {split}".encode()).hexdigest(),
        summary=f"{what}: {num_tokens:,} tokens, {len(train):,} + {len(validation):,} sequences",
        num_tokens=num_tokens,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        has_text=True,
    )


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
