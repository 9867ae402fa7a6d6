"""Splits a layer into a forward pass that returns its residuals, and a backward pass that starts from these residuals.

The two passes run in different rows of a schedule, so residuals are stored in a buffer. They are the residuals that
`jax.vjp` saves under the model's `jax.checkpoint` policies. Residuals that do not depend on the activations (weights,
casts of them, rotary angles, masks of documents or of dropout, random keys) are not stored: the backward pass
recomputes them from the weights and the microbatch.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from meshtrain.errors import Problem, UserError
from meshtrain.models.task import Activations, LayerSums, Params
from meshtrain.sharding.jaxprs import depends, results
from meshtrain.sharding.trees import Arrays, Masks, merge, select

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
        self._pulls = list[Any]()
        arguments = weights, x, given
        trace = jax.make_jaxpr(lambda *given: self._differentiate(layer, mask, *given), return_shape=True)
        closed, (self.output, self.sums, residuals) = trace(*arguments)
        self._closed = closed
        self._shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)]
        is_x = [index == 1 for index, part in enumerate(arguments) for _ in jax.tree.leaves(part)]
        depends_on_x = depends(closed.jaxpr, is_x)
        first = len(depends_on_x) - len(residuals)
        self._outputs, self._residuals = closed.jaxpr.outvars[:first], closed.jaxpr.outvars[first:]
        chosen = list(zip(self._residuals, depends_on_x[first:], strict=True))
        # Two residuals may be the same array.
        self._kept = list(dict.fromkeys(var for var, is_kept in chosen if is_kept))
        again = (var for var, is_kept in chosen if not is_kept and not isinstance(var, Literal))
        self._again = list(dict.fromkeys(again))
        if any(_aval(var).memory_space == jax.memory.Space.Host for var in self._kept):
            raise UserError(
                Problem(
                    "stages.repeated",
                    got="saved activations in host memory with a pipeline",
                    allowed="jax.checkpoint policies that save on the device or recompute",
                    nearest="nothing_saveable",
                )
            )

    def _differentiate(
        self, layer: Layer, mask: Masks, weights: Params, x: Activations, given: Given
    ) -> tuple[Activations, LayerSums, list[jax.Array]]:
        """Runs a layer under `jax.vjp`; returns (output, auxiliary (loss, metrics) or None, residuals).

        The residuals are the leaves of the backward function from `jax.vjp`, which is a pytree. Its structure is stored
        in `self`, so that `backward` can rebuild the function.
        """
        trained, frozen = select(weights, mask)

        def differentiable(trained: Params, x: Activations) -> tuple[tuple[Activations, jax.Array | None], Arrays]:
            y, sums = layer(merge(trained, frozen), x, given)
            return ((y, None), None) if sums is None else ((y, sums[0]), sums[1])

        (y, loss), pull, metrics = jax.vjp(differentiable, trained, x, has_aux=True)
        leaves, structure = jax.tree.flatten(pull)
        # A buffer stores a random key as numbers.
        implementations = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]
        self._pulls = [structure, implementations]
        numbers = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]
        return y, None if loss is None else (loss, metrics), numbers

    @property
    def kept(self) -> list[jax.ShapeDtypeStruct]:
        """The residuals that `forward` returns for `backward`, as abstract arrays of numeric dtypes."""
        return [jax.ShapeDtypeStruct(_aval(var).shape, _aval(var).dtype) for var in self._kept]

    def forward(self, weights: Params, x: Activations, given: Given) -> tuple[Activations, LayerSums, list[jax.Array]]:
        """Returns (output, sums, residuals) of the layer; only residuals that depend on `x` are returned.

        The sums are the (loss, metrics) that the layer adds, or None.
        """
        arguments, num_outputs = jax.tree.leaves((weights, x, given)), len(self._outputs)
        found = results(self._closed, [*self._outputs, *self._kept], *arguments)
        y, sums = jax.tree.unflatten(jax.tree.structure((self.output, self.sums)), found[:num_outputs])
        return y, sums, found[num_outputs:]

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
        # The recomputed residuals do not depend on the activations, so zeros replace them.
        x = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self._shapes]
        again = results(self._closed, self._again, *jax.tree.leaves((weights, x, given)))
        values = dict(zip([*self._kept, *self._again], [*kept, *again], strict=True))
        numbers = [var.val if isinstance(var, Literal) else values[var] for var in self._residuals]
        structure, implementations = self._pulls
        pairs = zip(numbers, implementations, strict=True)
        leaves = [each if impl is None else jax.random.wrap_key_data(each, impl=impl) for each, impl in pairs]
        pull = jax.tree.unflatten(structure, leaves)
        gradients, x_cotangent = pull((with_float0(cotangent, self.output), None if self.sums is None else seed))
        return gradients, floating(x_cotangent)


def _aval(var: Var | Literal) -> Any:
    return var.aval


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


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
