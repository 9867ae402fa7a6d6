"""Manual regions inside of a manual region, in functions that the program calls once.

JAX emits one function for a jaxpr that is called several times, such as a jitted function or the body of a loop. On
TPUs XLA does not inline such a function. If it has a manual region, and its callers are in another, the partitioner
takes the outer region's axes for automatic ones and aborts (Check failed: target.IsManualSubgroup() ==
sharding().IsManualSubgroup(), seen with jax 0.10.2). Here each call gets a copy of its jaxpr, and so its own function.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def called_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function of trees of arrays; no two calls in it share a jaxpr with a manual region."""

    def run(*arguments: Any) -> Any:
        closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = jax.core.eval_jaxpr(_copy(closed.jaxpr), closed.consts, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(result), leaves)

    return run


def _copy(value: Any) -> Any:
    """Returns a parameter of an equation with a copy of each jaxpr in it that has a manual region."""
    if not _has_region(value):
        return value
    if isinstance(value, tuple):
        return tuple(map(_copy, value))
    if isinstance(value, Jaxpr):
        copies = [{name: _copy(param) for name, param in equation.params.items()} for equation in value.eqns]
        equations = [equation.replace(params=params) for equation, params in zip(value.eqns, copies, strict=True)]
        return value.replace(eqns=equations)
    return value.replace(jaxpr=_copy(value.jaxpr))


def _has_region(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_region, value))
    if isinstance(value, Jaxpr):  # of newer versions a ClosedJaxpr, too
        return any(
            equation.primitive.name == "shard_map" or _has_region(tuple(equation.params.values()))
            for equation in value.eqns
        )
    return isinstance(value, ClosedJaxpr) and _has_region(value.jaxpr)
