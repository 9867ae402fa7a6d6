"""Compares the training step with plain JAX (`plain_decoder.py`) for the same model, and times the start of a run.

Times on a shared machine vary; ratios of runs close in time vary less. Therefore the steps alternate, each round gives
one ratio, and the result is the median over rounds. The plain step runs twice in a round: its ratio to itself measures
the noise.

Extras: cuda
"""

import argparse
import dataclasses
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.models.decoder_options import NormOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.optim.learning_rate import learning_rate
from meshtrain.sharding.rules import AXES
from meshtrain.step.precision import PrecisionOptions, compute_dtype
from scripts.benchmarks import plain_decoder

ROOT = Path(__file__).parents[2]
TINY = "configs/tiny.py"
SIZES = ("tiny", "llama", "gpt2")
GOAL = 1.03
TURNS = ("program", "plain", "plain again")

LLAMA = DecoderOptions(num_layers=4, embed_dim=256, mlp_dim=768, num_heads=8, num_kv_heads=4, vocab_size=257)
GPT2 = DecoderOptions(
    num_layers=4,
    embed_dim=256,
    mlp_dim=1024,
    num_heads=8,
    num_kv_heads=8,
    positions="learned",
    norm=NormOptions(name="layernorm"),
    activation="gelu",
    tied_embeddings=True,
    biases=True,
    vocab_size=257,
)

Turn = Callable[[], tuple[float, float]]


def configuration(size: str, precision: str) -> Config:
    """Returns the assembly on one device of a model to compare: `tiny` (its configuration file), `llama`, `gpt2`."""
    if size == "tiny":
        config, _ = parse([f"--config={ROOT / TINY}"], reads_data=False)
    else:
        config = Config(batch_size=4, sequence_length=256, model={"llama": LLAMA, "gpt2": GPT2}[size])
    return dataclasses.replace(config, precision=PrecisionOptions(policy=precision))


def example_batch(config: Config) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens, with two documents per sequence."""
    generator, shape = np.random.default_rng(0), (config.batch_size, config.sequence_length)
    place, start = np.arange(config.sequence_length), generator.integers(1, config.sequence_length, (shape[0], 1))
    tokens = generator.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": (1 + (place >= start)).astype(np.int32),
        "positions": np.where(place < start, place, place - start).astype(np.int32),
        "weights": (place != start - 1).astype(np.float32),
    }


def plain_step(config: Config) -> tuple[Any, Any]:
    """Returns the optimizer and the training step (not jitted) of the same model in plain JAX."""
    schedule = learning_rate(
        config.learning_rate,
        num_steps=config.num_steps,
        embed_dim=config.model.embed_dim,
        batch_size=config.batch_size,
    )
    loss = plain_decoder.gpt2_loss if config.model.tied_embeddings else plain_decoder.llama_loss
    bound = functools.partial(loss, vocab_size=config.model.vocab_size, dtype=compute_dtype(config.precision))
    transformation = plain_decoder.adamw(schedule)
    return transformation, plain_decoder.train_step(bound, transformation)


def compiled_steps(config: Config, device: jax.Device, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the compiled steps (state, batch) -> (state, result), and their states, with equal weights."""
    assembly: Assembly = assemble(config, dict.fromkeys(AXES, 1), [device])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    transformation, step = plain_step(config)
    plain_state = jax.tree.map(jnp.copy, (state.params, jax.jit(transformation.init)(state.params)))
    steps = {
        "program": assembly.steps.train.lower(state, batch).compile(),
        "plain": jax.jit(step, donate_argnums=0).lower(plain_state, batch).compile(),
    }
    return steps, {"program": state, "plain": plain_state}


def turns(steps: dict[str, Any], states: dict[str, Any], batch: Any) -> dict[str, Turn]:
    """Returns a function for each run in a round; it runs one step and returns its (wall, CPU) seconds."""

    def turn(name: str) -> tuple[float, float]:
        start = time.perf_counter(), time.process_time()
        states[name], result = steps[name](states[name], batch)
        jax.block_until_ready((states[name], result))
        return time.perf_counter() - start[0], time.process_time() - start[1]

    return {name: functools.partial(turn, name.removesuffix(" again")) for name in TURNS}


def compare(named: dict[str, Turn], num_rounds: int, num_warm_ups: int = 3) -> dict[str, list[tuple[float, float]]]:
    """Returns the times of each run, round by round.

    The order rotates and reverses, so that over six rounds each run follows every other run equally often. This matters
    because a run after another run of the same program has its weights in the cache.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
    names = list(named)
    for number in range(-num_warm_ups, num_rounds):
        first = number // 2 % len(names)
        order = names[first:] + names[:first]
        for name in order[:: -1 if number % 2 else 1]:
            took = named[name]()
            if number >= 0:
                times[name].append(took)
    return times


def median_ratio(times: dict[str, list[tuple[float, float]]], over: str, under: str, clock: int) -> float:
    """Returns the median over rounds of the ratio of two runs' times; clock 0 is wall time, 1 is CPU time."""
    return statistics.median(a[clock] / b[clock] for a, b in zip(times[over], times[under], strict=True))


def step_lines(size: str, precision: str, num_rounds: int, device: jax.Device) -> list[str]:
    """Returns the lines of one comparison."""
    config = configuration(size, precision)
    batch = jax.device_put(example_batch(config), device)
    steps, states = compiled_steps(config, device, batch)
    times = compare(turns(steps, states, batch), num_rounds)
    wall, cpu = (median_ratio(times, "program", "plain", clock) for clock in (0, 1))
    noise = median_ratio(times, "plain again", "plain", 0)
    costs = {name: step.cost_analysis() for name, step in steps.items()}
    counted = [
        f"{what} {costs['program'][key] / costs['plain'][key]:.3f}"
        for what, key in (("flops", "flops"), ("bytes", "bytes accessed"))
        if key in costs["plain"]
    ]
    verdict = "within" if wall <= GOAL else "above"
    median_ms = statistics.median(wall for wall, _ in times["program"]) * 1e3
    return [
        f"{size:<6} {precision:<9} program / plain: {wall:.3f} ({verdict} the goal of {GOAL})   "
        f"CPU time {cpu:.3f}   plain / itself {noise:.3f}   {'   '.join(counted)}   ({median_ms:.1f} ms a step here)"
    ]


def start_seconds(workdir: Path, cache: Path) -> tuple[float, float]:
    """Returns the time of the smallest configuration from process start to the log line of its first step.

    Args:
      workdir: a folder that does not exist yet.
      cache: the folder of the compilation cache.

    Returns:
      (wall seconds, CPU seconds of all its threads).

    Raises:
      RuntimeError: the process ended before that line.
    """
    command = [sys.executable, "-m", "meshtrain", "train", f"--config={TINY}", f"--workdir={workdir}"]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        arrived = any(line.startswith("step") for line in process.stdout)
        wall_seconds = time.perf_counter() - start
        process.kill()
    if not arrived:
        raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode} before its first step")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_seconds, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime


def start_lines(num_repeats: int) -> list[str]:
    """Returns the lines about starts; each repeat is a start with an empty cache, then a start with a full cache."""
    times: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(num_repeats):
        with tempfile.TemporaryDirectory() as folder:
            for name, took in times.items():
                took.append(start_seconds(Path(folder, name), Path(folder, "cache")))
    said = [
        f"{name} cache {statistics.median(wall for wall, _ in took):.1f} s"
        f" ({statistics.median(cpu for _, cpu in took):.1f} s of CPU time)"
        for name, took in times.items()
    ]
    ratios = [median_ratio(times, "warm", "cold", clock) for clock in (0, 1)]
    return [
        f"start of {TINY} to the first step done, on this machine as busy as it is: {', '.join(said)}",
        f"start of {TINY}, warm / cold: {ratios[0]:.2f}   CPU time {ratios[1]:.2f}",
    ]


def main(argv: Sequence[str]) -> int:
    """Prints a line for each comparison, then the lines about starts."""
    parser = argparse.ArgumentParser(prog="scripts/bench step", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=SIZES, help="models to compare")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=30, help="runs of each step")
    parser.add_argument("--starts", type=int, default=3, help="starts with an empty and with a full cache; 0: none")
    arguments = parser.parse_args(argv)
    devices, _ = distributed.start(1)
    print(f"jax {jax.__version__}, {devices[0].device_kind}, {os.cpu_count()} CPU cores")
    for size in arguments.sizes:
        print(*step_lines(size, arguments.precision, arguments.rounds, devices[0]), sep="\n", flush=True)
    if arguments.starts:
        print(*start_lines(arguments.starts), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
