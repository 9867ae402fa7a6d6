"""Dtypes of parameters, activations, reductions and logits. Gradient sums, norms and losses are float32."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.options import option
from meshtrain.sharding.param_kinds import is_router_bias, matrix_dims
from meshtrain.sharding.param_sharding import Names
from meshtrain.sharding.trees import Arrays, Masks, NamesTree

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
# The policy fp8 uses 8-bit operands in the layers' products with weights. All other arrays have the dtypes of the
# policy `_BESIDE_FP8`.
FP8, _BESIDE_FP8 = "fp8", "bfloat16"


@dataclasses.dataclass(frozen=True)
class PrecisionOptions:
    """Dtypes, set together by `policy` or separately by their options; and whether a step is deterministic."""

    policy: str = option(
        "float32",
        "dtype of activations, and of weights in products; gradient sums, norms and losses stay float32; fp8: "
        "bfloat16, with 8-bit operands in the layers' matrix products",
        choices=(*_DTYPES, FP8),
    )
    param_dtype: str = option(
        "auto", "dtype of parameters in storage and updates; auto: float32", choices=("auto", "float32", "bfloat16")
    )
    frozen_dtype: str = option(
        "auto",
        "dtype of stored matrices and tables that are not trained; auto: param_dtype",
        choices=("auto", "float32", "bfloat16"),
        only_for={"all weights are trained": (False,)},
    )
    compute_dtype: str = option(
        "auto",
        "dtype of activations, and of weights in products; auto: the dtype of precision.policy",
        choices=("auto", *_DTYPES),
    )
    reduce_dtype: str = option(
        "auto",
        "dtype of gradients in collectives over data; sums over microbatches are float32; auto: float32",
        choices=("auto", "float32", "bfloat16"),
    )
    output_dtype: str = option(
        "auto",
        "dtype of logits, before softmax and loss cast them to float32; auto: the dtype of precision.policy",
        choices=("auto", *_DTYPES),
    )
    deterministic: bool = option(
        False,
        "compile the step for GPUs with deterministic operations and without autotuning, which is slower; no effect "
        "on other devices",
    )


def param_dtype(options: PrecisionOptions) -> DTypeLike:
    """Returns the dtype in which parameters are stored."""
    return _DTYPES["float32" if options.param_dtype == "auto" else options.param_dtype]


def as_stored(params: Arrays, logical_axes: NamesTree, trained: Masks, options: PrecisionOptions) -> Arrays:
    """Returns parameters cast to the dtypes in which they are stored.

    A router's bias is float32, because its updates are small. `frozen_dtype` applies only to frozen matrices and
    tables. Norms compute in float32, so rounding their scales would change the model's output.

    Args:
      params: a pytree of arrays, the parameters in any float dtype.
      logical_axes: a pytree with the structure of the parameters: the logical axes of each parameter.
      trained: a pytree of bool with the structure of the parameters: true for each trained parameter.
      options: the options that select the dtypes.
    """
    of_frozen = param_dtype(options) if options.frozen_dtype == "auto" else _DTYPES[options.frozen_dtype]

    def one(leaf: jax.Array, axes: Names, is_trained: bool) -> jax.Array:
        if is_router_bias(axes):
            return cast(leaf, jnp.float32)
        is_rounded = not is_trained and matrix_dims(axes) is not None
        return cast(leaf, of_frozen if is_rounded else param_dtype(options))

    return jax.tree.map(one, params, logical_axes, trained)


def compute_name(options: PrecisionOptions) -> str:
    """Returns the name of the dtype of activations."""
    return _of_policy(options) if options.compute_dtype == "auto" else options.compute_dtype


def _of_policy(options: PrecisionOptions) -> str:
    return _BESIDE_FP8 if options.policy == FP8 else options.policy


def product_name(options: PrecisionOptions) -> str:
    """Returns the name of the dtype in which most matrix products are computed.

    Utilization (MFU) is relative to the peak FLOP/s of a device with this dtype.
    """
    return FP8 if in_fp8(options) else compute_name(options)


def in_fp8(options: PrecisionOptions) -> bool:
    """Returns whether the layers multiply activations and weights as 8-bit floats."""
    return options.policy == FP8


def compute_dtype(options: PrecisionOptions) -> DTypeLike:
    """Returns the dtype of activations, and of weights in products with activations."""
    return _DTYPES[compute_name(options)]


def reduce_dtype(options: PrecisionOptions) -> DTypeLike:
    """Returns the dtype of gradients in collectives over data."""
    return _DTYPES["float32" if options.reduce_dtype == "auto" else options.reduce_dtype]


def output_dtype(options: PrecisionOptions) -> DTypeLike:
    """Returns the dtype of the head's logits."""
    return _DTYPES[_of_policy(options) if options.output_dtype == "auto" else options.output_dtype]


def cast(tree: Arrays, dtype: DTypeLike) -> Arrays:
    """Returns a pytree of arrays with each floating-point leaf cast to `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
