"""Losses of configs/tiny.py with moments in fewer bytes; docs/memory.md has the table.

Started by scripts/rounding_table. All runs have the same initial weights, data and validation examples, on one device.
The second moment's decay is 0.999: with the configuration's 0.95 it forgets faster than rounding could hold it back.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import jax

from meshtrain.assemble import assemble
from meshtrain.config.config import Config, parse
from meshtrain.launch import distributed
from meshtrain.layout.axes import AXES
from meshtrain.optim import moments
from meshtrain.run.evaluate import evaluate, training_batches
from meshtrain.run.opened import open_data
from meshtrain.step.held import held
from meshtrain.words.errors import run

NUM_STEPS, BETA2 = 300, 0.999
SHOWN_EVERY = 25
MOMENTS = moments.KINDS
HEADER = (
    "| moments | beta2 | mean loss of the last 20 steps | validation loss | against the first | bytes a parameter |",
    "| --- | --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run came to.

    Attributes:
      last: mean training loss of the last 20 steps, or of all if there are fewer.
      validation: mean validation loss after the last step.
      moment_bytes: of the optimizer's state, for each parameter.
    """

    last: float
    validation: float
    moment_bytes: float


def trained(config: Config, devices: Sequence[jax.Device], what: str) -> Outcome:
    """Trains on one device and evaluates.

    Args:
      config: of the run.
      devices: at least one.
      what: named in the lines of progress.
    """
    assembly = assemble(config, dict.fromkeys(AXES, 1), devices)
    corpus = open_data(config, assembly.task)
    state, losses = assembly.init(jax.random.key_data(jax.random.key(config.seed))), list[float]()
    for _, batch in zip(range(config.num_steps), training_batches(assembly, corpus, 0), strict=False):
        state, metrics = assembly.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        if len(losses) % SHOWN_EVERY == 0:
            print(f"{what}, step {len(losses)}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    last, num_parameters = losses[-20:], sum(leaf.size for leaf in jax.tree.leaves(assembly.state.params))
    moment_bytes = held(assembly.state, assembly.replicas).moments / num_parameters
    return Outcome(sum(last) / len(last), evaluate(assembly, corpus, state)["eval_loss"], moment_bytes)


def line(kind: str, beta2: float, outcome: Outcome, first: Outcome) -> str:
    """Returns a run's row.

    Args:
      kind: of the moments.
      beta2: the decay of the second moment.
      outcome: of the run.
      first: of the run that the others are compared with.
    """
    against = "" if outcome is first else f"{outcome.validation / first.validation - 1:+.2%}"
    cells = (kind, beta2, f"{outcome.last:.4f}", f"{outcome.validation:.4f}", against, f"{outcome.moment_bytes:.2f}")
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table, a row as soon as its run has ended."""
    parser = argparse.ArgumentParser(prog="scripts/rounding_table", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument("--beta2", type=float, default=BETA2, help="decay of the second moment")
    parser.add_argument("--kinds", default=",".join(MOMENTS), help="which of them, separated by commas")
    given, overrides = parser.parse_known_args(argv)
    devices, _ = distributed.start(1)
    words = ["--config=configs/tiny.py", f"--config.num_steps={given.steps}", f"--config.optimizer.beta2={given.beta2}"]
    config, _ = parse([*words, *overrides])
    print(*HEADER, sep="\n", flush=True)
    first: Outcome | None = None
    for kind in given.kinds.split(","):
        optimizer = dataclasses.replace(config.optimizer, moments=kind)
        outcome = trained(dataclasses.replace(config, optimizer=optimizer), devices, kind)
        first = first or outcome
        print(line(kind, given.beta2, outcome, first), flush=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
