"""Measures how generation time grows with the number of tokens, and the speedup by the cache.

One generator uses the cache of `Task.decode`. The other computes `Task.logits` of the complete sequence for each token,
like tasks without `Task.decode`. Both choose the most probable tokens with the same weights. They alternate in rounds,
after a round that compiles.

Extras: cuda
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config.resolve import resolve
from meshtrain.config.schema import Config
from meshtrain.errors import run
from meshtrain.generation.sampling import Sampling
from meshtrain.generation.token_loop import Generator, Request
from meshtrain.generation.window import by_window
from meshtrain.launch import distributed
from meshtrain.sharding.rules import AXES

PROMPT_TOKENS, PLAIN, SHORT, LONG = 64, 32, 256, 512


def assembled(config: Config) -> Assembly:
    """Returns the assembly of a configuration on one device."""
    devices, _ = distributed.start(1)
    return assemble(config, dict.fromkeys(AXES, 1), devices)


def seconds(generator: Generator, num_tokens: int, rows: int) -> tuple[float, list[list[int]]]:
    """Returns the seconds to generate tokens for each row, including prompts, and the tokens."""
    prompts = np.random.default_rng(0).integers(0, 250, (rows, PROMPT_TOKENS))
    drawn: list[list[int]] = [[] for _ in range(rows)]

    def take(row: int, ids: list[int], is_last: bool) -> bool:
        drawn[row] += ids
        return False

    start = time.perf_counter()
    generator.draw(
        [Request(prompt.tolist(), row) for row, prompt in enumerate(prompts)], num_tokens, Sampling(), 0, take
    )
    return time.perf_counter() - start, drawn


def main(argv: Sequence[str]) -> int:
    """Prints the ratios, each the median over rounds."""
    parser = argparse.ArgumentParser(prog="scripts/bench generate", description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="width of the residual stream")
    parser.add_argument("--rows", type=int, default=1, help="number of texts in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    width, length = arguments.width, PROMPT_TOKENS + LONG
    model = {"num_layers": arguments.layers, "embed_dim": width, "mlp_dim": 4 * width}
    given = {"model": model, "data": {"source": "synthetic"}, "sequence_length": length, "batch_size": arguments.rows}
    assembly = assembled(resolve(given))
    task, logits = assembly.task, assembly.steps.logits
    assert task.decode is not None
    assert logits is not None
    params = assembly.steps.init(jax.random.key_data(jax.random.key(0))).params
    cached, uncached = (
        Generator(decode, params, assembly.mesh, assembly.placed.rules, end_ids=(-1,))
        for decode in (task.decode, by_window(logits, assembly.batch))
    )
    device = assembly.mesh.devices.flat[0].device_kind
    print(f"jax {jax.__version__}, {device}, {task.num_parameters:,} parameters, {arguments.rows} texts at a time")
    turns = [(cached, SHORT), (cached, LONG), (uncached, PLAIN)]
    same = [seconds(*turn, arguments.rows)[1] for turn in turns]  # compiles
    print(f"the same tokens with the cache and without: {[row[:PLAIN] for row in same[0]] == same[2]}")
    rounds = [[seconds(*turn, arguments.rows)[0] for turn in turns] for _ in range(arguments.rounds)]
    short, long, plain = (statistics.median(one[turn] for one in rounds) for turn in range(3))
    growth = statistics.median(one[1] / one[0] for one in rounds)
    saved = statistics.median(one[2] / PLAIN / (one[0] / SHORT) for one in rounds)
    print(f"{SHORT} tokens {short:.2f} s, {LONG} tokens {long:.2f} s, {PLAIN} without the cache {plain:.2f} s")
    print(f"{LONG} tokens over {SHORT}: {growth:.2f}; time of a token without / with the cache: {saved:.1f}")
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
