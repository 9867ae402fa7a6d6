"""Marks the values of a layer that its backward pass may save; a tape records these values and replays them.

The forward pass of a layer (`models/split.py`) runs under a tape that records each value whose name a remat policy
saves. The backward pass runs the layer again under a tape that replays: `mark` returns the recorded value, whose
derivative is that of the value computed again. Operations that lead to a recorded value are then needed only for this
derivative, and the others are removed as dead code. So the model decides which values are saved. `jax.checkpoint`, its
policies and JAX's flags for them have no effect.

`mark` may be called in the layer itself or in a manual region of it (`placement.on_shards`). Inside a loop, a
condition, or a function with its own backward pass, a recorded value would leave the trace to which it belongs.
`mark_residuals` and `value_and_pullback` mark the values of such functions.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.sharding.passes import Passes
from meshtrain.sharding.trees import ArrayFunction, Arrays

# The name of weights that `Placement.weight` gathered from the devices that store their parts.
GATHERED = "gathered"


class Tape:
    """The saved values of a layer in the order of its operations; the values of a manual region are one list in it.

    Attributes:
      names: the names of the values that are saved.
      values: while recording, the values so far; while replaying, the values that follow.
      replays: whether the tape replays values.
    """

    def __init__(self, names: Collection[str], values: Sequence[Arrays] | None = None) -> None:
        """Creates a tape that records, or a tape that replays `values` if these are given."""
        self.names, self.replays, self.values = names, values is not None, list(values or ())

    def pass_on(self, value: Arrays) -> Arrays:
        """Records a value and returns it, or returns the next recorded value, which replaces it."""
        if not self.replays:
            self.values.append(value)
            return value
        recorded = self.values.pop(0)
        same = recorded.shape == value.shape and recorded.dtype == value.dtype
        assert same, "the layer runs again with the same operations"
        return recorded


_TAPE: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("tape", default=None)


def current() -> Tape | None:
    """Returns the tape of the layer that JAX traces, None if no values of it are recorded or replayed."""
    return _TAPE.get()


@contextlib.contextmanager
def under(tape: Tape | None) -> Iterator[Tape | None]:
    """Makes a tape the current tape in a `with` block; None: no tape."""
    token = _TAPE.set(tape)
    try:
        yield tape
    finally:
        _TAPE.reset(token)
    assert tape is None or not tape.replays or not tape.values, "the layer reads all values that it recorded"


def mark(x: jax.Array, name: str, *, has_gradient: bool = True) -> jax.Array:
    """Returns `x`; a policy that saves `name` saves the value of `x` for the backward pass.

    Args:
      x: any array of the layer.
      name: the name of a kind of values, such as the constants of `models/remat.py`.
      has_gradient: whether the operations that lead to `x` are needed again for its derivative; False if `x` is
        computed from `jax.lax.stop_gradient`.
    """
    tape = current()
    if tape is None or name not in tape.names:
        return x
    value: jax.Array = tape.pass_on(x)
    if not tape.replays or not has_gradient or not jnp.issubdtype(x.dtype, jnp.inexact):
        return value
    replaced: jax.Array = _value_of_first(value, x)
    return replaced


@jax.custom_jvp
def _value_of_first(recorded: jax.Array, x: jax.Array) -> jax.Array:
    return recorded


@_value_of_first.defjvp
def _tangent_of_second(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[1]


def value_and_pullback(function: ArrayFunction, *arguments: Arrays) -> tuple[Arrays, Any]:
    """Returns `function(*arguments)` without a derivative, and its pullback for a custom backward pass.

    While a tape records, the pullback is None, and marked values of the function are recorded. While a tape replays,
    the pullback reads these values and computes other residuals again. The custom backward pass gets the pullback as a
    residual, because a pullback is a pytree.

    Args:
      function: a function of pytrees of arrays that returns one array.
      *arguments: its arguments.
    """
    tape, fixed = current(), jax.lax.stop_gradient(arguments)
    if tape is None:
        return jax.vjp(function, *fixed)
    if tape.replays:
        with under(Tape(tape.names, tape.values.pop(0))):
            return jax.vjp(function, *fixed)
    inner = Tape(tape.names)
    with under(inner):
        result = function(*fixed)
    tape.values.append(inner.values)
    return result, None


def mark_residuals(
    functions: Sequence[Callable[..., jax.Array]], which: jax.Array | None, name: str, *arguments: Arrays
) -> jax.Array:
    """Returns the result of one of several functions, and marks its result and the residuals of its backward pass.

    Marked are the residuals that depend on the arguments and are not arguments: for attention, the heads and the
    softmax's statistics. The functions may contain conditions and functions with custom backward passes. What they
    close over has no gradient.

    Args:
      functions: one function of `arguments`, or two functions whose residuals have the same shapes.
      which: with two functions, a bool scalar that selects the first; None with one function.
      name: the name of the marked values.
      *arguments: floating-point arrays, or None.
    """
    tape = current()
    if tape is None or name not in tape.names:
        return functions[0](*arguments) if which is None else jax.lax.cond(which, *functions, *arguments)
    every = [True] * len(jax.tree.leaves(arguments))
    with under(None):
        traced = [Passes(_with_nothing_else(run), arguments, every, every, every) for run in functions]
    consts = [passes.consts for passes in traced]

    @jax.custom_vjp
    def attach(given: Arrays, arguments: Arrays, result: jax.Array, kept: list[jax.Array]) -> jax.Array:
        return result

    def pull(residuals: Arrays, cotangent: jax.Array) -> tuple[None, Arrays, None, None]:
        (which, consts), arguments, kept = residuals
        return None, _choose(which, _backward, traced, consts, arguments, kept, cotangent), None, None

    attach.defvjp(lambda given, arguments, result, kept: (result, (given, arguments, kept)), pull)
    result, kept = _choose(which, _forward, traced, consts, jax.lax.stop_gradient(arguments))
    kept = [tape.pass_on(leaf) for leaf in kept]
    # The result may be one of the residuals, which is saved once.
    (place,) = traced[0].outputs_kept
    result = tape.pass_on(result) if place is None else kept[place]
    attached: jax.Array = attach((which, consts), arguments, result, kept)
    return attached


def _with_nothing_else(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, None]]:
    return lambda *arguments: (function(*arguments), None)


def _choose(which: jax.Array | None, run: ArrayFunction, traced: list[Passes], *arguments: Arrays) -> Arrays:
    """Runs a pass of the function that `which` selects, see `mark_residuals`; `run` is `_forward` or `_backward`."""
    runs = [functools.partial(run, passes, number) for number, passes in enumerate(traced)]
    return runs[0](*arguments) if which is None else jax.lax.cond(which, *runs, *arguments)


def _forward(
    passes: Passes, number: int, consts: list[list[Arrays]], arguments: Arrays
) -> tuple[jax.Array, list[jax.Array]]:
    (result, _), kept = passes.forward(*arguments, consts=consts[number])
    return result, kept


def _backward(
    passes: Passes, number: int, consts: list[list[Arrays]], arguments: Arrays, kept: list[jax.Array], cotangent: Arrays
) -> tuple[Arrays, ...]:
    return passes.backward(kept, passes.select_read(arguments), cotangent, consts[number])
