"""Splits a differentiable function into a forward pass that returns its residuals, and a backward pass that reads them.

The residuals are the leaves of the pullback that `jax.vjp` returns, which is a pytree. Residuals that do not depend on
selected arguments (for example casts of weights, gathered weights, masks) are not returned: the backward pass computes
them again from its arguments. Pipelines, layers that save all activations, and kernels use this split.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from meshtrain.sharding.jaxprs import depends, part_of, results
from meshtrain.sharding.trees import Arrays

# (*arguments) -> (outputs that have cotangents, other results)
Function: TypeAlias = Callable[..., tuple[Arrays, Arrays]]


class Passes:
    """The forward pass and the backward pass of a function, which is traced once.

    Attributes:
      result: (outputs, other results) of the function, as abstract arrays.
      reads: for each leaf of the arguments whether the backward pass reads it.
      consts: the arrays that the function closes over.
    """

    def __init__(
        self,
        function: Function,
        arguments: tuple[Arrays, ...],
        has_gradient: Sequence[bool],
        is_saved: Sequence[bool],
        is_given_again: Sequence[bool] = (),
    ) -> None:
        """Traces the function.

        Args:
          function: a function of pytrees of arrays that returns (outputs, other results). Only outputs have cotangents.
          arguments: its arguments, arrays or abstract arrays.
          has_gradient: for each leaf of the arguments whether the backward pass returns its cotangent.
          is_saved: for each leaf whether residuals that depend on it are saved.
          is_given_again: for each leaf whether the backward pass gets it as an argument, so that a residual that is the
            leaf itself is not saved; (): none of the leaves in `is_saved`.
        """
        self._pulls = list[Any]()
        leaves, self._structure = jax.tree.flatten(arguments)
        self._has_gradient = list(has_gradient)
        differentiate = lambda *leaves: self._differentiate(function, leaves)  # noqa: E731
        closed, (self.result, _) = jax.make_jaxpr(differentiate, return_shape=True)(*leaves)
        self._closed, self.consts = closed, closed.consts
        first = len(jax.tree.leaves(self.result))
        self._outputs, self._residuals = closed.jaxpr.outvars[:first], closed.jaxpr.outvars[first:]
        available = {var for var, is_given in zip(closed.jaxpr.invars, is_given_again, strict=False) if is_given}
        marks = depends(closed.jaxpr, list(is_saved))[first:]
        chosen = [(var, mark) for var, mark in zip(self._residuals, marks, strict=True) if not isinstance(var, Literal)]
        # Two residuals may be the same array.
        self._kept = list(dict.fromkeys(var for var, mark in chosen if mark and var not in available))
        self._again = list(dict.fromkeys(var for var, mark in chosen if not mark or var in available))
        self._part, self.reads = part_of(closed, self._again)

    def _differentiate(self, function: Function, leaves: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Runs the function under `jax.vjp`; returns ((outputs, other results), residuals).

        The structure of the pullback is stored in `self`, so that `backward` can rebuild the pullback.
        """

        def of_differentiated(differentiated: list[jax.Array]) -> tuple[Arrays, Arrays]:
            rest = iter(differentiated)
            pairs = zip(leaves, self._has_gradient, strict=True)
            merged = [next(rest) if has_gradient else leaf for leaf, has_gradient in pairs]
            return function(*jax.tree.unflatten(self._structure, merged))

        chosen = [leaf for leaf, has_gradient in zip(leaves, self._has_gradient, strict=True) if has_gradient]
        outputs, pull, others = jax.vjp(of_differentiated, chosen, has_aux=True)
        residuals, structure = jax.tree.flatten(pull)
        # A buffer stores a random key as numbers.
        implementations = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in residuals]
        self._pulls = [structure, implementations]
        return (outputs, others), [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in residuals]

    @property
    def kept(self) -> list[jax.core.ShapedArray]:
        """The residuals that `forward` returns for `backward`, as abstract arrays of numeric dtypes."""
        return [_aval(var) for var in self._kept]

    @property
    def outputs_kept(self) -> list[int | None]:
        """For each leaf of `result` the index of the same array among `kept`, None if it is not among them."""
        places = {var: index for index, var in enumerate(self._kept)}
        return [None if isinstance(var, Literal) else places.get(var) for var in self._outputs]

    def select_read(self, arguments: tuple[Arrays, ...]) -> list[Arrays]:
        """Returns the leaves of the arguments that `backward` reads; the other leaves may be of any kind."""
        return [leaf for leaf, is_read in zip(jax.tree.leaves(arguments), self.reads, strict=True) if is_read]

    def forward(self, *arguments: Arrays, consts: Sequence[Arrays] | None = None) -> tuple[Any, list[jax.Array]]:
        """Returns ((outputs, other results), residuals) of the function.

        Args:
          *arguments: the arguments of the function.
          consts: the values of the arrays that the function closes over; None: the values from its trace.
        """
        closed = self._closed if consts is None else self._closed.replace(consts=list(consts))
        found = results(closed, [*self._outputs, *self._kept], *jax.tree.leaves(arguments))
        num_outputs = len(self._outputs)
        return jax.tree.unflatten(jax.tree.structure(self.result), found[:num_outputs]), found[num_outputs:]

    def backward(
        self,
        kept: Sequence[jax.Array],
        read: Sequence[jax.Array],
        cotangents: Arrays,
        consts: Sequence[Arrays] | None = None,
    ) -> tuple[Arrays, ...]:
        """Returns the cotangents of the arguments; None in place of each leaf without a gradient.

        Args:
          kept: the residuals from `forward`.
          read: the result of `select_read` for the arguments of `forward`.
          cotangents: the cotangents of the outputs.
          consts: see `forward`.
        """
        again = jax.core.eval_jaxpr(self._part.jaxpr, self._part.consts if consts is None else consts, *read)
        values = dict(zip([*self._kept, *self._again], [*kept, *again], strict=True))
        numbers = [var.val if isinstance(var, Literal) else values[var] for var in self._residuals]
        structure, implementations = self._pulls
        pairs = zip(numbers, implementations, strict=True)
        leaves = [each if impl is None else jax.random.wrap_key_data(each, impl=impl) for each, impl in pairs]
        (found,) = jax.tree.unflatten(structure, leaves)(cotangents)
        rest = iter(found)
        result: tuple[Arrays, ...] = jax.tree.unflatten(
            self._structure, [next(rest) if has_gradient else None for has_gradient in self._has_gradient]
        )
        return result


def _aval(var: Var) -> Any:
    return var.aval


def _is_key(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
