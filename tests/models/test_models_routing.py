"""Where tokens go, and the sums that keep the load of experts even; compared with loops over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.models.moe import routing
from meshtrain.models.moe.routing import Routing, Tokens

NUM_SEQUENCES, NUM_TOKENS, WIDTH, NUM_EXPERTS, NUM_CHOSEN = 3, 5, 4, 6, 2
GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(size=(NUM_SEQUENCES, NUM_TOKENS, NUM_EXPERTS)).astype(np.float32)
BIAS = np.float32([0, 0, 3, 0, -3, 0])
ARE_REAL = np.ones((NUM_SEQUENCES, NUM_TOKENS), np.float32)
ARE_REAL[1, 3:] = 0  # padding
TOKENS = Tokens((ARE_REAL * GENERATOR.random(ARE_REAL.shape)).astype(np.float32), ARE_REAL)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize(("kind", "bias", "scale"), [("softmax", None, 1.0), ("sigmoid", BIAS, 2.5)])
def test_the_best_experts_are_chosen_and_gates_add_up(kind, bias, scale):
    """The bias chooses, and gates are those of scores without it."""
    found = routing.route(LOGITS, bias, NUM_CHOSEN, kind, scale)
    for place in np.ndindex(NUM_SEQUENCES, NUM_TOKENS):
        scores = {"softmax": softmax, "sigmoid": sigmoid}[kind](LOGITS[place])
        best = np.argsort(-(scores if bias is None else scores + bias))[:NUM_CHOSEN]
        np.testing.assert_array_equal(found.chosen[place], best)
        np.testing.assert_allclose(found.gates[place], scale * scores[best] / scores[best].sum(), rtol=1e-6)
        np.testing.assert_allclose(found.shares[place], scores / scores.sum(), rtol=1e-6)
    if bias is not None:
        assert (found.chosen == 2).any(axis=-1).all()
        assert not (found.chosen == 4).any()


def test_experts_are_chosen_in_the_groups_whose_two_best_score_highest():
    groups, kept, chosen = 3, 2, 3
    found = routing.route(LOGITS, BIAS, chosen, "sigmoid", 1.0, (groups, kept))
    differs = False
    for place in np.ndindex(NUM_SEQUENCES, NUM_TOKENS):
        ranked = sigmoid(LOGITS[place]) + BIAS
        of_groups = np.sort(ranked.reshape(groups, -1))[:, -2:].sum(axis=1)
        allowed = np.repeat(np.isin(np.arange(groups), np.argsort(-of_groups)[:kept]), NUM_EXPERTS // groups)
        best = np.argsort(-np.where(allowed, ranked, -np.inf))[:chosen]
        np.testing.assert_array_equal(found.chosen[place], best)
        differs |= set(best) != set(np.argsort(-ranked)[:chosen])
    assert differs, "groups change a choice"


def test_logits_are_float32_of_highest_precision_whatever_the_dtype():
    x = jnp.asarray(GENERATOR.normal(size=(1, 2, WIDTH)), jnp.bfloat16)
    router = jnp.asarray(GENERATOR.normal(size=(WIDTH, NUM_EXPERTS)), jnp.float32)
    assert routing.logits(x, router).dtype == jnp.float32
    np.testing.assert_allclose(routing.logits(x, router), np.float32(x) @ np.float32(router), rtol=1e-6)
    assert "HIGHEST" in str(jax.make_jaxpr(routing.logits)(x, router))


@pytest.fixture(scope="module")
def to():
    return routing.route(LOGITS, None, NUM_CHOSEN, "softmax")


def of_loops(to: Routing, tokens: Tokens) -> tuple[float, float, float]:
    """Balance, z and entropy as the papers write them, one sequence and one token after the other."""
    balance = z = entropy = 0.0
    for s in range(NUM_SEQUENCES):
        real = [t for t in range(NUM_TOKENS) if tokens.are_real[s, t]]
        for i in range(NUM_EXPERTS):
            frequency = NUM_EXPERTS / (NUM_CHOSEN * len(real)) * sum(i in to.chosen[s, t] for t in real)
            share = sum(to.shares[s, t, i] for t in real) / len(real)
            balance += frequency * share * tokens.weights[s].sum()
        for t in range(NUM_TOKENS):
            z += tokens.weights[s, t] * np.log(np.exp(LOGITS[s, t]).sum()) ** 2
            entropy -= tokens.weights[s, t] * sum(p * np.log(p) for p in np.asarray(to.shares[s, t]))
    return balance, z, entropy


def test_losses_are_those_of_loops_over_tokens_without_padding(to):
    counts = routing.counts(to.chosen, TOKENS, NUM_EXPERTS)
    np.testing.assert_array_equal(counts.sum(axis=1), NUM_CHOSEN * ARE_REAL.sum(axis=1))
    found = routing.balance(to, counts, TOKENS), routing.z_loss(to, TOKENS), routing.entropy(to, TOKENS)
    np.testing.assert_allclose(found, of_loops(to, TOKENS), rtol=1e-5)


def test_losses_do_not_depend_on_how_a_batch_is_cut(to):
    def balance(part):
        some, tokens = jax.tree.map(lambda leaf: leaf[part], (to, TOKENS))
        return routing.balance(some, routing.counts(some.chosen, tokens, NUM_EXPERTS), tokens)

    np.testing.assert_allclose(balance(slice(None)), balance(slice(0, 1)) + balance(slice(1, None)), rtol=1e-6)


def test_an_even_load_has_a_balance_loss_of_one_for_each_target():
    shares = jnp.full((1, NUM_EXPERTS, NUM_EXPERTS), 1 / NUM_EXPERTS)
    chosen = jnp.arange(NUM_EXPERTS)[None, :, None]
    tokens = Tokens(jnp.full((1, NUM_EXPERTS), 0.5), jnp.ones((1, NUM_EXPERTS)))
    even = Routing(chosen, jnp.ones(chosen.shape), shares, jnp.zeros((1, NUM_EXPERTS)))
    found = routing.balance(even, routing.counts(chosen, tokens, NUM_EXPERTS), tokens)
    np.testing.assert_allclose(found, 0.5 * NUM_EXPERTS, rtol=1e-6)


@pytest.mark.parametrize(
    "counts, expected",
    [
        ([3, 3, 3], [0, 0, 0]),
        ([4, 3, 3], [-1, 1, 1]),  # the mean is 10 / 3
        ([0, 0, 0], [0, 0, 0]),
        ([2**24 - 1, 2**24 - 2], [-1, 1]),
        ([2**24 - 1] * 100 + [2**24 - 2], [-1] * 100 + [1]),  # a mean in float32 would equal the counts
        ([[5, 1, 2, 0], [2, 2, 2, 2]], [[-1, 1, 0, 1], [0, 0, 0, 0]]),
    ],
)
def test_a_bias_falls_above_the_mean_and_rises_below(counts, expected):
    np.testing.assert_array_equal(routing.direction(jnp.float32(counts)), np.float32(expected))
