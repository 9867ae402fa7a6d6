"""Prints the memory of attention by sequence length, from the GPU compiler, without a GPU (docs/results/plans.md).

One H100, one packed sequence in bfloat16, 32 query heads on 8 key and value heads of 128; only forward and backward.

Extras: plan-gpu
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from meshtrain.cli.tables import format_bytes
from meshtrain.errors import run
from meshtrain.models.attention import blockwise, dot_product, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.plan.cluster.clusters import Cluster, open_cluster

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = (8192, 32768, 131072)


WAYS: dict[str, Callable[..., jax.Array]] = {
    "xla": functools.partial(dot_product.attend, how="xla"),
    "blockwise": functools.partial(blockwise.attend, name="heads"),
    "triton": functools.partial(triton.attend, name="heads", interpret=False),
}


def compiled(way: str, length: int, cluster: Cluster, head_dim: int = HEAD_DIM) -> jax.stages.Compiled:
    """Compiles forward and backward of attention for the first device of a cluster.

    Args:
      way: a key of `WAYS`.
      length: tokens.
      cluster: of GPUs.
      head_dim: width of a head.
    """
    place = jax.sharding.SingleDeviceSharding(cluster.devices[0])

    def given(num_heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length, num_heads, head_dim), jnp.bfloat16, sharding=place)

    def both(
        q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array, cotangent: jax.Array
    ) -> tuple[object, ...]:
        attention = Attention(NUM_HEADS, NUM_KV_HEADS, head_dim)
        heads, backward = jax.vjp(lambda *qkv: WAYS[way](*qkv, (documents, documents), attention), q, k, v)
        return heads, *backward(cotangent)

    documents = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=place)
    traced = jax.jit(both).trace(
        given(NUM_HEADS), given(NUM_KV_HEADS), given(NUM_KV_HEADS), documents, given(NUM_HEADS)
    )
    return traced.lower(lowering_platforms=("cuda",)).compile()


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Returns the bytes of temporaries, without arguments and results."""
    statistics = program.memory_analysis()
    assert statistics is not None
    return int(statistics.temp_size_in_bytes)


def main() -> int:
    """Prints the table; returns the exit code."""
    argparse.ArgumentParser(prog="scripts/bench attention", description=(__doc__ or "").partition("\n")[0]).parse_args()
    cluster = open_cluster("h100:1x1")
    print(f"| tokens | {' | '.join(f'`{way}`' for way in WAYS)} |")
    print("|---" * (1 + len(WAYS)) + "|")
    for length in LENGTHS:
        sizes = [format_bytes(temporary_bytes(compiled(way, length, cluster))) for way in WAYS]
        print(f"| {length:,} | {' | '.join(sizes)} |", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
