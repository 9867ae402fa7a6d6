"""Which results of a traced function depend on some of its inputs."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from meshtrain.layout.loops import counts


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
