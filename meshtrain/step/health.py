"""The norms of each layer's gradients, weights and updates, and of the other parameters by their first key.

They are sums of squares that the step takes anyway, or while it reads the same arrays: of a weight that stacks layers
one for each layer. So all that is sent for them is a number for each. In memory a pipeline has layers in chunks and
empty places after them; norms are in layer order on every mesh.
"""

import collections
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshtrain.models.metrics import Metrics
from meshtrain.pipeline.stages import Stack, layer_order_names, layer_order_shape, reshape_stack
from meshtrain.sharding.param_sharding import STACKED, Names
from meshtrain.sharding.trees import Arrays, leaves_with_paths

Squares = Mapping[str, jax.Array]  # path -> sums of squares, float32 [L], or [] of what stacks no layers


class Layers(NamedTuple):
    """Where the layers of parameters are.

    Attributes:
      names: path -> logical axes.
      stack: of the pipeline; None: layers are in layer order in memory.
    """

    names: Mapping[str, Names]
    stack: Stack | None = None


def squares(layers: Layers, tree: Arrays) -> Squares:
    """Returns the sums of squares of each array, of each of its layers: float32 [L] in layer order, else [].

    Args:
      layers: of the parameters.
      tree: of float32 arrays like them; a scalar stands for one that is frozen.
    """
    (names, stack), result = layers, {}
    for path, leaf in leaves_with_paths(tree):
        dims = [dim for dim in range(leaf.ndim) if names[path][dim] in STACKED]
        of_places = jnp.sum(jnp.square(leaf), axis=[dim for dim in range(leaf.ndim) if dim not in dims])
        own = tuple(names[path][dim] for dim in dims)
        result[path] = reshape_stack(of_places, layer_order_shape(of_places.shape, own, stack), stack)
    return result


def totals(found: Squares) -> jax.Array:
    """Returns the sum of squares of each array, float32 [leaves]."""
    return jnp.stack([jnp.sum(one) for one in found.values()])


def metrics(layers: Layers, of_gradients: Squares, weights: Arrays, moved: Arrays) -> Metrics:
    """Returns `norms` of gradients, of weights before the step, and of the change of weights, all float32.

    The change is that of the stored weights: after rounding, and zero in a step that the guard skips.
    """
    # A difference, because XLA would store the optimizer's updates for their norms and pass over memory once more.
    of_updates = squares(layers, jax.tree.map(jnp.subtract, moved, weights))
    of_all = {"weight": squares(layers, weights), "update": of_updates, "grad": of_gradients}
    return {name: norm for what, one in of_all.items() for name, norm in norms(what, one, layers.names).items()}


def norms(what: str, found: Squares, names: Mapping[str, Names]) -> Metrics:
    """Returns `WHAT_norm_of/layers` -> norms float32 [L], in layer order, and `WHAT_norm_of/KEY` -> [] for other keys.

    Layers that stand below another key, such as those of an encoder, are `WHAT_norm_of/KEY/layers`. Below one key there
    may be stacks of several lengths: each has a group, `WHAT_norm_of/KEY/layers of L`.
    """
    lengths = collections.defaultdict[str, set[int]](set)
    for path, one in found.items():
        lengths[path.partition("/")[0]].update({one.size} if one.ndim else set())
    groups = dict[str, jax.Array]()
    for path, one in found.items():
        key = group = path.partition("/")[0]
        if one.ndim and group != (axis := layer_order_names(names[path])[0]):
            group = f"{group}/{axis}"
        group += f" of {one.size}" if one.ndim and len(lengths[key]) > 1 else ""
        groups[group] = groups[group] + one if group in groups else one
    return {f"{what}_norm_of/{group}": jnp.sqrt(total) for group, total in groups.items()}


def last_not_finite(found: Squares, number: jax.Array) -> jax.Array:
    """Returns the last layer of an array whose sum is not finite, where the backward pass met it first; int32 scalar.

    Args:
      found: of the gradients.
      number: of the array, see `guard.first_not_finite`. -1 is returned for the loss, and for what stacks no layers.
    """

    def last(one: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(jnp.isfinite(one), -1, jnp.arange(one.size))) if one.ndim else jnp.int32(-1)

    of_arrays = jnp.stack([jnp.int32(-1), *map(last, found.values())])
    return jnp.where(number > 0, of_arrays[number], -1).astype(jnp.int32)
