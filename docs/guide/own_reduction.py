"""A custom gradient reduction: each replica sends partial sums to the next replica, around a ring.

python -m meshtrain train --config=configs/tiny.py --config.mesh.data=4 \
  --config.reduction.name=docs.guide.own_reduction:ring
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshtrain.sharding.reduction import Reduction, ReductionOptions


def ring(options: ReductionOptions, dtype: DTypeLike) -> Reduction:
    """Returns the ring reduction, which sends sums in `dtype` (`precision.reduce_dtype`)."""

    def summed(x: jax.Array, dim: int, over: str) -> jax.Array:
        n, me = jax.lax.axis_size(over), jax.lax.axis_index(over)
        send = lambda part: jax.lax.ppermute(part, over, [(i, (i + 1) % n) for i in range(n)])  # noqa: E731
        whole = jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1)
        rows = (jnp.stack(jnp.split(x, n, axis=dim)) if dim else whole).astype(dtype)
        part = rows[me - 1]
        for i in range(n - 1):
            part = send(part) + rows[(me - 2 - i) % n]
        if dim:  # ZeRO level 1: this replica needs only its shard of the sum
            return part.astype(jnp.float32)
        rows = rows.at[me].set(part)
        for i in range(n - 1):
            part = send(part)
            rows = rows.at[(me - 1 - i) % n].set(part)
        return rows.reshape(-1)[: x.size].reshape(x.shape).astype(jnp.float32)

    return Reduction(
        update=lambda gradients, residual, over, scattered: (
            jax.tree.map(lambda x, dim: summed(x, dim, over), gradients, scattered), residual
        ),
        sent_bytes=lambda elements, n, is_scattered: (
            elements * (n - 1) / n * (1 if is_scattered else 2) * jnp.dtype(dtype).itemsize
        ),
    )  # fmt: skip
