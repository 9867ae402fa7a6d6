"""Counts the FLOPs of matrix products in the traced step, for comparison with the compiled program.

FLOPs are for one device. Traced shapes are global along the axes left to the partitioner, so FLOPs are divided by the
sizes of these axes. Inside `jax.shard_map`, shapes are already local to a device along the manual axes.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend import core

from meshtrain.models.attention import blockwise
from meshtrain.plan.hlo.flops import SPLASH, TRITON, Attention
from meshtrain.plan.hlo.parse import share_in, turns_in
from meshtrain.plan.hlo.products import GROUPED, Window, places_on_data, used_share
from meshtrain.sharding.jaxprs import inner_jaxprs

Equation: TypeAlias = Any  # a `core.JaxprEqn` of arrays; for mypy the `aval` of its variables has no shape

CUDNN = {
    "dot_product_attention_fwd_wrapper": Attention("cudnn", "forward"),
    "dot_product_attention_bwd_wrapper": Attention("cudnn", "backward"),
}


def traced_flops(jaxpr: core.Jaxpr, mesh_shape: dict[str, int], shares: Mapping[str, float] | None = None) -> float:
    """Returns the FLOPs of matrix products on one device, assuming that the partitioner splits all work evenly.

    Attention kernels count masked blocks too, although the kernels skip these blocks.

    Args:
      jaxpr: the traced step.
      mesh_shape: mesh axis -> size.
      shares: name scope -> a number that the trace does not contain, because it depends on the data (`Cost.shares`).
        For a conditional, it is the share of its runs that take the second branch; for an expert kernel, the share of
        its blocks that have rows; for a loop, its number of iterations. If the number is unknown, both branches, all
        blocks, or one iteration are counted. None: all numbers are unknown.
    """
    return _flops(jaxpr, mesh_shape, frozenset(mesh_shape), shares or {})


def _flops(
    jaxpr: core.Jaxpr,
    mesh_shape: dict[str, int],
    automatic: frozenset[str],
    shares: Mapping[str, float],
    above: str = "",
) -> float:
    """Returns the FLOPs of matrix products of a traced function on one device.

    Args:
      jaxpr: the traced function.
      mesh_shape: mesh axis -> size.
      automatic: the axes left to the partitioner; traced shapes are global along them.
      shares: name scope -> share of a branch, share of blocks, or number of iterations, as in `traced_flops`; empty:
        all numbers are unknown.
      above: the path of name scopes of the enclosing calls, outermost first.
    """
    total = 0.0
    share = math.prod(mesh_shape[axis] for axis in automatic)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if not equation.outvars:
            # JAX 0.10 keeps a kernel without results in the trace if its results were saved; compilers remove it.
            continue
        if name == "dot_general":
            total += _product(equation) / share
        elif name == "conv_general_dilated":
            total += _convolution(equation) / share
        elif kernel := _attention(equation):
            total += kernel.flops(*_query_and_key(equation)) / share
        elif name == "pallas_call" and (grouped := GROUPED.search(_scopes(equation, above))):
            total += _of_blocks(grouped[1], equation, used_share(_scopes(equation, above), shares)) / share
        else:
            inside = automatic
            if name == "shard_map":
                inside = automatic - frozenset(equation.params["newly_manual_axes"])
            times = equation.params["length"] if name == "scan" else _turns(equation, shares) if name == "while" else 1
            scopes = _scopes(equation, above)
            flops = [_flops(inner, mesh_shape, inside, shares, scopes) for inner in inner_jaxprs(equation)]
            taken = share_in(str(equation.source_info.name_stack), shares) if name == "cond" else None
            if taken is not None:
                flops = [(1 - taken) * flops[0], taken * flops[1]]
            total += times * sum(flops)
    return total


def _kernel(equation: core.JaxprEqn) -> str:
    """Returns the name of a Pallas kernel; '' for a kernel without a name, and for any other operation."""
    return (equation.params["name"] or "") if equation.primitive.name == "pallas_call" else ""


def _scopes(equation: core.JaxprEqn, above: str) -> str:
    """Returns a path: the name scopes of an operation, outermost first, and the name of its Pallas kernel.

    The last part of the path is empty if the operation calls no Pallas kernel.

    Args:
      equation: the operation.
      above: the path of name scopes of the enclosing calls.
    """
    return f"{above}/{equation.source_info.name_stack}/{_kernel(equation)}"


def _of_blocks(part: str, equation: Equation, used_share: float) -> float:
    """Returns the FLOPs of an expert kernel in `models/moe/grouped_matmul.py`; blocks without rows do not count.

    Args:
      part: the kind of kernel: `times` (products of rows and weights) or `weights` (gradients of the weights).
      equation: the operation that calls the kernel.
      used_share: share of the blocks that have rows.
    """
    arrays = [variable.aval for variable in equation.invars]
    first, second = (array.shape for array in arrays if array.ndim >= 2)
    result = equation.outvars[0].aval.shape
    size = math.prod(result) * first[1] if part == "times" else second[0] * math.prod(result[1:])
    return 2.0 * size * used_share


def _attention(equation: core.JaxprEqn) -> Attention | None:
    """Returns the attention kernel that an operation calls; None for any other operation."""
    if equation.primitive.name in CUDNN:
        return CUDNN[equation.primitive.name]
    if match := SPLASH.match(_kernel(equation)):
        return Attention("splash", match[1])
    match = TRITON.match(_kernel(equation))
    return Attention("triton", match[1]) if match else None


def attention_kernel(jaxpr: core.Jaxpr) -> str:
    """Returns the name of the attention implementation in a traced step, as in the option `model.attention`.

    Returns `xla` if the step contains no kernel and no blockwise attention.
    """
    for equation in jaxpr.eqns:
        if kernel := _attention(equation):
            return kernel.by
        if equation.primitive.name in ("jit", "pjit") and equation.params["name"] == blockwise.TRACED_NAME:
            return "blockwise"
        if inside := next((name for name in map(attention_kernel, inner_jaxprs(equation)) if name != "xla"), ""):
            return inside
    return "xla"


def _turns(equation: core.JaxprEqn, shares: Mapping[str, float]) -> float:
    """Returns the number of iterations of a while loop; 1 if it is unknown.

    If the loop's condition is `i < constant`, the number is the constant: the counter is assumed to go from 0 in steps
    of 1. For any other condition, the number is the entry of `shares` for the loop's name scope.

    Args:
      equation: the `while` operation.
      shares: name scope of a loop -> its number of iterations; entries for other operations are ignored.
    """
    closed = equation.params["cond_jaxpr"]
    tests, bound = closed.jaxpr.eqns, None
    if len(tests) == 1 and tests[0].primitive.name == "lt" and isinstance(tests[0].invars[1], core.Literal):
        bound = int(tests[0].invars[1].val)
    turns = turns_in(f"{equation.source_info.name_stack}/while", shares)
    return bound or (1 if turns is None else turns)


def _product(equation: Equation) -> float:
    ((contracted, _), _) = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(result) * math.prod(left[dim] for dim in contracted)


def _convolution(equation: Equation) -> float:
    """Returns the FLOPs of a convolution: 2 x result x input features x positions of the window.

    Positions of the window on padding do not count. `plan.hlo.products` counts a compiled convolution in the same way.
    """
    given, numbers = equation.params, equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars)
    result = equation.outvars[0].aval.shape
    places = 1
    for dim, stride in enumerate(given["window_strides"]):
        # A spec is (batch or output features, features or input features, the dims of the window).
        of_left, of_window, of_result = (
            spec[2 + dim] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
        )
        low, dilations = given["padding"][dim][0], (given["lhs_dilation"][dim], given["rhs_dilation"][dim])
        window = Window(right[of_window], stride, low, *dilations)
        places *= places_on_data(left[of_left], result[of_result], window)
    outer = result[numbers.out_spec[0]] * result[numbers.out_spec[1]]
    return 2.0 * outer * right[numbers.rhs_spec[1]] * places / given["batch_group_count"]


def _query_and_key(equation: Equation) -> list[tuple[int, ...]]:
    """Returns the shapes of query and key: the kernel's first two floating-point operands with at least 3 dims."""
    arrays = [variable.aval for variable in equation.invars]
    return [array.shape for array in arrays if array.ndim >= 3 and jnp.issubdtype(array.dtype, jnp.floating)][:2]
