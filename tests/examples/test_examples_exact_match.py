"""Exact match counts pairs, each once, and is right about those whose counted targets are all right."""

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.examples.seq2seq_task import exact_match


def test_exact_match_counts_pairs_with_a_target():
    generator = np.random.default_rng(0)
    segment_ids = np.sort(generator.integers(0, 5, (50, 12)), axis=1)[:, ::-1].astype(np.int32)
    targets = generator.integers(0, 9, (50, 12))
    predicted = np.where(generator.random((50, 12)) < 0.8, targets, 0)
    weights = (generator.random((50, 12)) < 0.6).astype(np.float32)
    pairs = [
        (counted, all(predicted[row, place][counted] == targets[row, place][counted]))
        for row in range(50)
        for segment in np.unique(segment_ids[row])
        if (counted := weights[row, (place := segment_ids[row] == segment)] > 0).any()
    ]
    found = exact_match(
        jax.nn.one_hot(predicted, 9), {"targets": targets, "weights": weights, "segment_ids": jnp.asarray(segment_ids)}
    )
    assert tuple(map(int, found)) == (sum(is_right for _, is_right in pairs), len(pairs))
    assert 0 < found.sum < found.weight
