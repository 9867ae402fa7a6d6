"""Prints the memory of attention by sequence length, from the GPU compiler, without a GPU (docs/results/plans.md).

One H100, one packed sequence in bfloat16, 32 query heads on 8 key and value heads of 128; only forward and backward.
On a machine with a GPU from Hopper on, `--measure` runs cuDNN's kernel with a score function (`flex`) on three shapes.

Extras: plan-gpu
"""

import argparse
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.cli.tables import format_bytes
from meshtrain.errors import run
from meshtrain.models.attention import blockwise, dot_product, flex, triton
from meshtrain.models.attention.attention import Attention
from meshtrain.plan.cluster.attention_tracing import as_on_target
from meshtrain.plan.cluster.clusters import Cluster, open_cluster

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
LENGTHS = (8192, 32768, 131072)
NUM_CALLS = 20


WAYS: dict[str, Callable[..., jax.Array]] = {
    "xla": functools.partial(dot_product.attend, how="xla"),
    "blockwise": functools.partial(blockwise.attend, name="heads"),
    "triton": functools.partial(triton.attend, name="heads", interpret=False),
    "flex": functools.partial(flex.attend, name="heads"),
}


class Shape(NamedTuple):
    """A shape of packed sequences for cuDNN's kernel with a score function (`models/attention/flex.py`).

    Attributes:
      length: tokens of a sequence.
      head_dim: width of a head.
      options: further fields of `Attention`.
    """

    length: int
    head_dim: int
    options: Mapping[str, Any]


SHAPES = {
    "8,192 tokens, heads of 128": Shape(8192, 128, {}),
    "8,192 tokens, heads of 64, window 1,024": Shape(8192, 64, {"window": 1024}),
    "8,192 tokens, heads of 128, window 4,096, cap 50, sinks": Shape(
        8192, 128, {"window": 4096, "cap": 50.0, "sinks": True}
    ),
}


def both_passes(way: str, attention: Attention) -> Callable[..., tuple[Any, ...]]:
    """Returns a function of q, k, v, document ids and the heads' cotangent: heads, and the cotangents of q, k and v."""

    def both(
        q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array, cotangent: jax.Array
    ) -> tuple[object, ...]:
        sinks = jnp.zeros(q.shape[:3], jnp.float32) if attention.sinks else None
        attend = lambda *qkv: WAYS[way](*qkv, (documents, documents), attention, sinks)  # noqa: E731
        heads, backward = jax.vjp(attend, q, k, v)
        return heads, *backward(cotangent)

    return both


def compiled(
    way: str, length: int, cluster: Cluster, head_dim: int = HEAD_DIM, shape: Shape | None = None
) -> jax.stages.Compiled:
    """Compiles forward and backward of attention for the first device of a cluster.

    Args:
      way: a key of `WAYS`.
      length: tokens.
      cluster: of GPUs.
      head_dim: width of a head.
      shape: further settings of attention; None: causal attention without a window.
    """
    mesh = jax.sharding.Mesh(np.array(cluster.devices[:1]), ("device",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def given(num_heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length, num_heads, head_dim), jnp.bfloat16, sharding=place)

    both = both_passes(way, Attention(NUM_HEADS, NUM_KV_HEADS, head_dim, **(shape.options if shape else {})))
    documents = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=place)
    with as_on_target(cluster), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(both).trace(
            given(NUM_HEADS), given(NUM_KV_HEADS), given(NUM_KV_HEADS), documents, given(NUM_HEADS)
        )
        return traced.lower(lowering_platforms=("cuda",)).compile()


def seconds(function: Callable[..., Any], *arguments: jax.Array) -> float:
    """Returns the seconds of a call: the time of several queued calls divided by their number."""
    call = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready([call(*arguments) for _ in range(3)])
    began = time.perf_counter()
    for _ in range(NUM_CALLS):
        result = call(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / NUM_CALLS


def measure(shape: Shape) -> tuple[float, float, float]:
    """Returns seconds and errors of cuDNN's kernel on this machine's GPU, against `blockwise` in float32.

    The result is (milliseconds of both passes, relative error of the heads, largest relative error of a gradient). The
    sequence contains four documents.

    Args:
      shape: the shape to measure.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
    q, k, v, cotangent = (
        jax.random.normal(key, (1, shape.length, num, shape.head_dim), jnp.bfloat16)
        for key, num in zip(keys, heads, strict=True)
    )
    documents = (4 * jnp.arange(shape.length, dtype=jnp.int32) // shape.length)[None]
    attention = Attention(NUM_HEADS, NUM_KV_HEADS, shape.head_dim, **shape.options)
    arguments = q, k, v, documents, cotangent
    exact = jax.jit(both_passes("blockwise", attention))(
        *(x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in arguments)
    )
    got = jax.jit(both_passes("flex", attention))(*arguments)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
    errors = [float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) for a, b in pairs]
    return 1000 * seconds(both_passes("flex", attention), *arguments), errors[0], max(errors[1:])


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Returns the bytes of temporaries, without arguments and results."""
    statistics = program.memory_analysis()
    assert statistics is not None
    return int(statistics.temp_size_in_bytes)


def main() -> int:
    """Prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench attention", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="on a GPU from Hopper on: time and errors of `flex`")
    if parser.parse_args().measure:
        print("| shape | ms | error of heads | error of gradients |\n| --- | --: | --: | --: |")
        for name, shape in SHAPES.items():
            print(f"| {name} | {' | '.join(f'{number:.3g}' for number in measure(shape))} |", flush=True)
        return 0
    cluster = open_cluster("h100:1x1")
    print(f"| tokens | {' | '.join(f'`{way}`' for way in WAYS)} |")
    print("|---" * (1 + len(WAYS)) + "|")
    for length in LENGTHS:
        sizes = [format_bytes(temporary_bytes(compiled(way, length, cluster))) for way in WAYS]
        print(f"| {length:,} | {' | '.join(sizes)} |", flush=True)
    print("\n| shape | `flex` | `blockwise` |\n| --- | --: | --: |")
    for name, shape in SHAPES.items():
        programs = [compiled(way, shape.length, cluster, shape.head_dim, shape) for way in ("flex", "blockwise")]
        print(f"| {name} | {' | '.join(format_bytes(temporary_bytes(program)) for program in programs)} |", flush=True)
    return 0


if __name__ == "__main__":
    run(main)
