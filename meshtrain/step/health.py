"""Norms of gradients, weights and updates: one per stacked layer, and one per top-level key for all other arrays.

A weight that stacks layers has one sum of squares per layer. The step computes these sums when it reads the same arrays
for other purposes, and devices exchange only one number per sum. A pipeline stores layers in chunks with padding layers
after them; norms are in layer order on every mesh.
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

Squares = Mapping[str, jax.Array]  # path -> sums of squares, float32 [L], or [] without stacked layers


class Layers(NamedTuple):
    """Describes which dims of the parameters stack layers, and in which order.

    Attributes:
      names: path of a parameter -> its logical axes.
      stack: the pipeline's arrangement of layers; None: layers are in layer order in memory.
    """

    names: Mapping[str, Names]
    stack: Stack | None = None


def squares(layers: Layers, tree: Arrays) -> Squares:
    """Returns path -> sum of squares of each array: float32 [L] if the array stacks L layers, in layer order, else [].

    Args:
      layers: which dims of the parameters stack layers.
      tree: a pytree of float32 arrays with the structure of the parameters; the leaf of a frozen parameter may be a
        scalar.
    """
    (names, stack), result = layers, {}
    for path, leaf in leaves_with_paths(tree):
        dims = [dim for dim in range(leaf.ndim) if names[path][dim] in STACKED]
        of_places = jnp.sum(jnp.square(leaf), axis=[dim for dim in range(leaf.ndim) if dim not in dims])
        own = tuple(names[path][dim] for dim in dims)
        result[path] = reshape_stack(of_places, layer_order_shape(of_places.shape, own, stack), stack)
    return result


def totals(found: Squares) -> jax.Array:
    """Returns the sum of squares of each parameter's array, summed over its layers: float32 [leaves].

    Args:
      found: path -> sum of squares, a scalar or [L] for L layers; the result of `squares`.
    """
    return jnp.stack([jnp.sum(one) for one in found.values()])


def metrics(layers: Layers, of_gradients: Squares, weights: Arrays, moved: Arrays) -> Metrics:
    """Returns the norms of a step's gradients, of its weights, and of the change of the weights: name -> float32 norm.

    The function `norms` defines the names and shapes. The change is the difference between stored weights, so it
    includes rounding, and is zero in a step that the guard skips.

    Args:
      layers: which dims of the parameters stack layers.
      of_gradients: path -> sum of squares of the gradient, from `squares`.
      weights: the trained weights before the step, float32.
      moved: the trained weights after the step, float32.
    """
    # The norm is computed from a difference of weights. For norms of the optimizer's updates XLA would store the
    # updates and read memory once more.
    of_updates = squares(layers, jax.tree.map(jnp.subtract, moved, weights))
    of_all = {"weight": squares(layers, weights), "update": of_updates, "grad": of_gradients}
    return {name: norm for what, one in of_all.items() for name, norm in norms(what, one, layers.names).items()}


def norms(what: str, found: Squares, names: Mapping[str, Names]) -> Metrics:
    """Returns metric name -> norm, float32: [L] in layer order for L stacked layers, a scalar for other arrays.

    There is one norm for all arrays without layers under a top-level key of the parameters, and one for each stacked
    layer. With `what` = "grad", the names are "grad_norm_of/layers" for stacked layers under the key `layers`,
    "grad_norm_of/KEY" for arrays without layers under KEY, and "grad_norm_of/KEY/layers" for stacked layers under
    another KEY, such as an encoder. If a key has stacks of several lengths L, each length has a separate norm, with
    " of L" after the name.

    Args:
      what: the first part of the metric names: "weight", "update" or "grad".
      found: path -> sum of squares, from `squares`.
      names: path -> the logical axes of a parameter.
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
    """Returns the index of the last layer with a non-finite gradient in one stacked array: int32 scalar, -1 for none.

    The backward pass starts at the last layer, so the gradient of this layer became non-finite first. The result is
    also -1 if `number` means the loss, or an array that stacks no layers.

    Args:
      found: path -> sum of squares of a gradient, from `squares`.
      number: which array to search: the result of `guard.first_not_finite`, 1 + the array's index in `found`.
    """

    def last(one: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(jnp.isfinite(one), -1, jnp.arange(one.size))) if one.ndim else jnp.int32(-1)

    of_arrays = jnp.stack([jnp.int32(-1), *map(last, found.values())])
    return jnp.where(number > 0, of_arrays[number], -1).astype(jnp.int32)
