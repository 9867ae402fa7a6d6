"""Compares each schedule with a textbook pipeline: a scan that contains a ppermute, differentiated by `jax.grad`.

There are two textbook pipelines: each stage has one chunk of layers, or several chunks and circulating microbatches.

All programs compute loss and gradients of the same batch from the same weights. Step times are medians over rounds in
which the programs alternate.

M: microbatches, S: stages, V: chunks a stage.

Extras: cuda
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.schema import Config
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.models.remat import RematOptions
from meshtrain.models.task import Batch, Params, Stages, batch_axes, entries
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.pipeline import executor
from meshtrain.pipeline import stages as ring
from meshtrain.pipeline.schedules import PipelineOptions
from meshtrain.plan.hlo import flops, parse
from meshtrain.sharding.gradients import GradientSync
from meshtrain.sharding.param_sharding import ParamSharding
from meshtrain.sharding.placement import Placement, on_shards
from meshtrain.sharding.rules import AXES, PIPELINE
from meshtrain.step.accumulate import split_microbatches
from meshtrain.step.step import with_sequence_index

TEXTBOOK, CIRCULAR = "scan + jax.grad", "circular + grad"
# Name of a program -> schedule and chunks of its configuration; the textbook programs use only the chunks.
PROGRAMS = {
    TEXTBOOK: ("gpipe", 1),
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    CIRCULAR: ("interleaved_1f1b", 2),
    "interleaved_1f1b": ("interleaved_1f1b", 2),
}
NUM_COMPILATIONS = 3  # the minimum is used, because other programs increase even CPU time


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A compiled program (params, batch, key data) -> (loss, gradients), its arguments, and its compile time."""

    compiled: Any
    arguments: tuple[Any, ...]
    compile_seconds: float


def configuration(arguments: argparse.Namespace, schedule: str, num_chunks: int) -> Config:
    """Returns the assembly of a small decoder whose number of layers is divisible by stages x 2 chunks."""
    return Config(
        batch_size=arguments.sequences * arguments.microbatches,
        sequence_length=arguments.tokens,
        model=DecoderOptions(
            num_layers=2 * arguments.stages,
            embed_dim=arguments.width,
            mlp_dim=4 * arguments.width,
            num_heads=4,
            num_kv_heads=4,
            vocab_size=1024,
        ),
        pipeline=PipelineOptions(schedule, arguments.microbatches, num_chunks),
        remat=RematOptions("full"),
    )


def textbook(
    stages: Stages, mesh: jax.sharding.Mesh, specs: Any, num_chunks: int, params: Params, batch: Batch, rng: jax.Array
) -> jax.Array:
    """Returns the loss sum of microbatches [b, M, ...]: V M + S - 1 ticks, complete embedding and head on every stage.

    At tick r, stage s processes unit r - s. Microbatches run in groups of S; each group passes all chunks before the
    next group.
    """

    def on_stage(params: Params, batch: Batch, key_data: jax.Array) -> jax.Array:
        outer = dict(params)
        layers = outer.pop("layers")
        rng, num_parts = jax.random.wrap_key_data(key_data), ring.num_microbatches(batch)
        num_stages, stage = jax.lax.axis_size(PIPELINE), jax.lax.axis_index(PIPELINE)
        group = num_stages * num_chunks

        @jax.checkpoint
        def repeated(x: jax.Array, m: jax.Array, chunk: jax.Array) -> jax.Array:
            start = ring.first_layer(chunk, num_stages, stages.num_layers, num_chunks)
            return stages.repeated(ring.chunk_of(layers, chunk, num_chunks), x, part(m), rng, start, True)[0]

        def part(m: jax.Array) -> Batch:
            return ring.microbatch(batch, m)

        def row(carry: tuple[jax.Array, jax.Array], r: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            inbox, total = carry
            unit = jnp.clip(r - stage, 0, num_chunks * num_parts - 1)
            chunk, m = unit // num_stages % num_chunks, unit // group * num_stages + unit % num_stages
            x = jnp.where((stage == 0) & (chunk == 0), stages.first(outer, part(m), rng, True, None), inbox)
            y = repeated(x, m, chunk)
            loss = stages.last(outer, y, part(m), None)[0]
            is_last = (stage == num_stages - 1) & (chunk == num_chunks - 1) & (r >= stage)
            return (ring.to_next(y, num_stages), total + jnp.where(is_last, loss, 0)), None

        x = jax.eval_shape(lambda: stages.first(outer, part(jnp.int32(0)), rng, True, None))
        empty = jnp.zeros(x.shape, x.dtype), jnp.zeros((), jnp.float32)
        # Each stage returns its sum, added up outside: the gradient of a psum inside would be wrong by the factor S.
        return jax.lax.scan(row, empty, jnp.arange(num_chunks * num_parts + num_stages - 1))[0][1][None]

    whole = PartitionSpec()
    each = PartitionSpec(PIPELINE)
    region = on_shards(mesh, on_stage, (specs, whole, whole), each, axes=ring.MANUAL)
    return jnp.sum(region(params, batch, jax.random.key_data(rng)))


def candidate(name: str, config: Config, devices: Sequence[jax.Device]) -> Candidate:
    """Compiles one of the programs."""
    shape = dict.fromkeys(AXES, 1) | {PIPELINE: len(devices)}
    assembly = assemble(config, shape, devices)
    stages, program, mesh = assembly.task.stages, assembly.placed.program, assembly.mesh
    assert stages is not None
    assert program is not None
    places = jax.tree.map(lambda leaf: leaf.sharding, assembly.state.params)
    replicas = GradientSync(
        mesh, jax.tree.map(lambda leaf: ParamSharding.same(leaf.sharding.spec, leaf.ndim), assembly.state.params)
    )

    def scheduled(params: Params, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Params]:
        sums = executor.gradients(stages, program, replicas, params, batch, rng)
        return sums.loss, sums.gradients

    compute: Callable[..., Any] = scheduled
    if name in (TEXTBOOK, CIRCULAR):
        num_chunks = config.pipeline.num_chunks
        layers = PartitionSpec(PIPELINE) if num_chunks == 1 else PartitionSpec(None, PIPELINE)
        parts = {key: layers if key == "layers" else PartitionSpec() for key in places}
        compute = jax.value_and_grad(functools.partial(textbook, stages, mesh, parts, num_chunks))
        places = {key: jax.tree.map(lambda _, k=key: NamedSharding(mesh, parts[k]), places[key]) for key in places}

    axes = batch_axes(entries(assembly.task, config.batch_size))

    def step(params: Params, batch: Batch, key_data: jax.Array) -> Any:
        microbatches = split_microbatches(
            with_sequence_index(batch), config.pipeline.num_microbatches, Placement.single_device(), axes
        )
        return compute(params, microbatches, jax.random.wrap_key_data(key_data))

    key_data = jax.random.key_data(jax.random.key(0))
    params = jax.device_put(assembly.steps.init(key_data).params, places)
    arguments = params, example_batch(assembly), key_data
    whole = NamedSharding(mesh, PartitionSpec())
    seconds = []
    for _ in range(NUM_COMPILATIONS):
        jax.clear_caches()
        lowered = jax.jit(step, out_shardings=(whole, places)).lower(*arguments)
        # CPU time of all threads, because other programs change it only a little.
        start = time.process_time()
        compiled = lowered.compile()
        seconds.append(time.process_time() - start)
    return Candidate(compiled, arguments, min(seconds))


def example_batch(assembly: Assembly) -> dict[str, jax.Array]:
    """Returns a batch of random tokens, with one document per sequence."""
    generator, shape = np.random.default_rng(0), assembly.batch["tokens"].shape
    tokens = generator.integers(0, 1024, (shape[0], shape[1] + 1)).astype(np.int32)
    entries = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }
    return {name: jax.device_put(entry, assembly.batch[name].sharding) for name, entry in entries.items()}


def times_of(candidates: dict[str, Candidate], num_rounds: int) -> dict[str, float]:
    """Returns the median seconds of each candidate's step, without the first round."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(num_rounds + 1):
        for name, one in candidates.items():
            start = time.perf_counter()
            jax.block_until_ready(one.compiled(*one.arguments))
            if number:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def lines(candidates: dict[str, Candidate], num_rounds: int) -> list[str]:
    """Returns the table, each number with its ratio to the textbook pipeline."""
    steps = times_of(candidates, num_rounds)
    numbers = {
        name: (
            steps[name] * 1e3,
            one.compiled.memory_analysis().temp_size_in_bytes / 1e6,
            flops.matmul_flops(parse.read(one.compiled.as_text())).total / 1e9,
            one.compile_seconds,
        )
        for name, one in candidates.items()
    }
    heads = ("step ms", "temporary MB", "matmul GFLOP", "compile CPU s")
    said = [" ".join([f"{'':<17}", *(f"{head:>20}" for head in heads)])]
    for name, row in numbers.items():
        pairs = zip(row, numbers[TEXTBOOK], strict=True)
        said.append(" ".join([f"{name:<17}", *(f"{value:>10.2f} (x {value / base:5.2f})" for value, base in pairs)]))
    return said


def main(argv: Sequence[str]) -> int:
    """Prints one table."""
    parser = argparse.ArgumentParser(prog="scripts/bench pipeline", description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=2, help="sequences in a microbatch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--width", type=int, default=128, help="width of the residual stream")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args(argv)
    devices, _ = distributed.start(arguments.stages)
    jax.config.update("jax_enable_compilation_cache", False)
    print(
        f"jax {jax.__version__}, {arguments.stages} x {devices[0].device_kind}; per device, x: relative to the textbook"
    )
    candidates = {
        name: candidate(name, configuration(arguments, schedule, num_chunks), devices)
        for name, (schedule, num_chunks) in PROGRAMS.items()
    }
    losses = [float(one.compiled(*one.arguments)[0]) for one in candidates.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
    print(*lines(candidates, arguments.rounds), sep="\n")
    if devices[0].platform == "cpu":
        print(
            "Virtual CPU devices share the cores: masked work of idle stages costs time here that it does not cost\n"
            "on a mesh, with a separate device for each stage."
        )
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
