"""Kinds of metrics: how each is summed over a batch, and how the logged number follows from the sum.

Metrics are summed over layers, microbatches, shards, stages and the batches of an evaluation. A plain scalar is divided
by the weight of the loss.

E: experts, L: layers, N: the largest integer that `Largest` can count, or the number of bins of `Peaks`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.sharding.trees import Tree

# Name of the metric for the number of parts in which a device computed its experts' rows, see `moe/chunks.py`.
EXPERT_PARTS = "expert_parts"
EACH = "_each"  # suffix of the name of the load of each expert, which is logged in addition to the `Load`


class Ratio(NamedTuple):
    """A metric that is logged as `sum / weight`, such as the share of correct answers; both are float32 scalars."""

    sum: jax.Array
    weight: jax.Array


class Count(NamedTuple):
    """A metric whose sum is logged without division, such as the number of truncated sequences: a float32 scalar."""

    sum: jax.Array


class Load(NamedTuple):
    """A metric for the load of experts: how many tokens chose each expert, float32 [..., E], exact up to 2^24.

    The logged number is the maximum count divided by the mean count: 1 if all counts are equal, E if all tokens chose
    the same expert. If `counts` has a row for each layer, the logged number is the mean over rows. There are separate
    rows because a sum over layers would hide an uneven load in each layer. Each layer returns an array with its row,
    and zeros in the rows of the other layers.
    """

    counts: jax.Array


class Largest(NamedTuple):
    """A metric for the maximum of integers from 0 to N, stored as the number of occurrences of each integer.

    `counts` is float32 [N + 1]. The logged number is the largest integer that occurred, or 0 if all counts are 0.
    """

    counts: jax.Array


class Peaks(NamedTuple):
    """A metric for the largest magnitude of activations in each layer, stored as a histogram.

    `counts` is float32 [layers, N]: how often a layer's largest magnitude was in each of N bins, eight bins per factor
    of 2. Each layer returns an array with its row, and zeros in the rows of the other layers. The last bin also counts
    non-finite numbers. The logged number of a layer is the middle of the highest bin with a count, which is at most
    4.4 % off, or 0 without counts. The maximum over layers is logged as well.
    """

    counts: jax.Array


Metric = jax.Array | Ratio | Count | Load | Largest | Peaks
Metrics = Mapping[str, Metric]
# A metric's field or the weight of the loss: a float32 scalar, or a Python or NumPy number after the copy to the host.
Number: TypeAlias = Any
PEAK = "largest_activation"
_BINS, _LEAST, _MOST = 8, -16, 32  # bins per octave, from 2 ** _LEAST to 2 ** _MOST


def divisor(weight: Number) -> Number:
    """Returns the weight, or 1 if it is 0, to divide a sum by."""
    return weight + (weight == 0)


def number_to_log(metric: Metric | float, weight: Number) -> Number:
    """Returns the number to log for a metric, a scalar.

    >>> print(number_to_log(Load(jnp.float32([[3, 1, 0, 0], [1, 1, 1, 1]])), jnp.float32(7)))
    2.0

    Args:
      metric: a metric of any kind, with arrays or floats. A `Ratio` of weight 0 and a `Load` without counts give 0.
      weight: weight of the loss, by which a plain scalar is divided.
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
    """Returns the values to log for all metrics, by name: a scalar for each metric, and arrays for some kinds.

    A `Load` also gives the load of each expert, float32 [experts]. `Peaks` also give the maximum of each layer, float32
    [layers].

    Args:
      metrics: metric name -> metric, summed over a batch.
      weight: weight of the loss, by which plain scalars are divided.
    """
    result = {name: number_to_log(metric, weight) for name, metric in metrics.items()}
    peaks = {f"{name}_of/layers": of_layers(one) for name, one in metrics.items() if isinstance(one, Peaks)}
    each = {name + EACH: of_each(metric) for name, metric in metrics.items() if isinstance(metric, Load)}
    return result | peaks | each


def peaks(x: jax.Array, layer: jax.Array, num_layers: int) -> Peaks:
    """Returns the `Peaks` of one layer's activations, with zeros for other layers and without a gradient.

    Args:
      x: activations of any shape.
      layer: int32 scalar, the index of the layer.
      num_layers: L, the number of rows of the result.
    """
    largest = jnp.log2(jnp.max(jnp.abs(jax.lax.stop_gradient(x))).astype(jnp.float32))
    last = _BINS * (_MOST - _LEAST) - 1
    place = jnp.where(jnp.isnan(largest), last, jnp.clip(jnp.floor(_BINS * (largest - _LEAST)), 0, last))
    return Peaks(jnp.zeros((num_layers, last + 1), jnp.float32).at[layer, place.astype(jnp.int32)].set(1))


def of_layers(metric: Peaks) -> jax.Array:
    """Returns the largest magnitude in each layer, float32 [layers]; 0 for a layer without counts."""
    highest = ((metric.counts > 0) * np.arange(1, metric.counts.shape[-1] + 1)).max(axis=-1)
    return (highest > 0) * 2.0 ** ((highest - 0.5) / _BINS + _LEAST)


def of_each(load: Load) -> jax.Array:
    """Returns each expert's count divided by the mean count, float32 [experts]; for several layers, the mean over them.

    >>> print(of_each(Load(jnp.float32([[3, 1, 0, 0], [1, 1, 1, 1]]))))
    [2.  1.  0.5 0.5]
    """
    mean = load.counts.mean(axis=-1, keepdims=True)
    loads = load.counts / divisor(mean)
    return loads.reshape(-1, loads.shape[-1]).mean(axis=0)


def are_metrics(metrics: Tree) -> bool:
    """Returns whether a value is a dict whose values are all metrics.

    A metric is a scalar, a `Ratio` or `Count` of scalars, or a `Load`, `Largest` or `Peaks` with an array of counts.
    """
    return isinstance(metrics, Mapping) and all(_is_metric(metric) for metric in metrics.values())


def _is_metric(metric: Tree) -> bool:
    if isinstance(metric, Load | Largest | Peaks):
        return jnp.ndim(metric.counts) > 0
    fields = metric if isinstance(metric, Ratio | Count) else (metric,)
    return all(is_scalar(field) for field in fields)


def is_scalar(value: Tree) -> bool:
    """Returns whether a value is a number or a scalar array, rather than a tuple, a dict or a larger array."""
    return not isinstance(value, tuple | Mapping) and jnp.shape(value) == ()
