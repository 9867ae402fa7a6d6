"""What a model that sees one token reaches: the loss that training has to get under.

Shapes: V vocab_size.
"""

import itertools
from collections.abc import Iterable

import numpy as np

from meshtrain.data.packing import Examples, TokenPairs

LARGEST_VOCAB = 512

# Synthetic data has no end worth waiting for; this many tokens settle V * V counts.
_MOST_TRAIN_CHUNKS = 1 << 14
_STRENGTHS = tuple(2.0**power for power in range(-6, 13))


def _count(pairs: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> np.ndarray:
    """Returns how often each token follows each, float64 [V, V]."""
    counts = np.zeros(vocab_size * vocab_size)
    for tokens, targets in pairs:
        counts += np.bincount(tokens.astype(np.int64) * vocab_size + targets, minlength=len(counts))
    return counts.reshape(vocab_size, vocab_size)


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
    """Returns the smoothing under which each training pair is likeliest once it is itself left out of the counts."""
    seen = counts > 0
    unigram = (counts.sum(0) + 1) / (counts.sum() + len(counts))
    rest, follows = counts - 1, counts.sum(1, keepdims=True) - 1

    def likelihood(strength: float) -> float:
        left_out = (rest + strength * unigram) / (follows + strength)
        return float((counts[seen] * np.log(left_out[seen])).sum())

    return max(_STRENGTHS, key=likelihood)


def bigram_loss(
    train: Examples, validation: Examples, *, vocab_size: int, indices: Iterable[int] | None = None
) -> float | None:
    """Returns the validation loss of a smoothed bigram model, in nats per token.

    It is fitted to every training token, smoothing included, and scored on the tokens that the model is scored on.

    Args:
      train: examples to count in.
      validation: examples to score.
      vocab_size: one more than the largest id.
      indices: which validation examples; None is all.

    Returns:
      The mean over the positions with weight 1; None beyond 512 ids, or where nothing is scored.
    """
    if vocab_size > LARGEST_VOCAB:
        return None
    counts = _count(itertools.islice(train.pairs(), _MOST_TRAIN_CHUNKS), vocab_size)
    scored = validation.pairs() if indices is None else _scored(validation, indices)
    asked = _count(scored, vocab_size)
    if not asked.sum() or not counts.sum():
        return None
    log_probabilities = np.log(_probabilities(counts, _strength(counts)))
    return float(-(asked * log_probabilities).sum() / asked.sum())
