"""The backward pass of one layer: `jax.vjp` without the weights among its residuals, so that a scan can stack it.

K: layers in a chunk.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.layout.trees import merged, select
from meshtrain.models.task import LayerSums, Params

# (weights, activations) -> (activations, sums), see `Stages.repeated`.
Layer = Callable[[Params, Any], tuple[Any, LayerSums]]
# (weights, cotangent of the output's floating leaves, cotangent of the loss) -> (gradients of the trained weights,
# cotangent of the input's floating leaves).
Pullback = Callable[[Params, Any, jax.Array], tuple[Params, Any]]


def layer_vjp(layer: Layer, weights: Params, x: Any, mask: Any = None) -> tuple[Any, LayerSums, Pullback]:
    """Returns the output of a layer, its sums, and its backward pass.

    The backward pass is a pytree of residuals, so that `jax.lax.scan` can stack it. It takes the weights as an
    argument: if they were residuals, the scan would stack a copy of them.

    Args:
      layer: (weights, activations) -> (activations, sums).
      weights: the layer's parameters.
      x: the activations that enter it.
      mask: a tree of bool like the weights, true for each that gets a gradient; None: all of them.
    """
    trained, frozen = select(weights, mask)

    def differentiable(trained: Params, x: Any) -> tuple[tuple[Any, Any], Any]:
        y, sums = layer(merged(trained, frozen), x)
        return ((y, None), None) if sums is None else ((y, sums[0]), sums[1])

    (y, loss), pull, metrics = jax.vjp(differentiable, trained, x, has_aux=True)
    output = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), y)
    leaves, structure = jax.tree.leaves(pull), jax.tree.structure(pull)
    places = indices_of_weights(leaves, weights)

    def run(residuals: list[jax.Array], weights: Params, cotangent: Any, seed: jax.Array) -> tuple[Params, Any]:
        own, rest = jax.tree.leaves(weights), iter(residuals)
        pull = jax.tree.unflatten(structure, [next(rest) if place is None else own[place] for place in places])
        gradients, x_cotangent = pull((with_float0(cotangent, output), None if loss is None else seed))
        return gradients, floating(x_cotangent)

    residuals = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return y, None if loss is None else (loss, metrics), jax.tree_util.Partial(run, residuals)


def indices_of_weights(residuals: list[jax.Array], weights: Params) -> list[int | None]:
    """Returns for each residual the index of the leaf of the weights that it is, None for another array."""
    own = jax.tree.leaves(weights)
    return [next((i for i, one in enumerate(own) if one is residual), None) for residual in residuals]


def floating(tree: Any) -> Any:
    """Returns a tree with None in place of the leaves that have no cotangent: integers, bools, float0."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, tree)


def with_float0(cotangent: Any, output: Any) -> Any:
    """Returns a cotangent as the function from `jax.vjp` takes it: float0 zeros in place of each None of `floating`.

    Args:
      cotangent: of the floating leaves of `output`.
      output: arrays, or abstract arrays.
    """

    def fill(leaf: Any, part: Any) -> Any:
        return np.zeros(leaf.shape, jax.dtypes.float0) if part is None else part

    return jax.tree.map(fill, output, cotangent)
