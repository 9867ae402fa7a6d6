"""Finds the weights that a function reads in a single loop, one layer at a time, and puts a hook on each layer's.

A model that scans over stacked weights [L, ...] reads a slice of each in one iteration. The function is traced to a
jaxpr; its scans then run with a hook on their slices. Tasks need no change, whether Linen, NNX or plain functions.

L: layers in a stack.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var, jaxpr_as_fun

# (slices of weights by the index of each, slices of what goes with it) -> the slices that the layer computes with.
Hook = Callable[[dict[int, jax.Array], dict[int, Any]], dict[int, jax.Array]]

# Operations between a weight and its loop that keep its layers apart: one input, one output.
_ON_EACH_LAYER = ("convert_element_type", "reshape", "copy")
_CALLS = ("jit", "pjit")


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of a list of arrays and of other arguments, traced.

    Attributes:
      closed: its jaxpr.
      structure: of its result.
      sliced: indices of the arrays [L, ...] of which one loop alone reads slices, in the order of L or against it.
    """

    closed: ClosedJaxpr
    structure: Any
    sliced: frozenset[int]

    def run(self, arrays: Sequence[jax.Array], others: Any, given: Mapping[int, Any], hook: Hook) -> Any:
        """Returns the function's result; its loops compute with the slices that the hook returns.

        Args:
          arrays: with the shapes that were traced.
          others: the other argument, likewise.
          given: index of a sliced array -> a tree of arrays [L, ...] whose slices the hook gets. Other arrays stay
            without a hook.
          hook: called once for each loop, where JAX traces the loop's body.
        """
        jaxpr = self.closed.jaxpr
        tracked = {jaxpr.invars[index]: index for index in given}
        arguments = [*arrays, *jax.tree.leaves(others)]
        return jax.tree.unflatten(self.structure, _Run(given, hook)(jaxpr, self.closed.consts, arguments, tracked))


def traced(function: Callable[[list[jax.Array], Any], Any], arrays: list[jax.Array], others: Any) -> Traced:
    """Traces a function of a list of arrays and of a tree of others; finds those in the list that one loop slices."""
    closed, result = jax.make_jaxpr(function, return_shape=True)(arrays, others)
    found = _sliced(closed.jaxpr, {closed.jaxpr.invars[index]: index for index in range(len(arrays))})
    return Traced(closed, jax.tree.structure(result), frozenset(found))


def counts(scan: Any) -> tuple[int, int]:
    """Returns the number of constants and of carried arrays of a scan's equation; its stacked inputs follow them.

    JAX versions name these counts differently, so ranks give them: a stacked input has one dim less in the body.
    """
    inner = scan.params["jaxpr"].jaxpr
    num_stacked = sum(x.aval.ndim < y.aval.ndim for x, y in zip(inner.invars, scan.invars, strict=True))
    num_carried = sum(x.aval.ndim == y.aval.ndim for x, y in zip(inner.outvars, scan.outvars, strict=True))
    return len(scan.invars) - num_stacked - num_carried, num_carried


def _sliced(jaxpr: Jaxpr, tracked: Mapping[Var, int]) -> set[int]:
    tracked, found = dict(tracked), set[int]()
    uses = collections.Counter(var for var in _read_by(jaxpr.eqns) + list(jaxpr.outvars) if isinstance(var, Var))
    for equation in jaxpr.eqns:
        for at, var in enumerate(equation.invars):
            if isinstance(var, Literal) or var not in tracked or uses[var] > 1:
                continue
            index = tracked[var]
            if equation.primitive.name == "scan":
                found |= {index} if at >= sum(counts(equation)) else set()
            elif equation.primitive.name in _CALLS:
                inner = equation.params["jaxpr"].jaxpr
                found |= _sliced(inner, {inner.invars[at]: index})
            elif _keeps_layers(equation):
                tracked[equation.outvars[0]] = index
    return found


def _read_by(equations: Sequence[Any]) -> list[Any]:
    return [var for equation in equations for var in equation.invars]


def _keeps_layers(equation: Any) -> bool:
    """Returns whether each layer of the output is made of the same layer of the input, or of several in a row."""
    if equation.primitive.name not in _ON_EACH_LAYER or len(equation.invars) > 1:
        return False
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    # Groups of layers, [L / n, n, ...], as remat.every makes them.
    keeps = before == after or (len(after) > 1 and before[1:] == after[2:])
    return keeps and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Runs a jaxpr whose tracked variables, each read once, reach a loop."""

    given: Mapping[int, Any]
    hook: Hook

    def __call__(
        self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], tracked: Mapping[Var, int]
    ) -> list[Any]:
        tracked, between = dict(tracked), list[Any]()
        values: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
        read = lambda var: var.val if isinstance(var, Literal) else values[var]  # noqa: E731
        for equation in jaxpr.eqns:
            mine = {
                at: tracked[var]
                for at, var in enumerate(equation.invars)
                if not isinstance(var, Literal) and var in tracked
            }
            if not mine or equation.primitive.name not in ("scan", *_CALLS):
                between.append(equation)
                for index in mine.values():
                    tracked[equation.outvars[0]] = index
                continue
            values |= _evaluated(jaxpr, between, values)
            between = []
            inputs = [read(var) for var in equation.invars]
            if equation.primitive.name == "scan":
                outputs = self._scan(equation, inputs, mine)
            else:
                inner = equation.params["jaxpr"]
                within = {inner.jaxpr.invars[at]: index for at, index in mine.items()}
                outputs = self(inner.jaxpr, inner.consts, inputs, within)
            values |= zip(equation.outvars, outputs, strict=True)
        values |= _evaluated(jaxpr, between, values)
        return [read(var) for var in jaxpr.outvars]

    def _scan(self, equation: Any, inputs: list[Any], mine: Mapping[int, int]) -> list[Any]:
        num_consts, num_carried = counts(equation)
        start, length = num_consts + num_carried, equation.params["length"]
        body = jaxpr_as_fun(equation.params["jaxpr"])
        consts, carry, stacked = inputs[:num_consts], inputs[num_consts:start], inputs[start:]
        # A loop over groups of layers gets what goes with a group.
        grouped = lambda leaf: leaf if len(leaf) == length else leaf.reshape(length, -1, *leaf.shape[1:])  # noqa: E731
        given = {index: jax.tree.map(grouped, self.given[index]) for index in mine.values()}

        def one(carry: list[Any], slices: tuple[list[Any], dict[int, Any]]) -> tuple[list[Any], list[Any]]:
            own, given = slices
            hooked = self.hook({index: own[at - start] for at, index in mine.items()}, given)
            own = [hooked[mine[at]] if at in mine else x for at, x in enumerate(own, start)]
            outputs = body(*consts, *carry, *own)
            return outputs[:num_carried], outputs[num_carried:]

        reverse, unroll = equation.params["reverse"], equation.params["unroll"]
        carry, outputs = jax.lax.scan(one, carry, (stacked, given), length=length, reverse=reverse, unroll=unroll)
        return [*carry, *outputs]


def run_after(function: Callable[..., Any], first: jax.Array, *arguments: Any) -> Any:
    """Returns `function(*arguments)`, whose loops take memory only when `first` and what precedes them are computed.

    A scan writes its stacked results, such as the residuals of a backward pass, into arrays that start as constants. A
    compiler may allocate constants long before the loop. Here they start as copies of `first`, which the loop
    overwrites. And it may put a product off until the loop is over, which keeps the factors in memory.

    Args:
      function: any function of trees of arrays.
      first: a float scalar.
      *arguments: of the function.
    """
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr, between = closed.jaxpr, list[Any]()
    inputs = (*closed.consts, *jax.tree.leaves(arguments))
    given: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    values = dict(given)
    read = lambda var: var.val if isinstance(var, Literal) else values[var]  # noqa: E731
    for at, equation in enumerate(jaxpr.eqns):
        if equation.primitive.name != "scan" or _is_offloaded(equation):
            between.append(equation)
            continue
        values |= _evaluated(jaxpr, between, values)
        between = []
        needed = {var for var in (*_read_by(jaxpr.eqns[at:]), *jaxpr.outvars) if isinstance(var, Var)}
        ready = {var: values[var] for var in values if var in needed and var not in given and _is_plain(var)}
        values |= zip(ready, jax.lax.optimization_barrier(list(ready.values())), strict=True)
        outputs = _scan_after(equation, [read(var) for var in equation.invars], first)
        values |= zip(equation.outvars, outputs, strict=True)
    values |= _evaluated(jaxpr, between, values)
    return jax.tree.unflatten(jax.tree.structure(result), [read(var) for var in jaxpr.outvars])


def _is_plain(var: Var) -> bool:
    """Returns whether a variable is an array of numbers, not of random keys."""
    array: Any = var.aval
    return not jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _is_offloaded(equation: Any) -> bool:
    """Returns whether an operation reads or writes host memory: the residuals of such a loop take none of a device."""
    arrays: list[Any] = [var.aval for var in (*equation.invars, *equation.outvars)]
    return any(array.memory_space == jax.memory.Space.Host for array in arrays)


def _scan_after(equation: Any, inputs: list[Any], first: jax.Array) -> list[Any]:
    """Returns the results of a scan whose stacked ones start as copies of `first`."""
    num_consts, num_carried = counts(equation)
    start, length = num_consts + num_carried, equation.params["length"]
    body = jaxpr_as_fun(equation.params["jaxpr"])
    consts, carry, stacked = inputs[:num_consts], inputs[num_consts:start], inputs[start:]
    made = [var.aval for var in equation.outvars[num_carried:]]
    # Each starts with a number of its own: of equal arrays XLA makes one, and copies it.
    arrays = [jnp.broadcast_to((first + at).astype(one.dtype), one.shape) for at, one in enumerate(made)]

    # A while loop, as a scan becomes one: a second counter would hide from XLA which slice an iteration writes.
    def one(state: tuple[jax.Array, list[Any], list[Any]]) -> tuple[jax.Array, list[Any], list[Any]]:
        turn, carry, arrays = state
        at = length - 1 - turn if equation.params["reverse"] else turn
        slices = [jax.lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in stacked]
        outputs = body(*consts, *carry, *slices)
        written = zip(arrays, outputs[num_carried:], strict=True)
        arrays = [jax.lax.dynamic_update_index_in_dim(array, new, at, 0) for array, new in written]
        return turn + 1, outputs[:num_carried], arrays

    _, carry, arrays = jax.lax.while_loop(lambda state: state[0] < length, one, (jnp.int32(0), carry, arrays))
    return [*carry, *arrays]


def _evaluated(jaxpr: Jaxpr, equations: Sequence[Any], values: Mapping[Var, Any]) -> dict[Var, Any]:
    """Returns the results of some equations of a jaxpr, in their order, by variable."""
    made = [var for equation in equations for var in equation.outvars if not isinstance(var, DropVar)]
    inputs = list(dict.fromkeys(var for var in _read_by(equations) if isinstance(var, Var) and var in values))
    part = jaxpr.replace(constvars=[], invars=inputs, eqns=list(equations), outvars=made)
    return dict(zip(made, jax.core.eval_jaxpr(part, [], *(values[var] for var in inputs)), strict=True))
