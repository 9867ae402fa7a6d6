"""Measures the validation loss of configs/tiny.py by kind of gradient compression (docs/results/training.md).

All runs of a seed have the same initial weights, data and validation examples. The step of each kind is compiled once
and trains all seeds, in one process on eight simulated devices, eight replicas.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import jax

from meshtrain.assembly.assemble import Assembly, assemble
from meshtrain.config import extensions
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.data.loader import batches
from meshtrain.errors import run
from meshtrain.lab.compression import CompressionOptions
from meshtrain.launch import distributed
from meshtrain.run.dataset import open_data
from meshtrain.run.evaluation import evaluate
from meshtrain.sharding.reduction import SUM, ReductionOptions
from meshtrain.sharding.rules import AXES

NUM_REPLICAS, NUM_STEPS, NUM_SEEDS = 8, 300, 3
SHOWN_EVERY = 25
FLOAT32_BYTES = 4
KINDS = {
    "none": ReductionOptions(SUM),
    "int8": CompressionOptions("int8"),
    "topk": CompressionOptions("topk"),
    "int8-without-feedback": CompressionOptions("int8", feedback=False),
}
HEADER = (
    "| seed | kind | bytes sent per parameter and step | mean loss of the last 20 steps | "
    "validation loss | change of validation loss |",
    "| --- | --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
      last: mean training loss of the last 20 steps, or of all steps of a shorter run.
      validation: mean validation loss after the last step.
    """

    last: float
    validation: float


def assembled(config: Config, options: ReductionOptions, devices: Sequence[jax.Device]) -> Assembly:
    """Returns the assembly of a run with these options, on data-parallel replicas only."""
    shape = dict.fromkeys(AXES, 1) | {"data": NUM_REPLICAS}
    return assemble(dataclasses.replace(config, reduction=options), shape, devices)


def trained(assembly: Assembly, seed: int, what: str) -> Outcome:
    """Trains with a seed and evaluates.

    Args:
      assembly: the run's assembly, the same for all seeds.
      seed: the seed of weights and data.
      what: the name of the run in progress lines.
    """
    config = dataclasses.replace(assembly.config, seed=seed)
    assembly = dataclasses.replace(assembly, config=config)
    corpus = open_data(config, assembly.task)
    state, losses = assembly.steps.init(jax.random.key_data(jax.random.key(seed))), list[float]()
    for _, batch in zip(
        range(config.num_steps), batches(corpus.train, batch=assembly.batch, seed=config.seed), strict=False
    ):
        state, metrics = assembly.steps.train(state, batch)
        losses.append(float(metrics["loss"]))
        if len(losses) % SHOWN_EVERY == 0:
            print(f"{what}, seed {seed}, step {len(losses)}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    last = losses[-20:]
    return Outcome(sum(last) / len(last), evaluate(assembly, corpus, state)["eval_loss"])


def sent_bytes(options: ReductionOptions) -> float:
    """Returns the bytes that a replica sends in a step, per parameter, by formula."""
    if reduction := extensions.of(Config(reduction=options)):
        return reduction.sent_bytes(1, NUM_REPLICAS, False)
    return 2 * (NUM_REPLICAS - 1) / NUM_REPLICAS * FLOAT32_BYTES


def line(seed: int, kind: str, outcome: Outcome, plain: Outcome) -> str:
    """Returns a run's row.

    Args:
      seed: the run's seed.
      kind: a name in `KINDS`.
      outcome: the result of the run.
      plain: the result of the run without compression.
    """
    against = outcome.validation / plain.validation - 1
    cells = (seed, kind, f"{sent_bytes(KINDS[kind]):.2f}", f"{outcome.last:.4f}", f"{outcome.validation:.4f}")
    return f"| {' | '.join(map(str, cells))} | {'' if kind == 'none' else f'{against:+.2%}'} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table, each row when its run ends."""
    parser = argparse.ArgumentParser(prog="scripts/bench compression", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="runs of each kind, with seeds from 0 on")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds to run, 'none' first, separated by commas")
    given, overrides = parser.parse_known_args(argv)
    devices, _ = distributed.start(NUM_REPLICAS)
    config, _ = parse(["--config=configs/tiny.py", f"--config.num_steps={given.steps}", *overrides])
    assemblies = {kind: assembled(config, KINDS[kind], devices) for kind in given.kinds.split(",")}
    print(*HEADER, sep="\n", flush=True)
    for seed in range(given.seeds):
        outcomes = dict[str, Outcome]()
        for kind, assembly in assemblies.items():
            outcomes[kind] = trained(assembly, seed, kind)
            print(line(seed, kind, outcomes[kind], outcomes["none"]), flush=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
