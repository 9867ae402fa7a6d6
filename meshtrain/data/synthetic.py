"""Synthetic examples that a model can learn: sequences that count up by a fixed step, with noise.

Shapes: T sequence_length.
"""

import dataclasses

import numpy as np

from meshtrain.data.packing import Example, TokenPairs

NUM_TRAIN_EXAMPLES = 1 << 20
NUM_VALIDATION_EXAMPLES = 1 << 10

_LARGEST_STEP = 4
_NOISE = 0.1


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
