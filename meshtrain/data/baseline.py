"""The loss of a smoothed bigram model: a baseline that a trained model should beat.

Shapes: V vocabulary.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from meshtrain.data.packing import Examples, TokenPairs

LARGEST_VOCAB = 512

# Synthetic data has a million examples: this many chunks are enough for V x V counts.
_MOST_TRAIN_CHUNKS = 1 << 12
_STRENGTHS = tuple(2.0**power for power in range(-6, 13))


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
