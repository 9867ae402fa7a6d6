"""Attention on GPUs by JAX's own Pallas kernel, compiled through Triton; supports documents in packed sequences.

The kernel stores no [T, T] matrix. JAX's module is experimental and marked as deprecated in newer versions of JAX. So
`is_available` checks whether JAX has the module and whether its functions have the parameters that this file passes.

b, T, N, G, H: see `attention.py`.
"""

import functools
import inspect
import math
import warnings
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain.errors import Problem, UserError
from meshtrain.models.attention import kernel
from meshtrain.models.attention.attention import Attention, Documents, pad, pad_documents

# Sequences are padded to a multiple of the forward kernel's block of queries.
GRANULE = 128
LN_2 = math.log(2)  # the kernel's logarithms are to base 2
LARGEST_HEAD_DIM = 256  # the tests compile it for 64, 128 and 256
# Names of the parameters of the backward rule of `mha`; `_static` returns the values of the first ten.
BACKWARD = (
    "sm_scale", "causal", "block_sizes", "backward_pass_impl", "num_warps", "num_stages", "grid", "interpret", "debug",
    "return_residuals", "res", "do",
)  # fmt: skip

Static = tuple[float, bool, bool]  # (scale of scores, whether attention is causal, whether the kernel is interpreted)


@functools.cache
def is_available() -> bool:
    """Returns whether this version of JAX has the kernel, with the forward and backward rules that `attend` calls."""
    try:
        backward = _module().mha.bwd
    except (ImportError, AttributeError):
        return False
    return tuple(inspect.signature(backward).parameters) == BACKWARD


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents,
    attention: Attention,
    sinks: jax.Array | None = None,
    *,
    name: str,
    interpret: bool,
) -> jax.Array:
    """Returns the attention output of each head, [b, T, N, H], by the GPU kernel; for the arguments see `attention.py`.

    The kernel supports neither windows nor capped scores. Queries and keys must be the same tokens (S is T).

    Raises:
      UserError: this version of JAX does not have the kernel, or has it with other parameters.
    """
    assert attention.window == attention.cap == 0, "the configuration check rejects this"
    if not is_available():
        raise UserError(
            Problem(
                "model.attention",
                got="triton, but this version of JAX does not have its kernel",
                allowed="auto, xla, blockwise, cudnn",
                nearest="model.attention=auto",
            )
        )
    length = q.shape[1]
    whole = length + -length % GRANULE
    documents = pad_documents(documents, q, k, (whole, whole), attention.causal)
    static = (attention.scale, attention.causal, interpret)
    q, k, v = (pad(x, whole) for x in (q, k, v))
    pallas = kernel.Kernel(_forward, _backward, static, name, LN_2)
    heads = kernel.attend(pallas, sinks, q, k, v, documents and documents[0])
    return heads[:, :length]


def _forward(
    static: Static, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope(_scope(static)):
        _, residuals = _module().mha.fwd(q, *(_for_each_query(x, q) for x in (k, v)), ids, *_static(static, q))
    # The rule's residuals are its arguments, the heads, and the logarithms of the softmax's sums [b, N, T].
    heads, log_sums = residuals[-2:]
    return heads, log_sums


def _backward(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array | None,
    heads: jax.Array,
    log_sums: jax.Array,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    repeated = (q, _for_each_query(k, q), _for_each_query(v, q), ids, heads, log_sums)
    with jax.named_scope(_scope(static)):
        dq, dk, dv, _ = _module().mha.bwd(*_static(static, q), repeated, cotangent)
    dk, dv = (_sum_of_queries(found, x) for found, x in ((dk, k), (dv, v)))
    return dq, dk, dv


def _for_each_query(x: jax.Array, q: jax.Array) -> jax.Array:
    """Repeats keys or values [b, T, G, H] to the query heads of `q`, [b, T, N, H].

    The kernel requires this, because it does not support grouped queries.
    """
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _sum_of_queries(found: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the cotangent of `x`, [b, T, G, H], summed in float32 over the query heads that share a key head.

    Args:
      found: cotangent of the repeated array `_for_each_query(x, q)`, [b, T, N, H].
      x: keys or values before they were repeated, [b, T, G, H].
    """
    num_sequences, length, num_groups, head_dim = x.shape
    parts = found.reshape(num_sequences, length, num_groups, -1, head_dim)
    return jnp.sum(parts, axis=3, dtype=jnp.float32).astype(x.dtype)


def _scope(static: Static) -> str:
    """Returns the name scope of the kernel's operations, from which the planner reads whether attention is causal.

    `static` are the kernel's settings that are not arrays.
    """
    return "triton_causal" if static[1] else "triton_full"


def _static(static: Static, q: jax.Array) -> tuple[Any, ...]:
    scale, causal, interpret = static
    # The largest blocks with which heads of this dim fit into an A100's shared memory, 164 KiB.
    forward, backward = ((128, 64), 64) if q.shape[3] <= 128 else ((64, 64), 32)
    sizes = _module().BlockSizes(
        block_q=forward[0],
        block_k=forward[1],
        block_q_dkv=backward,
        block_kv_dkv=backward,
        block_q_dq=backward,
        block_kv_dq=backward,
    )
    return (scale, causal, sizes, "triton", None, 2, None, interpret, False, False)


def _module() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    return attention
