"""Kinds of metrics: what is added up over a batch, and the number that is logged of the sum.

All are added up over layers, microbatches, shards, stages and the batches of an evaluation. A plain scalar is divided
by the weight of the loss.

E: experts, N: a largest number.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.sharding.trees import Tree

# The metric of how many parts of its rows a device computed, see `moe.parts`.
EXPERT_PARTS = "expert_parts"
EACH = "_each"  # ends the name under which the load of each expert is logged, beside that of the `Load`


class Ratio(NamedTuple):
    """A metric with a weight of its own, such as the share of right answers among answers: float32 scalars."""

    sum: jax.Array
    weight: jax.Array


class Count(NamedTuple):
    """A metric that is logged as it is, such as the number of sequences that were cut: a float32 scalar."""

    sum: jax.Array


class Load(NamedTuple):
    """How often each expert was chosen: float32 [..., E], exact up to 2^24.

    What is logged is the largest count over the mean count, 1 where all are equal and E where all tokens chose the same
    expert; of several rows (layers) the mean of these numbers. A layer adds its row to the zeros of the other layers,
    because a sum over layers would hide that each of them prefers some experts.
    """

    counts: jax.Array


class Largest(NamedTuple):
    """The largest of whole numbers from 0 to N: float32 [N + 1], how often there was each. 0 where there was none."""

    counts: jax.Array


class Peaks(NamedTuple):
    """The largest magnitude in each layer: float32 [L, N], how often it was in each of N bins, eight to an octave.

    A layer adds its row to the zeros of the other layers. The last bin has what is not finite too. What is logged is
    the middle of the highest bin that was met, 4.4 % off at most, and 0 of layers that count nothing.
    """

    counts: jax.Array


Metric = jax.Array | Ratio | Count | Load | Largest | Peaks
Metrics = Mapping[str, Metric]
# Of a metric, or the weight of the loss: a float32 scalar, or a number or numpy scalar where it was read.
Number: TypeAlias = Any
PEAK = "largest_activation"
_BINS, _LEAST, _MOST = 8, -16, 32  # bins of an octave, from 2 ** _LEAST to 2 ** _MOST


def divisor(weight: Number) -> Number:
    """Returns what a sum is divided by: its weight, or 1 where that is 0."""
    return weight + (weight == 0)


def logged(metric: Metric | float, weight: Number) -> Number:
    """Returns what is logged of a metric, a scalar.

    >>> print(logged(Load(jnp.float32([[3, 1, 0, 0], [1, 1, 1, 1]])), jnp.float32(7)))
    2.0

    Args:
      metric: of any kind, of arrays or of floats. A `Ratio` of weight 0 and a `Load` without counts give 0.
      weight: of the loss.
    """
    if isinstance(metric, Ratio):
        return metric.sum / divisor(metric.weight)
    if isinstance(metric, Count):
        return metric.sum
    if isinstance(metric, Load):
        mean = metric.counts.mean(axis=-1)
        return (metric.counts.max(axis=-1) / divisor(mean)).mean()
    if isinstance(metric, Largest):
        return ((metric.counts > 0) * np.arange(metric.counts.size)).max()
    if isinstance(metric, Peaks):
        return of_layers(metric).max()
    return metric / divisor(weight)


def all_logged(metrics: Metrics, weight: Number) -> dict[str, Number]:
    """Returns what is logged of all metrics: a scalar of each, and what each expert or each layer has.

    That is of a `Load` the load of each expert, float32 [E], and of `Peaks` the largest of each layer, float32 [L].

    Args:
      metrics: of a batch.
      weight: of the loss.
    """
    result = {name: logged(metric, weight) for name, metric in metrics.items()}
    peaks = {f"{name}_of/layers": of_layers(one) for name, one in metrics.items() if isinstance(one, Peaks)}
    each = {name + EACH: of_each(metric) for name, metric in metrics.items() if isinstance(metric, Load)}
    return result | peaks | each


def peaks(x: jax.Array, layer: jax.Array, num_layers: int) -> Peaks:
    """Returns the row of one layer and zeros for the others, from its activations of any shape; no gradient."""
    largest = jnp.log2(jnp.max(jnp.abs(jax.lax.stop_gradient(x))).astype(jnp.float32))
    last = _BINS * (_MOST - _LEAST) - 1
    place = jnp.where(jnp.isnan(largest), last, jnp.clip(jnp.floor(_BINS * (largest - _LEAST)), 0, last))
    return Peaks(jnp.zeros((num_layers, last + 1), jnp.float32).at[layer, place.astype(jnp.int32)].set(1))


def of_layers(metric: Peaks) -> jax.Array:
    """Returns the largest magnitude in each layer, float32 [L]."""
    highest = ((metric.counts > 0) * np.arange(1, metric.counts.shape[-1] + 1)).max(axis=-1)
    return (highest > 0) * 2.0 ** ((highest - 0.5) / _BINS + _LEAST)


def of_each(load: Load) -> jax.Array:
    """Returns the count of each expert over the mean count, float32 [E]; of several rows (layers) the mean of these.

    >>> print(of_each(Load(jnp.float32([[3, 1, 0, 0], [1, 1, 1, 1]]))))
    [2.  1.  0.5 0.5]
    """
    mean = load.counts.mean(axis=-1, keepdims=True)
    loads = load.counts / divisor(mean)
    return loads.reshape(-1, loads.shape[-1]).mean(axis=0)


def are_metrics(metrics: Tree) -> bool:
    """Returns whether this is a dict of metrics: scalars, and kinds of scalars, or of counts, which are arrays."""
    return isinstance(metrics, Mapping) and all(_is_metric(metric) for metric in metrics.values())


def _is_metric(metric: Tree) -> bool:
    if isinstance(metric, Load | Largest | Peaks):
        return jnp.ndim(metric.counts) > 0
    fields = metric if isinstance(metric, Ratio | Count) else (metric,)
    return all(is_scalar(field) for field in fields)


def is_scalar(value: Tree) -> bool:
    """Returns whether this is one number or a scalar array, and no container."""
    return not isinstance(value, tuple | Mapping) and jnp.shape(value) == ()
