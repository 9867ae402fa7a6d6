"""In which dtype the step computes. Parameters, moments, gradient sums and losses are float32 under every policy."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.options import option


@dataclasses.dataclass(frozen=True)
class PrecisionOptions:
    """The dtype of activations and of the weights that meet them."""

    policy: str = option(
        "float32",
        "dtype of activations and cast weights; parameters, gradient sums, softmax, norms and losses stay float32",
        choices=("float32", "bfloat16", "float16"),
    )


def compute_dtype(options: PrecisionOptions) -> DTypeLike:
    """Returns the dtype of activations under a policy."""
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}[options.policy]
