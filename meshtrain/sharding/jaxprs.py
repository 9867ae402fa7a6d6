"""Transforms of traced functions: the only module that walks jaxprs to change or to run them.

`trace` detects the weights that a function reads in a single loop, one layer at a time: a model that scans over stacked
weights [L, ...] reads a slice of each weight per iteration. `Traced.run` runs the function with a hook on these slices.
Tasks need no change, whether written in Linen, NNX or plain functions. `run_after` delays the allocation of memory by
loops, `depends` computes which results depend on which inputs, `results` computes selected variables of a jaxpr, and
`inline_calls` gives manual regions separate jaxprs.

L: layers in a stack.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters import partial_eval

from meshtrain.sharding.trees import ArrayFunction, Arrays

Value: TypeAlias = Any  # value of a variable: an array, or the number of a literal
Variable: TypeAlias = Var | Literal  # an input of an equation
ShapedEquation: TypeAlias = Any  # a `JaxprEqn` of arrays: its variables' `aval` has a shape, which JAX does not declare
ShapedAval: TypeAlias = Any  # `jax.core.ShapedArray`, the `aval` of such a variable
Param: TypeAlias = Any  # parameter of an equation: a jaxpr, a tuple of parameters, or a value without jaxprs

# (slices of weights by index, slices of additional arrays by index) -> the slices that the layer uses.
Hook = Callable[[dict[int, jax.Array], dict[int, Arrays]], dict[int, jax.Array]]
Values = dict[Var, Value]
# (index of an equation, the equation, values of the variables so far) -> its results.
Step = Callable[[int, JaxprEqn, Values], Sequence[Value]]

# Operations between a weight and its loop that keep layers separate: one input, one output.
_ON_EACH_LAYER = ("convert_element_type", "reshape", "copy")
_CALLS = ("jit", "pjit")


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of a list of arrays and a pytree of other arguments, after tracing.

    Attributes:
      closed: the jaxpr of the function.
      structure: the pytree structure of the function's result.
      sliced: the indices, in the list, of the arrays [L, ...] (L: layers) that the function reads in one loop only, one
        layer in each iteration, from the first layer to the last or in reverse.
    """

    closed: ClosedJaxpr
    structure: jax.tree_util.PyTreeDef
    sliced: frozenset[int]

    def run(self, arrays: Sequence[jax.Array], others: Arrays, given: Mapping[int, Arrays], hook: Hook) -> Arrays:
        """Runs the function with a hook that replaces the slices that its loops read; returns the function's result.

        Args:
          arrays: the list of arrays, with the traced shapes.
          others: the pytree of other arguments, with the traced shapes.
          given: index of a sliced array -> a pytree of additional arrays [L, ...], L: layers. The hook gets the slices
            of each array in this mapping and of its additional arrays. Other sliced arrays do not pass through the
            hook.
          hook: a function (index -> slice, index -> slices of its additional arrays) -> (index -> slice with which the
            loop computes). It is called once for each loop, while JAX traces the loop's body.
        """
        jaxpr, arguments = self.closed.jaxpr, [*arrays, *jax.tree.leaves(others)]
        tracked = {jaxpr.invars[index]: index for index in given}
        outputs = _run_hooked(jaxpr, self.closed.consts, arguments, tracked, given, hook)
        return jax.tree.unflatten(self.structure, outputs)


def trace(function: Callable[[list[jax.Array], Arrays], Arrays], arrays: list[jax.Array], others: Arrays) -> Traced:
    """Traces a function of a list of arrays and a pytree of other arguments; detects the arrays that one loop slices.

    Args:
      function: the function to trace.
      arrays: the first argument of the function, in which sliced arrays are detected.
      others: the second argument of the function.
    """
    closed, result = jax.make_jaxpr(function, return_shape=True)(arrays, others)
    found = _find_sliced(closed.jaxpr, {closed.jaxpr.invars[index]: index for index in range(len(arrays))})
    return Traced(closed, jax.tree.structure(result), frozenset(found))


def _find_sliced(jaxpr: Jaxpr, tracked: Mapping[Var, int]) -> set[int]:
    tracked, result = dict(tracked), set[int]()
    uses = collections.Counter(map(id, _read_by(jaxpr.eqns) + list(jaxpr.outvars)))
    for equation in jaxpr.eqns:
        for at, index in _places_of(tracked, equation).items():
            if uses[id(equation.invars[at])] > 1:
                continue
            if equation.primitive.name == "scan":
                result |= {index} if at >= sum(_counts(equation)) else set()
            elif equation.primitive.name in _CALLS:
                inner = equation.params["jaxpr"].jaxpr
                result |= _find_sliced(inner, {inner.invars[at]: index})
            elif _keeps_layers(equation):
                tracked[equation.outvars[0]] = index
    return result


def _keeps_layers(equation: ShapedEquation) -> bool:
    """Returns whether an equation computes each layer of its result from the same layer of its input.

    True for a cast, a copy, and a reshape that groups n consecutive layers ([L, ...] -> [L / n, n, ...], L: layers),
    if the result is a floating-point array.
    """
    if equation.primitive.name not in _ON_EACH_LAYER or len(equation.invars) > 1:
        return False
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    # Groups of layers, [L / n, n, ...], as created by remat.every.
    keeps = before == after or (len(after) > 1 and before[1:] == after[2:])
    return keeps and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)


def _run_hooked(
    jaxpr: Jaxpr,
    consts: Sequence[Value],
    arguments: Sequence[Value],
    tracked: Mapping[Var, int],
    given: Mapping[int, Arrays],
    hook: Hook,
) -> list[Value]:
    """Evaluates a jaxpr for `Traced.run`: slices of the tracked inputs pass through the hook in their loop.

    Args:
      jaxpr: the jaxpr to evaluate.
      consts: the values of its constants.
      arguments: the values of its inputs.
      tracked: an input of the jaxpr that exactly one equation reads -> the index of its array in the list that was
        passed to `trace`.
      given: index in this list -> a pytree of additional arrays [L, ...] for the hook, L: layers.
      hook: a function (index -> slice, index -> slices of its additional arrays) -> (index -> slice with which the loop
        computes).
    """
    tracked, places = dict(tracked), dict[int, dict[int, int]]()
    for number, equation in enumerate(jaxpr.eqns):
        mine = _places_of(tracked, equation)
        if mine and equation.primitive.name in ("scan", *_CALLS):
            places[number] = mine
        elif mine:
            tracked[equation.outvars[0]] = mine[0]

    def step(number: int, equation: JaxprEqn, values: Values) -> Sequence[Value]:
        inputs, mine = _read(equation.invars, values), places[number]
        if equation.primitive.name == "scan":
            return _scan(equation, inputs, mine, given, hook)
        inner = equation.params["jaxpr"]
        within = {inner.jaxpr.invars[at]: index for at, index in mine.items()}
        return _run_hooked(inner.jaxpr, inner.consts, inputs, within, given, hook)

    return _run(jaxpr, consts, arguments, places, step)


def _scan(
    equation: JaxprEqn, inputs: list[Value], mine: Mapping[int, int], given: Mapping[int, Arrays], hook: Hook
) -> list[Value]:
    """Evaluates a scan in which the slices of some inputs pass through the hook.

    Args:
      equation: the scan.
      inputs: the values of its inputs.
      mine: position of an input whose slices pass through the hook -> the index of its array in the list that was
        passed to `trace`.
      given: index in this list -> a pytree of additional arrays [L, ...] for the hook, L: layers.
      hook: a function (index -> slice, index -> slices of its additional arrays) -> (index -> slice with which the loop
        computes).
    """
    loop = _Loop(equation, inputs)
    start = len(loop.consts) + len(loop.carry)
    # A loop over groups of layers gets the additional arrays of a group.
    grouped = lambda leaf: leaf if len(leaf) == loop.length else leaf.reshape(loop.length, -1, *leaf.shape[1:])  # noqa: E731
    beside = {index: jax.tree.map(grouped, given[index]) for index in mine.values()}

    def one(
        carry: list[Value], slices: tuple[list[jax.Array], dict[int, Arrays]]
    ) -> tuple[list[Value], list[jax.Array]]:
        own, given = slices
        hooked = hook({index: own[at - start] for at, index in mine.items()}, given)
        return loop.body(carry, [hooked[mine[at]] if at in mine else x for at, x in enumerate(own, start)])

    reverse, unroll = equation.params["reverse"], equation.params["unroll"]
    stacked = (loop.stacked, beside)
    carry, outputs = jax.lax.scan(one, loop.carry, stacked, length=loop.length, reverse=reverse, unroll=unroll)
    return [*carry, *outputs]


def run_after(function: ArrayFunction, first: jax.Array, *arguments: Arrays) -> Arrays:
    """Returns `function(*arguments)`, computed so that its loops allocate memory only after `first` is computed.

    A scan writes its stacked results, such as the residuals of a backward pass, into arrays that start as constants. A
    compiler may allocate constants long before the loop. Here these arrays start as copies of `first`, and the loop
    overwrites all of their elements. A compiler may also delay a matrix product before the loop until the loop is over,
    so that both factors stay in memory. Therefore a barrier makes the loop wait for all earlier values that later
    equations need.

    Args:
      function: any function of pytrees of arrays.
      first: a float scalar.
      *arguments: the arguments of `function`.
    """
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
    jaxpr = closed.jaxpr
    given = {*jaxpr.constvars, *jaxpr.invars}
    loops = [number for number, one in enumerate(jaxpr.eqns) if _is_loop(one) and not _is_offloaded(one)]

    def step(number: int, equation: JaxprEqn, values: Values) -> Sequence[Value]:
        needed = {var for var in (*_read_by(jaxpr.eqns[number:]), *jaxpr.outvars) if isinstance(var, Var)}
        ready = {var: values[var] for var in values if var in needed and var not in given and _is_plain(var)}
        values |= zip(ready, jax.lax.optimization_barrier(list(ready.values())), strict=True)
        return _scan_after(equation, _read(equation.invars, values), first)

    outputs = _run(jaxpr, closed.consts, jax.tree.leaves(arguments), loops, step)
    return jax.tree.unflatten(jax.tree.structure(result), outputs)


def _is_plain(var: Var) -> bool:
    """Returns whether a variable is an array of numbers, not of PRNG keys."""
    array: ShapedAval = var.aval
    return not jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _is_loop(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a scan that is compiled as a loop; an unrolled scan has no stacked arrays."""
    return equation.primitive.name == "scan" and equation.params["unroll"] == 1


def _is_offloaded(equation: JaxprEqn) -> bool:
    """Returns whether an equation reads or writes host memory; residuals of an offloaded loop take no device memory."""
    arrays: list[ShapedAval] = [var.aval for var in (*equation.invars, *equation.outvars)]
    return any(array.memory_space == jax.memory.Space.Host for array in arrays)


def _scan_after(equation: ShapedEquation, inputs: list[Value], first: jax.Array) -> list[Value]:
    """Evaluates a scan as a while loop whose stacked results are allocated as copies of the scalar `first`."""
    loop = _Loop(equation, inputs)
    made = [var.aval for var in equation.outvars[len(loop.carry) :]]
    # Each starts with a different number, because XLA would create equal arrays once and copy them.
    arrays = [jnp.broadcast_to((first + at).astype(one.dtype), one.shape) for at, one in enumerate(made)]

    # A while loop, not a scan: the second counter of a scan would hide from XLA which slice an iteration writes.
    def one(
        state: tuple[jax.Array, list[Value], list[jax.Array]],
    ) -> tuple[jax.Array, list[Value], list[jax.Array]]:
        turn, carry, arrays = state
        at = loop.length - 1 - turn if equation.params["reverse"] else turn
        slices = [jax.lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in loop.stacked]
        carry, outputs = loop.body(carry, slices)
        written = zip(arrays, outputs, strict=True)
        arrays = [jax.lax.dynamic_update_index_in_dim(array, new, at, 0) for array, new in written]
        return turn + 1, carry, arrays

    state = (jnp.int32(0), loop.carry, arrays)
    _, carry, arrays = jax.lax.while_loop(lambda state: state[0] < loop.length, one, state)
    return [*carry, *arrays]


class _Loop:
    """The inputs of a scan by kind (constants, carried arrays, stacked arrays read in slices), and the scan's body."""

    def __init__(self, equation: JaxprEqn, inputs: list[Value]) -> None:
        num_consts, num_carried = _counts(equation)
        start = num_consts + num_carried
        self.length = equation.params["length"]
        self.consts, self.carry, self.stacked = inputs[:num_consts], inputs[num_consts:start], inputs[start:]
        self._function = jaxpr_as_fun(equation.params["jaxpr"])

    def body(self, carry: list[Value], slices: list[jax.Array]) -> tuple[list[Value], list[jax.Array]]:
        """Runs one iteration; returns the new carry, and the iteration's slices of the stacked results.

        Args:
          carry: the carried arrays before the iteration.
          slices: this iteration's slices of the stacked inputs.
        """
        outputs = self._function(*self.consts, *carry, *slices)
        return outputs[: len(self.carry)], outputs[len(self.carry) :]


def _counts(scan: ShapedEquation) -> tuple[int, int]:
    """Returns the number of constants and the number of carried arrays among a scan's inputs.

    All further inputs are stacked arrays, which the scan reads in slices. JAX versions name these counts differently,
    so they are derived from ranks: a stacked input has one dim less in the body.
    """
    inner = scan.params["jaxpr"].jaxpr
    num_stacked = sum(x.aval.ndim < y.aval.ndim for x, y in zip(inner.invars, scan.invars, strict=True))
    num_carried = sum(x.aval.ndim == y.aval.ndim for x, y in zip(inner.outvars, scan.outvars, strict=True))
    return len(scan.invars) - num_stacked - num_carried, num_carried


def _run(
    jaxpr: Jaxpr,
    consts: Sequence[Value],
    arguments: Sequence[Value],
    stops: Sequence[int] | Mapping[int, Mapping[int, int]],
    step: Step,
) -> list[Value]:
    """Evaluates a jaxpr; the function `step` computes selected equations in place of JAX.

    Args:
      jaxpr: the jaxpr to evaluate.
      consts: the values of its constants.
      arguments: the values of its inputs.
      stops: the indices of the equations that `step` computes, in increasing order; JAX computes the other equations.
      step: a function (index, equation, values of the variables so far) that returns the equation's results.
    """
    values: Values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    start = 0
    for number in (*stops, len(jaxpr.eqns)):
        values |= _evaluate(jaxpr, jaxpr.eqns[start:number], values)
        for equation in jaxpr.eqns[number : number + 1]:
            values |= zip(equation.outvars, step(number, equation, values), strict=True)
        start = number + 1
    return _read(jaxpr.outvars, values)


def _evaluate(jaxpr: Jaxpr, equations: Sequence[JaxprEqn], values: Values) -> Values:
    """Evaluates consecutive equations of a jaxpr; returns variable -> value for the results of these equations.

    Args:
      jaxpr: the jaxpr that contains the equations.
      equations: the equations to evaluate, in order.
      values: variable -> value for the variables that were computed before, which the equations may read.
    """
    made = [var for equation in equations for var in equation.outvars if not isinstance(var, DropVar)]
    inputs = list(dict.fromkeys(var for var in _read_by(equations) if isinstance(var, Var) and var in values))
    part = jaxpr.replace(constvars=[], invars=inputs, eqns=list(equations), outvars=made)
    return dict(zip(made, jax.core.eval_jaxpr(part, [], *_read(inputs, values)), strict=True))


def _read_by(equations: Sequence[JaxprEqn]) -> list[Variable]:
    return [var for equation in equations for var in equation.invars]


def _read(variables: Sequence[Variable], values: Values) -> list[Value]:
    return [var.val if isinstance(var, Literal) else values[var] for var in variables]


def _places_of(tracked: Mapping[Var, int], equation: JaxprEqn) -> dict[int, int]:
    """Returns which inputs of an equation are tracked variables: position of the input -> the variable's number.

    Args:
      tracked: variable -> its number.
      equation: the equation, whose other inputs are not in the result.
    """
    variables = enumerate(equation.invars)
    return {at: tracked[var] for at, var in variables if not isinstance(var, Literal) and var in tracked}


def results(closed: ClosedJaxpr, wanted: Sequence[Variable], *arguments: Value) -> list[jax.Array]:
    """Returns the values of selected variables of a jaxpr, and evaluates only the equations that they need.

    Args:
      closed: the jaxpr.
      wanted: variables or literals of the jaxpr, results or intermediate.
      *arguments: the values of the jaxpr's inputs.
    """
    part, reads = part_of(closed, wanted)
    read = [value for value, is_read in zip(arguments, reads, strict=True) if is_read]
    result: list[jax.Array] = jax.core.eval_jaxpr(part.jaxpr, part.consts, *read)
    return result


def part_of(closed: ClosedJaxpr, wanted: Sequence[Variable]) -> tuple[ClosedJaxpr, list[bool]]:
    """Returns the part of a jaxpr that computes selected variables, and for each input whether this part reads it.

    Inputs that are not read are not inputs of the part. All constants remain.

    Args:
      closed: the jaxpr.
      wanted: variables or literals of the jaxpr, results or intermediate.
    """
    jaxpr = closed.jaxpr.replace(outvars=list(wanted))
    needed: Jaxpr
    needed, reads = partial_eval.dce_jaxpr(jaxpr, [True] * len(wanted))
    return ClosedJaxpr(needed, closed.consts), reads


def depends(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Returns for each output of a jaxpr whether it depends on a marked input.

    The result is exact for calls and scans. Each output of any other equation that contains jaxprs (`cond`, `while`)
    counts as dependent on all inputs of this equation.

    Args:
      jaxpr: the jaxpr; its constants are not marked.
      inputs: for each input of the jaxpr whether it is marked.
    """
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    for equation in jaxpr.eqns:
        marks = [not isinstance(var, Literal) and var in marked for var in equation.invars]
        marked |= {var for var, mark in zip(equation.outvars, _depends(equation, marks), strict=True) if mark}
    return [not isinstance(var, Literal) and var in marked for var in jaxpr.outvars]


def _depends(equation: JaxprEqn, marks: list[bool]) -> list[bool]:
    inner = list(inner_jaxprs(equation))
    if len(inner) != 1 or len(inner[0].invars) != len(marks) or len(inner[0].outvars) != len(equation.outvars):
        return [any(marks)] * len(equation.outvars)
    if equation.primitive.name != "scan":
        return depends(inner[0], marks)
    start, num_carry = _counts(equation)
    while True:  # until the marks of the carry do not change, because each iteration reads the previous carry
        outputs = depends(inner[0], marks)
        before = marks[start : start + num_carry]
        after = [old or new for old, new in zip(before, outputs[:num_carry], strict=True)]
        if after == before:
            return outputs
        marks = [*marks[:start], *after, *marks[start + num_carry :]]


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs in an equation's parameters: the body of a call or a loop, or the branches of a condition."""
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, Jaxpr):
                yield part


def inline_calls(function: ArrayFunction) -> ArrayFunction:
    """Returns an equivalent function in which each call has its own copy of a jaxpr with a manual region.

    JAX emits one function for a jaxpr that is called several times, such as a jitted function or the body of a loop. On
    TPUs XLA does not inline this function. If it contains a manual region, and it is called inside another manual
    region, the partitioner treats the outer region's axes as automatic and aborts (Check failed:
    target.IsManualSubgroup() == sharding().IsManualSubgroup(), seen with jax 0.10.2). So each call gets a copy of its
    jaxpr, and thus a separate function.
    """

    def run(*arguments: Arrays) -> Arrays:
        closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = jax.core.eval_jaxpr(_copy(closed.jaxpr), closed.consts, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(result), leaves)

    return run


def _copy(value: Param) -> Param:
    """Returns a parameter of an equation, with copies of all jaxprs that contain a manual region."""
    if isinstance(value, tuple) and any(isinstance(part, Jaxpr | ClosedJaxpr) for part in value):
        return tuple(map(_copy, value))  # a named tuple, such as the implementation of random keys, has no jaxprs
    if isinstance(value, Jaxpr) and _has_region(value):  # in newer versions also a ClosedJaxpr
        copies = [{name: _copy(param) for name, param in equation.params.items()} for equation in value.eqns]
        return value.replace(eqns=[one.replace(params=params) for one, params in zip(value.eqns, copies, strict=True)])
    if isinstance(value, ClosedJaxpr) and _has_region(value.jaxpr):
        return value.replace(jaxpr=_copy(value.jaxpr))
    return value


def _has_region(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive.name == "shard_map" or any(map(_has_region, inner_jaxprs(equation)))
        for equation in jaxpr.eqns
    )
