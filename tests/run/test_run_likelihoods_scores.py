"""Log probabilities and greedy hits of targets, summed by segment: against sums taken one by one."""

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.run.likelihoods import segment_scores, segment_sums, token_scores

B, T, V = 2, 6, 5


def test_scores_are_those_of_a_softmax_and_padding_has_none():
    logits = jax.random.normal(jax.random.key(0), (B, T, V)).at[..., V - 1].set(-jnp.inf)
    targets = jax.random.randint(jax.random.key(1), (B, T), 0, V - 1)
    log_probabilities, is_greedy = token_scores(logits, targets)
    probabilities = np.exp(np.asarray(logits, np.float64))
    wanted = np.take_along_axis(
        probabilities / probabilities.sum(-1, keepdims=True), np.asarray(targets)[..., None], -1
    )
    np.testing.assert_allclose(log_probabilities, np.log(wanted[..., 0]), rtol=1e-6)
    assert is_greedy.tolist() == (np.asarray(logits).argmax(-1) == np.asarray(targets)).tolist()
    assert 0 < np.sum(is_greedy) < B * T
    assert token_scores(jnp.zeros((1, 1, 3)), jnp.int32([[1]]))[1].tolist() == [[False]], "of equal ones the first"


def test_each_segment_has_its_own_sums():
    segments = jnp.int32([[1, 1, 2, 2, 2, 0], [1, 2, 3, 4, 5, 6]])
    values = jnp.float32([[1, 2, 4, 8, 16, 99], [1, 2, 4, 8, 16, 32]])
    assert segment_sums(values, segments, T).tolist() == [[3, 28, 0, 0, 0, 0], [1, 2, 4, 8, 16, 32]]


def test_only_targets_that_count_are_summed():
    logits = jnp.broadcast_to(jnp.log(jnp.float32([0.5, 0.25, 0.25])), (1, T, 3))
    targets = jnp.int32([[0, 1, 0, 0, 1, 0]])
    weights = jnp.float32([[0, 1, 1, 1, 0, 1]])
    sums, misses = segment_scores(logits, targets, weights, jnp.int32([[1, 1, 2, 2, 2, 3]]))
    np.testing.assert_allclose(np.exp(sums[0, :3]), [0.25, 0.25, 0.5], rtol=1e-6)
    assert misses[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert not sums[0, 3:].any()
