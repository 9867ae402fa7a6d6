"""Gives a layer a backward pass that starts from selected values of its forward pass, and computes the others again.

`keep_named` saves the values that the layer marks (`sharding/saved.py`); `keep_activations` saves all residuals except
those that depend only on weights. Both define the backward pass (`jax.custom_vjp`), so that the program does not depend
on how JAX's own `jax.checkpoint` selects residuals.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from meshtrain.models.remat import saved_names
from meshtrain.models.task import LayerSums, Params
from meshtrain.sharding.jaxprs import part_of
from meshtrain.sharding.passes import Passes
from meshtrain.sharding.placement import Placement
from meshtrain.sharding.saved import Tape, under
from meshtrain.sharding.trees import Arrays

# (weights, activations, further arguments) -> (activations, (loss, metrics) or None), see `Stages.repeated`.
Layer = Callable[[Params, Any, Arrays], tuple[Any, LayerSums]]
Outputs: TypeAlias = Any  # (activations, loss or None): the results of a layer that have cotangents
Pull: TypeAlias = Callable[[Outputs], tuple[Arrays, ...]]  # cotangents of outputs -> cotangents of arguments


def with_policy(layer: Layer, policy: str, placement: Placement) -> Layer:
    """Returns the layer with the backward pass of a remat policy.

    Args:
      layer: a layer that closes over no traced array.
      policy: one of the choices of `RematOptions.policy`.
      placement: states whether weights are gathered, and whether gathered weights are saved.
    """
    if policy != "none":
        return keep_named(layer, saved_names(policy, placement), input_on_host=policy == "offload")
    return keep_activations(layer) if placement.gathers_weights and not placement.keeps_gathered else layer


def split_result(result: tuple[Any, LayerSums]) -> tuple[Outputs, Arrays]:
    """Returns ((activations, loss), metrics) for the result of a layer; only the first pair has cotangents.

    Loss and metrics are None if the layer adds no sums.
    """
    y, sums = result
    return ((y, None), None) if sums is None else ((y, sums[0]), sums[1])


def keep_named(layer: Layer, names: Collection[str], *, input_on_host: bool = False) -> Layer:
    """Returns the same layer; its backward pass reads the values that the layer marks with one of `names`.

    The backward pass also reads the arguments, and computes all other values again. A value that no operation of the
    backward pass needs is not saved.

    Args:
      layer: a layer that closes over no traced array.
      names: names of marked values.
      input_on_host: whether the activations before the layer are stored in host memory until the backward pass.
    """

    def differentiate(arguments: tuple[Arrays, ...], has_gradient: list[bool]) -> tuple[Any, Pull]:
        tape = Tape(names)
        with under(tape):
            result = layer(*arguments)
        saved, of_saved = jax.tree.flatten(tape.values)
        leaves, structure = jax.tree.flatten(arguments)
        # A marked value that is an argument is saved once. In a trace, an array is one object.
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        aliases = [places.get(id(leaf)) for leaf in saved]

        def backward(leaves: list[jax.Array], saved: list[jax.Array], cotangents: Outputs) -> list[jax.Array]:
            values = [leaf if place is None else leaves[place] for leaf, place in zip(saved, aliases, strict=True)]

            def of_differentiated(differentiated: list[jax.Array]) -> tuple[Outputs, Arrays]:
                rest = iter(differentiated)
                merged = [next(rest) if each else leaf for leaf, each in zip(leaves, has_gradient, strict=True)]
                return split_result(layer(*jax.tree.unflatten(structure, merged)))

            with under(Tape(names, jax.tree.unflatten(of_saved, values))):
                chosen = [leaf for leaf, each in zip(leaves, has_gradient, strict=True) if each]
                _, pull, _ = jax.vjp(of_differentiated, chosen, has_aux=True)
            (found,) = pull(cotangents)
            gradients: list[jax.Array] = found
            return gradients

        outputs, _ = split_result(result)
        closed = jax.make_jaxpr(backward)(leaves, saved, outputs)
        part, reads = part_of(closed, closed.jaxpr.outvars)
        before, num_x = (len(jax.tree.leaves(each)) for each in arguments[:2])
        inputs = [*leaves, *saved]
        on_host = [input_on_host and before <= place < before + num_x for place in range(len(inputs))]
        reads_inputs, reads_outputs = reads[: len(inputs)], reads[len(inputs) :]
        read = [place for place, is_read in enumerate(reads_inputs) if is_read]
        held = [_move(inputs[place], on_host[place], jax.memory.Space.Host) for place in read]

        def pull(held: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
            values = [_move(x, on_host[at], jax.memory.Space.Device) for x, at in zip(held, read, strict=True)]
            chosen = [x for x, is_read in zip(cotangents, reads_outputs, strict=True) if is_read]
            found: list[jax.Array] = jax.core.eval_jaxpr(part.jaxpr, part.consts, *values, *chosen)
            return found

        return result, _as_pull(pull, held, outputs, structure, has_gradient)

    return _with_backward(layer, differentiate)


def keep_activations(layer: Layer) -> Layer:
    """Returns the same layer; its backward pass computes residuals that depend only on weights again.

    These are casts of weights and gathered weights. All other residuals are saved.

    Args:
      layer: a layer that closes over no traced array.
    """

    def differentiate(arguments: tuple[Arrays, ...], has_gradient: list[bool]) -> tuple[Any, Pull]:
        num_weights, num = (len(jax.tree.leaves(each)) for each in (arguments[0], arguments))
        is_saved = [place >= num_weights for place in range(num)]
        passes = Passes(lambda *given: split_result(layer(*given)), arguments, has_gradient, is_saved)
        (outputs, metrics), kept = passes.forward(*arguments)
        y, loss = outputs
        result = y, None if loss is None else (loss, metrics)
        structure = jax.tree.structure(arguments)

        def pull(held: tuple[list[jax.Array], list[jax.Array]], cotangents: list[jax.Array]) -> list[jax.Array]:
            found = passes.backward(*held, jax.tree.unflatten(jax.tree.structure(outputs), cotangents))
            return jax.tree.leaves(found)

        return result, _as_pull(pull, (kept, passes.select_read(arguments)), outputs, structure, has_gradient)

    return _with_backward(layer, differentiate)


def _with_backward(layer: Layer, differentiate: Callable[..., tuple[Any, Pull]]) -> Layer:
    """Returns the layer with the backward pass that `differentiate` returns.

    Args:
      layer: the layer.
      differentiate: (arguments, for each leaf whether it has a gradient) -> (result, pullback), a pytree of residuals.
    """

    @jax.custom_vjp
    def run(weights: Params, x: Any, given: Arrays) -> tuple[Any, LayerSums]:
        return layer(weights, x, given)

    def forward(*primals: Arrays) -> tuple[Any, Pull]:
        is_primal = lambda leaf: isinstance(leaf, CustomVJPPrimal)  # noqa: E731
        # Frozen weights and integers have no gradient.
        found = [
            leaf.perturbed and bool(jnp.issubdtype(leaf.value.dtype, jnp.inexact))
            for leaf in jax.tree.leaves(primals, is_leaf=is_primal)
        ]
        return differentiate(jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=is_primal), found)

    def backward(pull: Pull, cotangents: tuple[Any, Any]) -> tuple[Arrays, ...]:
        return pull(split_result(cotangents)[0])

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _as_pull(
    pull: Callable[..., list[jax.Array]], held: Arrays, outputs: Outputs, structure: Any, has_gradient: Sequence[bool]
) -> Pull:
    """Returns a pullback as a pytree whose leaves are the residuals `held`.

    Args:
      pull: (residuals, cotangents of the leaves of the outputs) -> cotangents of the leaves with a gradient.
      held: the residuals.
      outputs: the outputs of the layer, whose shapes replace missing cotangents by zeros.
      structure: the pytree structure of the layer's arguments.
      has_gradient: for each leaf of the arguments whether it has a gradient.
    """
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(outputs)]

    def run(held: Arrays, cotangents: Outputs) -> tuple[Arrays, ...]:
        leaves = jax.tree.leaves(cotangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
        found = iter(pull(held, [_filled(*pair) for pair in zip(leaves, shapes, strict=True)]))
        result: tuple[Arrays, ...] = jax.tree.unflatten(
            structure, [next(found) if each else None for each in has_gradient]
        )
        return result

    return jax.tree_util.Partial(run, held)


def _filled(cotangent: jax.Array | SymbolicZero, shape: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    if jnp.issubdtype(shape.dtype, jnp.inexact):
        return jnp.zeros(shape.shape, shape.dtype)
    return np.zeros(shape.shape, jax.dtypes.float0)


def _move(x: jax.Array, moves: bool, memory: Any) -> jax.Array:
    return jax.device_put(x, memory) if moves else x
