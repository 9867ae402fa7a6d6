"""Compares the training step of a model with experts and of a dense model of equal active size, on one device.

The steps alternate as in `step.py`; the result is the median of their ratio over rounds.

Extras: cuda
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax

from meshtrain.assembly.assemble import assemble
from meshtrain.config.schema import Config
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.models.decoder_options import MoeOptions
from meshtrain.models.transformer.decoder import DecoderOptions
from meshtrain.sharding.rules import AXES
from scripts.benchmarks.step import compare, example_batch, median_ratio, turns

GOAL = 1.5
DENSE = DecoderOptions(num_layers=4, embed_dim=256, mlp_dim=768, num_heads=8, num_kv_heads=4, vocab_size=257)


def configurations(batch_size: int, sequence_length: int) -> dict[str, Config]:
    """Returns the runs to compare: 8 experts with 2 per token, and an mlp as wide as two experts."""
    experts = dataclasses.replace(
        DENSE, moe=MoeOptions(num_experts=8, experts_per_token=2, expert_dim=DENSE.mlp_dim // 2)
    )
    models = {"program": experts, "plain": DENSE}
    return {
        name: Config(batch_size=batch_size, sequence_length=sequence_length, model=model)
        for name, model in models.items()
    }


def compiled(config: Config, device: jax.Device) -> tuple[Any, Any, Any]:
    """Returns the compiled step (state, batch) -> (state, result), its state, and a batch."""
    batch = jax.device_put(example_batch(config), device)
    assembly = assemble(config, dict.fromkeys(AXES, 1), [device])
    state = assembly.steps.init(jax.random.key_data(jax.random.key(0)))
    return assembly.steps.train.lower(state, batch).compile(), state, batch


def main(argv: Sequence[str]) -> int:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(prog="scripts/bench experts_step", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="runs of each step")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a sequence")
    arguments = parser.parse_args(argv)
    devices, _ = distributed.start(1)
    made = {
        name: compiled(config, devices[0])
        for name, config in configurations(arguments.batch_size, arguments.sequence_length).items()
    }
    steps, states = ({name: one[i] for name, one in made.items()} for i in (0, 1))
    batch = made["plain"][2]
    times = compare(turns(steps, states, batch), arguments.rounds)
    wall, cpu = (median_ratio(times, "program", "plain", clock) for clock in (0, 1))
    noise = median_ratio(times, "plain again", "plain", 0)
    median_ms = statistics.median(wall for wall, _ in times["program"]) * 1e3
    tokens = arguments.batch_size * arguments.sequence_length
    verdict = "within" if wall <= GOAL else "above"
    print(f"jax {jax.__version__}, {devices[0].device_kind}, {os.cpu_count()} CPU cores, {tokens} tokens a step")
    print(
        f"8 experts, top 2 / dense of the active size: {wall:.2f} ({verdict} the goal of {GOAL})   "
        f"CPU time {cpu:.2f}   dense / itself {noise:.2f}   ({median_ms:.0f} ms a step here)"
    )
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
