"""Finds residuals of a layer's backward pass that are computed from weights alone: copies that a scan would stack.

`pullback.layer_vjp` recognizes weights among the residuals by identity. A cast, a transpose or a sum of weights is
another array, and a stage would save one for each layer of a chunk. The layer's jaxpr shows such residuals.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshtrain.layout.loops import counts
from meshtrain.models.task import LayerSums, Params
from meshtrain.pipeline.pullback import Layer, layer_vjp
from meshtrain.words.errors import warn
from meshtrain.words.tables import format_bytes

# The share of the weights' bytes above which copies are reported. Broadcast scales of norms are far below it.
WARN_ABOVE = 0.05


def inspect(layer: Layer, weights: Params, x: Any, mask: Any = None) -> LayerSums:
    """Returns the abstract sums of a layer; warns where its backward pass saves copies of more than 5 % of its weights.

    The layer is traced once for both. `mask` is that of `layer_vjp`.
    """

    def outputs(weights: Params, x: Any) -> tuple[list[jax.Array], LayerSums]:
        _, sums, pullback = layer_vjp(layer, weights, x, mask)
        return jax.tree.leaves(pullback), sums

    closed, (residuals, sums) = jax.make_jaxpr(outputs, return_shape=True)(weights, x)
    own = jax.tree.leaves(weights)
    is_copy = from_inputs_alone(closed.jaxpr, len(own))[: len(residuals)]
    copies = [leaf for leaf, copied in zip(residuals, is_copy, strict=True) if copied]
    if num_bytes(copies) > WARN_ABOVE * num_bytes(own):
        arrays = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in copies)
        warn(
            f"stages.repeated: its backward pass saves {format_bytes(num_bytes(copies))} a layer that are made from "
            f"weights alone ({arrays}), for each layer of a stage; nearest: dtypes by Stages.cast, and a jax.lax.scan "
            "over the layers whose products take weights as they are stored"
        )
    return sums


def num_bytes(leaves: Sequence[Any]) -> int:
    """Returns the bytes of arrays or abstract arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def from_inputs_alone(jaxpr: Jaxpr, num_inputs: int) -> list[bool]:
    """Returns for each output whether it depends on the first inputs, and on no other input or constant.

    Args:
      jaxpr: a jaxpr.
      num_inputs: the number of inputs that count as the first ones.
    """
    is_first = [index < num_inputs for index in range(len(jaxpr.invars))]
    on_first = depends(jaxpr, is_first, on_constants=False)
    on_others = depends(jaxpr, [not first for first in is_first], on_constants=True)
    return [first and not others for first, others in zip(on_first, on_others, strict=True)]


def depends(jaxpr: Jaxpr, inputs: Sequence[bool], *, on_constants: bool) -> list[bool]:
    """Returns for each output of a jaxpr whether it depends on one of the marked inputs.

    The result is exact through calls and scans. Each output of any other equation that contains jaxprs (`cond`,
    `while`) counts as dependent on all of its inputs.

    Args:
      jaxpr: a jaxpr.
      inputs: which inputs are marked.
      on_constants: whether its constants are marked.
    """
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    marked |= set(jaxpr.constvars) if on_constants else set()
    for equation in jaxpr.eqns:
        marks = [not isinstance(var, Literal) and var in marked for var in equation.invars]
        marked |= {var for var, mark in zip(equation.outvars, _outputs(equation, marks), strict=True) if mark}
    return [not isinstance(var, Literal) and var in marked for var in jaxpr.outvars]


def _outputs(equation: Any, marks: list[bool]) -> list[bool]:
    values = [value for value in equation.params.values() if isinstance(value, ClosedJaxpr | Jaxpr)]
    inner = [value.jaxpr if isinstance(value, ClosedJaxpr) else value for value in values]
    if len(inner) != 1 or len(inner[0].invars) != len(marks) or len(inner[0].outvars) != len(equation.outvars):
        return [any(marks)] * len(equation.outvars)
    if equation.primitive.name != "scan":
        return depends(inner[0], marks, on_constants=False)
    start, num_carry = counts(equation)
    while True:  # until the marks of the carry do not change, because each turn reads the carry of the one before
        outputs = depends(inner[0], marks, on_constants=False)
        before = marks[start : start + num_carry]
        after = [old or new for old, new in zip(before, outputs[:num_carry], strict=True)]
        if after == before:
            return outputs
        marks = [*marks[:start], *after, *marks[start + num_carry :]]
