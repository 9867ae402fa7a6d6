import math

import numpy as np
import pytest

from meshtrain.data.corpus import bigram_loss
from meshtrain.data.packing import StreamExamples, TokenStream


def examples(ids, length=8):
    return StreamExamples(TokenStream((np.asarray(ids, np.uint16),), -1), length)


def chain(num_tokens, seed):
    """A Markov chain over 3 ids, and the entropy of a step of it in nats."""
    steps = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    random = np.random.default_rng(seed)
    tokens = [0]
    for draw in random.random(num_tokens):
        tokens.append(int(np.searchsorted(np.cumsum(steps[tokens[-1]]), draw)))
    values, vectors = np.linalg.eig(steps.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    return tokens, float(-(stationary[:, None] * steps * np.log(steps)).sum())


def test_reaches_the_entropy_of_a_markov_chain():
    train, entropy = chain(40_000, seed=0)
    validation, _ = chain(40_000, seed=1)
    assert bigram_loss(examples(train), examples(validation)) == pytest.approx(entropy, abs=0.01)


def test_certain_text_costs_next_to_nothing_and_unseen_pairs_stay_finite():
    train = examples([0, 1, 2] * 1000)
    assert bigram_loss(train, train) < 0.01
    unseen = bigram_loss(train, examples([0, 2, 1] * 10))
    assert 1 < unseen < 20


def test_random_text_costs_the_logarithm_of_the_vocabulary():
    ids = np.random.default_rng(0).integers(0, 50, 30_000)
    loss = bigram_loss(examples(ids[:15_000]), examples(ids[15_000:]))
    # 2,500 pairs, six times each: without smoothing fitted to the training text this is far above.
    assert loss == pytest.approx(math.log(50), abs=0.05)


def test_scores_only_the_examples_asked_for():
    train = examples([0, 1] * 500 + [2, 3] * 500)
    validation = examples([0, 1] * 12 + [3, 3] * 12 + [0])
    easy = bigram_loss(train, validation, indices=range(2))
    hard = bigram_loss(train, validation, indices=range(4, 6))
    assert easy < 0.1 < 3 < hard
    assert bigram_loss(train, validation, indices=range(6)) == pytest.approx(bigram_loss(train, validation))


def test_only_weighted_targets_count():
    stream = TokenStream((np.asarray([0, 1, 9] * 300, np.uint16),), 9)
    counted = StreamExamples(stream, 8)
    # After the end id comes a new document: were it scored, 9 -> 0 would be certain, and were it not, so are the rest.
    assert bigram_loss(counted, counted, indices=range(10)) == pytest.approx(bigram_loss(counted, counted), abs=1e-3)
    assert not any((tokens == 9).any() for tokens, _ in counted.pairs())


def test_large_vocabularies_and_nothing_to_score():
    small, large = examples([0, 1] * 50), examples([0, 512] * 50)
    assert bigram_loss(large, small) is None
    assert bigram_loss(small, large) is None
    assert bigram_loss(small, examples([1])) is None
