"""The router: the experts and gates of each token, and losses that keep the load of experts even.

b: sequences in a microbatch, T: tokens per sequence, E: experts, k: experts per token.

Everything is float32. If two scores are closer than the rounding error, different meshes could choose different
experts, so logits are computed at the device's highest precision.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.models.remat import CHOSEN
from meshtrain.sharding.saved import mark


class Tokens(NamedTuple):
    """The properties of a batch's tokens that the router's losses and counts need.

    Attributes:
      weights: float32 [b, T], the weight of each target in the loss.
      are_real: float32 [b, T], 1 for a token and 0 for padding.
    """

    weights: jax.Array
    are_real: jax.Array


class Routing(NamedTuple):
    """The k experts chosen for each token, their gates, and the scores of all E experts.

    Attributes:
      chosen: int32 [b, T, k], the indices of each token's experts, best first.
      gates: float32 [b, T, k], the factors by which the results of the chosen experts are multiplied.
      shares: float32 [b, T, E], the scores of all experts, divided by their sum over experts.
      log_normalizers: float32 [b, T], the logarithm of the sum of exp(logit) over experts.
    """

    chosen: jax.Array
    gates: jax.Array
    shares: jax.Array
    log_normalizers: jax.Array


def logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Returns the router's logits for E experts, float32 [b, T, E].

    Args:
      x: activations [b, T, D], any float dtype.
      router: weight of the router, float32 [D, E].
    """
    return jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    num_chosen: int,
    kind: str,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
) -> Routing:
    """Chooses k experts for each token; returns the experts, their gates and the scores of all experts.

    `softmax` chooses the experts with the k largest probabilities (Jiang et al. 2024, Mixtral; Qwen3-MoE with its
    `norm_topk_prob`). `sigmoid` chooses the k largest of sigmoid(logit) + bias, and gates are the sigmoids without the
    bias (DeepSeek-AI 2024, DeepSeek-V3, equations 12 to 16). The gates of a token are divided by their sum, then
    multiplied by `scale`.

    Args:
      logits: router logits, float32 [b, T, E].
      bias: float32 [E], added to scores only to choose experts; None: no bias.
      num_chosen: number of experts per token, k.
      kind: how scores are computed from logits, one of the choices of `model.moe.router`.
      scale: factor of the gates.
      groups: (number of groups of experts, number of groups from which a token's experts are chosen), see
        `in_best_groups`.
    """
    scores = jax.nn.softmax(logits) if kind == "softmax" else jax.nn.sigmoid(logits)
    ranked = in_best_groups(scores if bias is None else scores + bias, *groups)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(ranked), num_chosen)
    # Every remat policy saves the choices, because a recomputation could round differently and choose other experts.
    chosen = mark(chosen.astype(jnp.int32), CHOSEN)
    gates = jnp.take_along_axis(scores, chosen, axis=-1)
    gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    shares = scores if kind == "softmax" else scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    return Routing(chosen, gates * scale, shares, jax.nn.logsumexp(logits, axis=-1))


def in_best_groups(ranked: jax.Array, num_groups: int, num_kept: int) -> jax.Array:
    """Sets the scores of experts outside of each token's best groups to minus infinity; returns float32 [b, T, E].

    Groups consist of consecutive experts. The score of a group is the sum of its two best experts' scores (DeepSeek-AI
    2024, DeepSeek-V3, section 2.1.2, where groups are nodes).

    Args:
      ranked: scores of experts, float32 [b, T, E].
      num_groups: number of groups, a divisor of E.
      num_kept: number of best groups for each token; the scores of their experts are unchanged.
    """
    if num_kept == num_groups:
        return ranked
    grouped = ranked.reshape(*ranked.shape[:-1], num_groups, -1)
    # Comparisons instead of `top_k`: for four dims XLA's partitioner would gather the scores of all devices.
    first = jnp.argmax(grouped, axis=-1, keepdims=True) == jnp.arange(grouped.shape[-1])
    best = jnp.max(grouped, axis=-1) + jnp.max(jnp.where(first, -jnp.inf, grouped), axis=-1)
    index = jnp.arange(num_groups)
    is_ahead = (best[..., None, :] > best[..., :, None]) | (
        (best[..., None, :] == best[..., :, None]) & (index[None, :] < index[:, None])
    )
    is_kept = jnp.sum(is_ahead, axis=-1) < num_kept
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def counts(chosen: jax.Array, tokens: Tokens, num_experts: int) -> jax.Array:
    """Returns how many tokens of each sequence chose each expert, float32 [b, E]; padding is not counted.

    Args:
      chosen: indices of each token's experts, int32 [b, T, k].
      tokens: states which tokens are padding.
      num_experts: number of experts, E.
    """
    hot = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32)
    return jnp.sum(hot * tokens.are_real[..., None, None], axis=(1, 2))


def balance(routing: Routing, counts: jax.Array, tokens: Tokens) -> jax.Array:
    """Returns the load-balancing loss of the router, float32 scalar: a sum over sequences weighted by their targets.

    The loss of one sequence of T tokens is sum_i f_i P_i. f_i is E / (k T) times the number of tokens that chose expert
    i, and P_i is the mean share of expert i (DeepSeek-V3, equations 17 to 20). The loss is 1 if f and P are even.
    Multiplied by k, it equals `load_balancing_loss_func` of transformers for the logits of one layer and one sequence.
    For a batch, `load_balancing_loss_func` takes means over all sequences, so its result depends on how a batch is
    split into microbatches. This function takes means within each sequence.

    Args:
      routing: routing of the tokens.
      counts: float32 [b, E], how many tokens of each sequence chose each expert, from the function `counts`.
      tokens: weights of targets, and which tokens are padding.
    """
    num_tokens = jnp.maximum(jnp.sum(tokens.are_real, axis=1), 1.0)[:, None]
    num_experts, num_chosen = routing.shares.shape[-1], routing.chosen.shape[-1]
    frequencies = counts * num_experts / (num_chosen * num_tokens)
    shares = jnp.sum(routing.shares * tokens.are_real[..., None], axis=1) / num_tokens
    of_sequences = jnp.sum(jax.lax.stop_gradient(frequencies) * shares, axis=-1)
    return jnp.sum(of_sequences * jnp.sum(tokens.weights, axis=1))


def z_loss(routing: Routing, tokens: Tokens) -> jax.Array:
    """Returns the router z-loss, float32 scalar: the weighted sum over targets of (log sum exp of logits)^2.

    Source: Zoph et al. 2022, ST-MoE.

    Args:
      routing: routing of the tokens; `log_normalizers` are read.
      tokens: weights of targets.
    """
    return jnp.sum(tokens.weights * jnp.square(routing.log_normalizers))


def entropy(routing: Routing, tokens: Tokens) -> jax.Array:
    """Returns the entropy of each token's shares of experts in nats, summed over weighted targets, a float32 scalar.

    The result has no gradient.

    Args:
      routing: routing of the tokens; `shares` are read.
      tokens: weights of targets.
    """
    shares = jax.lax.stop_gradient(routing.shares)
    terms = -shares * jnp.log(jnp.maximum(shares, jnp.finfo(jnp.float32).tiny))
    return jnp.sum(tokens.weights * jnp.sum(terms, axis=-1))


def direction(counts: jax.Array) -> jax.Array:
    """Returns the direction in which the router bias of each of E experts changes, float32 [..., E]: -1, 0 or 1.

    It is -1 for an expert with more tokens than the mean over experts, 1 for an expert with fewer, and 0 at the mean.
    Counts are compared as integers, so the result has the same bits in any order of summation.

    >>> print(direction(jnp.float32([4, 1, 2, 2])))
    [-1.  1.  1.  1.]

    Args:
      counts: number of tokens that chose each expert, float32 [..., E], integers below 2^24. Their sum over E must be
        below 2^31.
    """
    counted = counts.astype(jnp.int32)
    total = jnp.sum(counted, axis=-1, keepdims=True)
    floor, rest = total // counts.shape[-1], total % counts.shape[-1]
    is_above = counted > floor
    is_below = (counted < floor) | ((counted == floor) & (rest > 0))
    return is_below.astype(jnp.float32) - is_above.astype(jnp.float32)
