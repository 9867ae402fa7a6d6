"""Measures losses of configs/tiny.py with moments in fewer bytes, and with 8-bit products (docs/results/training.md).

All runs have the same initial weights, data and validation examples, on one device.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import jax

from meshtrain.assembly.assemble import assemble
from meshtrain.config.resolve import parse
from meshtrain.config.schema import Config
from meshtrain.data.loader import batches
from meshtrain.errors import run
from meshtrain.launch import distributed
from meshtrain.run.dataset import open_data
from meshtrain.run.evaluation import evaluate
from meshtrain.sharding.rules import AXES
from meshtrain.step.device_memory import training_state_bytes

NUM_STEPS = 300
SHOWN_EVERY = 25


@dataclasses.dataclass(frozen=True)
class Kind:
    """The rounding options of a run.

    Attributes:
      policy: value of `precision.policy`.
      moments: value of `optimizer.moments`.
      beside: the kind for comparison; '': none.
    """

    policy: str = "float32"
    moments: str = "float32"
    beside: str = ""


KINDS = {
    "float32": Kind(),
    "moments-bfloat16": Kind(moments="bfloat16", beside="float32"),
    "moments-8bit": Kind(moments="8bit", beside="float32"),
    "bfloat16": Kind("bfloat16"),
    "fp8": Kind("fp8", beside="bfloat16"),
}
HEADER = (
    "| kind | beta2 | mean loss of the last 20 steps | validation loss | "
    "change of validation loss | bytes of moments per parameter |",
    "| --- | --- | --- | --- | --- | --- |",
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
      last: mean training loss of the last 20 steps, or of all steps of a shorter run.
      validation: mean validation loss after the last step.
      moment_bytes: bytes of the optimizer's state per parameter.
    """

    last: float
    validation: float
    moment_bytes: float


def changed(config: Config, kind: Kind) -> Config:
    """Returns the configuration of a run of this kind."""
    return dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, moments=kind.moments),
        precision=dataclasses.replace(config.precision, policy=kind.policy),
    )


def trained(config: Config, devices: Sequence[jax.Device], what: str) -> Outcome:
    """Trains on one device and evaluates.

    Args:
      config: the run's configuration.
      devices: at least one.
      what: the name of the run in progress lines.
    """
    assembly = assemble(config, dict.fromkeys(AXES, 1), devices)
    corpus = open_data(config, assembly.task)
    state, losses = assembly.steps.init(jax.random.key_data(jax.random.key(config.seed))), list[float]()
    for _, batch in zip(
        range(config.num_steps), batches(corpus.train, batch=assembly.batch, seed=config.seed), strict=False
    ):
        state, metrics = assembly.steps.train(state, batch)
        losses.append(float(metrics["loss"]))
        if len(losses) % SHOWN_EVERY == 0:
            print(f"{what}, step {len(losses)}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    last, num_parameters = losses[-20:], sum(leaf.size for leaf in jax.tree.leaves(assembly.state.params))
    moment_bytes = training_state_bytes(assembly.state, assembly.states.sums).moments / num_parameters
    return Outcome(sum(last) / len(last), evaluate(assembly, corpus, state)["eval_loss"], moment_bytes)


def line(name: str, beta2: float, outcome: Outcome, beside: Outcome | None) -> str:
    """Returns a run's row.

    Args:
      name: a name in `KINDS`.
      beta2: the decay of the second moment.
      outcome: the result of the run.
      beside: the result of the run for comparison; None: there is no such run.
    """
    against = f"{outcome.validation / beside.validation - 1:+.2%} of {KINDS[name].beside}" if beside else ""
    cells = (name, beta2, f"{outcome.last:.4f}", f"{outcome.validation:.4f}", against, f"{outcome.moment_bytes:.2f}")
    return f"| {' | '.join(map(str, cells))} |"


def main(argv: Sequence[str]) -> int:
    """Prints the table, each row when its run ends."""
    parser = argparse.ArgumentParser(prog="scripts/bench rounding", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="steps of each run")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds to run, separated by commas")
    given, overrides = parser.parse_known_args(argv)
    devices, _ = distributed.start(1)
    config, _ = parse(["--config=configs/tiny.py", f"--config.num_steps={given.steps}", *overrides])
    print(*HEADER, sep="\n", flush=True)
    outcomes = dict[str, Outcome]()
    for name in given.kinds.split(","):
        kind = KINDS[name]
        outcomes[name] = trained(changed(config, kind), devices, name)
        beside = outcomes[kind.beside] if kind.beside in outcomes else None
        print(line(name, config.optimizer.beta2, outcomes[name], beside), flush=True)
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
