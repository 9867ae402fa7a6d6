"""Each option of the table for GPUs, tried on the installed compiler: the schedule shows what it is for.

`scripts/test --plan` runs these, without a GPU.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshtrain.hardware import compiler_options
from meshtrain.plan.cluster.clusters import open_cluster
from meshtrain.plan.hlo import parse
from meshtrain.plan.hlo.collectives import collectives

pytestmark = pytest.mark.gpu_compiler

WIDTH, LAYERS, DEVICES, LARGE = 2048, 6, 8, 2**17
WHOLE, SPLIT, STACKED = PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data")
H100 = "NVIDIA H100 80GB HBM3"
EARLY = "xla_gpu_enable_latency_hiding_scheduler"
LIMIT, SLOP = "xla_gpu_experimental_parallel_collective_overlap_limit", "xla_gpu_memory_limit_slop_factor"
OFF = "COLLECTIVE_PIPELINING_MODE_OFF"
TABLE = compiler_options.options_of(
    H100, 2 * compiler_options.LARGE_BYTES, is_late=True, by_chunk=True, splits_experts=True, is_deterministic=True
)
OPTIONS = {option.name: option.value for option in TABLE}


def gathered(weights, x):
    """Layers of which each gathers its weight."""
    layer = lambda x, w: (jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True)), None)  # noqa: E731
    return jax.lax.scan(layer, x, weights)[0]


def reduced(reduce, num_sums, xs):
    """Layers of which each reduces what it multiplies."""
    layer = lambda carry, x: (carry, [reduce(x.T @ jnp.tanh(i * x)) for i in range(1, num_sums + 1)])  # noqa: E731
    return jax.lax.scan(layer, 0, xs)[1]


def beside_products(u, v, x, w):
    """Three reductions of 32 GiB each, of which the results are small, and products that need none of them."""
    sums = [jnp.max(jax.lax.psum(jnp.sin(i * u[:, None] * v), "data")) for i in (1.0, 2.0, 3.0)]
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return *sums, x


def small_and_large(small, large, x, w):
    """A small and a large gather, and products that need neither."""
    gathers = [jax.lax.all_gather(jnp.sin(one), "data", tiled=True) for one in (small, large)]
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return *gathers, x


def added_up(rows, values):
    """The gradient of a look-up: several rows of it may be the same."""
    return jnp.zeros((WIDTH, WIDTH), jnp.float32).at[rows.astype(jnp.int32)].add(values.astype(jnp.float32))


def scatter(x):
    return jax.lax.psum_scatter(x, "data", tiled=True)


def add(x):
    return jax.lax.psum(x, "data")


class Program(NamedTuple):
    """A function of one device's shards: its global shapes, and the specs of arguments and results."""

    of_shards: Callable
    shapes: list
    given: tuple
    results: object


TOKENS = (DEVICES * 4096, WIDTH)
ROWS = [(LAYERS, *TOKENS)]
GATHER = Program(gathered, [(LAYERS, WIDTH, WIDTH), TOKENS], (STACKED, SPLIT), SPLIT)
ADD = Program(functools.partial(reduced, add, 1), ROWS, (STACKED,), WHOLE)
ADD_TWO = Program(functools.partial(reduced, add, 2), ROWS, (STACKED,), WHOLE)
SCATTER_TWO = Program(functools.partial(reduced, scatter, 2), ROWS, (STACKED,), STACKED)
BESIDE = Program(
    beside_products, [(2**23,), (WIDTH,), TOKENS, (WIDTH, WIDTH)], (WHOLE, WHOLE, SPLIT, WHOLE), (*[WHOLE] * 3, SPLIT)
)
WEIGHED = Program(
    small_and_large,
    [(512, WIDTH), (LARGE, WIDTH), TOKENS, (WIDTH, WIDTH)],
    (*[SPLIT] * 3, WHOLE),
    (WHOLE, WHOLE, SPLIT),
)


LOOKED_UP = Program(added_up, [(TOKENS[0],), TOKENS], (SPLIT, SPLIT), SPLIT)


def compiled(card, program, options):
    """The text of the scheduled program on eight devices of one host."""
    mesh = Mesh(np.asarray(open_cluster(f"{card}:1x{DEVICES}").devices), ("data",), axis_types=(AxisType.Auto,))
    way = jax.jit(
        jax.shard_map(program.of_shards, mesh=mesh, in_specs=program.given, out_specs=program.results, check_vma=False)
    )
    given = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(program.shapes, program.given, strict=True)
    ]
    return way.trace(*given).lower(lowering_platforms=("cuda",)).compile(compiler_options=options).as_text()


def asynchronous(text):
    """Collectives that other work may run beside."""
    return sum(one.is_asynchronous for one in collectives(parse.read(text), {"data": DEVICES}))


def pipelined(text):
    """Collectives that a loop starts for another one of its rounds."""
    return text.count('"is_pipelined":true')


def joined(text):
    """The fewer collectives, the larger."""
    return -len(collectives(parse.read(text), {"data": DEVICES}))


def sorts(text):
    """Sorted rows are added up in their order; atomic additions come in any."""
    return text.count(" sort(")


def of_cublas(text):
    return text.count("__cublas$lt$matmul")


def in_flight(text):
    """The most collectives that run at once."""
    now, most = 0, 0
    for end in re.findall(r" (?:all-reduce|async)-(start|done)\(", text):
        now += 1 if end == "start" else -1
        most = max(most, now)
    return most


def products_beside_the_large(text):
    """Products between the start and the end of the gather with most bytes."""
    lines = text.splitlines()
    (start,) = [place for place, line in enumerate(lines) if re.search(rf"bf16\[{LARGE},.* all-gather-start\(", line)]
    end = next(place for place in range(start, len(lines)) if " all-gather-done(" in lines[place])
    return sum("dot_general" in line.partition("=")[0] for line in lines[start:end])


def less(seen):
    return lambda text: -seen(text)


class Trial(NamedTuple):
    """A program that shows an option: with the table's value `seen` is larger than with `other`.

    `beside` are the options that have the table's value both times. An A100 does by default without what an H100 has.
    """

    program: Program
    other: object
    seen: Callable
    beside: tuple = (EARLY,)
    card: str = "h100"


TRIALS = {
    EARLY: Trial(GATHER, False, asynchronous, (), "a100"),
    # It weighs an H100's collectives by size.
    "xla_gpu_enable_analytical_sol_latency_estimator": Trial(WEIGHED, True, less(products_beside_the_large)),
    "xla_gpu_pipeline_all_gather": Trial(GATHER, OFF, pipelined),
    "xla_gpu_pipeline_reduce_scatter": Trial(SCATTER_TWO, OFF, pipelined),
    "xla_gpu_pipeline_all_reduce": Trial(ADD, OFF, pipelined),
    "xla_gpu_all_reduce_combine_threshold_bytes": Trial(ADD_TWO, 1, joined),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": Trial(SCATTER_TWO, 1, joined),
    LIMIT: Trial(BESIDE, 1, in_flight, (EARLY, SLOP)),
    "xla_gpu_deterministic_ops": Trial(LOOKED_UP, False, sorts, ()),
    "xla_gpu_enable_triton_gemm": Trial(GATHER, True, of_cublas),
    SLOP: Trial(BESIDE, 95, in_flight, (EARLY, LIMIT)),  # 95: XLA's own
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_compiler_takes_the_option_and_the_schedule_shows_it(name):
    trial = TRIALS[name]
    beside = {one: OPTIONS[one] for one in trial.beside}
    with_it, without = (
        trial.seen(compiled(trial.card, trial.program, {**beside, name: value}))
        for value in (OPTIONS[name], trial.other)
    )
    assert with_it > without


def test_the_compiler_takes_all_options_together():
    assert asynchronous(compiled("h100", GATHER, OPTIONS)) > 0
