"""What the program costs over plain JAX: a train step of the same model beside one in `plain_decoder.py`, and a start.

Started by scripts/bench_step. Times on a shared machine say little; ratios of neighbours in time say more. So the steps
take turns, each round gives one ratio, and the median over rounds counts. The plain step takes two turns in a round:
its ratio to itself is what this machine's noise looks like.
"""

import argparse
import dataclasses
import functools
import os
import signal
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

from meshtrain.assemble import Assembly, assemble
from meshtrain.config import Config
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.layout.axes import AXES
from meshtrain.models.decoder import DecoderOptions
from meshtrain.optim.learning_rate import LearningRateOptions, learning_rate
from meshtrain.step.precision import PrecisionOptions, compute_dtype
from scripts import plain_decoder

ROOT = Path(__file__).parents[1]
GOAL = 1.03
TURNS = ("program", "plain", "plain again")

LLAMA = DecoderOptions(num_layers=4, embed_dim=256, mlp_dim=768, num_heads=8, num_kv_heads=4)
SIZES = {
    "tiny": (32, 64, DecoderOptions(num_layers=8, embed_dim=64, mlp_dim=256, num_heads=8, num_kv_heads=8)),
    "llama": (4, 256, LLAMA),
    "gpt2": (
        4,
        256,
        dataclasses.replace(
            LLAMA,
            mlp_dim=1024,
            num_kv_heads=8,
            positions="learned",
            norm="layernorm",
            activation="gelu",
            tied_embeddings=True,
            biases=True,
        ),  # fmt: skip
    ),
}

Turn = Callable[[], tuple[float, float]]


def configuration(size: str, precision: str) -> Config:
    """Returns a run of one of the models to compare, on one device."""
    batch_size, sequence_length, model = SIZES[size]
    return Config(
        batch_size=batch_size,
        sequence_length=sequence_length,
        model=model,
        precision=PrecisionOptions(policy=precision),
        learning_rate=LearningRateOptions(peak=1e-3, warmup_steps=10),
    )


def example_batch(config: Config) -> dict[str, np.ndarray]:
    """Returns a batch of two documents a sequence, of random tokens."""
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
    """Returns the optimizer and the train step, not yet jitted, of the same model in plain JAX."""
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


def turns(config: Config, device: jax.Device) -> tuple[dict[str, Turn], dict[str, Any]]:
    """Returns what runs one step and gives its (wall seconds, CPU seconds), and the compiled steps."""
    assembly: Assembly = assemble(config, dict.fromkeys(AXES, 1), [device])
    state = assembly.init(jax.random.key_data(jax.random.key(0)))
    batch = jax.device_put(example_batch(config), device)
    transformation, step = plain_step(config)
    plain_state = jax.jit(lambda params: (params, transformation.init(params)))(state.params)
    compiled = {
        "program": assembly.train_step.lower(state, batch).compile(),
        "plain": jax.jit(step, donate_argnums=0).lower(plain_state, batch).compile(),
    }
    states = {"program": state, "plain": jax.tree.map(jnp.array, plain_state)}

    def turn(name: str) -> tuple[float, float]:
        start = time.perf_counter(), time.process_time()
        states[name], result = compiled[name](states[name], batch)
        jax.block_until_ready((states[name], result))
        return time.perf_counter() - start[0], time.process_time() - start[1]

    named = {name: functools.partial(turn, name.removesuffix(" again")) for name in TURNS}
    return named, compiled


def compare(named: dict[str, Turn], num_rounds: int, num_warm_ups: int = 3) -> dict[str, list[tuple[float, float]]]:
    """Returns the times of each turn, round by round; the order within a round rotates, so that none is favoured."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
    order = list(named)
    for number in range(-num_warm_ups, num_rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            took = named[name]()
            if number >= 0:
                times[name].append(took)
    return times


def median_ratio(times: dict[str, list[tuple[float, float]]], over: str, under: str, clock: int) -> float:
    """Returns the median over rounds of one turn's time by another's; clock 0 is wall time, 1 is CPU time."""
    return statistics.median(a[clock] / b[clock] for a, b in zip(times[over], times[under], strict=True))


def step_lines(size: str, precision: str, num_rounds: int, device: jax.Device) -> list[str]:
    """Returns what one comparison says, ready to print."""
    named, compiled = turns(configuration(size, precision), device)
    times = compare(named, num_rounds)
    wall, cpu = (median_ratio(times, "program", "plain", clock) for clock in (0, 1))
    noise = median_ratio(times, "plain again", "plain", 0)
    costs = {name: step.cost_analysis() for name, step in compiled.items()}
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


def start_seconds(workdir: Path, cache: Path) -> float:
    """Returns the time from starting a process to the log line of its first step, for `configs/tiny.py`."""
    command = [sys.executable, "-m", "meshtrain.main", "--config=configs/tiny.py", f"--workdir={workdir}"]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    start = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step"):
                took = time.perf_counter() - start
                process.send_signal(signal.SIGKILL)
                process.communicate()
                return took
        raise RuntimeError("no first step:\n" + "".join(said) + (process.stderr.read() if process.stderr else ""))


def start_lines(num_repeats: int) -> list[str]:
    """Returns what start-ups say, ready to print: each repeat is one with an empty cache, then one with a full one."""
    cold, warm = [], []
    for _ in range(num_repeats):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder, "cache")
            cold.append(start_seconds(Path(folder, "cold"), cache))
            warm.append(start_seconds(Path(folder, "warm"), cache))
    ratio = statistics.median(a / b for a, b in zip(warm, cold, strict=True))
    return [
        f"start of configs/tiny.py to the first step done: cold cache {statistics.median(cold):.1f} s, "
        f"warm {statistics.median(warm):.1f} s here; warm / cold: {ratio:.2f}"
    ]


def main(argv: Sequence[str]) -> int:
    """Prints a line for each comparison, then the start-up's."""
    parser = argparse.ArgumentParser(prog="scripts/bench_step", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES), help="models to compare")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each step")
    parser.add_argument("--starts", type=int, default=3, help="start-ups with a cold and with a warm cache; 0: none")
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
