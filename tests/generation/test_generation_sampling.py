"""Which tokens temperature, top-k and top-p leave, and what random numbers depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.generation.sampling import Sampling, choose, mask_logits, row_keys

# Probabilities of five tokens, in no order; the third is padding.
PROBABILITIES = np.array([[0.1, 0.4, 0.0, 0.3, 0.2]])
LOGITS = np.log(np.maximum(PROBABILITIES, 1e-30)) + np.where(PROBABILITIES > 0, 0, -np.inf)


def left(**chosen):
    return sorted(np.flatnonzero(np.isfinite(mask_logits(jnp.asarray(LOGITS), Sampling(1.0, **chosen))[0])))


@pytest.mark.parametrize(
    ("chosen", "tokens"),
    [
        ({}, [0, 1, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 9}, [0, 1, 3, 4]),
        ({"top_p": 0.1}, [1]),  # the token that crosses p stays
        ({"top_p": 0.5}, [1, 3]),
        ({"top_p": 0.75}, [1, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 3, 4]),
        # Of what top-k leaves, the first two have 4/9 + 3/9 of the probability; of all tokens they have 0.7.
        ({"top_k": 3, "top_p": 0.75}, [1, 3]),
    ],
)
def test_what_is_left(chosen, tokens):
    assert left(**chosen) == tokens


def test_tokens_that_are_as_probable_as_the_last_one_stay():
    logits = jnp.log(jnp.asarray([[0.25, 0.25, 0.25, 0.25]]))
    assert np.isfinite(mask_logits(logits, Sampling(1.0, top_k=2))).all()
    assert np.isfinite(mask_logits(logits, Sampling(1.0, top_p=0.3))).all()


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-30, 9e-7])
def test_what_float32_cannot_divide_by_is_greedy(temperature):
    logits = jnp.asarray([[2.0, 9.0, 8.0, -3.0]])
    keys = jax.random.split(jax.random.key(0), 1)
    drawn = {int(choose(logits, keys, jnp.int32(i), Sampling(temperature))[0]) for i in range(20)}
    assert drawn == {1}


def test_zero_is_greedy_and_temperature_comes_before_the_others():
    keys = jax.random.split(jax.random.key(0), 1)
    assert choose(jnp.asarray(LOGITS), keys, jnp.int32(0), Sampling(0.0, top_k=3)).tolist() == [1]
    # At temperature 0.5 probabilities are squared: 0.16, 0.09, 0.04, 0.01 of 0.3; 0.5 is reached by the first alone.
    drawn = {int(choose(jnp.asarray(LOGITS), keys, jnp.int32(i), Sampling(0.5, top_p=0.5))[0]) for i in range(20)}
    assert drawn == {1}


def test_frequencies_are_the_probabilities():
    num_draws = 4000
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (num_draws, 5))
    keys = row_keys(jax.random.key(3), jnp.zeros(num_draws, jnp.int32), jnp.arange(num_draws))
    counts = np.bincount(choose(rows, keys, jnp.int32(0), Sampling(1.0)), minlength=5)
    deviations = np.sqrt(num_draws * PROBABILITIES[0] * (1 - PROBABILITIES[0]))
    assert np.all(np.abs(counts - num_draws * PROBABILITIES[0]) <= 4 * deviations)


def test_random_numbers_depend_on_prompt_sample_and_position_alone():
    flat = jnp.zeros((4, 1000))
    prompts, samples = jnp.asarray([0, 0, 1, 7]), jnp.asarray([0, 1, 0, 3])
    draw = lambda rows, index, seed=5: np.asarray(  # noqa: E731
        choose(
            flat[rows], row_keys(jax.random.key(seed), prompts[rows], samples[rows]), jnp.int32(index), Sampling(1.0)
        )
    )
    everyone = draw(jnp.arange(4), 2)
    assert len(set(everyone.tolist())) == 4
    assert draw(jnp.asarray([3, 1]), 2).tolist() == everyone[[3, 1]].tolist(), "whichever rows are beside them"
    assert not np.array_equal(draw(jnp.arange(4), 3), everyone)
    assert not np.array_equal(draw(jnp.arange(4), 2, seed=6), everyone)
