"""Splits a layer into a forward pass that returns its residuals, and a backward pass that starts from these residuals.

The two passes run in different rows of a schedule, so residuals are stored in a buffer. They are the residuals that the
model's remat policy saves. Residuals that do not depend on the activations (weights, casts of them, rotary angles,
masks of documents or of dropout, random keys) are not stored: the backward pass recomputes them from the weights and
the microbatch (`sharding/passes.py`).
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.errors import Problem, UserError
from meshtrain.models.split import split_result
from meshtrain.models.task import Activations, LayerSums, Params
from meshtrain.sharding.passes import Passes
from meshtrain.sharding.trees import Arrays, Masks, mark_leaves

Given: TypeAlias = Arrays  # further inputs of a layer, such as its index: any pytree of integers
# (weights, activations, given) -> (activations, sums), see `Stages.repeated`.
Layer = Callable[[Params, Activations, Given], tuple[Activations, LayerSums]]


class SplitLayer:
    """A layer that is traced once, and offers its forward pass and its backward pass as two separate methods.

    The caller stores the residuals between the two calls.
    """

    def __init__(self, layer: Layer, weights: Params, x: Activations, given: Given, mask: Masks = None) -> None:
        """Traces the layer for these shapes. Both passes read the arrays that the layer closes over.

        Args:
          layer: a function (weights, activations, given) -> (activations, sums).
          weights: the layer's parameters.
          x: the activations before the layer.
          given: further inputs of the layer, such as its index.
          mask: a pytree of bool with the structure of the weights, true for each weight with a gradient; None: all
            weights.

        Raises:
          UserError: a residual that depends on activations is in host memory.
        """
        arguments = weights, x, given
        is_trained = mark_leaves(True if mask is None else mask, weights)
        is_x = [jax.tree.map(lambda _, index=index: index == 1, part) for index, part in enumerate(arguments)]
        run = lambda *arguments: split_result(layer(*arguments))  # noqa: E731
        self._passes = Passes(run, arguments, jax.tree.leaves((is_trained, *is_x[1:])), jax.tree.leaves(is_x))
        (self.output, loss), metrics = self._passes.result
        self.sums = None if loss is None else (loss, metrics)
        if any(array.memory_space == jax.memory.Space.Host for array in self._passes.kept):
            raise UserError(
                Problem(
                    "stages.repeated",
                    got="saved activations in host memory with a pipeline",
                    allowed="jax.checkpoint policies that save on the device or recompute",
                    nearest="nothing_saveable",
                )
            )

    @property
    def kept(self) -> list[jax.ShapeDtypeStruct]:
        """The residuals that `forward` returns for `backward`, as abstract arrays of numeric dtypes."""
        return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in self._passes.kept]

    def forward(self, weights: Params, x: Activations, given: Given) -> tuple[Activations, LayerSums, list[jax.Array]]:
        """Returns (output, sums, residuals) of the layer; only residuals that depend on `x` are returned.

        The sums are the (loss, metrics) that the layer adds, or None.
        """
        ((y, loss), metrics), kept = self._passes.forward(weights, x, given)
        return y, None if loss is None else (loss, metrics), kept

    def backward(
        self, kept: list[jax.Array], weights: Params, given: Given, cotangent: Activations, seed: jax.Array
    ) -> tuple[Params, Activations]:
        """Returns the gradients of the trained weights, and the cotangent of the input's floating leaves.

        Args:
          kept: the residuals from `forward`.
          weights: the layer's parameters, the same as in the call of `forward`.
          given: further inputs of the layer, the same as in the call of `forward`.
          cotangent: the cotangent of the output's floating leaves; None for other leaves.
          seed: the cotangent of the loss that the layer adds, float32 scalar.
        """
        # The recomputed residuals do not depend on the activations, so the backward pass does not read these.
        x = jax.tree.map(lambda _: False, self.output)
        outputs = with_float0(cotangent, self.output), None if self.sums is None else seed
        gradients, of_x, _ = self._passes.backward(kept, self._passes.select_read((weights, x, given)), outputs)
        return gradients, floating(of_x)


def floating(tree: Arrays) -> Arrays:
    """Returns the pytree with None in place of leaves that have no cotangent: integers, bools, float0."""
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, tree)


def with_float0(cotangent: Activations, output: Activations) -> Activations:
    """Replaces each None of `floating` in a cotangent by float0 zeros, which functions from `jax.vjp` require.

    Args:
      cotangent: cotangents of the floating leaves of `output`, and None for all other leaves.
      output: arrays or abstract arrays, whose shapes the zeros get.
    """

    def fill(leaf: jax.Array, part: jax.Array | None) -> jax.Array | np.ndarray:
        return np.zeros(leaf.shape, jax.dtypes.float0) if part is None else part

    return jax.tree.map(fill, output, cotangent)
